"""Writes small models to disk: random weights of a config, with the tokenizer of pico."""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from mycli.quant.planning import pace
from mycli.quant.planning import plan as planning
from mycli.runtime.checkpoint.open_folder import open_model_folder
from mycli.runtime.device.placement import Placement
from tests.support.paths import PICO

CPU = Placement(torch.device("cpu"), torch.float32)
SMALL: Mapping[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 4096,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
    "dtype": "bfloat16",
}


def write_config(folder: Path, **changes: Any) -> None:
    (folder / "config.json").write_text(json.dumps({**SMALL, **changes}))


def random_model(folder: Path, deviation: float = 0.1, **changes: Any) -> Path:
    """Write a model of SMALL with `changes` to a new folder: bf16 weights of a fixed seed, norm weights around one."""
    folder.mkdir()
    write_config(folder, **changes)
    generator = torch.Generator().manual_seed(0)
    tensors = {
        name: (torch.randn(shape, generator=generator) * deviation + (len(shape) == 1)).bfloat16()
        for name, shape in open_model_folder(folder).config.tensors()
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(PICO / name, folder / name)
    return folder


def shorten_report(patch: pytest.MonkeyPatch, tokens: int) -> None:
    """Measure quantized copies on `tokens` tokens only, and the speed of plans briefly: not for figures to publish."""
    patch.setattr(pace, "_SECONDS", 0.01)
    patch.setattr(planning, "QUICK_TOKENS", tokens)
