"""Dense families with attention layers: small configurations of every kind."""

from typing import Any

from tests.support.family_parts import GEMMA4, IDS, MULTIPLIERS, longrope, ministral_rope, scaled


def block(group: int | None, width: float | None) -> dict[str, Any]:
    """Return an item of `block_configs`; None: a layer without attention, or without an MLP."""
    return {
        "attention": {"n_heads_in_group": group, "no_op": group is None, "replace_with_linear": False},
        "ffn": {"ffn_mult": width, "no_op": width is None, "replace_with_linear": False},
    }


# MiniCPM's keys, and the same for Granite's code, which is the reference.
MINICPM = {
    **{"scale_emb": 12, "scale_depth": 1.4, "dim_model_base": 16},
    **{
        "embedding_multiplier": 12,
        "residual_multiplier": 1.4 / 3**0.5,
        "logits_scaling": 4,
        "attention_multiplier": 0.25,
    },
}
HELIUM = {**IDS, "hidden_size": 64, "head_dim": 16}  # the heads together are as wide as the hidden size

# id -> (model_type, differences from SMALL)
DENSE: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-gqa4:2-hd16": ("llama", {}),
    "llama-mha4-tied": ("llama", {"num_key_value_heads": 4, "tie_word_embeddings": True}),
    "llama-mqa4:1-hd32": ("llama", {"num_key_value_heads": 1, "head_dim": 32}),
    "llama-biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-rope-linear": ("llama", scaled("linear", factor=2.5)),
    "llama-rope-dynamic-beyond": ("llama", {"max_position_embeddings": 16, **scaled("dynamic", factor=2.0)}),
    "llama-rope-llama3": (
        "llama",
        scaled("llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=16),
    ),
    "llama-rope-yarn": ("llama", scaled("yarn", factor=4.0, original_max_position_embeddings=16)),
    "llama-rope-yarn-attention-factor": (
        "llama",
        scaled("yarn", factor=4.0, original_max_position_embeddings=16, attention_factor=0.9, beta_fast=8.0),
    ),
    "mistral-window7": ("mistral", {"sliding_window": 7}),
    "mistral-no-window-hd24": ("mistral", {"sliding_window": None, "head_dim": 24}),
    "qwen2-biases": ("qwen2", {}),
    "qwen2-tied-window-upper": (
        "qwen2",
        {"tie_word_embeddings": True, "use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
    ),
    "exaone-llama3": (
        "exaone",
        scaled("llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=16),
    ),
    "exaone-mha-tied-biases": (
        "exaone",
        {"num_key_value_heads": 4, "tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True},
    ),
    "telechat3-yarn": (
        "telechat3",
        {**scaled("yarn", factor=4.0, original_max_position_embeddings=16), "rms_norm_eps": 1e-5},
    ),
    "PanguEmbedded-biases-hd24": ("PanguEmbedded", {"attention_bias": True, "head_dim": 24, "rms_norm_eps": 1e-5}),
    "baichuan-mha": ("baichuan", {"num_key_value_heads": 4}),
    "mimo-hd24": ("mimo", {"head_dim": 24}),
    "olmo2-gqa4:2": ("olmo2", {**IDS}),
    "olmo2-mha-tied-biases": (
        "olmo2",
        {"num_key_value_heads": 4, "tie_word_embeddings": True, "attention_bias": True, **IDS},
    ),
    "phi3-gqa4:2": ("phi3", {**IDS}),
    "phi3-mha-tied-window16": (
        "phi3",
        {"num_key_value_heads": 4, "tie_word_embeddings": True, "sliding_window": 16, **IDS},
    ),
    "phi3-longrope-within-partial": (
        "phi3",
        {**IDS, "hidden_size": 96, "num_hidden_layers": 2, **longrope(9, original=64, partial_rotary_factor=0.75)},
    ),
    "phi3-longrope-beyond-tied": ("phi3", {**IDS, "tie_word_embeddings": True, **longrope(8, original=16)}),
    "gemma2-window7-tied": ("gemma2", {**IDS, "head_dim": 16, "sliding_window": 7, "query_pre_attn_scalar": 24}),
    "gemma2-mqa-low-caps-untied": (
        "gemma2",
        {
            **IDS,
            "num_key_value_heads": 1,
            "head_dim": 24,
            "sliding_window": 16,
            "query_pre_attn_scalar": 24,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 3.0,
            "tie_word_embeddings": False,
        },
    ),
    "gemma3-window7-tied": (
        "gemma3_text",
        {**IDS, "head_dim": 16, "num_hidden_layers": 7, "sliding_window": 7, "query_pre_attn_scalar": 24},
    ),
    "gemma3-linear-untied": (
        "gemma3_text",
        {
            **IDS,
            "head_dim": 32,
            "sliding_window": 9,
            "sliding_window_pattern": 2,
            "rope_scaling": {"rope_type": "linear", "factor": 8.0},
            "tie_word_embeddings": False,
        },
    ),
    "gemma4-ple-shared-kv-double": (
        "gemma4_text",
        {
            **GEMMA4,
            "num_hidden_layers": 6,
            "layer_types": ["sliding_attention", "full_attention"] * 3,
            "hidden_size_per_layer_input": 32,
            "vocab_size_per_layer_input": 97,
            "num_kv_shared_layers": 3,
            "use_double_wide_mlp": True,
            "final_logit_softcapping": 30.0,
        },
    ),
    "gemma4-keys-are-values-untied": (
        "gemma4_text",
        {
            **GEMMA4,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
            "hidden_size_per_layer_input": 0,
            "attention_k_eq_v": True,
            "num_global_key_value_heads": 1,
            "tie_word_embeddings": False,
        },
    ),
    "gemma3n-sparse-shared-kv": (
        "gemma3n_text",
        {
            **IDS,
            "head_dim": 16,
            "num_hidden_layers": 5,
            "sliding_window": 7,
            "layer_types": [*2 * ("sliding_attention", "full_attention"), "sliding_attention"],
            "num_kv_shared_layers": 2,
            "activation_sparsity_pattern": [0.95, 0.5, 0.0, 0.0, 0.0],
            "vocab_size_per_layer_input": 97,
            "hidden_size_per_layer_input": 32,
            "laurel_rank": 16,
        },
    ),
    "gemma3n-second-of-three-widths-unscaled-biases-untied": (
        "gemma3n_text",
        {
            **IDS,
            "head_dim": 32,
            "sliding_window": 7,
            "layer_types": ["full_attention", "sliding_attention", "full_attention"],
            "num_kv_shared_layers": 0,
            "intermediate_size": [88, 64, 120],
            "altup_num_inputs": 3,
            "altup_active_idx": 1,
            "altup_correct_scale": False,
            "attention_bias": True,
            "final_logit_softcapping": 4.0,
            "vocab_size_per_layer_input": 97,
            "hidden_size_per_layer_input": 8,
            "laurel_rank": 8,
            "tie_word_embeddings": False,
        },
    ),
    "gemma4_unified-tied": (
        "gemma4_unified_text",
        {**GEMMA4, "num_hidden_layers": 7, "attention_k_eq_v": True, "num_global_key_value_heads": 1},
    ),
    "gemma4_unified-no-bidirection-hd24": (
        "gemma4_unified_text",
        {**GEMMA4, "head_dim": 24, "use_bidirectional_attention": None, "sliding_window": 16},
    ),
    "smollm3-tied": ("smollm3", {**IDS, "num_hidden_layers": 4, "tie_word_embeddings": True}),
    "smollm3-untied-window": (
        "smollm3",
        {
            **IDS,
            "no_rope_layers": [1, 0, 1],
            "use_sliding_window": True,
            "sliding_window": 9,
            "tie_word_embeddings": False,
            "attention_bias": True,
        },
    ),
    "olmo3-window7": ("olmo3", {**IDS, "num_hidden_layers": 4, "sliding_window": 7}),
    "olmo3-yarn-tied": (
        "olmo3",
        {
            **IDS,
            "num_hidden_layers": 4,
            "sliding_window": 16,
            "num_key_value_heads": 4,
            "tie_word_embeddings": True,
            "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
        },
    ),
    "ministral3-beyond": ("ministral3", {**IDS, "head_dim": 16, **ministral_rope(original=16)}),
    "ministral3-within-window-tied": (
        "ministral3",
        {**IDS, "head_dim": 24, "sliding_window": 11, "tie_word_embeddings": True, **ministral_rope(original=64)},
    ),
    "granite-multipliers": ("granite", {**IDS, **MULTIPLIERS}),
    "granite-tied-biases": (
        "granite",
        {**IDS, **MULTIPLIERS, "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    ),
    "nemotron-nas-every-kind": (
        "nemotron-nas",
        {
            **{"num_hidden_layers": 4, "num_key_value_heads": 4, "intermediate_size": 512},
            "block_configs": [block(2, 12.0), block(None, 6.0), block(1, None), block(4, 6.0)],
        },
    ),
    "minicpm-tied": ("minicpm", {**IDS, **MINICPM, "tie_word_embeddings": True}),
    "minicpm-longrope-beyond-biases": (
        "minicpm",
        {**IDS, **MINICPM, "attention_bias": True, **longrope(8, original=16)},
    ),
    "glm4-half-turned": ("glm4", {**IDS, "head_dim": 16}),
    "glm4-tied-hd24-no-bias": (
        "glm4",
        {**IDS, "head_dim": 24, "tie_word_embeddings": True, "attention_bias": False, "num_key_value_heads": 1},
    ),
    "seed_oss-biases": ("seed_oss", {**IDS, "head_dim": 32}),
    "seed_oss-tied-out-bias": (
        "seed_oss",
        {**IDS, "head_dim": 16, "tie_word_embeddings": True, "attention_out_bias": True, "attention_bias": False},
    ),
    "exaone4-window7": ("exaone4", {**IDS, "num_hidden_layers": 4, "sliding_window": 7}),
    "exaone4-no-window-tied": (
        "exaone4",
        {
            **IDS,
            "sliding_window": None,
            "layer_types": ["full_attention"] * 3,
            "tie_word_embeddings": True,
            "num_key_value_heads": 4,
        },
    ),
    "cohere2-window7-tied": ("cohere2", {**IDS, "num_hidden_layers": 4, "sliding_window": 7, "logit_scale": 0.25}),
    "cohere2-untied-biases": (
        "cohere2",
        {
            **IDS,
            "sliding_window": 16,
            "layer_types": ["full_attention", "sliding_attention", "full_attention"],
            "tie_word_embeddings": False,
            "attention_bias": True,
        },
    ),
    "hunyuan-alpha": ("hunyuan_v1_dense", {**IDS, "head_dim": 16, **scaled("dynamic", factor=1.0, alpha=1000.0)}),
    "maincoder-hd24": ("maincoder", {**IDS, "head_dim": 24}),
    "maincoder-tied": ("maincoder", {**IDS, "head_dim": 16, "tie_word_embeddings": True}),
    "hunyuan-tied-biases": (
        "hunyuan_v1_dense",
        {**IDS, "head_dim": 32, "tie_word_embeddings": True, "attention_bias": True, "num_key_value_heads": 4},
    ),
    "ernie4_5-tied": ("ernie4_5", {**IDS, "head_dim": 24, "tie_word_embeddings": True}),
    "ernie4_5-untied-biases": ("ernie4_5", {**IDS, "head_dim": 16, "tie_word_embeddings": False, "use_bias": True}),
    "arcee-yarn": ("arcee", {**IDS, **scaled("yarn", factor=4.0, original_max_position_embeddings=16)}),
    "arcee-tied-biases": (
        "arcee",
        {**IDS, "tie_word_embeddings": True, "mlp_bias": True, "attention_bias": True, "num_key_value_heads": 1},
    ),
    "cwm-window7": (
        "cwm",
        {
            **IDS,
            "bos_token_id": 3,
            "num_hidden_layers": 5,
            "head_dim": 16,
            "sliding_window": 7,
            **scaled(
                "llama3", factor=16.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=16
            ),
        },
    ),
    "cwm-tied-window16": (
        "cwm",
        {**IDS, "bos_token_id": 3, "head_dim": 24, "sliding_window": 16, "tie_word_embeddings": True},
    ),
    "cohere-mha-tied": ("cohere", {**IDS, "num_key_value_heads": 4, "logit_scale": 0.25}),
    "cohere-gqa-untied-biases": (
        "cohere",
        {**IDS, "num_key_value_heads": 1, "tie_word_embeddings": False, "attention_bias": True},
    ),
    "cohere-head-norms": ("cohere", {**IDS, "use_qk_norm": True}),  # Command R+
    "glm-half-turned": ("glm", {**IDS, "head_dim": 16}),
    "glm-tied-hd24-no-bias": (
        "glm",
        {**IDS, "head_dim": 24, "tie_word_embeddings": True, "attention_bias": False, "num_key_value_heads": 1},
    ),
    "helium-mha": ("helium", {**HELIUM, "num_key_value_heads": 4}),
    "helium-tied-biases": (
        "helium",
        {**HELIUM, "tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True},
    ),
    "qwen3-qk-norm-hd32": ("qwen3", {"head_dim": 32}),
    "qwen3-tied-biases-yarn": (
        "qwen3",
        {
            "head_dim": 16,
            "attention_bias": True,
            "tie_word_embeddings": True,
            **scaled("yarn", factor=4.0, original_max_position_embeddings=16),
        },
    ),
}
