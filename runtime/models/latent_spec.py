"""Declaration of multi-head latent attention (MLA, arXiv 2405.04434): all heads read one cached vector per token.

Names and shapes only, without torch.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from mycli.runtime.models.part_spec import InputSource, LinearSpec, NormSpec, OutputRows, RopeSpec


@dataclass(frozen=True)
class LatentAttentionSpec:
    """Attention whose keys and values are products of a latent vector [rank] per token, which the cache stores.

    A head's key is `nope_dim` values of kv_b(latent), then `rope_dim` rotated values that all heads share; its value is
    the next `value_dim` values of kv_b(latent). The cache holds the latent after `kv_norm` and the rotated values.

    inputs: the query's projection (or its low-rank half, with `q_norm` and `q_b`), then latent and shared key in one.
    gate: from the input to a value for each head, whose sigmoid multiplies the head's output.
    """

    heads: int
    rank: int
    nope_dim: int
    rope_dim: int
    value_dim: int
    norm: NormSpec | None
    inputs: tuple[LinearSpec, LinearSpec]
    kv_norm: NormSpec
    kv_b: LinearSpec
    o: LinearSpec
    rope: RopeSpec | None
    scale: float  # multiplies the scores
    q_norm: NormSpec | None = None
    q_b: LinearSpec | None = None
    gate: LinearSpec | None = None
    output_norm: NormSpec | None = None
    residual_scale: float = 1.0

    # What `AttentionSpec` declares and these families do not have.
    window: ClassVar[None] = None
    softcap: ClassVar[None] = None
    kv_source: ClassVar[None] = None
    kv_shared: ClassVar[bool] = False

    @property
    def kv_heads(self) -> int:
        return 1

    @property
    def head_dim(self) -> int:
        return self.nope_dim + self.rope_dim

    def products(self) -> Mapping[str, tuple[LinearSpec, ...]]:
        query = {} if self.q_b is None else {"latent_q": (self.q_b,)}
        return {"latent_in": self.inputs, **query, "latent_kv": (self.kv_b,), "o": (self.o,)}

    @property
    def unquantized(self) -> tuple[LinearSpec, ...]:
        return () if self.gate is None else (self.gate,)

    def inner_norms(self) -> tuple[NormSpec | None, ...]:
        return self.q_norm, self.kv_norm

    def input_source(self, product: str) -> InputSource:
        if product == "o":  # the rows of kv_b that compute values, behind those of the head's key
            return OutputRows("latent_kv", self.nope_dim, self.heads, 1, self.value_dim, self.nope_dim + self.value_dim)
        entering = self.norm if self.gate is None else None  # the norm feeds the gate too
        return {"latent_in": entering, "latent_q": self.q_norm, "latent_kv": self.kv_norm}[product]

    def forward_values(self) -> int:
        """Return the number of activation values per token of a pass over cached latents, for the memory model."""
        # As projected; the latent normed and the parts rotated; queries, then contexts, in latent space and theirs.
        query, value = self.heads * self.head_dim, self.heads * self.value_dim
        projected = sum(linear.out_features for linear in self.inputs)
        low = self.inputs[0].out_features if self.q_b is not None else 0
        return projected + low + 2 * query + 2 * self.heads * self.rank + value + self.o.out_features

    def training_values(self) -> int:
        """Return the number of values per token of a forward and backward pass with expanded keys and values."""
        query, value = self.heads * self.head_dim, self.heads * self.value_dim
        expanded = self.heads * (self.nope_dim + self.value_dim)
        return 2 * sum(linear.out_features for linear in self.inputs) + 6 * query + 4 * expanded + 3 * value
