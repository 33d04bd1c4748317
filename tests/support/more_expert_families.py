"""Families of 2025 and 2026 whose layers choose among experts: small configurations of every kind."""

from typing import Any

from tests.support.expert_families import EXPERTS8
from tests.support.family_parts import IDS, MULTIPLIERS

BY_LAYER_TYPE = {
    "rope_parameters": {
        "full_attention": {"rope_type": "default", "rope_theta": 500000.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
    }
}

# id -> (model_type, what differs from SMALL)
MORE_EXPERTS: dict[str, tuple[str, dict[str, Any]]] = {
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
}
