"""Test LoRA adapters in GGUF files, written as convert_lora_to_gguf.py writes them, against PEFT's layout."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.quants import quantize
from torch import Tensor

from mycli.runtime.checkpoint.model_folder import ModelFolder
from mycli.runtime.checkpoint.open_folder import open_model_folder
from mycli.runtime.errors import ModelError
from tests.support.adapters import DOWN, QUERIES, tensors_for, write_adapter, write_gguf_adapter
from tests.support.command_line import Mycli
from tests.support.paths import PICO

STORED = {QUERIES: "blk.0.attn_q.weight", DOWN: "blk.1.ffn_down.weight"}
Arrays = dict[str, Any]


def arrays(tensors: Mapping[str, Tensor]) -> Arrays:
    """Return A and B by their names in GGUF; the rows of q are paired for llama.cpp's rope."""
    found: Arrays = {}
    heads = open_model_folder(PICO).config.heads
    for module, stored in STORED.items():
        a, b = (tensors[f"base_model.model.{module}.lora_{part}.weight"].numpy() for part in "AB")
        if module == QUERIES:
            b = b.reshape(heads, 2, -1, b.shape[1]).swapaxes(1, 2).reshape(b.shape)
        found |= {f"{stored}.lora_a": np.ascontiguousarray(a), f"{stored}.lora_b": np.ascontiguousarray(b)}
    return found


def weights(folder: ModelFolder) -> dict[str, Tensor]:
    checkpoint = folder.checkpoint()
    return {f"{module}.weight": checkpoint.read(f"{module}.weight") for module in STORED}


def test_it_is_the_same_adapter(tmp_path: Path) -> None:
    tensors, base = tensors_for(PICO, *STORED), open_model_folder(PICO)
    expected = weights(base.with_adapter("a", write_adapter(tmp_path / "a", tensors)))
    adapted = base.with_adapter("b", write_gguf_adapter(tmp_path / "b.gguf", arrays(tensors)))
    actual, plain = weights(adapted), weights(base)
    for name, weight in expected.items():
        assert actual[name].equal(weight) and not weight.equal(plain[name]), name
    assert (tmp_path / "b.gguf") in adapted.source_files()


def test_half_precision_and_no_alpha(tmp_path: Path) -> None:
    """llama.cpp's scale without alpha is 1."""
    tensors, base = tensors_for(PICO, *STORED), open_model_folder(PICO)
    rounded = {name: tensor.half().float() for name, tensor in tensors.items()}
    expected = weights(base.with_adapter("a", write_adapter(tmp_path / "a", rounded, lora_alpha=4)))
    halves = {name: values.astype(np.float16) for name, values in arrays(tensors).items()}
    actual = weights(base.with_adapter("b", write_gguf_adapter(tmp_path / "b.gguf", halves, alpha=0.0)))
    assert all(actual[name].equal(weight) for name, weight in expected.items())


def test_quantized_matrices_are_decoded(tmp_path: Path) -> None:
    tensors, base = tensors_for(PICO, DOWN), open_model_folder(PICO)
    a = tensors[f"base_model.model.{DOWN}.lora_A.weight"].numpy()
    b = tensors[f"base_model.model.{DOWN}.lora_B.weight"].numpy()
    path, writer = tmp_path / "q.gguf", GGUFWriter(tmp_path / "q.gguf", "llama")
    writer.add_type("adapter")
    writer.add_string("adapter.type", "lora")
    writer.add_float32("adapter.lora.alpha", 8.0)
    blocks = quantize(a, GGMLQuantizationType.Q8_0)
    writer.add_tensor(f"{STORED[DOWN]}.lora_a", blocks, raw_dtype=GGMLQuantizationType.Q8_0)
    writer.add_tensor(f"{STORED[DOWN]}.lora_b", b)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    actual = base.with_adapter("q", path).checkpoint().read(f"{DOWN}.weight")
    exact = base.with_adapter("a", write_adapter(tmp_path / "a", tensors)).checkpoint().read(f"{DOWN}.weight")
    plain = base.checkpoint().read(f"{DOWN}.weight")
    assert (actual - exact).float().norm() < 0.02 * (plain - exact).float().norm()


def _without(name: str) -> Callable[[Arrays], object]:
    return lambda tensors: tensors.pop(name)


def _renamed(old: str, new: str) -> Callable[[Arrays], object]:
    return lambda tensors: tensors.update({new: tensors.pop(old)})


REFUSED: dict[str, tuple[Callable[[Arrays], object], dict[str, Any], str]] = {
    "half": (_without("blk.0.attn_q.weight.lora_a"), {}, r"q_proj.weight has lora_a missing"),
    "other-half": (_without("blk.0.attn_q.weight.lora_b"), {}, r"q_proj.weight has lora_b missing"),
    "whole": (_renamed("blk.0.attn_q.weight.lora_a", "blk.0.attn_q.weight"), {}, "attn_q.weight: not part of"),
    "no-such-layer": (
        lambda tensors: tensors.update({f"blk.77.attn_q.weight.lora_{half}": np.ones((4, 4), "f4") for half in "ab"}),
        {},
        "layers.77.self_attn.q_proj.weight: the model has no such weight",
    ),
    "no-such-name": (
        _renamed("blk.0.attn_q.weight.lora_a", "blk.0.x.weight.lora_a"),
        {},
        "blk.0.x.weight: the model has no",
    ),
    "embedding": (
        lambda tensors: tensors.update({"token_embd.weight.lora_a": np.ones((4, 4), "f4")}),
        {},
        "adapters of the embedding are not supported",
    ),
    "other-rank": (
        lambda tensors: tensors.update({"blk.0.attn_q.weight.lora_b": np.ones((256, 3), "f4")}),
        {},
        r"A \[4, 256\] and B \[256, 3\] of rank 4 do not fit",
    ),
    "no-rank": (
        lambda tensors: tensors.update({f"blk.0.attn_q.weight.lora_{half}": np.ones(256, "f4") for half in "ab"}),
        {},
        "do not fit the weight",
    ),
    "model": (lambda tensors: None, {"type_": "model"}, "a model, not a LoRA adapter"),
    "other-kind": (lambda tensors: None, {"kind": "ia3"}, "adapter.type is ia3"),
    "infinite-alpha": (lambda tensors: None, {"alpha": float("inf")}, "adapter.lora.alpha"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_others_are_refused_by_name(tmp_path: Path, name: str) -> None:
    change, settings, message = REFUSED[name]
    tensors = arrays(tensors_for(PICO, *STORED))
    change(tensors)
    path = write_gguf_adapter(tmp_path / "b.gguf", tensors, **settings)
    with pytest.raises(ModelError, match=message):
        open_model_folder(PICO).with_adapter("b", path).checkpoint()


def test_commands_take_it_and_explain_mistakes(mycli: Mycli, tmp_path: Path) -> None:
    path = write_gguf_adapter(tmp_path / "b.gguf", arrays(tensors_for(PICO, *STORED)), alpha=80.0)
    ask = ("What is the capital of Japan?", "-t", "0", "-n", "12", "--device", "cpu")
    plain, tuned = mycli("run", "pico", *ask), mycli("run", "pico", *ask, "--adapter", str(path))
    assert tuned.returncode == 0 and tuned.stdout != plain.stdout
    alone = mycli("run", str(path), *ask)
    assert alone.returncode == 3 and f"hint: mycli run MODEL --adapter {path}" in alone.stderr
