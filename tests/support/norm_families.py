"""Dense families with norms, MLPs, gates or token mixers unlike Llama's: small configurations of every kind."""

from typing import Any

from tests.support.family_parts import IDS, MULTIPLIERS, scaled

GPT2 = {**IDS, "max_position_embeddings": 80}  # no less than the tokens of a reply: positions have a table
THREE = ["sliding_attention", "full_attention", "sliding_attention"]

# id -> (model_type, differences from SMALL)
NORMS: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma-gqa4:2": ("gemma", {**IDS, "head_dim": 16}),
    "gemma-mqa-untied-biases-legacy-gelu": (
        "gemma",
        {
            **IDS,
            "head_dim": 24,
            "num_key_value_heads": 1,
            "tie_word_embeddings": False,
            "attention_bias": True,
            "hidden_act": "gelu",
        },
    ),
    "olmo-clip": ("olmo", {**IDS, "clip_qkv": 0.5}),
    "olmo-mha-tied-biases": (
        "olmo",
        {**IDS, "num_key_value_heads": 4, "tie_word_embeddings": True, "attention_bias": True},
    ),
    "starcoder2-window7-tied": ("starcoder2", {**IDS, "sliding_window": 7}),
    "starcoder2-untied-no-bias": (
        "starcoder2",
        {**IDS, "use_bias": False, "tie_word_embeddings": False, "num_key_value_heads": 1, "hidden_act": "relu2"},
    ),
    "stablelm-parallel-head-norms": (
        "stablelm",
        {**IDS, "use_parallel_residual": True, "qk_layernorm": True, "partial_rotary_factor": 0.5},
    ),
    "stablelm-biases-tied": (
        "stablelm",
        {**IDS, "use_qkv_bias": True, "tie_word_embeddings": True, "num_key_value_heads": 4},
    ),
    "phi-gqa4:2": ("phi", {**IDS}),
    "phi-head-norms-mha-relu2": (
        "phi",
        {**IDS, "qk_layernorm": True, "num_key_value_heads": 4, "partial_rotary_factor": 0.25, "hidden_act": "relu2"},
    ),
    "gpt_neox-sequential-half-rotated-no-bias": (
        "gpt_neox",
        {
            **IDS,
            **{"use_parallel_residual": False, "attention_bias": False, "hidden_act": "gelu_fast"},
            **scaled("default", partial_rotary_factor=0.5),
        },
    ),
    "gpt_neox-parallel": ("gpt_neox", {**IDS, **scaled("default", partial_rotary_factor=0.25)}),
    "gpt2-by-layer": ("gpt2", {**GPT2, "scale_attn_by_inverse_layer_idx": True}),
    "gpt2-unscaled-gelu-untied": (
        "gpt2",
        {
            **{**GPT2, "scale_attn_weights": False, "n_inner": 88},
            **{"activation_function": "gelu", "tie_word_embeddings": False},
        },
    ),
    "gpt2-tied": ("gpt2", GPT2),
    "gpt_neo-mixed-untied": (
        "gpt_neo",
        {
            **{**GPT2, "attention_types": [[["global"], 1], [["local"], 2]], "window_size": 5},
            **{"activation_function": "gelu", "intermediate_size": None, "tie_word_embeddings": False},
        },
    ),
    "gpt_neo-window7-tied": (
        "gpt_neo",
        {**GPT2, "attention_types": [[["local", "global", "local"], 1]], "window_size": 7},
    ),
    "gpt_bigcode-unscaled-tanh-untied": (
        "gpt_bigcode",
        {**GPT2, "scale_attn_weights": False, "n_inner": 88, "tie_word_embeddings": False},
    ),
    "gpt_bigcode-tied": ("gpt_bigcode", {**GPT2, "activation_function": "gelu"}),
    "falcon-40b-biases-untied": (
        "falcon",
        {
            **{**IDS, "new_decoder_architecture": True, "num_kv_heads": 2, "bias": True},
            **{"ffn_hidden_size": 88, "tie_word_embeddings": False},
        },
    ),
    "falcon-11b": (
        "falcon",
        {**IDS, "new_decoder_architecture": True, "num_kv_heads": 2, "num_ln_in_parallel_attn": 1},
    ),
    "falcon-biases-untied": ("falcon", {**IDS, "ffn_hidden_size": 88, "bias": True, "tie_word_embeddings": False}),
    "falcon-7b": ("falcon", {**IDS, "num_kv_heads": 1}),  # without the key, its class saves the number of heads
    "nemotron-half-rotated": ("nemotron", {**IDS, "head_dim": 24}),
    "nemotron-tied-biases": (
        "nemotron",
        {
            **IDS,
            "attention_bias": True,
            "mlp_bias": True,
            "tie_word_embeddings": True,
            "partial_rotary_factor": 1.0,
            "num_key_value_heads": 1,
        },
    ),
    "jais2-gqa4:2": ("jais2", {**IDS}),
    "jais2-tied-no-bias": (
        "jais2",
        {**IDS, "attention_bias": False, "mlp_bias": False, "tie_word_embeddings": True, "head_dim": 24},
    ),
    "apertus-llama3": (
        "apertus",
        {
            **IDS,
            **scaled(
                "llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=16
            ),
        },
    ),
    "apertus-tied-biases": (
        "apertus",
        {**IDS, "attention_bias": True, "tie_word_embeddings": True, "num_key_value_heads": 4},
    ),
    "nanochat-gqa4:2": ("nanochat", {**IDS}),
    "nanochat-tied-biases-low-cap": (
        "nanochat",
        {
            **IDS,
            "attention_bias": True,
            "tie_word_embeddings": True,
            "final_logit_softcapping": 3.0,
            "num_key_value_heads": 1,
        },
    ),
    "muse_glimmer-window7": (
        "muse_glimmer_text",
        {**IDS, "num_hidden_layers": 5, "head_dim": 16, "sliding_window": 7, "final_logit_softcapping": 3.0},
    ),
    "muse_glimmer-no-window-rotated-tied-biases": (
        "muse_glimmer_text",
        {
            **IDS,
            "head_dim": 32,
            "num_key_value_heads": 1,
            "attention_bias": True,
            "tie_word_embeddings": True,
            "layer_types": ["full_attention"] * 3,
            "layer_rope_theta": [10000.0, 0, 10000.0],
            "qk_scale_factor": 1.5,
            "output_multiplier": 0.5,
            "post_norm_eps": 0.01,
        },
    ),
    "internlm3-biases": ("internlm3", {**IDS, "head_dim": 24, "attention_bias": True, "mlp_bias": True}),
    "internlm3-tied-mqa": ("internlm3", {**IDS, "head_dim": 16, "num_key_value_heads": 1, "tie_word_embeddings": True}),
    "iquestcoder-hd24": ("iquestcoder", {**IDS, "head_dim": 24}),
    "iquestcoder-tied-biases": (
        "iquestcoder",
        {**IDS, "head_dim": 16, "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    ),
    "vaultgemma-window7": ("vaultgemma", {**IDS, "head_dim": 16, "sliding_window": 7, "query_pre_attn_scalar": 24}),
    "vaultgemma-mqa-low-caps-untied": (
        "vaultgemma",
        {
            **IDS,
            "num_key_value_heads": 1,
            "head_dim": 24,
            "sliding_window": 16,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 3.0,
            "tie_word_embeddings": False,
            "attention_bias": True,
        },
    ),
    "hyperclovax-multipliers": ("hyperclovax", {**IDS, **MULTIPLIERS, "logits_scaling": 0.125}),
    "hyperclovax-no-post-norm-tied-biases": (
        "hyperclovax",
        {
            **IDS,
            "use_post_norm": False,
            "attention_bias": True,
            "mlp_bias": True,
            "tie_word_embeddings": True,
            "head_dim": 24,
        },
    ),
    "ministral-window7-some": (
        "ministral",
        {
            **IDS,
            "head_dim": 16,
            "sliding_window": 7,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    "ministral-window9-tied": ("ministral", {**IDS, "head_dim": 24, "sliding_window": 9, "tie_word_embeddings": True}),
    "bitnet-gqa4:2": ("bitnet", {**IDS}),
    "bitnet-tied-biases": (
        "bitnet",
        {**IDS, "attention_bias": True, "tie_word_embeddings": True, "num_key_value_heads": 4, "hidden_act": "silu"},
    ),
    "granite_swa-window7-thetas": (
        "granite_swa",
        {
            **IDS,
            **MULTIPLIERS,
            "num_hidden_layers": 4,
            "sliding_window": 7,
            "layer_rope_theta": [0, 10000.0, 50000.0, 10000.0],
        },
    ),
    "granite_swa-untied-biases": (
        "granite_swa",
        {
            **IDS,
            **MULTIPLIERS,
            "layer_types": THREE,
            "sliding_window": 9,
            "attention_bias": True,
            "mlp_bias": True,
            "tie_word_embeddings": False,
        },
    ),
    "olmo_hybrid-delta": (
        "olmo_hybrid",
        {
            **IDS,
            "num_hidden_layers": 4,
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 16,
            "linear_num_key_heads": 4,
            "linear_num_value_heads": 4,
        },
    ),
    "olmo_hybrid-positive-tied-biases": (
        "olmo_hybrid",
        {
            **IDS,
            "layer_types": ["full_attention", "linear_attention", "linear_attention"],
            "linear_key_head_dim": 32,
            "linear_value_head_dim": 16,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_allow_neg_eigval": False,
            "linear_conv_kernel_dim": 3,
            "attention_bias": True,
            "tie_word_embeddings": True,
        },
    ),
    "lfm3-tied": ("lfm3", {**IDS, "num_hidden_layers": 5, "head_dim": 16, "sliding_window": 7}),
    "lfm3-plain-untied-biases": (
        "lfm3",
        {
            **IDS,
            "head_dim": 24,
            "layer_types": ["full_attention", "conv", "sliding_attention"],
            "sliding_window": 9,
            "use_sandwich_norm": False,
            "use_attention_gate": False,
            "conv_bias": True,
            "conv_L_cache": 4,
            "attention_bias": True,
            "tie_word_embeddings": False,
        },
    ),
    "diffllama-gqa4:2": ("diffllama", {**IDS}),
    "diffllama-8:4-tied-biases-head-dim": (
        "diffllama",
        {
            **IDS,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "head_dim": 24,
            "tie_word_embeddings": True,
            "attention_bias": True,
            "num_hidden_layers": 4,
        },
    ),
    "doge-mha": ("doge", {**IDS, "num_key_value_heads": 4}),
    "doge-gqa4:2-window7-tied-biases": (
        "doge",
        {**IDS, "sliding_window": 7, "tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True},
    ),
}
