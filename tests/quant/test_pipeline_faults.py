"""Test that quantizing refuses what it cannot do, before the work where possible, and leaves no partial output."""

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from mycli.quant import pipeline
from mycli.quant.output import model_card as record
from mycli.quant.output.work_folder import WorkFolder, unwritten_bytes
from mycli.quant.pipeline import quantize
from mycli.quant.planning import plan as planning
from mycli.quant.planning.memory import Need
from mycli.quant.planning.plan import plan_quantization
from mycli.quant.planning.target import OutputTarget
from mycli.quant.recipe import Recipe
from mycli.quant.solving import blockwise
from mycli.runtime.checkpoint.open_folder import open_model_folder
from mycli.runtime.errors import ModelError, ResourceError, UsageError, UserError
from mycli.runtime.hub.resolve import Source
from mycli.runtime.quantization.scheme import Packing
from tests.support.models import CPU, random_model, write_config
from tests.support.quantizing import DATA, GROUP_32, UNMEASURED, leftovers, make, rewrite

pytestmark = pytest.mark.usefixtures("short_calibration_text")


@pytest.fixture
def source(tmp_path: Path) -> Source:
    return Source("small", random_model(tmp_path / "source"), None, None)


@pytest.mark.parametrize("fault", ["E6-quantized-input"])
def test_a_quantized_model_is_refused(source: Source, tmp_path: Path, fault: str) -> None:
    make(source, tmp_path / "out")
    with pytest.raises(ModelError, match=r"out is already quantized \(compressed-tensors, int4-g32\)"):
        plan_quantization(Source("again", tmp_path / "out", None, None), GROUP_32)
    write_config(source.folder, quantization_config={"quant_method": "gptq", "bits": 4})
    with pytest.raises(ModelError, match="describes weights quantized by gptq, but the files have none"):
        plan_quantization(source, GROUP_32)


@pytest.mark.parametrize("fault", ["E5-indivisible"])
def test_a_group_that_does_not_fit_is_refused_before_any_work(source: Source, fault: str) -> None:
    with pytest.raises(UsageError, match="128 does not divide the 192 inputs of model.layers.0.mlp.down_proj"):
        plan_quantization(source, Recipe())


@pytest.mark.parametrize("bad", [float("nan"), float("inf")], ids=["A26-nan", "A26-inf"])
def test_weights_that_are_not_finite_are_refused_by_name(source: Source, tmp_path: Path, bad: float) -> None:
    name = "model.layers.1.self_attn.k_proj.weight"
    rewrite(source, name, lambda tensor: tensor.index_fill(0, torch.tensor([3]), bad))
    with pytest.raises(ModelError, match=name.replace(".", r"\.")):
        make(source, tmp_path / "out")
    assert leftovers(tmp_path) == []


@pytest.mark.parametrize("fault", ["A28-bf16-beyond-fp16-scales"])
def test_weights_beyond_the_scales_are_refused_by_name(source: Source, tmp_path: Path, fault: str) -> None:
    write_config(source.folder, dtype="float16")
    name = "model.layers.0.mlp.up_proj.weight"
    rewrite(source, name, lambda tensor: tensor * 1e8)
    with pytest.raises(ModelError, match=f"{name}: a weight of .* is beyond the range"):
        make(source, tmp_path / "out")
    assert leftovers(tmp_path) == []


