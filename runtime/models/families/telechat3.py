"""TeleChat 3 (36B): Llama."""

from mycli.runtime.models import hf_config
from mycli.runtime.models.config import ModelConfig
from mycli.runtime.models.families import llama
from mycli.runtime.utils.json_fields import Fields


def read(raw: Fields) -> ModelConfig:
    return llama.read(hf_config.with_defaults(raw, rms_norm_eps=1e-5))
