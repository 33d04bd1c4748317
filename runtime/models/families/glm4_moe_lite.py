"""GLM-4.7-Flash (30B-A3B): latent attention; sigmoid-routed experts with a correction bias, and a shared expert."""

from dataclasses import replace

from mycli.runtime.models import hf_config
from mycli.runtime.models.config import MAX_LAYERS, ModelConfig
from mycli.runtime.models.experts import EXPERT_KEYS
from mycli.runtime.models.families import glm4_moe
from mycli.runtime.models.latent_layers import read_latent, with_latent_head
from mycli.runtime.utils.json_fields import Fields


def _dense_layers(raw: Fields, layers: int) -> frozenset[int]:
    if not raw.has("mlp_layer_types"):
        return frozenset(range(raw.integer("first_k_dense_replace", 1, low=0, high=layers)))
    types = raw.array("mlp_layer_types", str, MAX_LAYERS)
    if len(types) != layers or set(types) - {"dense", "sparse"}:
        raise raw.fail("mlp_layer_types", f"must name dense or sparse for each of {layers} layers")
    return frozenset(index for index, name in enumerate(types) if name == "dense")


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
    mixture = replace(glm4_moe.read_experts(raw, fields["layers"]), dense=_dense_layers(raw, fields["layers"]))
    return ModelConfig(
        **fields,
        interleaved=raw.boolean("rope_interleave", True),
        build_layer=read_latent(raw, mixture=mixture, base=glm4_moe.layer),
    )
