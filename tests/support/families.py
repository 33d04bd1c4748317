"""Families of models as transformers makes them: small configurations of every kind of layer, and random models."""

from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

from mycli.runtime.layers.transformer import Transformer
from tests.support.mxfp4 import save_mxfp4

TOKENS = 40


SMALL = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 88,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}


def scaled(kind: str, **extra: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10000.0, **extra}}


IDS = {"bos_token_id": None, "eos_token_id": 2, "pad_token_id": 1}  # the families' own lie beyond SMALL's vocabulary


MULTIPLIERS = {
    "embedding_multiplier": 12.0,
    "attention_multiplier": 0.125,
    "residual_multiplier": 0.22,
    "logits_scaling": 8.0,
}


GEMMA4 = {**IDS, "head_dim": 16, "global_head_dim": 32, "sliding_window": 7}


EXPERTS8 = {**IDS, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 96}


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


DELTA = {
    "head_dim": 32,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}


def longrope(pairs: int, original: int, **extra: Any) -> dict[str, Any]:
    """`original` beside TOKENS says which of the two sets of factors is used."""
    short, long = ([1 + step * index / pairs for index in range(pairs)] for step in (0.5, 30))
    return {
        "max_position_embeddings": 128,
        "original_max_position_embeddings": original,
        **scaled("longrope", short_factor=short, long_factor=long, **extra),
    }


def ministral_rope(original: int) -> dict[str, Any]:
    more = {"mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.4}
    return scaled("yarn", factor=4.0, original_max_position_embeddings=original, **more)


# id -> (model_type, what differs from SMALL)
CASES: dict[str, tuple[str, dict[str, Any]]] = {
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
    "gemma4-told-lent-double": (
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
    "qwen3_moe-8top2": ("qwen3_moe", {**EXPERTS8, "head_dim": 16}),
    "qwen3_moe-every-other-normalized-tied": (
        "qwen3_moe",
        {
            **EXPERTS8,
            "num_hidden_layers": 4,
            "head_dim": 32,
            "num_experts_per_tok": 3,
            "norm_topk_prob": True,
            "decoder_sparse_step": 2,
            "mlp_only_layers": [3],
            "attention_bias": True,
            "tie_word_embeddings": True,
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
            **EXPERTS8,
            "num_hidden_layers": 4,
            "shared_expert_intermediate_size": 128,
            "norm_topk_prob": True,
            "decoder_sparse_step": 2,
            "tie_word_embeddings": True,
            "use_sliding_window": True,
            "sliding_window": 7,
            "max_window_layers": 1,
        },
    ),
    "granitemoe-8top2": ("granitemoe", {**IDS, **MULTIPLIERS, "num_local_experts": 8, "num_experts_per_tok": 2}),
    "granitemoe-tied-biases": (
        "granitemoe",
        {**IDS, **MULTIPLIERS, "num_local_experts": 4, "attention_bias": True, "tie_word_embeddings": True},
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
}


def enliven(model: transformers.PreTrainedModel) -> None:
    """Lively weights, biases, norms and scalars, so that whatever is left out or taken twice shows."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            spread = 0.3 if parameter.ndim == 1 else 2.0 / parameter.shape[-1] ** 0.5
            centre = 1.0 if "norm" in name else 0.0
            parameter.copy_(torch.randn_like(parameter) * spread + centre)
        for name, buffer in model.named_buffers():
            if name.endswith("layer_scalar"):
                buffer.copy_(torch.rand_like(buffer) + 0.5)


def make(folder: Path, model_type: str, changes: dict[str, Any]) -> transformers.PreTrainedModel:
    """A random model, saved to `folder`; the fp32 reference is returned."""
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(model_type, **{**SMALL, **changes})
    reference = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").float().eval()
    enliven(reference)
    if model_type == "gpt_oss":
        save_mxfp4(reference, folder)
    else:
        reference.save_pretrained(folder)
    return reference


def packed_weights(model: Transformer) -> dict[str, Tensor]:
    """The weights of all linears of the blocks by name, unpacked where they are packed."""
    found: dict[str, Tensor] = {}
    for block in model.layers():
        for linear in block.products.values():
            parts = torch.split(linear.weight(), [spec.out_features for spec in linear.specs])
            found |= {spec.name: part for spec, part in zip(linear.specs, parts, strict=True)}
    return found
