"""Falcon-Mamba (7B, Falcon3-Mamba 7B): Mamba-1 whose dt, B and C are normalized without a weight."""

from mycli.runtime.models.config import ModelConfig
from mycli.runtime.models.mamba_layers import read_plain_selective
from mycli.runtime.utils.json_fields import Fields


def read(raw: Fields) -> ModelConfig:
    return read_plain_selective(raw, norms=(None, None, None))
