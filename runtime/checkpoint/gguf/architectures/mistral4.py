"""Mistral Small 4: DeepSeek's latent attention with queries scaled by position, and softmax-routed experts."""

from dataclasses import replace
from typing import Any

from mycli.runtime.checkpoint.gguf.architecture import Config
from mycli.runtime.checkpoint.gguf.architectures.deepseek2 import ARCHITECTURE as DEEPSEEK2
from mycli.runtime.checkpoint.gguf.experts import SOFTMAX
from mycli.runtime.checkpoint.gguf.header import GgufModel
from mycli.runtime.models.config import ModelConfig

_SCALE, _LENGTH = "attention.temperature_scale", "attention.temperature_length"


def _read_config(model: GgufModel, config: Config) -> Config:
    read = DEEPSEEK2.read_config(model, config)
    rope, scale = dict(read["rope_parameters"]), model.number(_SCALE, 0.0)
    if scale and model.integer(_LENGTH) != rope.get("original_max_position_embeddings"):
        raise model.metadata.fail(model.key(_LENGTH), "differs from rope.scaling.original_context_length")
    if rope["rope_type"] == "yarn":  # the converter leaves the scale out, and llama.cpp then scales no queries
        rope["llama_4_scaling_beta"] = scale
    return {**read, "model_type": "mistral4", "rope_parameters": rope}


def _write_keys(config: ModelConfig) -> dict[str, Any]:
    keys, rope = DEEPSEEK2.write_keys(config), config.rope_scaling
    if not rope.query_beta:
        return keys
    return {**keys, _SCALE: float(rope.query_beta), _LENGTH: rope.original_context}


ARCHITECTURE = replace(
    DEEPSEEK2,
    name="mistral4",
    model_type="mistral4",
    written_types=("mistral4",),
    gating=(SOFTMAX,),
    read_config=_read_config,
    write_keys=_write_keys,
)
