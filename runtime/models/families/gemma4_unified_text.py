"""Gemma 4 12B, text model: Gemma 4 without per-layer inputs."""

from mycli.runtime.models import hf_config
from mycli.runtime.models.config import ModelConfig
from mycli.runtime.models.families.gemma4_text import read_gemma4
from mycli.runtime.utils.json_fields import Fields


def read(raw: Fields) -> ModelConfig:
    raw = hf_config.with_defaults(
        raw,
        head_dim=256,
        num_key_value_heads=4,
        max_position_embeddings=262144,
        sliding_window=1024,
        tie_word_embeddings=True,
        eos_token_id=1,
        bos_token_id=2,
    )
    return read_gemma4(raw)
