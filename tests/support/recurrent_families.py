"""Families with recurrent layers: small configurations of every kind."""

from typing import Any

from tests.support.family_parts import IDS, MULTIPLIERS

DELTA = {
    "head_dim": 32,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}

DELTA_EXPERTS = {
    **IDS,
    **DELTA,
    "num_hidden_layers": 4,
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 64,
}

LFM2_EXPERTS = {
    **IDS,
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
}

MAMBA = {
    "mamba_n_heads": 4,
    "mamba_d_state": 16,
    "mamba_n_groups": 2,
}
ODD_MAMBA = {
    "mamba_n_heads": 8,
    "mamba_d_state": 20,
    "mamba_n_groups": 1,
    "mamba_expand": 3,
    "mamba_d_conv": 3,
    "mamba_conv_bias": False,
    "mamba_proj_bias": True,
    "time_step_limit": (0.1, 0.9),
}
PLAIN_MAMBA = {"num_heads": 8, "head_dim": 16, "state_size": 16, "n_groups": 2}
NEMOTRON = {
    "head_dim": 32,
    "mamba_num_heads": 8,
    "mamba_head_dim": 16,
    "ssm_state_size": 16,
    "n_groups": 2,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "moe_shared_expert_intermediate_size": 64,
}
FALCON_MULTIPLIERS = {
    "embedding_multiplier": 3.0,
    "lm_head_multiplier": 0.25,
    "key_multiplier": 0.5,
    "attention_in_multiplier": 1.25,
    "attention_out_multiplier": 0.75,
    "ssm_in_multiplier": 1.5,
    "ssm_out_multiplier": 0.5,
    "mlp_multipliers": [0.75, 0.5],
    "ssm_multipliers": [0.5, 1.5, 0.75, 1.25, 0.625],
}
ATTENTION, MIXER = "full_attention", "linear_attention"

