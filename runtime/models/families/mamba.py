"""Mamba-1 (state-spaces/mamba-130m-hf to 2.8b-hf): a selective scan in every layer, without attention and MLPs."""

from mycli.runtime.models.config import ModelConfig
from mycli.runtime.models.mamba_layers import read_plain_selective
from mycli.runtime.utils.json_fields import Fields


def read(raw: Fields) -> ModelConfig:
    return read_plain_selective(raw)
