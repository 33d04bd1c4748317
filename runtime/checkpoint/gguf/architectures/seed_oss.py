"""Seed-OSS: the norm before the MLP has the name of a norm after attention."""

from mycli.runtime.checkpoint.gguf.architecture import Architecture, Config, linear_biases
from mycli.runtime.checkpoint.gguf.header import GgufModel
from mycli.runtime.checkpoint.gguf.requirements import WHOLE_ROTATION
from mycli.runtime.checkpoint.gguf.tensor_rules import LLAMA_TENSORS, TensorRule


def _read_config(model: GgufModel, config: Config) -> Config:
    output = "blk.0.attn_output.bias" in model.tensors
    return {**linear_biases(model, config), "attention_out_bias": output}


ARCHITECTURE = Architecture(
    name="seed_oss",
    model_type="seed_oss",
    written_types=("seed_oss",),
    requires=(WHOLE_ROTATION,),
    layer_tensors={**LLAMA_TENSORS, "post_attention_norm": TensorRule("post_attention_layernorm")},
    read_config=_read_config,
)
