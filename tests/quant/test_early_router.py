"""Test copies of a model whose routers read the input of the layer: the calibration of experts needs routes from it."""

import shutil
from pathlib import Path

import pytest
import torch

from mycli.quant.recipe import Recipe
from mycli.runtime.checkpoint.open_folder import open_model_folder
from mycli.runtime.engine.loading.loader import load_model
from mycli.runtime.hub.resolve import Source
from tests.support import quantizing
from tests.support.engines import whole
from tests.support.families import CASES, make
from tests.support.models import CPU
from tests.support.paths import PICO

pytestmark = pytest.mark.usefixtures("short_calibration_text", "quick_configs")


@pytest.mark.parametrize("method", ["gptq", "awq"])
def test_a_copy_computes_nearly_what_its_source_does(method: str, tmp_path: Path) -> None:
    model_type, changes = CASES["smallthinker-layouts-softmax-tied"]
    reference = make(tmp_path / "source", model_type, {**changes, "vocab_size": 4096})
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(PICO / name, tmp_path / "source" / name)
    recipe = Recipe(method, 8, 32, samples=8, seq=48)
    outcome = quantizing.make(Source("random", tmp_path / "source"), tmp_path / "copy", recipe)
    copy = load_model(open_model_folder(tmp_path / "copy"), CPU).model
    assert not any("primary_router" in name for name in open_model_folder(tmp_path / "copy").packings)
    tokens = torch.randint(0, 4096, (2, 24), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = reference(tokens).logits
    lost = (whole(copy, tokens) - expected).norm(dim=-1) / expected.norm(dim=-1)
    assert lost.quantile(0.25) < 0.1
    assert all(layer.output_error is None or layer.output_error < 1e-3 for layer in outcome.layers)
