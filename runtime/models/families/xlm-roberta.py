"""XLM-RoBERTa encoders, which compute embeddings (BGE-M3, multilingual E5, Arctic 2): RoBERTa with more languages."""

from mycli.runtime.models.config import ModelConfig
from mycli.runtime.models.families import roberta
from mycli.runtime.utils.json_fields import Fields


def read(raw: Fields) -> ModelConfig:
    if raw.values.get("position_embedding_type") == "rotary":
        message = "= 'rotary' is not supported for 'xlm-roberta': so Jina Embeddings 3 is stored for its own code"
        raise raw.fail("position_embedding_type", message, "use the repository whose name ends in -hf, or a GGUF file")
    return roberta.read(raw)
