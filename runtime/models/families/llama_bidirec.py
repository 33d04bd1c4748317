"""Llama with bidirectional attention, which computes embeddings: Llama-Embed-Nemotron 8B, Llama-Nemotron-Embed 1B."""

from dataclasses import replace

from mycli.runtime.models.config import ModelConfig
from mycli.runtime.models.families import llama
from mycli.runtime.utils.json_fields import Fields


def read(raw: Fields) -> ModelConfig:
    # Its class sets is_causal, which files contain or not; GGUF files say it by the other key.
    implied = ("is_causal", "use_bidirectional_attention")
    causal = {key: value for key, value in raw.values.items() if key not in implied}
    return replace(llama.read(Fields(causal, raw.source)), bidirectional=True, tie_embeddings=True)  # has no head
