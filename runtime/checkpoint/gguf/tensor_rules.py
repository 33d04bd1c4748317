"""How tensors of GGUF files are named and stored, by their Hugging Face names. Imports no torch."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from mycli.runtime.models.config import ModelConfig

if TYPE_CHECKING:  # `show` and `list` read configs without torch
    from torch import Tensor


@dataclass(frozen=True)
class RowOrder:
    """The rows of a weight viewed as `shape(config)`, and the order of these axes in the file."""

    shape: Callable[[ModelConfig], tuple[int, ...]]
    axes: tuple[int, ...]


@dataclass(frozen=True)
class RowRanges:
    """The rows of a weight in the order of the file, as ranges of rows in Hugging Face's order."""

    ranges: Callable[[ModelConfig], Iterable[range]]


@dataclass(frozen=True)
class ValueChange:
    """A change to every value of a weight: what the file stores, and its inverse. Both take and return fp32."""

    store: "Callable[[Tensor], Tensor]"
    load: "Callable[[Tensor], Tensor]"


@dataclass(frozen=True)
class TensorRule:
    """The Hugging Face name of a tensor, and how its GGUF form differs."""

    # After model.layers.N in a layer. With {expert} it stands for all experts: GGUF stacks them in one tensor
    # [experts, rows, columns]. Norms of several heads are stacked in the same way.
    name: str
    row_order: RowOrder | RowRanges | None = None
    change: ValueChange | None = None
    column_order: RowRanges | None = None
    # Where Hugging Face has several tensors for one in GGUF, whose rows follow one another: the others.
    more_names: tuple[str, ...] = ()
    # Where GGUF has two tensors for one of Hugging Face: the GGUF name of the other, whose rows come after these.
    followed_by: str | None = None
    first_rows: Callable[[ModelConfig], int] | None = None  # rows of the first of the two
    # Latent attention: GGUF has the half of the keys transposed, [heads, columns, rows], that of the values not.
    by_head: bool = False
    count_key: str = "expert_count"  # of the tensors in a stack
    # The shape in the file, where it has more axes.
    stored_shape: Callable[[ModelConfig], tuple[int, ...]] | None = None
    # The rows in the file, where it has more: further ones repeat the first.
    padded_rows: Callable[[ModelConfig], int] | None = None
    # Hugging Face's ending by the ending in GGUF.
    suffixes: Mapping[str, str] = field(default_factory=lambda: {".weight": ".weight", ".bias": ".bias"})


@dataclass(frozen=True)
class Place:
    """Where the file stores a tensor: the GGUF name, the rule it follows, its index in a stack, mostly of experts."""

    name: str
    rule: TensorRule
    expert: int | None = None
    in_metadata: bool = False  # the name is a key, whose array has a value for each layer

    @property
    def names(self) -> tuple[str, ...]:
        """The GGUF tensors that store it, one after the other."""
        if self.rule.followed_by is None:
            return (self.name,)
        block, ending = self.name.rsplit(".", 2)[0], self.name.rsplit(".", 1)[1]
        return self.name, f"{block}.{self.rule.followed_by}.{ending}"


# Rows of q and k of a head are rotated in pairs: llama.cpp's "norm" rope takes neighbours (2 i, 2 i + 1), Hugging Face
# halves of a head (i, i + dim / 2), so converters reorder the rows of architectures that use it.
PAIRED_Q = RowOrder(lambda config: (config.heads, 2, -1), (0, 2, 1))
PAIRED_K = RowOrder(lambda config: (config.kv_heads, 2, -1), (0, 2, 1))
# Gemma multiplies by 1 + gain; llama.cpp's RMSNorm multiplies by the stored value.
GAIN_PLUS_ONE = ValueChange(store=lambda gain: gain + 1.0, load=lambda stored: stored - 1.0)

MODEL_TENSORS = {
    "token_embd": TensorRule("model.embed_tokens"),
    "output_norm": TensorRule("model.norm"),
    "output": TensorRule("lm_head"),
}
LLAMA_TENSORS = {
    "attn_norm": TensorRule("input_layernorm"),
    "attn_q": TensorRule("self_attn.q_proj"),
    "attn_k": TensorRule("self_attn.k_proj"),
    "attn_v": TensorRule("self_attn.v_proj"),
    "attn_output": TensorRule("self_attn.o_proj"),
    "attn_q_norm": TensorRule("self_attn.q_norm"),
    "attn_k_norm": TensorRule("self_attn.k_norm"),
    "ffn_norm": TensorRule("post_attention_layernorm"),
    "ffn_gate": TensorRule("mlp.gate_proj"),
    "ffn_up": TensorRule("mlp.up_proj"),
    "ffn_down": TensorRule("mlp.down_proj"),
}
PER_LAYER_TENSORS = {
    # Tokens without per-layer inputs take those of the first token, but llama.cpp reads a row for every token.
    "per_layer_token_embd": TensorRule("model.embed_tokens_per_layer", padded_rows=lambda config: config.vocab_size),
    "per_layer_model_proj": TensorRule("model.per_layer_model_projection"),
    "per_layer_proj_norm": TensorRule("model.per_layer_projection_norm"),
}
PAIRED_TENSORS = {
    **LLAMA_TENSORS,
    "attn_q": TensorRule("self_attn.q_proj", PAIRED_Q),
    "attn_k": TensorRule("self_attn.k_proj", PAIRED_K),
}
