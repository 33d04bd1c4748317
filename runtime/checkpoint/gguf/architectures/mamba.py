"""Mamba-1: a selective scan in every layer, without attention and MLPs."""

from mycli.runtime.checkpoint.gguf.architecture import Architecture
from mycli.runtime.checkpoint.gguf.selective import (
    SELECTIVE_BIASES,
    SELECTIVE_REQUIRES,
    read_selective_fields,
    selective_tensors,
    write_mamba1_keys,
)
from mycli.runtime.checkpoint.gguf.tensor_rules import MODEL_TENSORS, TensorRule

ARCHITECTURE = Architecture(
    name="mamba",
    model_type="mamba",
    written_types=("mamba",),
    reads=lambda header, experts: not header.metadata.boolean("mamba.ssm.dt_b_c_rms", False),
    requires=SELECTIVE_REQUIRES,
    biases=SELECTIVE_BIASES,
    layer_tensors={"attn_norm": TensorRule("norm"), **selective_tensors("mixer")},
    model_tensors={**MODEL_TENSORS, "output_norm": TensorRule("model.norm_f")},
    optional=("attention.head_count", "attention.head_count_kv", "feed_forward_length"),
    epsilon_field="layer_norm_epsilon",
    read_config=read_selective_fields,
    write_keys=write_mamba1_keys,
)
