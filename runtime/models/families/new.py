"""GTE 1.5 and multilingual, with the model_type of their own code: encoders which compute embeddings, and rerankers."""

from mycli.runtime.models.config import ModelConfig
from mycli.runtime.models.families.gte import read_gte
from mycli.runtime.utils.json_fields import Fields


def read(raw: Fields) -> ModelConfig:
    return read_gte(raw, theta=10000.0)
