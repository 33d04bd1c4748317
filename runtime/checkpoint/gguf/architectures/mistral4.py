"""Mistral Small 4: DeepSeek's latent attention with queries scaled by position, and softmax-routed experts."""

from dataclasses import replace
from typing import Any

from mycli.runtime.checkpoint.gguf.architectures.deepseek2 import ARCHITECTURE as DEEPSEEK2
from mycli.runtime.checkpoint.gguf.architectures.deepseek2 import (
    TEMPERATURE_LENGTH,
    TEMPERATURE_SCALE,
    read_latent_config,
    read_temperature,
)
from mycli.runtime.checkpoint.gguf.experts import SOFTMAX
from mycli.runtime.models.config import ModelConfig


def _write_keys(config: ModelConfig) -> dict[str, Any]:
    keys, rope = DEEPSEEK2.write_keys(config), config.rope_scaling
    if not rope.query_beta:
        return keys
    return {**keys, TEMPERATURE_SCALE: float(rope.query_beta), TEMPERATURE_LENGTH: rope.original_context}


ARCHITECTURE = replace(
    DEEPSEEK2,
    name="mistral4",
    model_type="mistral4",
    written_types=("mistral4",),
    gating=(SOFTMAX,),
    read_config=lambda model, config: read_temperature(model, read_latent_config(model, config)),
    write_keys=_write_keys,
)
