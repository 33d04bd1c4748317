"""Hunyuan, dense: Llama with per-head norms of q and k after the rotary embedding."""

from dataclasses import replace

from mycli.runtime.models import hf_config
from mycli.runtime.models.config import ModelConfig, llama_layer
from mycli.runtime.models.layer_spec import LayerSpec
from mycli.runtime.models.part_spec import RopeScaling
from mycli.runtime.utils.json_fields import Fields


def layer(config: ModelConfig, index: int) -> LayerSpec:
    llama, prefix = llama_layer(config, index), f"model.layers.{index}.self_attn"
    attention = replace(
        llama.attention,
        q_norm=config.norm_spec(f"{prefix}.query_layernorm", config.head_dim),
        k_norm=config.norm_spec(f"{prefix}.key_layernorm", config.head_dim),
        norm_after_rope=True,
    )
    return replace(llama, mixer=attention)


def read(raw: Fields) -> ModelConfig:
    raw = hf_config.with_defaults(raw, rms_norm_eps=1e-5)
    fields = hf_config.common(raw)
    scaling = raw.object("rope_parameters" if raw.has("rope_parameters") else "rope_scaling")
    if fields["rope_scaling"].kind == "dynamic" and scaling.has("alpha"):
        alpha, dim = scaling.number("alpha", low=1e-3, high=1e9), fields["head_dim"]
        if dim > 2:  # "dynamic" in the files, but independent of the length
            fields |= {"rope_theta": fields["rope_theta"] * alpha ** (dim / (dim - 2)), "rope_scaling": RopeScaling()}
    return ModelConfig(**fields, **hf_config.attention_biases(raw), build_layer=layer)
