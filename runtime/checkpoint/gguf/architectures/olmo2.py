"""OLMo 2: norms after attention and MLP instead of before them."""

from mycli.runtime.checkpoint.gguf.architecture import LLAMA_TENSORS, Architecture, TensorRule, linear_biases

ARCHITECTURE = Architecture(
    name="olmo2",
    model_type="olmo2",
    written_types=("olmo2",),
    layer_tensors={
        **LLAMA_TENSORS,
        "post_attention_norm": TensorRule("post_attention_layernorm"),
        "post_ffw_norm": TensorRule("post_feedforward_layernorm"),
    },
    read_config=linear_biases,
)
