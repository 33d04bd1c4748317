"""Command R and Aya 23: one LayerNorm before attention and MLP in parallel, scaled logits."""

from mycli.runtime.checkpoint.gguf.architecture import Architecture, GgufKey, linear_biases

LOGIT_SCALE = GgufKey("logit_scale", "logit_scale", float, required=True, write=lambda c: float(c.logit_scale))
ARCHITECTURE = Architecture(
    name="command-r",
    model_type="cohere",
    written_types=("cohere",),
    keys=(LOGIT_SCALE,),
    epsilon="attention.layer_norm_epsilon",
    read_config=linear_biases,
)
