"""Solar Open (100B): Llama's attention; sigmoid-routed experts with a correction bias and a shared expert."""

from mycli.runtime.models import hf_config
from mycli.runtime.models.config import ModelConfig
from mycli.runtime.models.experts import EXPERT_KEYS
from mycli.runtime.models.families.glm4_moe import read_experts
from mycli.runtime.utils.json_fields import Fields


def read(raw: Fields) -> ModelConfig:
    raw = hf_config.with_defaults(
        raw,
        moe_intermediate_size=1280,
        first_k_dense_replace=0,
        head_dim=128,
        num_key_value_heads=8,
        rms_norm_eps=1e-5,
        rope_theta=1000000.0,
    )
    raw = hf_config.with_defaults(raw, intermediate_size=raw.integer("moe_intermediate_size"))  # no layer has an MLP
    fields = hf_config.common(raw, handled=EXPERT_KEYS)
    return ModelConfig(
        **fields,
        qkv_bias=raw.boolean("attention_bias", False),
        build_layer=read_experts(raw, fields["layers"]),
    )
