"""Families of models as transformers makes them: small configurations of every kind of layer, and random models."""

from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

from mycli.runtime.layers.batch import Batch
from mycli.runtime.layers.rope import Rope
from mycli.runtime.layers.transformer import Transformer

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


def make(folder: Path, model_type: str, changes: dict[str, Any]) -> transformers.PreTrainedModel:
    """A random model with lively weights, biases and norms, saved to `folder`; the fp32 reference is returned."""
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(model_type, **{**SMALL, **changes})
    reference = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").float().eval()
    with torch.no_grad():
        for name, parameter in reference.named_parameters():
            spread = 0.3 if parameter.ndim == 1 else 2.0 / parameter.shape[-1] ** 0.5
            centre = 1.0 if "norm" in name else 0.0
            parameter.copy_(torch.randn_like(parameter) * spread + centre)
    reference.save_pretrained(folder)
    return reference


def whole(model: Transformer, tokens: Tensor) -> Tensor:
    rope = Rope(model.config, TOKENS, model.device, model.dtype)
    logits = model(Batch(tokens, 0, "all"), rope, None)
    assert logits is not None
    return logits
