"""MiMo 7B (2025): Qwen 2 with an MTP head, which is not read."""

from dataclasses import replace

from mycli.runtime.models.config import ModelConfig, llama_layer
from mycli.runtime.models.families import qwen2
from mycli.runtime.models.layer_spec import LayerSpec
from mycli.runtime.utils.json_fields import Fields


def layer(config: ModelConfig, index: int) -> LayerSpec:
    return replace(llama_layer(config, index), ignored_prefixes=("model.mtp_layers.",))


def read(raw: Fields) -> ModelConfig:
    return replace(qwen2.read(raw), build_layer=layer)
