"""Tests the second model of the quality tables: what it is trained on, and that it is a model with a tokenizer."""

import math
from pathlib import Path

import pytest

from mycli.runtime.checkpoint.open_folder import open_model_folder
from tests.support import code_model


@pytest.mark.slow
def test_held_out_files_are_not_trained_on() -> None:
    shown, held_out = code_model.documents()
    assert not set(shown) & set(held_out)
    assert len(shown) > 1000 and 0.03 < len(held_out) / len(shown) < 0.08


@pytest.mark.slow
def test_the_model_is_written_with_both_texts(tmp_path: Path) -> None:
    folder = tmp_path / "code"
    code_model.write(folder, steps=1)
    opened = open_model_folder(folder)
    opened.checked_manifest()
    assert sum(math.prod(shape) for _, shape in opened.config.tensors()) > 30_000_000
    tokenizer = opened.tokenizer()
    for name in ("calibration", "held-out"):
        text = (tmp_path / f"code.{name}.txt").read_text(encoding="utf-8")
        assert tokenizer.decode(tokenizer.encode(text[:2000])) == text[:2000]
