"""DeepSeek-V2, V2-Lite and V2.5: latent attention; softmax-routed experts, maybe in groups, and shared experts."""

from mycli.runtime.models import hf_config
from mycli.runtime.models.config import ModelConfig
from mycli.runtime.models.experts import EXPERT_KEYS, ExpertNames, MoeLayers, read_expert_counts, read_expert_groups
from mycli.runtime.models.experts_spec import RoutingSpec
from mycli.runtime.models.latent_layers import read_latent, with_latent_head
from mycli.runtime.utils.json_fields import Fields

_NAMES = ExpertNames(shared="shared_experts", shared_gate=None)
_METHODS = ("greedy", "group_limited_greedy")


def _mixture(raw: Fields, layers: int) -> MoeLayers:
    count, top_k = read_expert_counts(raw, "n_routed_experts", layers, default=(64, 6))
    # transformers ignores norm_topk_prob here and DeepSeek's own code does not, so `read` refuses it.
    method = raw.text("topk_method", "greedy")
    if method not in _METHODS:
        raise raw.fail("topk_method", f"{method!r:.40} is not supported ({', '.join(_METHODS)})")
    groups, top_groups = (1, 1) if method == "greedy" else read_expert_groups(raw, count, top_k)
    scale = raw.number("routed_scaling_factor", 1.0, low=1e-6, high=1e6)
    size = raw.integer("moe_intermediate_size", 1407)
    return MoeLayers(
        count,
        RoutingSpec(top_k, False, groups=groups, top_groups=top_groups, group_best=1, scale=scale),
        size,
        _NAMES,
        dense=frozenset(range(raw.integer("first_k_dense_replace", 0, low=0, high=layers))),
        shared=size * raw.integer("n_shared_experts", 2, low=0, high=count),
        shared_bias=raw.boolean("mlp_bias", False),
    )


def read(raw: Fields) -> ModelConfig:
    raw = hf_config.with_defaults(
        raw,
        max_position_embeddings=2048,
        q_lora_rank=1536,
        kv_lora_rank=512,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        v_head_dim=128,
    )
    hf_config.require(raw, scoring_func="softmax", norm_topk_prob=False, moe_layer_freq=1)
    raw = with_latent_head(raw)
    fields = hf_config.common(raw, handled=EXPERT_KEYS)
    return ModelConfig(
        **fields,
        mlp_bias=raw.boolean("mlp_bias", False),
        interleaved=True,
        build_layer=read_latent(raw, mixture=_mixture(raw, fields["layers"])),
    )
