"""What one decoder layer is: its norms, linears, attention and MLP, declared once for everyone who has to know.

Running a layer, calibrating it, rescaling it, tuning it, counting its memory and fusing its kernels all read the same
declaration. `decoder_layer` declares a layer of the Llama kind; a family that differs declares its own in its file.
Knows names and shapes of tensors. Does not import torch.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mycli.runtime.models.config import ModelConfig

Shape = tuple[int, ...]


@dataclass(frozen=True)
class NormSpec:
    """One RMSNorm as the checkpoint names it: a gain [size]."""

    name: str
    size: int
    eps: float


@dataclass(frozen=True)
class LinearSpec:
    """One linear layer as the checkpoint names it: weight [out_features, in_features] and an optional bias."""

    name: str
    out_features: int
    in_features: int
    bias: bool = False


@dataclass(frozen=True)
class OutputRows:
    """The rows of a product's output that make, each alone, the inputs of a later product.

    Its inputs, seen as [groups, copies, width], are made by rows `start` + group * width + position, whichever the
    copy: query heads that share a key-value head are copies. So a factor on an input can be taken back in those rows.
    """

    product: str
    start: int
    groups: int
    copies: int
    width: int


@dataclass(frozen=True)
class AttentionSpec:
    """Attention on the residual stream: `norm`, q, k, v side by side, attention, o, `output_norm`, then the sum.

    `norm` and `output_norm` are None where the family has none there. `q_norm` and `k_norm` come before the rotation:
    over each head, or over all heads at once where their size is that of all heads. `window` in tokens: a query sees
    itself and window - 1 before it, None for all.
    """

    heads: int
    kv_heads: int
    head_dim: int
    window: int | None
    norm: NormSpec | None
    qkv: tuple[LinearSpec, ...]
    q_norm: NormSpec | None
    k_norm: NormSpec | None
    o: LinearSpec
    output_norm: NormSpec | None = None


@dataclass(frozen=True)
class MlpSpec:
    """A gated MLP on the residual stream: `norm`, gate and up side by side, silu(gate) * up, down, `output_norm`."""

    size: int
    norm: NormSpec | None
    gate_up: tuple[LinearSpec, ...]
    down: LinearSpec
    output_norm: NormSpec | None = None


@dataclass(frozen=True)
class LayerSpec:
    """One layer: attention, then the MLP. A product is what is multiplied at once: linears that share their input."""

    index: int
    attention: AttentionSpec
    mlp: MlpSpec

    def products(self) -> dict[str, tuple[LinearSpec, ...]]:
        """The linears of each product by its name, in order of execution; outputs lie side by side in this order."""
        attention, mlp = self.attention, self.mlp
        return {"qkv": attention.qkv, "o": (attention.o,), "gate_up": mlp.gate_up, "down": (mlp.down,)}

    def norms(self) -> list[NormSpec]:
        """The norms that the layer has."""
        attention, mlp = self.attention, self.mlp
        streams = (attention.norm, attention.output_norm, mlp.norm, mlp.output_norm)
        return [norm for norm in (*streams, attention.q_norm, attention.k_norm) if norm is not None]

    def made_by(self, product: str) -> NormSpec | OutputRows | None:
        """What makes the inputs of a product one by one; None where no single operation does (a residual stream)."""
        attention, mlp = self.attention, self.mlp
        if product == "qkv":
            return attention.norm
        if product == "gate_up":
            return mlp.norm
        if product == "down":
            return OutputRows("gate_up", mlp.size, 1, 1, mlp.size)
        values = (attention.heads + attention.kv_heads) * attention.head_dim
        copies = attention.heads // attention.kv_heads
        return OutputRows("qkv", values, attention.kv_heads, copies, attention.head_dim)

    def tensors(self) -> Iterator[tuple[str, Shape]]:
        """Names and shapes of the layer's tensors in an unquantized checkpoint."""
        for norm in self.norms():
            yield f"{norm.name}.weight", (norm.size,)
        for linears in self.products().values():
            for linear in linears:
                yield f"{linear.name}.weight", (linear.out_features, linear.in_features)
                if linear.bias:
                    yield f"{linear.name}.bias", (linear.out_features,)


def decoder_layer(config: "ModelConfig", index: int) -> LayerSpec:
    """A layer of the Llama kind: a norm before each part, q, k, v, gate and up each a tensor of its own."""
    hidden, inner, eps = config.hidden_size, config.intermediate_size, config.rms_norm_eps
    query, key = config.heads * config.head_dim, config.kv_heads * config.head_dim
    prefix = f"model.layers.{index}"
    attention, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
    return LayerSpec(
        index,
        AttentionSpec(
            heads=config.heads,
            kv_heads=config.kv_heads,
            head_dim=config.head_dim,
            window=config.window(index),
            norm=NormSpec(f"{prefix}.input_layernorm", hidden, eps),
            qkv=(
                LinearSpec(f"{attention}.q_proj", query, hidden, config.qkv_bias),
                LinearSpec(f"{attention}.k_proj", key, hidden, config.qkv_bias),
                LinearSpec(f"{attention}.v_proj", key, hidden, config.qkv_bias),
            ),
            q_norm=NormSpec(f"{attention}.q_norm", config.head_dim, eps) if config.qk_norm else None,
            k_norm=NormSpec(f"{attention}.k_norm", config.head_dim, eps) if config.qk_norm else None,
            o=LinearSpec(f"{attention}.o_proj", hidden, query, config.output_bias),
        ),
        MlpSpec(
            size=inner,
            norm=NormSpec(f"{prefix}.post_attention_layernorm", hidden, eps),
            gate_up=(
                LinearSpec(f"{mlp}.gate_proj", inner, hidden, config.mlp_bias),
                LinearSpec(f"{mlp}.up_proj", inner, hidden, config.mlp_bias),
            ),
            down=LinearSpec(f"{mlp}.down_proj", hidden, inner, config.mlp_bias),
        ),
    )
