"""DeepSeek-V2 and V3, Kimi K2, Mistral Large 3, GLM-4.7-Flash, Youtu: latent attention; routed experts, or none."""

import math
from typing import Any

from mycli.runtime.checkpoint.gguf.architecture import Architecture, Config, GgufKey
from mycli.runtime.checkpoint.gguf.experts import (
    EXPERT_GROUPS,
    NORM_KEY,
    SCALE_KEY,
    SIGMOID,
    SOFTMAX,
    expert_tensors,
)
from mycli.runtime.checkpoint.gguf.header import GgufModel
from mycli.runtime.checkpoint.gguf.kimi_delta import latent_attention
from mycli.runtime.checkpoint.gguf.requirements import Requirement
from mycli.runtime.checkpoint.gguf.tensor_rules import LLAMA_TENSORS, TensorRule
from mycli.runtime.models.config import ModelConfig
from mycli.runtime.models.experts_spec import ExpertsSpec

# Versions of the converter before 2026 wrote no expert_gating_func; llama.cpp knows GLM-4.7-Flash by its vocabulary.
_GLM_VOCABULARY = 154880
_LOG_SCALE = 0.1  # of YaRN's logarithm
TEMPERATURE_SCALE, TEMPERATURE_LENGTH = "attention.temperature_scale", "attention.temperature_length"


def _mixture(config: ModelConfig) -> ExpertsSpec | None:
    return next((spec.mlp for spec in config.layer_specs if isinstance(spec.mlp, ExpertsSpec)), None)


def _read_experts(model: GgufModel, config: Config) -> Config:
    # The name that other families have for n_routed_experts; transformers' DeepSeek V2 takes either, the last one.
    config.pop("num_experts", None)
    groups = model.integer("expert_group_count", 1) or 1
    sizes = {
        "n_routed_experts": model.integer("expert_count", low=1),
        "num_experts_per_tok": model.integer("expert_used_count", low=1),
        "moe_intermediate_size": model.integer("expert_feed_forward_length", low=1),
        "n_shared_experts": model.integer("expert_shared_count", 0),
        "first_k_dense_replace": model.integer("leading_dense_block_count", 0),
        "n_group": groups,
        "topk_group": model.integer("expert_group_used_count", 1) or 1,
        "mlp_bias": any(name.endswith((".ffn_up.bias", ".ffn_up_shexp.bias")) for name in model.tensors),
    }
    default = SIGMOID if config["vocab_size"] == _GLM_VOCABULARY else SOFTMAX
    if model.integer("expert_gating_func", default) == SIGMOID:
        return {**sizes, "model_type": "deepseek_v3"}
    method = "greedy" if groups == 1 else "group_limited_greedy"
    return {**sizes, "model_type": "deepseek_v2", "topk_method": method}


def read_temperature(model: GgufModel, read: Config) -> Config:
    """Return the config fields `read` with queries scaled by position, as Mistral's models have them."""
    rope, scale = dict(read["rope_parameters"]), model.number(TEMPERATURE_SCALE, 0.0)
    if scale and model.integer(TEMPERATURE_LENGTH) != rope.get("original_max_position_embeddings"):
        raise model.metadata.fail(model.key(TEMPERATURE_LENGTH), "differs from rope.scaling.original_context_length")
    if read.get("model_type") == "deepseek_v3":
        raise model.metadata.fail(model.key(TEMPERATURE_SCALE), "is not supported with sigmoid-routed experts")
    if rope["rope_type"] == "yarn":  # the converter leaves the scale out, and llama.cpp then scales no queries
        rope["llama_4_scaling_beta"] = scale
    return {**read, "model_type": "mistral4", "rope_parameters": rope}


def read_latent_config(model: GgufModel, config: Config) -> Config:
    """Return the config fields of latent attention and of the experts."""
    rope_dim, rope = config["head_dim"], dict(config["rope_parameters"])
    if model.has("rope.scaling.yarn_log_multiplier"):
        # The file has a tenth of it, and no key for mscale, which equals it in all published models.
        magnitude = model.number("rope.scaling.yarn_log_multiplier") / _LOG_SCALE
        rope |= {"mscale": magnitude, "mscale_all_dim": magnitude}
    # Files of before April 2025 have the sizes of whole heads in the keys of what the cache stores now.
    mla = "_mla" if model.has("attention.key_length_mla") else ""
    read: Config = {
        "rope_parameters": rope,
        "num_key_value_heads": config["num_attention_heads"],
        "q_lora_rank": model.integer("attention.q_lora_rank", 0) or None,
        "kv_lora_rank": model.integer("attention.kv_lora_rank", low=1),
        "qk_rope_head_dim": rope_dim,
        "qk_nope_head_dim": model.integer(f"attention.key_length{mla}", low=rope_dim + 1) - rope_dim,
        "v_head_dim": model.integer(f"attention.value_length{mla}", low=1),
        "attention_bias": any(name.endswith(".attn_kv_a_mqa.bias") for name in model.tensors),
    }
    return {**read, **(_read_experts(model, config) if model.integer("expert_count", 0) else {})}


