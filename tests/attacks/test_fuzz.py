"""Damaged checkpoints of every layout: read, or refused with a message. `fuzz` alone goes on for as long as asked."""

import json

import pytest

from tests.attacks import fuzz
from tests.attacks.fuzz_models import LAYOUTS
from tests.support.grids import chosen


@pytest.mark.parametrize("layout", chosen(LAYOUTS, ["awq", "fp8"]))
def test_what_is_damaged_is_read_or_refused(layout: str) -> None:
    for name, files in list(LAYOUTS[layout]().items())[:3]:
        assert fuzz.attempt(files) == "read", name
        for seed in range(12):
            fuzz.attempt(fuzz.damaged(files, f"{layout} {seed}"))


def test_a_seed_is_a_case() -> None:
    files = {"config.json": b'{"a": [1, 2, {"b": 3}]}', fuzz.WEIGHTS: LAYOUTS["awq"]()["gemm-g32"][fuzz.WEIGHTS]}
    made = [fuzz.damaged(files, f"x {seed}") for seed in range(40)]
    assert made == [fuzz.damaged(files, f"x {seed}") for seed in range(40)]
    assert sum(one != files for one in made) > 30


@pytest.mark.parametrize("kind", [[], {}, 7, ["llama"], {"llama": 1}], ids=repr)
def test_a_kind_of_model_that_is_no_text(kind: object) -> None:
    """Found by `fuzz`: it was looked up in a table before anything looked at it."""
    files = dict(LAYOUTS["awq"]()["gemm-g32"])
    files["config.json"] = json.dumps({**json.loads(files["config.json"]), "model_type": kind}).encode()
    assert fuzz.attempt(files) == "ModelError"
