"""MoE families of 2025 and 2026: small configurations of every kind."""

from typing import Any

from tests.support.expert_families import EXPERTS8, ROUTED8
from tests.support.family_parts import IDS, MULTIPLIERS, longrope, scaled

BY_LAYER_TYPE = {
    "rope_parameters": {
        "full_attention": {"rope_type": "default", "rope_theta": 500000.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
    }
}

PARTIAL_BY_LAYER_TYPE = {
    "rope_parameters": {
        "full_attention": {"rope_type": "default", "rope_theta": 500000.0, "partial_rotary_factor": 0.5},
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 1.0},
    }
}

THREE = ["sliding_attention", "full_attention", "sliding_attention"]

# With the keys of qwen2_moe.
DEEPSEEK = {
    **EXPERTS8,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 64,
    "qkv_bias": False,
    "norm_topk_prob": False,
}

MORE_EXPERTS: dict[str, tuple[str, dict[str, Any]]] = {
    "bailing_moe-8top2-biases": (
        "bailing_moe",
        {**ROUTED8, "head_dim": 24, "norm_topk_prob": True, "attention_bias": True, "use_qk_norm": False},
    ),
    "bailing_moe-groups-norms-two-shared-tied": (
        "bailing_moe",
        {
            **ROUTED8,
            "head_dim": 16,
            "n_group": 4,
            "topk_group": 2,
            "n_shared_experts": 2,
            "norm_topk_prob": True,
            "routed_scaling_factor": 2.5,
            "use_qk_norm": True,
            "tie_word_embeddings": True,
        },
    ),
    "sarvam_moe-8top2-norms": (
        "sarvam_moe",
        {
            **ROUTED8,
            "head_dim": 24,
            "partial_rotary_factor": 1.0,
            "norm_topk_prob": True,
            "routed_scaling_factor": 2.5,
            "use_qk_norm": True,
        },
    ),
    "deepseek-normalized-tied": (
        "deepseek",
        {
            **DEEPSEEK,
            "num_experts_per_tok": 3,
            "norm_topk_prob": True,
            "mlp_only_layers": [],
            "tie_word_embeddings": True,
        },
    ),
    "deepseek-8top2-first-dense": ("deepseek", {**DEEPSEEK, "mlp_only_layers": [0]}),
    "exaone_moe-window7": ("exaone_moe", {**EXPERTS8, "num_hidden_layers": 5, "sliding_window": 7, "head_dim": 16}),
    "exaone_moe-groups-tied": (
        "exaone_moe",
        {
            **EXPERTS8,
            "head_dim": 24,
            "n_group": 4,
            "topk_group": 2,
            "num_shared_experts": 2,
            "norm_topk_prob": False,
            "sliding_window": 9,
            "mlp_layer_types": ["sparse", "dense", "sparse"],
            "tie_word_embeddings": True,
        },
    ),
    "flex_olmo-8top2": ("flex_olmo", {**EXPERTS8}),
    "flex_olmo-normalized-tied-biases": (
        "flex_olmo",
        {
            **EXPERTS8,
            "norm_topk_prob": True,
            "attention_bias": True,
            "tie_word_embeddings": True,
            "num_key_value_heads": 4,
            "num_experts_per_tok": 3,
        },
    ),
    "granitemoeshared-8top2": (
        "granitemoeshared",
        {**IDS, **MULTIPLIERS, "num_local_experts": 8, "num_experts_per_tok": 2, "shared_intermediate_size": 64},
    ),
    "granitemoeshared-none-tied-biases": (
        "granitemoeshared",
        {**IDS, **MULTIPLIERS, "num_local_experts": 4, "attention_bias": True, "tie_word_embeddings": True},
    ),
    "mellum-window7": (
        "mellum",
        {
            **EXPERTS8,
            "head_dim": 16,
            "sliding_window": 7,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            **BY_LAYER_TYPE,
        },
    ),
    "mellum-dense-tied-biases": (
        "mellum",
        {
            **EXPERTS8,
            "head_dim": 24,
            "mlp_layer_types": ["dense", "sparse", "sparse"],
            "norm_topk_prob": False,
            "attention_bias": True,
            "tie_word_embeddings": True,
        },
    ),
    "hy_v3-8top2": ("hy_v3", {**EXPERTS8, "head_dim": 24}),
    "hy_v3-two-shared-tied-biases": (
        "hy_v3",
        {
            **EXPERTS8,
            "head_dim": 16,
            "num_shared_experts": 2,
            "attention_bias": True,
            "tie_word_embeddings": True,
            "mlp_layer_types": ["sparse", "dense", "sparse"],
            "router_scaling_factor": 1.5,
        },
    ),
    "afmoe-window7": (
        "afmoe",
        {
            **EXPERTS8,
            "num_hidden_layers": 5,
            "head_dim": 16,
            "sliding_window": 7,
            "mup_enabled": True,
            "num_shared_experts": 1,
        },
    ),
    "afmoe-biases-tied": (
        "afmoe",
        {
            **EXPERTS8,
            "head_dim": 24,
            "layer_types": THREE,
            "sliding_window": 9,
            "num_dense_layers": 0,
            "route_scale": 2.5,
            "attention_bias": True,
            "tie_word_embeddings": True,
        },
    ),
    "laguna-heads-by-layer-window7": (
        "laguna",
        {
            **EXPERTS8,
            "head_dim": 16,
            "shared_expert_intermediate_size": 32,
            "num_attention_heads_per_layer": [4, 6, 4],
            "layer_types": THREE,
            "sliding_window": 7,
            "moe_routed_scaling_factor": 2.5,
            **PARTIAL_BY_LAYER_TYPE,
        },
    ),
    "laguna-value-gates-capped-tied-biases": (
        "laguna",
        {
            **EXPERTS8,
            "head_dim": 24,
            "shared_expert_intermediate_size": 64,
            "gating": "per-element",
            "moe_router_logit_softcapping": 1.5,
            "mlp_layer_types": ["sparse", "dense", "sparse"],
            "attention_bias": True,
            "tie_word_embeddings": True,
        },
    ),
    "flint-window7": (
        "flint",
        {
            **EXPERTS8,
            "num_hidden_layers": 5,
            "head_dim": 16,
            "shared_expert_intermediate_size": 32,
            "sliding_window": 7,
        },
    ),
    "flint-unnormalized-tied-biases": (
        "flint",
        {
            **EXPERTS8,
            "head_dim": 24,
            "shared_expert_intermediate_size": 64,
            "layer_types": THREE,
            "sliding_window": 9,
            "mlp_only_layers": [],
            "norm_topk_prob": False,
            "attention_bias": True,
            "tie_word_embeddings": True,
        },
    ),
    "kolibri1-window7": (
        "kolibri1",
        {
            **EXPERTS8,
            "num_hidden_layers": 5,
            "head_dim": 16,
            "shared_expert_intermediate_size": 32,
            "sliding_window": 7,
            "norm_topk_prob": True,
        },
    ),
    "kolibri1-unnormalized-tied": (
        "kolibri1",
        {
            **EXPERTS8,
            "head_dim": 24,
            "shared_expert_intermediate_size": 64,
            "layer_types": THREE,
            "sliding_window": 9,
            "norm_topk_prob": False,
            "tie_word_embeddings": True,
        },
    ),
    "phimoe-4top2-head-bias": (
        "phimoe",
        {**IDS, "num_local_experts": 4, "lm_head_bias": True, "router_jitter_noise": 0.2},
    ),
    # Of the published models. Beyond the original context transformers keeps the short factors.
    "phimoe-longrope-within": (
        "phimoe",
        {**IDS, "num_local_experts": 4, **longrope(8, original=64, short_mscale=1.25, long_mscale=1.25)},
    ),
    "phimoe-window7-tied-biases": (
        "phimoe",
        {**IDS, "num_local_experts": 6, "sliding_window": 7, "attention_bias": True, "tie_word_embeddings": True},
    ),
    "cohere2_moe-window7-tied-shared": (
        "cohere2_moe",
        {
            **EXPERTS8,
            "num_hidden_layers": 4,
            "head_dim": 16,
            "sliding_window": 7,
            "num_shared_experts": 1,
            "logit_scale": 0.25,
        },
    ),
    "cohere2_moe-sigmoid-dense-rms-untied-biases": (
        "cohere2_moe",
        {
            **EXPERTS8,
            "head_dim": 24,
            "sliding_window": 9,
            "num_shared_experts": 2,
            "shared_expert_combination_strategy": "sum",
            "expert_selection_fn": "sigmoid",
            "norm_topk_prob": False,
            "mlp_layer_types": ["dense", "sparse", "sparse"],
            "layer_types": ["full_attention", "sliding_attention", "full_attention"],
            "prefix_dense_intermediate_size": 64,
            "rms_norm_eps": 1e-5,
            "tie_word_embeddings": False,
            "attention_bias": True,
        },
    ),
    "mimo_v2_flash-window7": (
        "mimo_v2_flash",
        {**ROUTED8, "num_hidden_layers": 7, "head_dim": 32, "v_head_dim": 16, "sliding_window": 7},
    ),
    "mimo_v2_flash-groups-tied-biases": (
        "mimo_v2_flash",
        {
            **ROUTED8,
            "head_dim": 48,
            "v_head_dim": 48,
            "sliding_window": 9,
            "num_key_value_heads": 1,
            "layer_types": THREE,
            "n_group": 4,
            "topk_group": 2,
            "attention_value_scale": None,
            "mlp_layer_types": ["sparse", "dense", "sparse"],
            "attention_bias": True,
            "tie_word_embeddings": True,
            "rope_parameters": {
                k: {"rope_type": "default", "rope_theta": t, "partial_rotary_factor": 0.5}
                for k, t in (("full_attention", 5e6), ("sliding_attention", 1e4))
            },
        },
    ),
    "granitemoe_swa-window7-shared": (
        "granitemoe_swa",
        {
            **IDS,
            **MULTIPLIERS,
            "num_hidden_layers": 4,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "shared_intermediate_size": 64,
            "sliding_window": 7,
        },
    ),
    "granitemoe_swa-thetas-tied-biases": (
        "granitemoe_swa",
        {
            **IDS,
            **MULTIPLIERS,
            "num_local_experts": 4,
            "attention_bias": True,
            "tie_word_embeddings": True,
            "layer_types": THREE,
            "sliding_window": 9,
            "layer_rope_theta": [10000.0, 0, 20000.0],
        },
    ),
    "llama4-chunk16-4top1": (
        "llama4_text",
        {
            **IDS,
            "num_hidden_layers": 4,
            "head_dim": 16,
            "intermediate_size": 64,
            "intermediate_size_mlp": 96,
            "num_local_experts": 4,
            "attention_chunk_size": 16,
            "floor_scale": 8,
            "attn_scale": 0.4,
        },
    ),
    "llama4-without-experts-tied": (  # MobileLLM-R1
        "llama4_text",
        {
            **IDS,
            "head_dim": 16,
            "num_local_experts": 0,
            "num_experts_per_tok": 0,
            "moe_layers": [],
            "interleave_moe_layer_step": 0,
            "intermediate_size_mlp": 96,
            "layer_types": ["full_attention"] * 3,
            "no_rope_layers": [1] * 3,
            "attn_temperature_tuning": False,
            "tie_word_embeddings": True,
        },
    ),
    "llama4-every-other-top2-biases-tied": (
        "llama4_text",
        {
            **IDS,
            "num_hidden_layers": 4,
            "head_dim": 24,
            "intermediate_size": 64,
            "intermediate_size_mlp": 96,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "interleave_moe_layer_step": 2,
            "attention_chunk_size": 9,
            "no_rope_layer_interval": 2,
            "use_qk_norm": False,
            "attn_temperature_tuning": False,
            "attention_bias": True,
            "tie_word_embeddings": True,
            **scaled(
                "llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=16
            ),
        },
    ),
}
