"""Qwen 3.5 and later, dense: Gated DeltaNet whose value heads take turns over the key heads.

Hugging Face has the value heads of a key head next to each other; in GGUF they follow as in a broadcast: the first of
every key head, then the second of every key head.
"""

from collections.abc import Callable, Iterable
from typing import Any

from mycli.runtime.checkpoint.gguf.architecture import Architecture
from mycli.runtime.checkpoint.gguf.architectures.qwen3next import (
    DELTA_MODEL_TENSORS,
    DELTA_TENSORS,
    EQUAL_SIZES,
    delta_net,
    read_delta_keys,
    write_delta_keys,
)
from mycli.runtime.checkpoint.gguf.rope import position_sections
from mycli.runtime.checkpoint.gguf.tensor_rules import RowRanges, TensorRule
from mycli.runtime.models.config import ModelConfig
from mycli.runtime.models.recurrent_spec import DeltaNetSpec


def _heads(size: Callable[[DeltaNetSpec], int], after_keys: bool = False) -> RowRanges:
    # Rows of value heads of `size` rows each, behind those of q and k where there are some.
    def ranges(config: ModelConfig) -> Iterable[range]:
        spec = delta_net(config)
        width, copies = size(spec), spec.heads // spec.key_heads
        start = 2 * spec.key_heads * spec.key_dim if after_keys else 0
        yield range(start)
        for copy in range(copies):
            for head in range(spec.key_heads):
                first = start + (head * copies + copy) * width
                yield range(first, first + width)

    return RowRanges(ranges)


_ONE, _VALUES = _heads(lambda spec: 1), _heads(lambda spec: spec.value_dim)
_CHANNELS = _heads(lambda spec: spec.value_dim, after_keys=True)
QWEN35_TENSORS = {
    **DELTA_TENSORS,
    "attn_qkv": TensorRule("linear_attn.in_proj_qkv", _CHANNELS),
    "attn_gate": TensorRule("linear_attn.in_proj_z", _VALUES),
    "ssm_beta": TensorRule("linear_attn.in_proj_b", _ONE),
    "ssm_alpha": TensorRule("linear_attn.in_proj_a", _ONE),
    "ssm_conv1d": TensorRule("linear_attn.conv1d", _CHANNELS),
    "ssm_dt": TensorRule("linear_attn.dt_bias", _ONE, suffixes={".bias": ""}),
    "ssm_a": TensorRule("linear_attn.A_log", _ONE, DELTA_TENSORS["ssm_a"].change, suffixes={"": ""}),
    "ssm_out": TensorRule("linear_attn.out_proj", column_order=_VALUES),
}


def write_qwen35_keys(config: ModelConfig) -> dict[str, Any]:
    """Return the keys of Gated DeltaNet and of the rotation by three positions: time, height and width."""
    return {**write_delta_keys(config), "rope.dimension_sections": position_sections(config)}


ARCHITECTURE = Architecture(
    name="qwen35",
    model_type="qwen3_5_text",
    written_types=("qwen3_5_text",),
    requires=(EQUAL_SIZES,),
    gated_queries=True,
    has_mtp_blocks=True,
    layer_tensors=QWEN35_TENSORS,
    model_tensors=DELTA_MODEL_TENSORS,
    read_config=read_delta_keys,
    write_keys=write_qwen35_keys,
)
