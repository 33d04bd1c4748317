"""StarCoder2: Llama with LayerNorms, biases everywhere, and a GELU MLP without a gate; no window in llama.cpp."""

from mycli.runtime.checkpoint.gguf.architecture import ALL_BIASES, LAYER_NORM_EPSILON, NORM_BIASES, Architecture
from mycli.runtime.checkpoint.gguf.requirements import HIDDEN_WIDE_HEADS, Requirement
from mycli.runtime.checkpoint.gguf.tensor_rules import LLAMA_TENSORS, TensorRule

ARCHITECTURE = Architecture(
    name="starcoder2",
    model_type="starcoder2",
    written_types=("starcoder2",),
    requires=(HIDDEN_WIDE_HEADS, Requirement("use_bias", lambda config: config.mlp_bias)),
    biases=(*ALL_BIASES, *NORM_BIASES),
    layer_tensors={**LLAMA_TENSORS, "ffn_up": TensorRule("mlp.c_fc"), "ffn_down": TensorRule("mlp.c_proj")},
    epsilon=LAYER_NORM_EPSILON,
    epsilon_field="norm_epsilon",
    read_config=lambda model, config: {
        "use_bias": "blk.0.ffn_up.bias" in model.tensors,
        "hidden_act": "gelu_pytorch_tanh",
        "sliding_window": None,
    },
)