# id -> (model_type, differences from SMALL)
RECURRENT: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_5-delta": ("qwen3_5_text", {**IDS, **DELTA, "num_hidden_layers": 4}),
    "qwen3_5-odd-heads-tied": (
        "qwen3_5_text",
        {
            **IDS,
            **DELTA,
            "head_dim": 24,
            "linear_key_head_dim": 24,
            "linear_value_head_dim": 40,
            "linear_num_value_heads": 6,
            "linear_conv_kernel_dim": 3,
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
            "tie_word_embeddings": True,
            "attention_bias": True,
        },
    ),
    "qwen3_5_moe-8top3": ("qwen3_5_moe_text", DELTA_EXPERTS),
    "qwen3_5_moe-odd-heads-top1-tied": (
        "qwen3_5_moe_text",
        {
            **DELTA_EXPERTS,
            "linear_key_head_dim": 24,
            "linear_value_head_dim": 40,
            "linear_num_value_heads": 6,
            "layer_types": ["full_attention", "linear_attention", "linear_attention", "full_attention"],
            "num_experts_per_tok": 1,
            "tie_word_embeddings": True,
        },
    ),
    "qwen3_next-8top3": ("qwen3_next", DELTA_EXPERTS),
    "qwen3_next-odd-heads-every-other-unnormalized-tied": (
        "qwen3_next",
        {
            **DELTA_EXPERTS,
            "linear_key_head_dim": 24,
            "linear_value_head_dim": 40,
            "linear_num_value_heads": 6,
            "linear_conv_kernel_dim": 3,
            "decoder_sparse_step": 2,
            "mlp_only_layers": [3],
            "norm_topk_prob": False,
            "tie_word_embeddings": True,
            "attention_bias": True,
        },
    ),
    "lfm2-tied": ("lfm2", {**IDS, "block_multiple_of": 16, "layer_types": ["conv", "full_attention", "conv"]}),
    "lfm2-untied-biases": (
        "lfm2",
        {
            **IDS,
            "block_auto_adjust_ff_dim": False,
            "conv_bias": True,
            "conv_L_cache": 4,
            "layer_types": ["full_attention", "conv", "conv"],
            "tie_word_embeddings": False,
            "num_key_value_heads": 4,
        },
    ),
    "lfm2_moe-8top3-tied": (
        "lfm2_moe",
        {**LFM2_EXPERTS, "num_hidden_layers": 4, "layer_types": ["conv", "full_attention", "conv", "conv"]},
    ),
    "lfm2_moe-uncorrected-biases-untied": (
        "lfm2_moe",
        {
            **LFM2_EXPERTS,
            "layer_types": ["full_attention", "conv", "full_attention"],
            "num_dense_layers": 0,
            "num_experts_per_tok": 1,
            "norm_topk_prob": False,
            "routed_scaling_factor": 1.5,
            "use_expert_bias": False,
            "conv_bias": True,
            "conv_L_cache": 4,
            "num_key_value_heads": 4,
            "tie_word_embeddings": False,
        },
    ),
    "granitemoehybrid-8top3": (
        "granitemoehybrid",
        {
            **IDS,
            **MAMBA,
            **MULTIPLIERS,
            "num_hidden_layers": 4,
            "layer_types": [MIXER, ATTENTION, MIXER, MIXER],
            "num_local_experts": 8,
            "num_experts_per_tok": 3,
            "intermediate_size": 32,
            "shared_intermediate_size": 64,
        },
    ),
    "granitemoehybrid-dense-odd-sizes-rope-biases-tied": (
        "granitemoehybrid",
        {
            **IDS,
            **ODD_MAMBA,
            "layer_types": [ATTENTION, MIXER, MIXER],
            "num_local_experts": 0,
            "shared_intermediate_size": 88,
            "position_embedding_type": "rope",
            "attention_bias": True,
            "tie_word_embeddings": True,
        },
    ),
    "bamba-2-groups": ("bamba", {**IDS, **MAMBA, "attn_layer_indices": [1]}),
    "bamba-odd-sizes-biases-tied": (
        "bamba",
        {
            **IDS,
            **ODD_MAMBA,
            "attn_layer_indices": [0, 2],
            "attention_bias": True,
            "mlp_bias": True,
            "tie_word_embeddings": True,
        },
    ),
    "nemotron_h-every-kind": (
        "nemotron_h",
        {
            **IDS,
            **NEMOTRON,
            "layers_block_type": [MIXER, "mlp", ATTENTION, MIXER, "moe"],
            "num_hidden_layers": 5,
        },
    ),
    "nemotron_h-no-experts": (
        "nemotron_h",
        {
            **IDS,
            **NEMOTRON,
            "layers_block_type": [MIXER, "mlp", ATTENTION, MIXER, "mlp"],
            "num_hidden_layers": 5,
        },
    ),
    "nemotron_h-groups-latent-experts-odd-sizes-biases-unnormalized": (
        "nemotron_h",
        {
            **IDS,
            **NEMOTRON,
            "layers_block_type": [ATTENTION, "moe", MIXER, "moe", "mlp"],
            "num_hidden_layers": 5,
            "mamba_num_heads": 4,
            "mamba_head_dim": 24,
            "ssm_state_size": 20,
            "n_groups": 1,
            "conv_kernel": 3,
            "use_conv_bias": False,
            "use_bias": True,
            "mlp_bias": True,
            "time_step_min": 0.5,
            "moe_latent_size": 32,
            "n_group": 2,
            "topk_group": 1,
            "norm_topk_prob": False,
            "routed_scaling_factor": 2.5,
            "moe_shared_expert_intermediate_size": 96,
            "layer_norm_epsilon": 1e-3,
        },
    ),
    "mamba2-2-groups": ("mamba2", {**IDS, **PLAIN_MAMBA}),
    "mamba2-odd-sizes-biases-tied": (
        "mamba2",
        {
            **IDS,
            "num_heads": 6,
            "head_dim": 32,
            "expand": 3,
            "state_size": 20,
            "n_groups": 1,
            "conv_kernel": 3,
            "use_bias": True,
            "use_conv_bias": False,
            "time_step_limit": (0.1, 0.9),
            "layer_norm_epsilon": 1e-3,
            "tie_word_embeddings": True,
        },
    ),
    "falcon_h1-multipliers": (
        "falcon_h1",
        {
            **IDS,
            **MAMBA,
            **FALCON_MULTIPLIERS,
            "mamba_d_ssm": 96,
            "mamba_d_head": 24,
        },
    ),
    "falcon_h1-normed-odd-sizes-biases-tied": (
        "falcon_h1",
        {
            **IDS,
            **ODD_MAMBA,
            "mamba_n_groups": 2,
            "mamba_d_ssm": None,
            "mamba_rms_norm": True,
            "projectors_bias": True,
            "attention_bias": True,
            "mlp_bias": True,
            "tie_word_embeddings": True,
        },
    ),
    "falcon_h1-normed-after-gate-multipliers-biases": (
        "falcon_h1",
        {
            **IDS,
            **MAMBA,
            **FALCON_MULTIPLIERS,
            "mamba_d_ssm": 64,
            "mamba_rms_norm": True,
            "mamba_norm_before_gate": False,
            "mamba_proj_bias": True,
            "attention_bias": True,
            "mlp_bias": True,
        },
    ),
}
