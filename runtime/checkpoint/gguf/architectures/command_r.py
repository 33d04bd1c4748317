"""Command R and Aya 23: one LayerNorm before attention and MLP in parallel, scaled logits."""

from mycli.runtime.checkpoint.gguf.architecture import LAYER_NORM_EPSILON, Architecture, GgufKey, linear_biases
from mycli.runtime.checkpoint.gguf.requirements import HIDDEN_WIDE_HEADS
from mycli.runtime.checkpoint.gguf.tensor_rules import MODEL_TENSORS

LOGIT_SCALE = GgufKey("logit_scale", "logit_scale", float, required=True, write=lambda c: float(c.logit_scale))
# llama.cpp takes the embedding as the head.
TIED_TENSORS = {name: rule for name, rule in MODEL_TENSORS.items() if name != "output"}
ARCHITECTURE = Architecture(
    name="command-r",
    model_type="cohere",
    written_types=("cohere",),
    requires=(HIDDEN_WIDE_HEADS,),
    model_tensors=TIED_TENSORS,
    keys=(LOGIT_SCALE,),
    epsilon=LAYER_NORM_EPSILON,
    read_config=linear_biases,
)
