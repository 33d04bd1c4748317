"""XLM-RoBERTa encoders, which compute embeddings (BGE-M3, multilingual E5, Arctic 2): RoBERTa with more languages."""

from mycli.runtime.models.config import ModelConfig
from mycli.runtime.models.families import roberta
from mycli.runtime.utils.json_fields import Fields


def read(raw: Fields) -> ModelConfig:
    return roberta.read(raw)
