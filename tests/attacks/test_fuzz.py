"""Check that damaged checkpoints of every layout are read, or refused with a message; `fuzz` runs longer."""

import json
from pathlib import Path

import pytest
import torch

from mycli.runtime.checkpoint.open_folder import open_model_folder
from mycli.runtime.engine.loading.loader import load_model
from tests.attacks import fuzz
from tests.attacks.fuzz_models import LAYOUTS
from tests.attacks.fuzz_references import NoReferenceError, compare
from tests.support.engines import whole
from tests.support.families import make
from tests.support.grids import chosen
from tests.support.models import CPU
from tests.support.multimodal_families import make_folder


@pytest.mark.parametrize("layout", chosen(LAYOUTS, ["awq", "fp8"]))
def test_what_is_damaged_is_read_or_refused(layout: str) -> None:
    for name, files in list(LAYOUTS[layout]().items())[:3]:
        assert fuzz.attempt(files) == "read", name
        for seed in range(12):
            fuzz.attempt(fuzz.damaged(files, f"{layout} {seed}"))


def test_a_seed_is_a_case() -> None:
    files = {"config.json": b'{"a": [1, 2, {"b": 3}]}', fuzz.WEIGHTS: LAYOUTS["awq"]()["gemm-g32"][fuzz.WEIGHTS]}
    cases = [fuzz.damaged(files, f"x {seed}") for seed in range(40)]
    assert cases == [fuzz.damaged(files, f"x {seed}") for seed in range(40)]
    assert sum(case != files for case in cases) > 30


@pytest.mark.parametrize("kind", [[], {}, 7, ["llama"], {"llama": 1}], ids=repr)
def test_a_kind_of_model_that_is_no_text(kind: object) -> None:
    """Regression of a `fuzz` finding: the value was looked up in a table before its type was checked."""
    files = dict(LAYOUTS["awq"]()["gemm-g32"])
    files["config.json"] = json.dumps({**json.loads(files["config.json"]), "model_type": kind}).encode()
    assert fuzz.attempt(files) == "ModelError"


def test_scores_beyond_the_resolution_of_floats(tmp_path: Path) -> None:
    """Regression of a `fuzz` finding: the largest score's weight overflowed, and all logits were NaN."""
    reference = make(tmp_path, "qwen3", {"head_dim": 16})
    reference.model.layers[1].self_attn.q_norm.weight.data[3] = 2.6e25
    reference.save_pretrained(tmp_path)
    tokens = torch.arange(40)[None] % 97
    with torch.no_grad():
        expected = reference(tokens).logits
    actual = whole(load_model(open_model_folder(tmp_path), CPU).model, tokens)
    assert (actual - expected).abs().max() <= 1e-4 * expected.abs().max()


def test_a_record_goes_on_where_it_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second run continues with the next seed, and the counts cover both runs."""
    good = LAYOUTS["awq"]()["gemm-g32"]
    monkeypatch.setattr(fuzz, "LAYOUTS", {"awq": lambda: {"gemm-g32": good}})
    tried: list[str] = []
    monkeypatch.setattr(fuzz, "damaged", lambda files, seed: tried.append(seed) or files)
    for _ in range(2):
        assert fuzz.run("awq", 0, fuzz.Record(tmp_path / "sums.json", 7), tmp_path) == 0
    assert tried == ["awq 7", "awq 8"]
    sums = fuzz.Record(tmp_path / "sums.json", 0).of("awq")
    assert (sums.seed, sums.cases, sums.outcomes, sums.faults) == (9, 2, {"read": 2}, [])
    assert sums.seconds > 0 and "continue with --seed 9" in sums.line("awq")


def test_a_fault_is_kept_and_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    good = LAYOUTS["awq"]()["gemm-g32"]
    monkeypatch.setattr(fuzz, "LAYOUTS", {"awq": lambda: {"gemm-g32": good}})
    monkeypatch.setattr(fuzz, "damaged", lambda files, seed: {**files, "config.json": b"1"})
    monkeypatch.setattr(fuzz, "attempt", lambda files, compare=None: "read" if files is good else 1 // 0)
    record = fuzz.Record(None, 3)
    assert fuzz.run("awq", 0, record, tmp_path) == 1
    assert record.of("awq").faults[0].startswith("ZeroDivisionError at ") and record.of("awq").seed == 4
    assert (tmp_path / "awq-3" / "config.json").read_bytes() == b"1"


@pytest.mark.parametrize(("tensor", "value"), [("pre_feedforward_layernorm", 1e20), ("mlp.down_proj", 3e38)])
def test_weights_whose_products_overflow_give_no_logits(tensor: str, value: float, tmp_path: Path) -> None:
    """transformers' logits are NaN, and so are ours, for which generation ends with an error."""
    reference = make_folder(tmp_path, "gemma3")
    reference.get_submodule(f"model.language_model.layers.1.{tensor}").weight.data.view(-1)[20] = value
    reference.save_pretrained(tmp_path)
    tokens = torch.arange(8)[None] * 7
    with torch.no_grad():
        assert bool(reference(tokens).logits.isnan().all())
    assert bool(whole(load_model(open_model_folder(tmp_path), CPU).model, tokens)[0, -1].isnan().all())


def test_the_place_of_an_image_has_no_reference(tmp_path: Path) -> None:
    """transformers' Gemma 4 computes padding where the token of an image stands, also without images."""
    make_folder(tmp_path, "gemma4")
    compare(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "audio_token_id": 7}))
    with pytest.raises(NoReferenceError, match="place of an image"):
        compare(tmp_path)
