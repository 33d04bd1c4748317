"""DeepSeek-V3, V3.1 and R1: latent attention; sigmoid-routed experts in groups, and a shared expert."""

from mycli.runtime.models import hf_config
from mycli.runtime.models.config import ModelConfig
from mycli.runtime.models.experts import EXPERT_KEYS
from mycli.runtime.models.families import glm4_moe
from mycli.runtime.models.latent_layers import read_latent, with_latent_head
from mycli.runtime.utils.json_fields import Fields


def read(raw: Fields) -> ModelConfig:
    raw = hf_config.with_defaults(
        raw,
        n_routed_experts=256,
        num_experts_per_tok=8,
        moe_intermediate_size=2048,
        n_group=8,
        topk_group=4,
        routed_scaling_factor=2.5,
        first_k_dense_replace=3,
        max_position_embeddings=4096,
        q_lora_rank=1536,
        kv_lora_rank=512,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        v_head_dim=128,
    )
    hf_config.require(raw, scoring_func="sigmoid", topk_method="noaux_tc", moe_layer_freq=1)
    raw = with_latent_head(raw)
    fields = hf_config.common(raw, handled=EXPERT_KEYS)
    return ModelConfig(
        **fields,
        interleaved=raw.boolean("rope_interleave", True),
        build_layer=read_latent(raw, mixture=glm4_moe.read_experts(raw, fields["layers"]), base=glm4_moe.layer),
    )
