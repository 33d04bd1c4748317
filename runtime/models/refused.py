"""Families that are known and not run, with the reason: whoever asks for one is told what is missing, not only that."""

_EXPERTS = "its layers choose among experts"
_RECURRENT = "some of its layers keep a recurrent state instead of keys and values"
_LATENT = "its keys and values are compressed into a latent vector (MLA)"
_BOTH = "some of its layers are recurrent, and they choose among experts"

REFUSED: dict[str, str] = {
    "deepseek_v2": _LATENT,
    "deepseek_v3": _LATENT,
    "falcon_h1": _RECURRENT,
    "falcon_mamba": _RECURRENT,
    "gemma3n": "its residual stream is several streams (AltUp), with a low-rank path beside each layer (Laurel)",
    "glm4_moe_lite": _LATENT,
    "granitemoehybrid": _BOTH,
    "jamba": _BOTH,
    "llama4": "its layers choose among experts, and some attend in chunks",
    "mamba": _RECURRENT,
    "mamba2": _RECURRENT,
    "minicpm3": _LATENT,
    "mllama": "some of its layers attend to an image",
    "nemotron_h": _RECURRENT,
    "phimoe": _EXPERTS,
    "recurrent_gemma": _RECURRENT,
    "t5": "it has an encoder",
    "t5gemma": "it has an encoder",
}
