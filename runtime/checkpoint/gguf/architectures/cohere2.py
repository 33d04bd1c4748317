"""Command R7B and Command A: a sliding window in three layers of four, no positions in the fourth."""

from mycli.runtime.checkpoint.gguf.architecture import LAYER_NORM_EPSILON, Architecture, linear_biases
from mycli.runtime.checkpoint.gguf.architectures.command_r import LOGIT_SCALE, TIED_TENSORS
from mycli.runtime.checkpoint.gguf.architectures.exaone4 import WINDOW_KEY
from mycli.runtime.checkpoint.gguf.requirements import HIDDEN_WIDE_HEADS

ARCHITECTURE = Architecture(
    name="cohere2",
    model_type="cohere2",
    written_types=("cohere2",),
    requires=(HIDDEN_WIDE_HEADS,),
    model_tensors=TIED_TENSORS,
    keys=(LOGIT_SCALE, WINDOW_KEY),
    epsilon=LAYER_NORM_EPSILON,
    epsilon_field="layer_norm_eps",
    # llama.cpp reads no pattern: every fourth layer has no window.
    slides=lambda layer: (layer + 1) % 4 != 0,
    read_config=linear_biases,
)
