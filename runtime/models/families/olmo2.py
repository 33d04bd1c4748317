"""OLMo 2: norms after attention and MLP instead of before; queries and keys are normed over all heads together."""

from dataclasses import replace

from mycli.runtime.models import hf_config
from mycli.runtime.models.config import ModelConfig, llama_layer
from mycli.runtime.models.layer_spec import LayerSpec
from mycli.runtime.utils.json_fields import Fields


def layer(config: ModelConfig, index: int) -> LayerSpec:
    llama, prefix = llama_layer(config, index), f"model.layers.{index}"
    attention = replace(
        llama.attention,
        norm=None,
        q_norm=config.norm_spec(f"{prefix}.self_attn.q_norm", config.heads * config.head_dim),
        k_norm=config.norm_spec(f"{prefix}.self_attn.k_norm", config.kv_heads * config.head_dim),
        output_norm=config.norm_spec(f"{prefix}.post_attention_layernorm"),
    )
    output_norm = config.norm_spec(f"{prefix}.post_feedforward_layernorm")
    return LayerSpec(index, attention, replace(llama.dense_mlp, norm=None, output_norm=output_norm))


def read(raw: Fields) -> ModelConfig:
    raw = hf_config.with_defaults(raw, rms_norm_eps=1e-5)
    return ModelConfig(**hf_config.common(raw), **hf_config.attention_biases(raw), build_layer=layer)
