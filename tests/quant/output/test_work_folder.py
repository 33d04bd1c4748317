"""Test work folders: written atomically, resumed, never mixed; after a kill, the final bytes are the same."""

import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from mycli.quant import pipeline
from mycli.quant.output import model_card as record
from mycli.quant.output.model_card import Layer
from mycli.quant.output.output_work import OutputWork
from mycli.quant.output.work_folder import Solved, WorkFolder, check_work_folder, require_same_run
from mycli.quant.pipeline import quantize
from mycli.quant.planning.plan import plan_quantization
from mycli.quant.planning.target import OutputTarget
from mycli.quant.recipe import Recipe
from mycli.quant.rounding.error_compensation import Moments
from mycli.quant.rounding.grid import Quantized
from mycli.quant.solving import blockwise
from mycli.runtime.errors import UsageError
from mycli.runtime.hub.resolve import Source
from mycli.runtime.quantization.scheme import Packing
from tests.support.forked import ForkedProcess
from tests.support.grids import chosen
from tests.support.models import CPU, random_model
from tests.support.quantizing import UNMEASURED, make

pytestmark = pytest.mark.usefixtures("short_calibration_text")

RECIPE = Recipe(bits=4, group=64, samples=8, seq=32)
RUN = {"recipe": {"bits": 4}, "versions": {"torch": "2"}}
USERS = (".locks", ".cache", "config", "state", "data", "hf")  # what the test environment may create


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Source:
    folder = random_model(tmp_path_factory.mktemp("models") / "tiny", hidden_size=64, num_hidden_layers=2)
    return Source("tiny", folder, None, None)


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


