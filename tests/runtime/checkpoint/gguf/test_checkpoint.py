"""Test how tensors of a GGUF file are read."""

from pathlib import Path

import pytest
import torch

from mycli.quant.export import ExportRequest, find_export_target
from mycli.quant.progress import silent
from mycli.runtime.checkpoint.gguf import checkpoint as gguf_checkpoint
from mycli.runtime.checkpoint.open_folder import open_model_folder
from mycli.runtime.hub.resolve import Source
from tests.support.paths import PICO


def test_a_large_tensor_is_the_same_read_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module, variant = find_export_target("gguf:q8_0")
    file = tmp_path / "pico.gguf"
    module.export(ExportRequest(Source("pico", PICO), open_model_folder(PICO), file, variant, requantize=True), silent)
    checkpoint = open_model_folder(file).checkpoint()
    names = [name for name, entry in checkpoint.manifest.tensors.items() if len(entry.shape) == 2][:9]
    whole = [checkpoint.read(name) for name in names]
    monkeypatch.setattr(gguf_checkpoint, "_VALUES", 1000)
    assert all(torch.equal(checkpoint.read(name), tensor) for name, tensor in zip(names, whole, strict=True))
