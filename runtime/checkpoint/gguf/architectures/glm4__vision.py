"""The text part of GLM-4.1V and GLM-4.6V Flash: llama.cpp rotates halves here, so the converter reorders q and k."""

from collections.abc import Iterable
from dataclasses import replace

from mycli.runtime.checkpoint.gguf.architectures import glm4
from mycli.runtime.checkpoint.gguf.tensor_rules import RowRanges, TensorRule
from mycli.runtime.models.config import ModelConfig


def _halves(heads: int, config: ModelConfig) -> Iterable[range]:
    # Of the rows that rotate first the even ones, then the odd ones; then the others.
    rotary = config.rotary_dim or config.head_dim
    for start in range(0, heads * config.head_dim, config.head_dim):
        yield from (range(start + first, start + rotary, 2) for first in range(2))
        yield range(start + rotary, start + config.head_dim)


ARCHITECTURE = replace(
    glm4.ARCHITECTURE,
    written_types=(),
    reads=lambda header, experts: header.metadata.has(glm4.SECTIONS),
    layer_tensors={
        **glm4.ARCHITECTURE.layer_tensors,
        "attn_q": TensorRule("self_attn.q_proj", RowRanges(lambda config: _halves(config.heads, config))),
        "attn_k": TensorRule("self_attn.k_proj", RowRanges(lambda config: _halves(config.kv_heads, config))),
    },
)
