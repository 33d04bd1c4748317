"""Names of EXAONE's published files, in place of those of Llama with which transformers computes it."""

import re
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file

# Within the model, in the order of application.
_NAMES = (
    (r"^model\.embed_tokens\.", "transformer.wte."),
    (r"^model\.norm\.", "transformer.ln_f."),
    (r"^model\.layers\.", "transformer.h."),
    (r"\.input_layernorm\.", ".ln_1."),
    (r"\.post_attention_layernorm\.", ".ln_2."),
    (r"\.self_attn\.o_proj\.", ".attn.attention.out_proj."),
    (r"\.self_attn\.", ".attn.attention."),
    (r"\.gate_proj\.", ".c_fc_0."),
    (r"\.up_proj\.", ".c_fc_1."),
    (r"\.down_proj\.", ".c_proj."),
)
_KEYS = {
    "hidden_act": "activation_function",
    "num_hidden_layers": "num_layers",
    "rms_norm_eps": "layer_norm_epsilon",
}


def publish_exaone(path: Path, config: dict[str, Any]) -> dict[str, Any]:
    """Rename the tensors of a file, and return the config with the keys of published ones."""
    tensors = load_file(path)
    for pattern, name in _NAMES:
        tensors = {re.sub(pattern, name, stored): tensor for stored, tensor in tensors.items()}
    save_file(tensors, path)
    return {_KEYS.get(key, key): value for key, value in config.items()}
