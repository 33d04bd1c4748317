"""Every family against transformers in fp32, from the same files: in one go, in chunks, and token by token."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from mycli.runtime.cache.kv_cache import StaticCache
from mycli.runtime.checkpoint.model_folder import ModelFolder
from mycli.runtime.device.placement import Placement
from mycli.runtime.engine.loader import load_model
from mycli.runtime.layers.batch import Batch
from mycli.runtime.layers.rope import Rope
from mycli.runtime.layers.transformer import Transformer
from mycli.runtime.models.config import families

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


def chunked(sizes: Callable[[int], int]) -> Callable[[Transformer, Tensor], Tensor]:
    def run(model: Transformer, tokens: Tensor) -> Tensor:
        rope = Rope(model.config, TOKENS, model.device, model.dtype)
        cache = StaticCache(model.config, TOKENS, model.device, model.dtype, sequences=tokens.shape[0])
        parts, start = [], 0
        while start < TOKENS:
            new = tokens[:, start : start + sizes(start)]
            logits = model(Batch(new, start, "all"), rope, cache)
            assert logits is not None
            parts.append(logits)
            start += new.shape[1]
        return torch.cat(parts, dim=1)

    return run


WAYS: dict[str, Callable[[Transformer, Tensor], Tensor]] = {
    "prefill": whole,
    "chunks-of-7": chunked(lambda start: 7),
    "prefill-then-steps": chunked(lambda start: 11 if start == 0 else 1),
    "steps": chunked(lambda start: 1),
}


@pytest.mark.parametrize("case", CASES, ids=str)
def test_logits_equal_transformers(case: str, tmp_path: Path) -> None:
    model_type, changes = CASES[case]
    reference = make(tmp_path, model_type, changes)
    model = load_model(ModelFolder.open(tmp_path), Placement(torch.device("cpu"), torch.float32)).model
    tokens = torch.randint(0, SMALL["vocab_size"], (2, TOKENS), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = reference(tokens).logits
    for way, run in WAYS.items():
        if model.config.rope.kind == "dynamic" and way != "prefill":
            continue  # its frequencies depend on the length so far: the next test walks step by step
        actual = run(model, tokens)
        assert (actual - expected).abs().max() <= 1e-4, way
        assert torch.equal(actual.argmax(-1), expected.argmax(-1)), way


def test_dynamic_scaling_step_by_step_equals_transformers(tmp_path: Path) -> None:
    """Keys keep the rotation they were stored with, in transformers' cache and in ours."""
    reference = make(tmp_path, *CASES["llama-rope-dynamic-beyond"])
    model = load_model(ModelFolder.open(tmp_path), Placement(torch.device("cpu"), torch.float32)).model
    tokens = torch.randint(0, SMALL["vocab_size"], (1, TOKENS), generator=torch.Generator().manual_seed(1))
    past, parts = None, []
    with torch.no_grad():
        for position in range(TOKENS):
            out = reference(tokens[:, position : position + 1], past_key_values=past, use_cache=True)
            past = out.past_key_values
            parts.append(out.logits)
    assert (WAYS["steps"](model, tokens) - torch.cat(parts, dim=1)).abs().max() <= 1e-4


@pytest.mark.parametrize("case", CASES, ids=str)
def test_tensors_are_those_of_the_reference(case: str, tmp_path: Path) -> None:
    """`ModelConfig.tensors` names every tensor of the model with its shape, and the parameter count is exact."""
    reference = make(tmp_path, *CASES[case])
    config = ModelFolder.open(tmp_path).config
    tied = "lm_head.weight" if config.tie_embeddings else None
    expected = {name: tuple(tensor.shape) for name, tensor in reference.state_dict().items() if name != tied}
    assert dict(config.tensors()) == expected
    assert config.parameters() == sum(parameter.numel() for parameter in reference.parameters())


def test_every_family_has_a_case() -> None:
    assert {model_type for model_type, _ in CASES.values()} == set(families())