def test_failure_half_way_leaves_the_target_as_it_was(
    source: Source, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make(source, tmp_path / "out")
    before = record.digests((tmp_path / "out").iterdir())
    monkeypatch.setattr(record, "encode", lambda **_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        make(source, tmp_path / "out", overwrite=True)
    assert leftovers(tmp_path) == ["out"]
    assert record.digests((tmp_path / "out").iterdir()) == before


@pytest.mark.parametrize("fault", ["D5-target-exists"])
def test_a_target_is_replaced_only_when_asked(source: Source, tmp_path: Path, fault: str) -> None:
    target = tmp_path / "out"
    make(source, target)
    with pytest.raises(UserError, match="out"):
        make(source, target, Recipe("rtn", bits=8, group=32))
    make(source, target, Recipe("rtn", bits=8, group=32), overwrite=True)
    assert set(open_model_folder(target).packings.values()) == {Packing(8, 32)}


@pytest.mark.parametrize("inside", ["", "copy"], ids=["D5-the-input", "D5-inside-the-input"])
def test_the_source_is_never_written_to(source: Source, inside: str) -> None:
    with pytest.raises(UsageError, match="is inside the model"):
        make(source, source.folder / inside, overwrite=True)


@pytest.mark.parametrize("fault", ["D1-no-space"])
def test_no_space_is_known_before_the_work(
    source: Source, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=1000))
    with pytest.raises(ResourceError, match="needed, 1000 bytes free"):
        make(source, tmp_path / "out")
    assert leftovers(tmp_path) == []


def test_finished_blocks_take_as_much_disk_as_the_plan_says(
    source: Source, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Codes take a byte each in the work folder, which exists until the result is complete."""
    work, target = plan_quantization(source, DATA, UNMEASURED), tmp_path / "out"
    (_, result), (_, replaced), (folder, blocks) = needs = work.disk_needs(target, OutputTarget(target).work_folder)
    stored: list[int] = []
    clear = WorkFolder.clear
    assert not replaced, "without a report no head is chosen"

    def measure(self: WorkFolder) -> None:
        stored.append(sum(path.stat().st_size for path in self.folder.glob("block-*")))
        assert unwritten_bytes(self.folder, blocks) == 0 and unwritten_bytes(self.folder, 1 << 40) < 1 << 40
        clear(self)

    monkeypatch.setattr(WorkFolder, "clear", measure)
    quantize(work, OutputTarget(target), CPU)
    assert blocks < stored[0] < 1.2 * blocks, "headers and norms are not counted"
    usage = shutil.disk_usage(tmp_path)._replace(free=result + blocks - 1)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    with pytest.raises(ResourceError, match="free on that disk"):
        make(source, tmp_path / "other", DATA)
    make(source, tmp_path / "without-data")
    with pytest.raises(ResourceError, match="free on that disk"):
        planning.require_disk([*needs[:1], (folder, 0), (target, result)])


def test_too_little_memory_is_known_before_the_work(source: Source, tmp_path: Path) -> None:
    work = replace(plan_quantization(source, GROUP_32), need=Need(1 << 60, 0, 1024))
    with pytest.raises(ResourceError, match="GiB of memory needed"):
        quantize(work, OutputTarget(tmp_path / "out"), CPU)


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory"),
        RuntimeError("DefaultCPUAllocator: can't allocate memory"),
        MemoryError(),
    ],
    ids=["E7-gpu", "E7-cpu", "E7-python"],
)
def test_memory_that_runs_out_is_no_crash(
    source: Source, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """The exit code is 5, the target does not exist, and solved blocks stay for the next run."""

    def failing(*_: object) -> None:
        raise error

    work = plan_quantization(source, DATA, UNMEASURED)
    solve = blockwise.LinearSolver.solve
    asked: list[int] = []

    def solving(self: blockwise.LinearSolver, *arguments: Any) -> Any:
        asked.append(1)
        return solve(self, *arguments) if len(asked) < 6 else failing()

    monkeypatch.setattr(blockwise.LinearSolver, "solve", solving)
    with pytest.raises(ResourceError, match="out of memory"):
        quantize(work, OutputTarget(tmp_path / "out"), CPU)
    assert leftovers(tmp_path) == [".out.work"]
    monkeypatch.setattr(blockwise.LinearSolver, "solve", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        quantize(work, OutputTarget(tmp_path / "out"), CPU)


def test_other_errors_keep_their_name(source: Source, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipeline, "quantize_tensors", lambda *_: torch.zeros(2) @ torch.zeros(3))
    with pytest.raises(RuntimeError, match="size"):
        make(source, tmp_path / "out")
