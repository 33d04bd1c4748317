"""GLM-4.7-Flash (30B-A3B): latent attention; sigmoid-routed experts with a correction bias, and a shared expert."""

from dataclasses import replace

from mycli.runtime.models import hf_config
from mycli.runtime.models.config import ModelConfig
from mycli.runtime.models.experts import EXPERT_KEYS, read_dense_layers
from mycli.runtime.models.families import glm4_moe
from mycli.runtime.models.latent_layers import read_latent, with_latent_head
from mycli.runtime.utils.json_fields import Fields


def read(raw: Fields) -> ModelConfig:
    raw = hf_config.with_defaults(
        raw,
        n_routed_experts=64,
        num_experts_per_tok=4,
        moe_intermediate_size=1536,
        routed_scaling_factor=1.8,
        max_position_embeddings=202752,
        rms_norm_eps=1e-5,
        q_lora_rank=768,
        kv_lora_rank=512,
        qk_nope_head_dim=192,
        qk_rope_head_dim=64,
        v_head_dim=256,
        bos_token_id=0,
        eos_token_id=1,
    )
    raw = with_latent_head(raw)
    fields = hf_config.common(raw, handled=("partial_rotary_factor", *EXPERT_KEYS))
    layers = fields["layers"]
    mixture = replace(glm4_moe.read_experts(raw, layers), dense=read_dense_layers(raw, layers, first=1))
    return ModelConfig(
        **fields,
        interleaved=raw.boolean("rope_interleave", True),
        build_layer=read_latent(raw, mixture=mixture, base=glm4_moe.layer),
    )
