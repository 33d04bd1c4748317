"""RoBERTa encoders, which compute embeddings (all-distilroberta): BERT whose positions start after padding."""

from mycli.runtime.models.config import ModelConfig
from mycli.runtime.models.families.bert import read_bert
from mycli.runtime.utils.json_fields import Fields


def read(raw: Fields) -> ModelConfig:
    return read_bert(raw, "roberta", first_position=raw.integer("pad_token_id", 1, low=0) + 1)