def test_other_files_in_the_folder_stay(tmp_path: Path) -> None:
    for name in ("notes.txt", ".draft.tmp", "photos/a.jpg", "output/a.jpg"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("mine")
    (tmp_path / ".block-00000.safetensors.0123456789ab.tmp").touch()  # of a run that was killed
    with WorkFolder(tmp_path, RUN) as work:
        work.save(0, solved())
        work.clear()
    assert sorted(path.name for path in tmp_path.iterdir()) == [".draft.tmp", "notes.txt", "output", "photos"]
    assert (tmp_path / "photos" / "a.jpg").read_text() == (tmp_path / "output" / "a.jpg").read_text() == "mine"


def test_unfinished_output_and_source_are_removed_with_the_work(tmp_path: Path) -> None:
    for name in ("output", "source"):
        (tmp_path / "work" / name).mkdir(parents=True)
        (tmp_path / "work" / name / "a").touch()
    with OutputWork(tmp_path / "work", RUN) as work:
        (tmp_path / "work" / "finished.jsonl").touch()
        work.clear()
    assert list(tmp_path.iterdir()) == []


def test_a_difference_is_named_by_its_cause(tmp_path: Path) -> None:
    text = {"samples": 128, "seq": 512, "sha256": "aa", "mix": {"code": 34, "languages": 17}}
    with WorkFolder(tmp_path, {"calibration": text}):
        pass
    fewer = {**text, "samples": 8, "sha256": "bb", "mix": {"code": 2, "languages": 1}}
    with pytest.raises(UsageError, match=r"differs in calibration samples \(128 there, 8 now\)$"):
        require_same_run(tmp_path, {"calibration": fewer})
    with pytest.raises(UsageError, match=r"differs in calibration sha256 \(aa there, bb now\)$"):
        require_same_run(tmp_path, {"calibration": {**text, "sha256": "bb"}})
    with pytest.raises(UsageError, match=r"differs in calibration \(\{.*\} there, None now\)$"):
        require_same_run(tmp_path, {"calibration": None})
    with WorkFolder(tmp_path / "both", {"calibration": text, "recipe": {"samples": 128, "bits": 4}}):
        pass
    with pytest.raises(
        UsageError, match=r"differs in calibration samples \(128 there, 8 now\); recipe bits \(4 there, 3 now\)$"
    ):
        require_same_run(tmp_path / "both", {"calibration": fewer, "recipe": {"samples": 8, "bits": 3}})


@pytest.mark.parametrize("fault", ["D8-changed-recipe"])
def test_work_of_another_run_is_refused(tmp_path: Path, fault: str) -> None:
    with WorkFolder(tmp_path, RUN) as work:
        work.save(0, solved())
    with (
        pytest.raises(UsageError, match="differs in recipe bits"),
        WorkFolder(tmp_path, {**RUN, "recipe": {"bits": 3}}),
    ):
        pass
    with pytest.raises(UsageError, match="was begun with torch 2; this is torch 3"):
        require_same_run(tmp_path, {"versions": {"torch": "3"}})
    require_same_run(tmp_path, {"recipe": RUN["recipe"]})  # fields that are not recorded count as equal
    require_same_run(tmp_path / "none", RUN)
    (tmp_path / "run.json").unlink()
    with pytest.raises(UsageError, match="unknown run"), WorkFolder(tmp_path, RUN):
        pass


def test_two_runs_do_not_share_a_folder(tmp_path: Path) -> None:
    with WorkFolder(tmp_path, RUN), pytest.raises(UsageError, match="another process"), WorkFolder(tmp_path, RUN):
        pass


def test_of_a_folder_in_use_the_process_is_named_and_not_the_difference(tmp_path: Path) -> None:
    other = {**RUN, "recipe": {"bits": 3}}
    with WorkFolder(tmp_path, RUN), pytest.raises(UsageError, match="another process"):
        check_work_folder(tmp_path, other)
    with pytest.raises(UsageError, match="differs in recipe bits"):
        check_work_folder(tmp_path, other)
    check_work_folder(tmp_path, RUN)


def test_a_restarted_run_drops_the_blocks_of_another(tmp_path: Path) -> None:
    with WorkFolder(tmp_path, {**RUN, "recipe": {"bits": 3}}) as work:
        work.save(0, solved())
    with WorkFolder(tmp_path, RUN, restart=True) as work:
        assert work.load(0) is None
    with WorkFolder(tmp_path, RUN):
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


@pytest.mark.parametrize(
    "recipe",
    chosen([RECIPE, replace(RECIPE, method="awq+gptq"), replace(RECIPE, tune=True)], quick=[RECIPE]),
    ids=lambda recipe: recipe.method + "-tune" * recipe.tune,
)
def test_finished_blocks_are_not_solved_again(
    source: Source, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recipe: Recipe
) -> None:
    whole, target = tmp_path / "whole", tmp_path / "out"
    make(source, whole, recipe)
    asked: list[str] = []
    solve = blockwise.LinearSolver.solve

    def failing(
        self: blockwise.LinearSolver,
        weights: Mapping[str, Tensor],
        packing: Packing,
        fitted: Moments,
        held: Moments,
        outputs: None,
    ) -> object:
        asked.extend(weights)
        if len(asked) == 10:  # q, k, v, o, gate, up, down of the first block; q, k, v of the second
            raise Stop
        return solve(self, weights, packing, fitted, held, outputs)

    monkeypatch.setattr(blockwise.LinearSolver, "solve", failing)
    with pytest.raises(Stop):
        make(source, target, recipe)
    assert not target.exists() and OutputTarget(target).work_folder.is_dir()
    with pytest.raises(UsageError, match="differs in recipe bits"):
        make(source, target, replace(recipe, bits=3))
    make(source, target, recipe)
    assert [name.split(".")[2] for name in asked[10:]] == ["1"] * 7
    assert record.digests(target.iterdir()) == record.digests(whole.iterdir())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "whole"]


@pytest.mark.parametrize("recipe", [Recipe("rtn", group=64), RECIPE], ids=lambda recipe: recipe.method)
def test_a_run_that_stores_its_parts_in_the_output_continues_after_them(
    source: Source, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recipe: Recipe
) -> None:
    """A kill may leave half a line in the journal; a run with other settings uses no earlier work."""
    stops = {"rtn": (10, 15), "gptq": (10, 13)}[recipe.method]  # q, k and v are solved together
    asked: list[str] = []
    solve = blockwise.LinearSolver.solve_without_data if recipe.method == "rtn" else blockwise.LinearSolver.solve

    def recording(self: blockwise.LinearSolver, weights: Any, *arguments: Any) -> Any:
        asked.extend([weights] if isinstance(weights, str) else weights)
        if len(asked) in stops:
            raise Stop
        return solve(self, weights, *arguments)

    def run(target: Path, recipe: Recipe, *, restart: bool = False) -> dict[str, str]:
        work = plan_quantization(source, recipe, UNMEASURED)
        quantize(work, OutputTarget(target, restart=restart), CPU, in_place=True)
        return record.digests(target.iterdir())

    make(source, tmp_path / "whole", recipe)
    make(source, tmp_path / "other", replace(recipe, bits=8))
    monkeypatch.setattr(blockwise.LinearSolver, solve.__name__, recording)
    for name in ("continued", "restarted"):
        asked.clear()
        with pytest.raises(Stop):
            run(tmp_path / name, recipe)
    with (OutputTarget(tmp_path / "continued").work_folder / "finished.jsonl").open("ab") as journal:
        journal.write(b'{"tensor": "lm_')
    with pytest.raises(Stop):
        run(tmp_path / "continued", recipe)
    assert run(tmp_path / "continued", recipe) == record.digests((tmp_path / "whole").iterdir())
    assert len(asked) - len(set(asked)) == {"rtn": 2, "gptq": 6}[recipe.method], "only what was interrupted is repeated"
    restarted = run(tmp_path / "restarted", replace(recipe, bits=8), restart=True)
    assert restarted == record.digests((tmp_path / "other").iterdir())


