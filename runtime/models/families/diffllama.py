"""DiffLlama: Llama with differential attention, the difference of two softmaxes over pairs of heads."""

import math
from dataclasses import replace

from mycli.runtime.models import hf_config
from mycli.runtime.models.config import ModelConfig, llama_layer
from mycli.runtime.models.layer_spec import LayerSpec
from mycli.runtime.models.part_spec import DifferentialSpec, NormSpec
from mycli.runtime.utils.json_fields import Fields


def layer(config: ModelConfig, index: int) -> LayerSpec:
    llama, name = llama_layer(config, index), f"model.layers.{index}.self_attn.lambda_"
    initial = 0.8 - 0.6 * math.exp(-0.3 * index)
    attention = replace(
        llama.attention,
        kv_heads=config.kv_heads // 2,
        head_dim=2 * config.head_dim,
        differential=DifferentialSpec((f"{name}q1", f"{name}k1", f"{name}q2", f"{name}k2"), initial),
        inner_norm=NormSpec(None, 2 * config.head_dim, config.rms_norm_eps, factor=1.0 - initial),
        scale=config.head_dim**-0.5,
    )
    return replace(llama, mixer=attention)


def read(raw: Fields) -> ModelConfig:
    raw = hf_config.with_defaults(raw, rms_norm_eps=1e-5)
    fields = hf_config.common(raw)
    if fields["kv_heads"] % 2:
        raise raw.fail("num_key_value_heads", f"{fields['kv_heads']} is odd; differential attention pairs heads")
    return ModelConfig(**fields, **hf_config.attention_biases(raw), build_layer=layer)