def _read_config(model: GgufModel, config: Config) -> Config:
    read = read_latent_config(model, config)
    return read_temperature(model, read) if model.number(TEMPERATURE_SCALE, 0.0) else read


def _write_keys(config: ModelConfig) -> dict[str, Any]:
    spec, mixture = latent_attention(config), _mixture(config)
    keys: dict[str, Any] = {
        "attention.head_count_kv": 1,
        "attention.key_length": spec.rank + spec.rope_dim,
        "attention.value_length": spec.rank,
        "attention.key_length_mla": spec.head_dim,
        "attention.value_length_mla": spec.value_dim,
        "attention.kv_lora_rank": spec.rank,
        "rope.dimension_count": spec.rope_dim,
    }
    if spec.q_norm is not None:
        keys["attention.q_lora_rank"] = spec.q_norm.size
    if config.rope_scaling.kind == "yarn":
        magnitude = math.sqrt(spec.scale * math.sqrt(spec.head_dim))
        keys["rope.scaling.yarn_log_multiplier"] = (magnitude - 1.0) / math.log(config.rope_scaling.factor)
    if mixture is None:
        # Keys that llama.cpp requires.
        counts = {"expert_shared_count": 0, "expert_feed_forward_length": config.intermediate_size}
        return {**keys, **counts, "leading_dense_block_count": config.layers}
    routing, shared = mixture.routing, 0 if mixture.shared is None else mixture.shared.mlp.size
    return {
        **keys,
        "expert_count": len(mixture.experts),
        "expert_used_count": routing.top_k,
        "expert_feed_forward_length": mixture.size,
        "expert_shared_count": shared // mixture.size,
        "leading_dense_block_count": next(s.index for s in config.layer_specs if isinstance(s.mlp, ExpertsSpec)),
        "expert_group_count": routing.groups,
        "expert_group_used_count": routing.top_groups,
        "expert_gating_func": SIGMOID if routing.scoring == "sigmoid" else SOFTMAX,
        "expert_weights_scale": float(routing.scale),
        "expert_weights_norm": routing.normalize,
    }


def _has_experts(config: Config) -> bool:
    return "n_routed_experts" in config


def _is_lite(config: ModelConfig) -> bool:
    # As llama.cpp tells DeepSeek-V2-Lite, GigaChat 3 and Kanana 2 from the others.
    return config.layers in (26, 27) or (config.layers == 48 and config.vocab_size == 128256)


LATENT_TENSORS = {
    **{name: rule for name, rule in LLAMA_TENSORS.items() if name not in ("attn_k", "attn_v")},
    "attn_q_a": TensorRule("self_attn.q_a_proj"),
    "attn_q_a_norm": TensorRule("self_attn.q_a_layernorm"),
    "attn_q_b": TensorRule("self_attn.q_b_proj"),
    "attn_kv_a_mqa": TensorRule("self_attn.kv_a_proj_with_mqa"),
    "attn_kv_a_norm": TensorRule("self_attn.kv_a_layernorm"),
    "attn_kv_b": TensorRule("self_attn.kv_b_proj"),
    "attn_k_b": TensorRule("self_attn.kv_b_proj", followed_by="attn_v_b", by_head=True),
}
ARCHITECTURE = Architecture(
    name="deepseek2",
    model_type="youtu",  # without experts; with some, the scores decide
    written_types=("deepseek_v2", "deepseek_v3", "glm4_moe_lite", "kimi_k2", "youtu"),
    requires=(
        *EXPERT_GROUPS,
        Requirement(
            "q_lora_rank, except in models of 26 or 27 layers, which have none",
            lambda config: (latent_attention(config).q_norm is None) == _is_lite(config),
        ),
    ),
    has_mtp_blocks=True,
    latent=True,
    layer_tensors={
        **LATENT_TENSORS,
        **expert_tensors(shared="shared_experts", bias="gate.e_score_correction_bias"),
    },
    keys=(
        GgufKey("expert_count", "n_routed_experts", applies=_has_experts),
        GgufKey(SCALE_KEY.name, SCALE_KEY.field, float, applies=_has_experts),
        GgufKey(NORM_KEY.name, NORM_KEY.field, bool, default=False, required=True, applies=_has_experts),
    ),
    gating=(SIGMOID, SOFTMAX),
    read_config=_read_config,
    write_keys=_write_keys,
)