def test_the_work_folder_can_be_chosen(source: Source, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipeline, "solve_copies", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        target = OutputTarget(tmp_path / "out", work_dir=tmp_path / "work")
        quantize(plan_quantization(source, RECIPE, UNMEASURED), target, CPU)
    assert json.loads((tmp_path / "work" / "run.json").read_text())["recipe"]["bits"] == 4


def blocks(folder: Path) -> dict[str, tuple[int, int]]:
    return {path.name: (path.stat().st_ino, path.stat().st_mtime_ns) for path in folder.glob("block-*.safetensors")}


@pytest.mark.parametrize("kills", [2, pytest.param(50, marks=pytest.mark.slow)], ids="D3-kill-9-{}-times".format)
def test_killed_at_random_moments_it_ends_with_the_same_bytes(
    tmp_path: Path, environment: dict[str, str], kills: int
) -> None:
    """Run the command as a user does; a block that was finished before a kill is never solved again.

    A block is on disk before the next begins, so at most one is lost. An existing target is complete at any moment.
    """
    # Tiny, with many blocks.
    source, target = random_model(tmp_path / "source", hidden_size=64, num_hidden_layers=6), tmp_path / "out"
    arguments = ["quantize", str(source), "--group", "32", "--samples", "32", "--report", "none", "--overwrite", "-q"]
    command = [sys.executable, "-m", "mycli.cli", *arguments, "--seq", "64", "-o", str(target)]
    work, chance = OutputTarget(target).work_folder, random.Random(0)

    def start() -> "subprocess.Popen[bytes]":
        return ForkedProcess(command, env={**environment, "OMP_NUM_THREADS": "1"}, stdout=subprocess.DEVNULL)

    def working(process: "subprocess.Popen[bytes]") -> float:
        """Return when the process holds the work folder's lock: the time before is mostly Python's imports."""
        lock = str(work / "lock")
        while process.poll() is None:
            with contextlib.suppress(OSError):
                if lock in map(os.readlink, Path(f"/proc/{process.pid}/fd").iterdir()):
                    break
            time.sleep(0.005)
        return time.monotonic()

    process = start()
    begun = working(process)
    assert process.wait() == 0
    seconds = time.monotonic() - begun
    expected = record.digests(target.iterdir())
    shutil.rmtree(target)
    struck = runs = resumed = 0
    while struck < kills and runs < 4 * kills:
        runs += 1
        done = blocks(work)
        process, moment = start(), chance.uniform(0, 0.8 * seconds)
        if chance.random() < 0.8 or not resumed:
            working(process)
        while not struck and process.poll() is None and not blocks(work):  # the next run has blocks to resume from
            time.sleep(0.005)
            moment = 0.0
        if done and not resumed:  # killed before it can end
            moment = 0.0
        with contextlib.suppress(subprocess.TimeoutExpired):
            assert process.wait(moment) == 0, "only a kill ends it early"
        process.send_signal(signal.SIGKILL)
        code, kept = process.wait(), blocks(work)
        print(f"run {runs}: exit {code}, {len(done)} blocks found, {len(kept)} left, target {target.exists()}")
        if code == -signal.SIGKILL and work.exists():
            struck += 1
            resumed += bool(done)
            assert done.items() <= kept.items(), "a finished block was solved again"
        if target.exists():
            assert record.digests(target.iterdir()) == expected
    assert struck and resumed, "no run was killed that went on from finished blocks"
    assert start().wait() == 0
    assert record.digests(target.iterdir()) == expected
    print(f"{struck} of {runs} runs were killed at work, which takes {seconds:.1f} s: the same bytes every time")
    assert sorted(path.name for path in tmp_path.iterdir() if path.name not in USERS) == ["out", "source"]
