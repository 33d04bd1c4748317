"""Qwen 3.5 and later with experts: Qwen 3.5's layers, a shared expert with a gate."""

from mycli.runtime.checkpoint.gguf.architecture import Architecture
from mycli.runtime.checkpoint.gguf.architectures.qwen2moe import SHARED_TENSORS
from mycli.runtime.checkpoint.gguf.architectures.qwen3next import (
    DELTA_MODEL_TENSORS,
    EQUAL_SIZES,
    read_delta_keys,
)
from mycli.runtime.checkpoint.gguf.architectures.qwen35 import QWEN35_TENSORS, write_qwen35_keys
from mycli.runtime.checkpoint.gguf.experts import expert_keys, shared_size_key

ARCHITECTURE = Architecture(
    name="qwen35moe",
    model_type="qwen3_5_moe_text",
    written_types=("qwen3_5_moe_text",),
    requires=(EQUAL_SIZES,),
    gated_queries=True,
    has_mtp_blocks=True,
    layer_tensors={**QWEN35_TENSORS, **SHARED_TENSORS},
    model_tensors=DELTA_MODEL_TENSORS,
    keys=(*expert_keys(), shared_size_key()),
    optional=("feed_forward_length",),
    read_config=read_delta_keys,
    write_keys=write_qwen35_keys,
)
