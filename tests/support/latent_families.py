"""Families with multi-head latent attention: small configurations of every kind."""

from typing import Any

from tests.support.family_parts import IDS, longrope, ministral_rope, scaled

SIZES = {
    "q_lora_rank": 64,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
    "num_key_value_heads": 4,
}
ODD_SIZES = {
    "q_lora_rank": None,
    "kv_lora_rank": 40,
    "qk_nope_head_dim": 24,
    "qk_rope_head_dim": 8,
    "v_head_dim": 20,
    "num_key_value_heads": 4,
}
YARN = scaled("yarn", factor=4.0, original_max_position_embeddings=16, mscale=0.707, mscale_all_dim=0.707)
EXPERTS = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
}
V3 = {**IDS, **EXPERTS, "n_group": 4, "topk_group": 2, "num_mtp_layers": 0}

# id -> (model_type, differences from SMALL)
LATENT: dict[str, tuple[str, dict[str, Any]]] = {
    "deepseek_v2-yarn": ("deepseek_v2", {**IDS, **SIZES, **EXPERTS, **YARN, "topk_method": "greedy"}),
    "deepseek_v2-groups-odd-sizes-biases-tied": (
        "deepseek_v2",
        {
            **IDS,
            **ODD_SIZES,
            **EXPERTS,
            "topk_method": "group_limited_greedy",
            "n_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 2.5,
            "first_k_dense_replace": 0,
            "attention_bias": True,
            "mlp_bias": True,
            "tie_word_embeddings": True,
        },
    ),
    "deepseek_v3-groups-yarn": (
        "deepseek_v3",
        {
            **V3,
            **SIZES,
            **scaled("yarn", factor=4.0, original_max_position_embeddings=16, mscale=1.0, mscale_all_dim=1.0),
        },
    ),
    "deepseek_v3-odd-sizes-half-split-biases-tied": (
        "deepseek_v3",
        {
            **V3,
            **ODD_SIZES,
            "n_group": 1,
            "topk_group": 1,
            "rope_interleave": False,
            "attention_bias": True,
            "norm_topk_prob": False,
            "n_shared_experts": 1,
            "tie_word_embeddings": True,
        },
    ),
    "sarvam_mla-yarn-ungrouped": (
        "sarvam_mla",
        {**V3, **SIZES, **YARN, "q_lora_rank": None, "n_shared_experts": 1, "n_group": 1, "topk_group": 1},
    ),
    "kimi_k2-ungrouped": ("kimi_k2", {**V3, **SIZES, "n_group": 1, "topk_group": 1}),
    "glm4_moe_lite-8top3": ("glm4_moe_lite", {**IDS, **EXPERTS, **SIZES}),
    "glm4_moe_lite-odd-sizes-sparse-first-tied": (
        "glm4_moe_lite",
        {
            **IDS,
            **EXPERTS,
            **ODD_SIZES,
            "n_group": 2,
            "mlp_layer_types": ["sparse", "dense", "sparse"],
            "rope_interleave": False,
            "attention_bias": True,
            "tie_word_embeddings": True,
        },
    ),
    "minicpm3-tied": ("minicpm3", {**IDS, **SIZES, "dim_model_base": 16, "scale_emb": 3}),
    "minicpm3-longrope-odd-sizes-biases-untied": (
        "minicpm3",
        {
            **IDS,
            **ODD_SIZES,
            **longrope(4, 16),
            "v_head_dim": None,
            "scale_depth": None,
            "dim_model_base": None,
            "attention_bias": True,
            "mlp_bias": True,
            "tie_word_embeddings": False,
        },
    ),
    "minicpm3-yarn": (
        "minicpm3",
        {**IDS, **SIZES, "dim_model_base": 16, **scaled("yarn", factor=4.0, original_max_position_embeddings=16)},
    ),
    # No padding token: transformers sets its embedding to zero when it reads a packed copy.
    "youtu-tied": ("youtu", {**IDS, **SIZES, "pad_token_id": None}),
    "youtu-odd-sizes-half-split-biases-untied": (
        "youtu",
        {
            **IDS,
            **ODD_SIZES,
            "rope_interleave": False,
            "attention_bias": True,
            "tie_word_embeddings": False,
        },
    ),
    "mistral4-beyond": ("mistral4", {**IDS, **EXPERTS, **SIZES, **ministral_rope(16)}),
    "mistral4-groups-odd-sizes-unnormalized-tied": (
        "mistral4",
        {
            **IDS,
            **EXPERTS,
            **ODD_SIZES,
            **ministral_rope(128),
            "n_group": 2,
            "routed_scaling_factor": 1.5,
            "norm_topk_prob": False,
            "first_k_dense_replace": 0,
            "rope_interleave": False,
            "attention_bias": True,
            "tie_word_embeddings": True,
        },
    ),
}
