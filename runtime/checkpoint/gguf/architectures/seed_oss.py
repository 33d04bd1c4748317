"""Seed-OSS: the norm before the MLP has the name of a norm after attention."""

from mycli.runtime.checkpoint.gguf.architecture import LLAMA_TENSORS, Architecture, TensorRule, linear_biases

ARCHITECTURE = Architecture(
    name="seed_oss",
    model_type="seed_oss",
    written_types=("seed_oss",),
    layer_tensors={**LLAMA_TENSORS, "post_attention_norm": TensorRule("post_attention_layernorm")},
    read_config=linear_biases,
)
