"""Unfinished work on disk: kept whole, taken up again, never mixed; killed at any moment, the same bytes at the end."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from mycli.quant import blockwise, pipeline, record
from mycli.quant.grid import Quantized
from mycli.quant.pipeline import default_work_folder, plan, quantize
from mycli.quant.recipe import Recipe
from mycli.quant.record import Layer
from mycli.quant.refit import Moments
from mycli.quant.resume import Solved, WorkFolder
from mycli.runtime.device import Placement
from mycli.runtime.errors import UsageError
from mycli.runtime.hub import Source
from mycli.runtime.packing import Packing
from tests.conftest import ROOT

DRAFT = ROOT / "runtime" / "pico" / "pico-draft"
SOURCE = Source("pico-draft", DRAFT, None, None)
RECIPE = Recipe(bits=4, group=64, samples=8, seq=32)
CPU = Placement(torch.device("cpu"), torch.float32)
RUN = {"recipe": {"bits": 4}, "versions": {"torch": "2"}}
KILLS = 3
PROGRAM = """
import sys, torch
torch.set_num_threads(1)
from pathlib import Path
from tests.test_resume import CPU, RECIPE, SOURCE
from mycli.quant.pipeline import plan, quantize
print("ready", flush=True)
quantize(plan(SOURCE, RECIPE), Path(sys.argv[1]), CPU, report="none", overwrite=True)
"""


def solved(name: str = "a") -> Solved:
    codes = torch.arange(64, dtype=torch.uint8).view(4, 16) % 16
    layer = Layer(name, "int4-g16", 0.5, output_error=0.25, refit=1.0, damping=0.01, fallback="why")
    return Solved({name: Quantized(codes, torch.ones(4, 1).bfloat16())}, {"norm": torch.ones(3)}, (layer,))


def test_a_block_comes_back_as_it_was(tmp_path: Path) -> None:
    with WorkFolder(tmp_path / "work", RUN) as work:
        assert work.load(3) is None
        work.save(3, solved())
    with WorkFolder(tmp_path / "work", RUN) as work:
        found = work.load(3)
        assert found is not None and found.layers == solved().layers
        assert torch.equal(found.linears["a"].codes, solved().linears["a"].codes)
        assert found.linears["a"].scales.dtype == torch.bfloat16
        assert torch.equal(found.changed["norm"], torch.ones(3))
        work.clear()
    assert not (tmp_path / "work").exists()


@pytest.mark.parametrize("fault", ["D8-changed-recipe"])
def test_work_of_another_run_is_refused(tmp_path: Path, fault: str) -> None:
    with WorkFolder(tmp_path, RUN) as work:
        work.save(0, solved())
    with pytest.raises(UsageError, match="differs in: recipe"), WorkFolder(tmp_path, {**RUN, "recipe": {"bits": 3}}):
        pass
    with pytest.raises(UsageError, match="differs in: versions"), WorkFolder(tmp_path, {"recipe": RUN["recipe"]}):
        pass
    (tmp_path / "run.json").unlink()
    with pytest.raises(UsageError, match="unknown run"), WorkFolder(tmp_path, RUN):
        pass


def test_two_runs_do_not_share_a_folder(tmp_path: Path) -> None:
    with WorkFolder(tmp_path, RUN), pytest.raises(UsageError, match="another process"), WorkFolder(tmp_path, RUN):
        pass


@pytest.mark.parametrize("length", [0, 5, 200])
def test_a_damaged_block_is_solved_again(tmp_path: Path, length: int) -> None:
    with WorkFolder(tmp_path, RUN) as work:
        work.save(0, solved())
        path = tmp_path / "block-00000.safetensors"
        path.write_bytes(path.read_bytes()[:length])
        assert work.load(0) is None


class Stop(Exception):
    pass


@pytest.mark.parametrize("recipe", [RECIPE, replace(RECIPE, method="awq+gptq")], ids=lambda recipe: recipe.method)
def test_finished_blocks_are_not_solved_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recipe: Recipe) -> None:
    whole, target = tmp_path / "whole", tmp_path / "out"
    quantize(plan(SOURCE, recipe), whole, CPU, report="none")
    asked: list[str] = []
    solve = blockwise.Solver.solve

    def failing(
        self: blockwise.Solver, weights: Mapping[str, Tensor], packing: Packing, fitted: Moments, held: Moments
    ) -> object:
        asked.extend(weights)
        if len(asked) == 10:  # q, k, v, o, gate, up, down of the first block; q, k, v of the second
            raise Stop
        return solve(self, weights, packing, fitted, held)

    monkeypatch.setattr(blockwise.Solver, "solve", failing)
    with pytest.raises(Stop):
        quantize(plan(SOURCE, recipe), target, CPU, report="none")
    assert not target.exists() and default_work_folder(target).is_dir()
    with pytest.raises(UsageError, match="differs in: recipe"):
        quantize(plan(SOURCE, replace(recipe, bits=3)), target, CPU, report="none")
    quantize(plan(SOURCE, recipe), target, CPU, report="none")
    assert [name.split(".")[2] for name in asked[10:]] == ["1"] * 7
    assert record.digests(target.iterdir()) == record.digests(whole.iterdir())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "whole"]


def test_the_work_folder_can_be_chosen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipeline, "_write_blocks", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        quantize(plan(SOURCE, RECIPE), tmp_path / "out", CPU, report="none", work_folder=tmp_path / "work")
    assert json.loads((tmp_path / "work" / "run.json").read_text())["recipe"]["bits"] == 4


@pytest.mark.parametrize("fault", ["D9-kill-9"])
def test_killed_at_random_moments_it_ends_with_the_same_bytes(tmp_path: Path, fault: str) -> None:
    """MYCLI_TEST_KILLS sets the number of kills."""
    target = tmp_path / "out"
    environment = {**os.environ, "PYTHONPATH": f"{ROOT / '.links'}:{ROOT}"}
    chance = random.Random(0)

    def start() -> "subprocess.Popen[str]":
        command = [sys.executable, "-c", PROGRAM, str(target)]
        process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True, cwd=ROOT)
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        return process

    begun = time.monotonic()
    assert start().wait() == 0
    seconds = time.monotonic() - begun
    expected = record.digests(target.iterdir())
    for path in target.iterdir():
        path.unlink()
    target.rmdir()
    for _ in range(int(os.environ.get("MYCLI_TEST_KILLS", KILLS))):
        process = start()
        time.sleep(chance.uniform(0, 0.7 * seconds))
        process.send_signal(signal.SIGKILL)
        process.wait()
        if target.exists():  # it was faster than the kill: whole, and begun anew
            assert record.digests(target.iterdir()) == expected
    assert start().wait() == 0
    assert record.digests(target.iterdir()) == expected
    assert sorted(path.name for path in tmp_path.iterdir() if not path.name.endswith(".lock")) == ["out"]
