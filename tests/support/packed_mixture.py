"""Small packed MoE models, for end-to-end tests of expert memory limits."""

import shutil
from pathlib import Path
from typing import Any

from tests.support.packed_folder import write_packed
from tests.support.paths import PICO

FIELDS = {
    "model_type": "qwen3_moe",
    "vocab_size": 4096,
    "hidden_size": 128,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "num_experts": 12,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 96,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
    "dtype": "bfloat16",
}
TEXTS = ("tokenizer.json", "tokenizer_config.json", "generation_config.json")


def mixture_fields(layers: int, hidden: int, experts: int, size: int) -> dict[str, Any]:
    """Return the config.json of a qwen3_moe with 8 active experts per token, for speed measurements."""
    return {
        "model_type": "qwen3_moe",
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": hidden // 64,
        "num_key_value_heads": 4,
        "head_dim": 64,
        "intermediate_size": 4 * hidden,
        "moe_intermediate_size": size,
        "num_experts": experts,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "vocab_size": 4096,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": True,
        "dtype": "bfloat16",
    }


def write_mixture(folder: Path) -> Path:
    """Write 12 experts in each of two layers, 3 active per token, int4 in groups of 32."""
    write_packed(folder, FIELDS, {"": 4})
    for name in TEXTS:
        if (PICO / name).exists():
            shutil.copy(PICO / name, folder / name)
    return folder
