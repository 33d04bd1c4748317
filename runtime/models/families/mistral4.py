"""Mistral Small 4: latent attention with queries scaled by position; softmax-routed experts and a shared expert."""

from mycli.runtime.models import hf_config
from mycli.runtime.models.config import ModelConfig
from mycli.runtime.models.experts import EXPERT_KEYS, ExpertNames, MoeLayers, read_expert_counts, read_routing
from mycli.runtime.models.latent_layers import read_latent, with_latent_head
from mycli.runtime.utils.json_fields import Fields

_NAMES = ExpertNames(shared="shared_experts", shared_gate=None, stacked=True)
_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 128.0,
    "original_max_position_embeddings": 8192,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}


def _mixture(raw: Fields, layers: int) -> MoeLayers:
    count, top_k = read_expert_counts(raw, "n_routed_experts", layers, default=(128, 4))
    size = raw.integer("moe_intermediate_size", 2048)
    return MoeLayers(
        count,
        read_routing(raw, count, top_k, "softmax"),
        size,
        _NAMES,
        dense=frozenset(range(raw.integer("first_k_dense_replace", 0, low=0, high=layers))),
        shared=size * raw.integer("n_shared_experts", 1, low=0, high=count),
    )


def read(raw: Fields) -> ModelConfig:
    raw = hf_config.with_defaults(
        raw,
        max_position_embeddings=1048576,
        q_lora_rank=1024,
        kv_lora_rank=256,
        qk_nope_head_dim=64,
        qk_rope_head_dim=64,
        v_head_dim=128,
    )
    raw = with_latent_head(hf_config.with_default_rope(raw, _ROPE))
    fields = hf_config.common(raw, handled=("llama_4_scaling_beta", "partial_rotary_factor", *EXPERT_KEYS))
    return ModelConfig(
        **fields,
        interleaved=raw.boolean("rope_interleave", True),
        build_layer=read_latent(raw, mixture=_mixture(raw, fields["layers"])),
    )
