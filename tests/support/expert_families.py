"""MoE families: small configurations of every kind."""

from typing import Any

from tests.support.family_parts import GEMMA4, IDS, MULTIPLIERS, scaled

EXPERTS8 = {**IDS, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 96}

ROUTED8 = {
    **IDS,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
}

EVERY_OTHER = {
    **EXPERTS8,
    "num_hidden_layers": 4,
    "norm_topk_prob": True,
    "decoder_sparse_step": 2,
    "tie_word_embeddings": True,
}

GPT_OSS = {
    **IDS,
    "head_dim": 16,
    "intermediate_size": 96,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "sliding_window": 16,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 150000.0,
        "factor": 4.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
        "original_max_position_embeddings": 16,
    },
}

GEMMA4_EXPERTS = {
    **GEMMA4,
    "hidden_size_per_layer_input": 0,
    "enable_moe_block": True,
    "num_experts": 8,
    "top_k_experts": 2,
    "moe_intermediate_size": 32,
}

# id -> (model_type, differences from SMALL)
EXPERTS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_moe-8top2": ("qwen3_moe", {**EXPERTS8, "head_dim": 16}),
    "qwen3_moe-every-other-normalized-tied": (
        "qwen3_moe",
        {
            **EVERY_OTHER,
            "head_dim": 32,
            "num_experts_per_tok": 3,
            "mlp_only_layers": [3],
            "attention_bias": True,
        },
    ),
    "mixtral-4top2": ("mixtral", {**IDS, "num_local_experts": 4, "sliding_window": None}),
    "mixtral-window7-top1-tied": (
        "mixtral",
        {**IDS, "num_local_experts": 6, "num_experts_per_tok": 1, "sliding_window": 7, "tie_word_embeddings": True},
    ),
    "olmoe-16top4": ("olmoe", {**IDS, "num_experts": 16, "num_experts_per_tok": 4, "num_key_value_heads": 4}),
    "olmoe-clip-normalized-gqa-tied": (
        "olmoe",
        {
            **IDS,
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "norm_topk_prob": True,
            "clip_qkv": 0.5,
            "tie_word_embeddings": True,
        },
    ),
    "gpt_oss-window7-gqa4:2": ("gpt_oss", {**GPT_OSS, "sliding_window": 7, "num_hidden_layers": 4}),
    "gpt_oss-8top1-tied": (
        "gpt_oss",
        {**GPT_OSS, "num_experts_per_tok": 1, "num_local_experts": 8, "head_dim": 32, "tie_word_embeddings": True},
    ),
    "qwen2_moe-shared": ("qwen2_moe", {**EXPERTS8, "shared_expert_intermediate_size": 64}),
    "qwen2_moe-every-other-normalized-tied-window": (
        "qwen2_moe",
        {
            **EVERY_OTHER,
            "shared_expert_intermediate_size": 128,
            "use_sliding_window": True,
            "sliding_window": 7,
            "max_window_layers": 1,
        },
    ),
    "gemma4-8top2": ("gemma4_text", GEMMA4_EXPERTS),
    "gemma4-experts-ple-shared-kv-double-untied": (
        "gemma4_text",
        {
            **GEMMA4_EXPERTS,
            "num_hidden_layers": 4,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "hidden_size_per_layer_input": 32,
            "vocab_size_per_layer_input": 97,
            "num_kv_shared_layers": 2,
            "use_double_wide_mlp": True,
            "num_experts": 5,
            "top_k_experts": 1,
            "tie_word_embeddings": False,
        },
    ),
    "granitemoe-8top2": ("granitemoe", {**IDS, **MULTIPLIERS, "num_local_experts": 8, "num_experts_per_tok": 2}),
    "granitemoe-tied-biases": (
        "granitemoe",
        {**IDS, **MULTIPLIERS, "num_local_experts": 4, "attention_bias": True, "tie_word_embeddings": True},
    ),
    "glm4_moe-8top3-scaled": (
        "glm4_moe",
        {**ROUTED8, "head_dim": 24, "num_experts_per_tok": 3, "routed_scaling_factor": 2.5, "attention_bias": True},
    ),
    "glm4_moe-groups-norms-two-shared-tied": (
        "glm4_moe",
        {
            **ROUTED8,
            "head_dim": 16,
            "n_group": 4,
            "topk_group": 2,
            "n_shared_experts": 2,
            "norm_topk_prob": False,
            "use_qk_norm": True,
            "tie_word_embeddings": True,
        },
    ),
    "ernie4_5_moe-8top3-tied": (
        "ernie4_5_moe",
        {**IDS, "moe_num_experts": 8, "moe_k": 3, "moe_intermediate_size": 32},
    ),
    "ernie4_5_moe-every-other-none-shared-untied": (
        "ernie4_5_moe",
        {
            **IDS,
            "num_hidden_layers": 5,
            "head_dim": 24,
            "moe_num_experts": 6,
            "moe_k": 1,
            "moe_intermediate_size": 96,
            "moe_num_shared_experts": 0,
            "moe_layer_start_index": 0,
            "moe_layer_end_index": 3,
            "moe_layer_interval": 2,
            "tie_word_embeddings": False,
        },
    ),
    "hunyuan_v1_moe-8top2": ("hunyuan_v1_moe", {**IDS, "head_dim": 24, "num_experts": 8, "moe_topk": 2}),
    "hunyuan_v1_moe-alpha-tied-biases": (
        "hunyuan_v1_moe",
        {
            **IDS,
            "head_dim": 16,
            "num_experts": 4,
            "moe_topk": [1, 1, 1],
            "attention_bias": True,
            "tie_word_embeddings": True,
            **scaled("dynamic", factor=1.0, alpha=1000.0),
        },
    ),
    "minimax_m2-8top2-half-turned": (
        "minimax_m2",
        {**IDS, "head_dim": 16, "num_local_experts": 8, "num_experts_per_tok": 2, "rotary_dim": 8},
    ),
    "minimax_m2-top1-mha-tied": (
        "minimax_m2",
        {
            **IDS,
            "head_dim": 24,
            "num_key_value_heads": 4,
            "num_local_experts": 5,
            "num_experts_per_tok": 1,
            "tie_word_embeddings": True,
        },
    ),
    "dots1-8top2": ("dots1", {**ROUTED8, "norm_topk_prob": True, "routed_scaling_factor": 2.5, "head_dim": 16}),
    "dots1-window7-tied-biases": (
        "dots1",
        {
            **ROUTED8,
            "head_dim": 24,
            "first_k_dense_replace": 1,
            "n_shared_experts": 2,
            "sliding_window": 7,
            "max_window_layers": 1,
            "attention_bias": True,
            "tie_word_embeddings": True,
        },
    ),
    "solar_open-8top2": ("solar_open", {**ROUTED8, "head_dim": 16, "routed_scaling_factor": 1.5}),
    "solar_open-three-shared-tied-biases": (
        "solar_open",
        {
            **ROUTED8,
            "head_dim": 24,
            "n_shared_experts": 3,
            "attention_bias": True,
            "tie_word_embeddings": True,
        },
    ),
}
