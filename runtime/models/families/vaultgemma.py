"""VaultGemma (1B): Gemma 2 without the norms after attention and MLP."""

from dataclasses import replace

from mycli.runtime.models.config import ModelConfig
from mycli.runtime.models.families import gemma2
from mycli.runtime.models.layer_spec import LayerSpec
from mycli.runtime.utils.json_fields import Fields


def layer(config: ModelConfig, index: int) -> LayerSpec:
    gemma = gemma2.layer(config, index)
    attention, mlp = replace(gemma.attention, output_norm=None), replace(gemma.dense_mlp, output_norm=None)
    return replace(gemma, mixer=attention, mlp=mlp)


def read(raw: Fields) -> ModelConfig:
    return replace(gemma2.read(raw), build_layer=layer)
