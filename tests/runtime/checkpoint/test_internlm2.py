"""Test folders of InternLM 2: they are read, and quantized, as the Llama that they are."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from mycli.runtime.checkpoint.open_folder import open_model_folder
from mycli.runtime.engine.loading.loader import load_model
from mycli.runtime.errors import ModelError
from tests.support.engines import whole
from tests.support.families import make
from tests.support.models import CPU

NAMES = {
    "model.embed_tokens.": "model.tok_embeddings.",
    "lm_head.": "output.",
    ".input_layernorm.": ".attention_norm.",
    ".post_attention_layernorm.": ".ffn_norm.",
    ".self_attn.o_proj.": ".attention.wo.",
    ".mlp.gate_proj.": ".feed_forward.w1.",
    ".mlp.down_proj.": ".feed_forward.w2.",
    ".mlp.up_proj.": ".feed_forward.w3.",
}


def publish(folder: Path, outer: str | None = None, **changes: Any) -> transformers.PreTrainedModel:
    """Save a Llama under the names of InternLM 2, in the section of an `outer` model if there is one."""
    reference = make(folder, "llama", {"num_attention_heads": 4, "num_key_value_heads": 2, **changes})
    raw = json.loads((folder / "config.json").read_text())
    tensors = load_file(folder / "model.safetensors")
    for layer in range(raw["num_hidden_layers"]):
        for part in ("weight", "bias") if raw["attention_bias"] else ("weight",):
            names = [f"model.layers.{layer}.self_attn.{name}_proj.{part}" for name in "qkv"]
            groups = [tensors.pop(name).unflatten(0, (raw["num_key_value_heads"], -1)) for name in names]
            tensors[f"model.layers.{layer}.attention.wqkv.{part}"] = torch.cat(groups, 1).flatten(0, 1)
    for name, published in NAMES.items():
        tensors = {key.replace(name, published): tensor for key, tensor in tensors.items()}
    bias = raw.pop("attention_bias")
    raw |= {"model_type": "internlm2", "bias": bias, "auto_map": {"AutoModelForCausalLM": "m.InternLM2ForCausalLM"}}
    if outer is not None:
        tensors = {f"language_model.{name}": tensor for name, tensor in tensors.items()}
        raw = {"model_type": outer, "llm_config": raw, "vision_config": {}}
    (folder / "config.json").write_text(json.dumps(raw))
    save_file(tensors, folder / "model.safetensors")
    return reference


CASES: dict[str, dict[str, Any]] = {
    "gqa4:2": {},
    "mha4-biases": {"num_key_value_heads": 4, "attention_bias": True},
    "mqa4:1-tied": {"num_key_value_heads": 1, "tie_word_embeddings": True},
    "dynamic": {"rope_scaling": {"type": "dynamic", "factor": 2.0}},
    "internvl_chat": {"outer": "internvl_chat"},
}


@pytest.mark.parametrize("case", CASES)
def test_logits_equal_those_of_llama(case: str, tmp_path: Path) -> None:
    reference = publish(tmp_path, **CASES[case])
    folder = open_model_folder(tmp_path)
    assert folder.config.model_type == "llama" and folder.raw.values["architectures"] == ["LlamaForCausalLM"]
    assert "auto_map" not in folder.raw.values
    model = load_model(folder, CPU).model
    tokens = torch.randint(4, 90, (2, 24), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected: Tensor = reference(tokens).logits
    for sizes in ([24], [7, 9, *[1] * 8]):
        assert (whole(model, tokens, sizes) - expected).abs().max() <= 2e-5 * expected.abs().max()


def test_a_tensor_of_another_number_of_heads_is_refused(tmp_path: Path) -> None:
    publish(tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**raw, "num_key_value_heads": 1}))
    with pytest.raises(ModelError, match="wqkv"):
        open_model_folder(tmp_path).checked_manifest()
