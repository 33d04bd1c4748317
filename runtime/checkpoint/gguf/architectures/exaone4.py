"""EXAONE 4: norms after attention and MLP; with a window, no positions in layers without it."""

from mycli.runtime.checkpoint.gguf.architecture import LLAMA_TENSORS, Architecture, GgufKey, TensorRule

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
ARCHITECTURE = Architecture(
    name="exaone4",
    model_type="exaone4",
    written_types=("exaone4",),
    has_mtp_blocks=True,
    layer_tensors=AFTER_TENSORS,
    keys=(WINDOW_KEY,),
    slides=lambda layer: (layer + 1) % 4 != 0,
    pattern=True,
    read_config=lambda model, config: (
        {}
        if model.integer("attention.sliding_window", 0)
        else {"layer_types": ["full_attention"] * config["num_hidden_layers"]}
    ),
)
