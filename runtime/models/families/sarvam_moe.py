"""Sarvam (30B): Ling 2.0 with another vocabulary, all values of a head rotated."""

from mycli.runtime.models import hf_config
from mycli.runtime.models.config import ModelConfig
from mycli.runtime.models.families import bailing_moe
from mycli.runtime.utils.json_fields import Fields


def read(raw: Fields) -> ModelConfig:
    # Defaults of the published code. It subtracts the mean of the correction bias, which changes no choice.
    return bailing_moe.read(
        hf_config.with_defaults(
            raw,
            num_key_value_heads=4,
            head_dim=256,
            max_position_embeddings=4096,
            rms_norm_eps=1e-6,
            num_experts=128,
            num_experts_per_tok=6,
            num_shared_experts=1,
            moe_intermediate_size=1024,
            first_k_dense_replace=1,
            routed_scaling_factor=2.5,
            use_qk_norm=True,
            moe_router_enable_expert_bias=True,
        )
    )
