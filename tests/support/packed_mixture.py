"""Writes a small packed MoE model with pico's tokenizer, for end-to-end tests of expert memory limits."""

import shutil
from pathlib import Path

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


def write_mixture(folder: Path) -> Path:
    """Write 12 experts in each of two layers, 3 active per token, int4 in groups of 32."""
    write_packed(folder, FIELDS, {"": 4})
    for name in TEXTS:
        if (PICO / name).exists():
            shutil.copy(PICO / name, folder / name)
    return folder
