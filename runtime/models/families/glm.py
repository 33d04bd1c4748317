"""GLM-4-9B (2024) and GLM-Edge: GLM-4-0414 without norms after attention and MLP."""

from dataclasses import replace

from mycli.runtime.models.config import ModelConfig
from mycli.runtime.models.families import glm4
from mycli.runtime.models.hf_config import with_defaults
from mycli.runtime.models.layer_spec import LayerSpec
from mycli.runtime.utils.json_fields import Fields


def layer(config: ModelConfig, index: int) -> LayerSpec:
    base = glm4.layer(config, index)
    return replace(base, mixer=replace(base.attention, output_norm=None), mlp=replace(base.dense_mlp, output_norm=None))


def read(raw: Fields) -> ModelConfig:
    return replace(glm4.read(with_defaults(raw, rms_norm_eps=1.5625e-07)), build_layer=layer)
