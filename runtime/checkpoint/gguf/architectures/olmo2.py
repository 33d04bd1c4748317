"""OLMo 2, and OLMo 3 where there is a window: norms after attention and MLP instead of before them."""

from mycli.runtime.checkpoint.gguf.architecture import Architecture, Config, linear_biases
from mycli.runtime.checkpoint.gguf.architectures.exaone4 import AFTER_TENSORS, WINDOW_KEY
from mycli.runtime.checkpoint.gguf.header import GgufModel
from mycli.runtime.checkpoint.gguf.requirements import HIDDEN_WIDE_HEADS, WHOLE_ROTATION


def _read_config(model: GgufModel, config: Config) -> Config:
    biases = linear_biases(model, config)
    if not model.integer("attention.sliding_window", 0):
        return {**biases, "layer_types": None}
    # Layers with a window rotate by positions that are not scaled.
    local = {"rope_type": "default", "rope_theta": config["rope_parameters"]["rope_theta"]}
    ropes = {"full_attention": config["rope_parameters"], "sliding_attention": local}
    return {**biases, "model_type": "olmo3", "rope_parameters": ropes}


ARCHITECTURE = Architecture(
    name="olmo2",
    model_type="olmo2",
    written_types=("olmo2", "olmo3"),
    requires=(HIDDEN_WIDE_HEADS, WHOLE_ROTATION),
    own_head=True,
    layer_tensors=AFTER_TENSORS,
    keys=(WINDOW_KEY,),
    slides=lambda layer: (layer + 1) % 4 != 0,
    pattern=True,
    read_config=_read_config,
)
