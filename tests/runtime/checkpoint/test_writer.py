"""Test which files of an interrupted run a writer continues."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from mycli.runtime.checkpoint.writer import CheckpointWriter
from mycli.runtime.models.part_spec import Shape

SHAPES: dict[str, Shape] = {"a.weight_packed": (3,), "a.weight_scale": (2,), "ab.weight": (4,), "b": (5,)}
SHARD_BYTES = 24


def values(name: str) -> Tensor:
    return torch.full(SHAPES[name], float(1 + list(SHAPES).index(name)))


def writer(folder: Path, names: tuple[str, ...] = tuple(SHAPES)) -> CheckpointWriter:
    plan = [(name, torch.float32, shape) for name, shape in zip(names, SHAPES.values(), strict=True)]
    return CheckpointWriter(folder / "out", plan, max_shard_bytes=SHARD_BYTES, resumable=folder / "work")


@pytest.fixture
def begun(tmp_path: Path) -> Path:
    """Return a folder in which a run ended after the linear `a` and the tensor `b`."""
    with writer(tmp_path) as first:
        assert not first.continues
        for name in ("a.weight_packed", "a.weight_scale", "b"):
            first.write(name, values(name))
    assert len(list((tmp_path / "work").glob("*.safetensors"))) == 3 and not (tmp_path / "out").exists()
    return tmp_path


def test_a_run_continues_after_what_was_written(begun: Path) -> None:
    with writer(begun) as second:
        assert second.continues
        second.mark_written("b")
        with pytest.raises(ValueError, match="3 tensors not written"):
            second.finish()
        second.mark_written("a")
        with pytest.raises(ValueError, match="1 tensors not written, ab.weight among them"):
            second.finish()
        second.write("ab.weight", values("ab.weight"))
        second.finish()
    written = {}
    for path in (begun / "out").glob("*.safetensors"):
        written |= load_file(path)
    assert written.keys() == SHAPES.keys() and all(torch.equal(written[name], values(name)) for name in SHAPES)


def _remove(path: Path) -> None:
    path.unlink()


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def _link(path: Path) -> None:
    path.symlink_to(path.rename(path.with_name("elsewhere")))


@pytest.mark.parametrize("damage", [_remove, _cut, _link])
def test_damaged_files_are_written_anew(damage: Callable[[Path], None], begun: Path) -> None:
    damage(begun / "work" / "model-00002-of-00003.safetensors")
    left = begun / "work" / "elsewhere"
    linked = left.read_bytes() if left.exists() else b""
    with writer(begun) as second:
        assert not second.continues
        for name in SHAPES:
            second.write(name, values(name))
        assert not any(path.is_symlink() for path in second.folder.iterdir())
    assert not linked or left.read_bytes() == linked


def test_files_of_another_plan_are_not_continued(begun: Path) -> None:
    with writer(begun, ("a.weight_packed", "a.weight_scale", "ac.weight", "b")) as other:
        assert not other.continues
