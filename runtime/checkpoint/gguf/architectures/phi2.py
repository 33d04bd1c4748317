"""Phi-1, 1.5 and 2: attention and a GELU MLP in parallel after one LayerNorm, biases everywhere."""

from mycli.runtime.checkpoint.gguf.architecture import ALL_BIASES, LAYER_NORM_EPSILON, NORM_BIASES, Architecture
from mycli.runtime.checkpoint.gguf.requirements import HIDDEN_WIDE_HEADS
from mycli.runtime.checkpoint.gguf.tensor_rules import LLAMA_TENSORS, MODEL_TENSORS, TensorRule

ARCHITECTURE = Architecture(
    name="phi2",
    model_type="phi",
    written_types=("phi",),
    requires=(HIDDEN_WIDE_HEADS,),
    biases=(*ALL_BIASES, *NORM_BIASES, "output"),
    layer_tensors={
        **{name: rule for name, rule in LLAMA_TENSORS.items() if name not in ("attn_q_norm", "attn_k_norm")},
        "attn_output": TensorRule("self_attn.dense"),
        "ffn_up": TensorRule("mlp.fc1"),
        "ffn_down": TensorRule("mlp.fc2"),
    },
    model_tensors={**MODEL_TENSORS, "output_norm": TensorRule("model.final_layernorm")},
    epsilon=LAYER_NORM_EPSILON,
    epsilon_field="layer_norm_eps",
    read_config=lambda model, config: {"hidden_act": "gelu_new"},
)
