"""StarCoder 1 and SantaCoder: GPT-2 with one head of keys and values."""

from mycli.runtime.checkpoint.gguf.architecture import ALL_BIASES, LAYER_NORM_EPSILON, NORM_BIASES, Architecture
from mycli.runtime.checkpoint.gguf.architectures.gpt2 import POSITION_TENSORS, gpt2_config
from mycli.runtime.checkpoint.gguf.tensor_rules import TensorRule

ARCHITECTURE = Architecture(
    name="starcoder",
    model_type="gpt_bigcode",
    written_types=("gpt_bigcode",),
    biases=(*ALL_BIASES, *NORM_BIASES),
    layer_tensors={
        "attn_norm": TensorRule("ln_1"),
        "attn_qkv": TensorRule("attn.c_attn"),
        "attn_output": TensorRule("attn.c_proj"),
        "ffn_norm": TensorRule("ln_2"),
        "ffn_up": TensorRule("mlp.c_fc"),
        "ffn_down": TensorRule("mlp.c_proj"),
    },
    model_tensors=POSITION_TENSORS,
    epsilon=LAYER_NORM_EPSILON,
    epsilon_field="layer_norm_epsilon",
    # llama.cpp approximates GELU for StarCoder, which has the exact function, as for SantaCoder, which has not.
    read_config=lambda model, config: gpt2_config(model, config, "gelu"),
)
