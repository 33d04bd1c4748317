"""Kimi K2: DeepSeek-V3 with other sizes."""

from mycli.runtime.models.config import ModelConfig
from mycli.runtime.models.families import deepseek_v3
from mycli.runtime.utils.json_fields import Fields


def read(raw: Fields) -> ModelConfig:
    return deepseek_v3.read(raw)
