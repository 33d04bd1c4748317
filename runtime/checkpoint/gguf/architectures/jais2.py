"""Jais 2: Llama with LayerNorms, biases everywhere, and a squared-ReLU MLP without a gate."""

from mycli.runtime.checkpoint.gguf.architecture import (
    ALL_BIASES,
    LAYER_NORM_EPSILON,
    NORM_BIASES,
    Architecture,
    linear_biases,
)
from mycli.runtime.checkpoint.gguf.requirements import WHOLE_ROTATION, Requirement

ARCHITECTURE = Architecture(
    name="jais2",
    model_type="jais2",
    written_types=("jais2",),
    requires=(
        WHOLE_ROTATION,
        Requirement("attention_bias and mlp_bias", lambda config: config.output_bias and config.mlp_bias),
    ),
    biases=(*ALL_BIASES, *NORM_BIASES),
    epsilon=LAYER_NORM_EPSILON,
    epsilon_field="layer_norm_eps",
    read_config=lambda model, config: {**linear_biases(model, config), "hidden_act": "relu2"},
)
