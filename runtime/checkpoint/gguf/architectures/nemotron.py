"""Nemotron 3 and 4 and Minitron: LayerNorms with gains stored as offsets from one, and a squared-ReLU MLP."""

from mycli.runtime.checkpoint.gguf.architecture import (
    ALL_BIASES,
    LAYER_NORM_EPSILON,
    NORM_BIASES,
    Architecture,
    linear_biases,
)
from mycli.runtime.checkpoint.gguf.requirements import HIDDEN_WIDE_HEADS
from mycli.runtime.checkpoint.gguf.tensor_rules import GAIN_PLUS_ONE, LLAMA_TENSORS, MODEL_TENSORS, TensorRule

ARCHITECTURE = Architecture(
    name="nemotron",
    model_type="nemotron",
    written_types=("nemotron",),
    requires=(HIDDEN_WIDE_HEADS,),
    biases=(*ALL_BIASES, *NORM_BIASES),
    own_head=True,
    layer_tensors={
        **LLAMA_TENSORS,
        "attn_norm": TensorRule("input_layernorm", change=GAIN_PLUS_ONE),
        "ffn_norm": TensorRule("post_attention_layernorm", change=GAIN_PLUS_ONE),
    },
    model_tensors={**MODEL_TENSORS, "output_norm": TensorRule("model.norm", change=GAIN_PLUS_ONE)},
    epsilon=LAYER_NORM_EPSILON,
    epsilon_field="norm_eps",
    read_config=lambda model, config: {**linear_biases(model, config), "hidden_act": "relu2"},
)
