"""EXAONE 4: norms after attention and MLP; with a window, no positions in layers without it."""

from mycli.runtime.checkpoint.gguf.architecture import Architecture, Config, GgufKey
from mycli.runtime.checkpoint.gguf.header import GgufModel
from mycli.runtime.checkpoint.gguf.requirements import HIDDEN_WIDE_HEADS, WHOLE_ROTATION, Requirement
from mycli.runtime.checkpoint.gguf.tensor_rules import LLAMA_TENSORS, TensorRule

AFTER_TENSORS = {
    **{name: rule for name, rule in LLAMA_TENSORS.items() if name not in ("attn_norm", "ffn_norm")},
    "post_attention_norm": TensorRule("post_attention_layernorm"),
    "post_ffw_norm": TensorRule("post_feedforward_layernorm"),
}
WINDOW_KEY = GgufKey(
    "attention.sliding_window",
    "sliding_window",
    write=lambda config: next((window for window in config.windows if window is not None), 0),
)


def full_attention(model: GgufModel, config: Config) -> Config:
    """Return the config fields of a file without a window: all layers attend to the whole context."""
    if model.integer(WINDOW_KEY.name, 0):
        return {}
    return {"layer_types": ["full_attention"] * config["num_hidden_layers"], "sliding_window": None}


# llama.cpp has the window of the 32B model alone, which it knows by the number of layers.
_WINDOW_LAYERS = 64
ARCHITECTURE = Architecture(
    name="exaone4",
    model_type="exaone4",
    written_types=("exaone4",),
    requires=(
        HIDDEN_WIDE_HEADS,
        WHOLE_ROTATION,
        Requirement(
            f"{_WINDOW_LAYERS} layers where there is a sliding window, and else another number",
            lambda config: (config.layers == _WINDOW_LAYERS) == any(config.windows),
        ),
    ),
    has_mtp_blocks=True,
    layer_tensors=AFTER_TENSORS,
    keys=(WINDOW_KEY,),
    slides=lambda layer: (layer + 1) % 4 != 0,
    pattern=True,
    read_config=full_attention,
)
