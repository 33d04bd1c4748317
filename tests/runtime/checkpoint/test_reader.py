"""Test writing and reading tensors against the safetensors library; values, damage and killed writers (A25 to D16)."""

import errno
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from mycli.runtime.checkpoint.manifest import Manifest
from mycli.runtime.checkpoint.reader import Checkpoint, check_finite
from mycli.runtime.checkpoint.safetensors_header import INDEX, SINGLE
from mycli.runtime.checkpoint.writer import CheckpointWriter
from mycli.runtime.device.placement import torch_dtype
from mycli.runtime.errors import ModelError, ResourceError, UsageError
from mycli.runtime.models.part_spec import Shape
from mycli.runtime.utils.dtypes import BY_SAFETENSORS_NAME
from mycli.runtime.utils.units import human_bytes

Plan = list[tuple[str, torch.dtype, Shape]]


def content(dtype: torch.dtype, shape: Shape, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    if dtype.is_floating_point:
        return torch.randn(shape, generator=generator).to(dtype)
    if dtype == torch.bool:
        return torch.rand(shape, generator=generator) < 0.5
    limits = torch.iinfo(dtype)
    return torch.randint(limits.min, limits.max, shape, generator=generator, dtype=dtype)


def same(a: Tensor, b: Tensor) -> bool:
    bits = [x.contiguous().reshape(-1).view(torch.uint8) for x in (a, b)]
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(*bits)


def saved(folder: Path, tensors: dict[str, Tensor], **options: Any) -> Checkpoint:
    save_file(tensors, folder / SINGLE)
    return Checkpoint(Manifest.open(folder), **options)


TENSORS = st.dictionaries(
    st.text("abcxyz._019é", min_size=1, max_size=12),
    st.tuples(st.sampled_from(sorted(BY_SAFETENSORS_NAME)), st.lists(st.integers(0, 5), max_size=3)),
    min_size=1,
    max_size=9,
)


@settings(max_examples=40, deadline=None)
@given(TENSORS, st.integers(1, 400), st.randoms(use_true_random=False))
def test_written_folder_is_read_alike_by_the_library(drawn: Any, limit: int, random: Any) -> None:
    tensors = {n: content(torch_dtype(d), tuple(s), i) for i, (n, (d, s)) in enumerate(drawn.items())}
    with TemporaryDirectory() as scratch:
        target = Path(scratch) / "out"
        plan = [(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()]
        with CheckpointWriter(target, plan, max_shard_bytes=limit) as writer:
            for name in random.sample(sorted(tensors), len(tensors)):
                writer.write(name, tensors[name])
            writer.finish()
        theirs: dict[str, Tensor] = {}
        for path in target.glob("*.safetensors"):
            theirs.update(load_file(path))
            with safe_open(path, "pt") as file:
                assert file.metadata() == {"format": "pt"}
        ours = Checkpoint(Manifest.open(target))
        assert theirs.keys() == tensors.keys()
        for name, tensor in tensors.items():
            assert same(theirs[name], tensor) and same(ours.read(name), tensor)


@settings(max_examples=40, deadline=None)
@given(TENSORS)
def test_folder_of_the_library_is_read_alike(drawn: Any) -> None:
    tensors = {n: content(torch_dtype(d), tuple(s), i) for i, (n, (d, s)) in enumerate(drawn.items())}
    with TemporaryDirectory() as scratch:
        checkpoint = saved(Path(scratch), tensors)
        for name, tensor in tensors.items():
            assert checkpoint.dtype(name) == tensor.dtype
            assert same(checkpoint.read(name), tensor)


# Reading


def test_rows_of_a_larger_tensor_are_read_in_place(tmp_path: Path) -> None:
    q, k = torch.randn(3, 4), torch.randn(2, 4)
    checkpoint = saved(tmp_path, {"q": q, "k": k})
    fused = torch.zeros(6, 4)
    checkpoint.read_into("q", fused[:3])
    checkpoint.read_into("k", fused[3:5])
    assert torch.equal(fused, torch.cat([q, k, torch.zeros(1, 4)]))


def test_wrong_destination_is_a_bug_not_a_guess(tmp_path: Path) -> None:
    checkpoint = saved(tmp_path, {"a": torch.ones(2, 4)})
    for out in (torch.empty(4, 2), torch.empty(8), torch.empty(2, 4, dtype=torch.int32), torch.empty(4, 2).T):
        with pytest.raises(ValueError, match="a is F32"):
            checkpoint.read_into("a", out)
    with pytest.raises(ModelError, match="no tensor b"):
        checkpoint.read("b")


def test_threads_read_at_once(tmp_path: Path) -> None:
    tensors = {f"t{i}": torch.full((1000,), float(i)) for i in range(50)}
    checkpoint = saved(tmp_path, tensors)
    with ThreadPoolExecutor(8) as pool:
        results = list(pool.map(checkpoint.read, tensors))
    assert all(torch.equal(a, b) for a, b in zip(results, tensors.values(), strict=True))


@pytest.mark.parametrize("case", ["A25-replaced", "A25-truncated", "A25-removed"])
def test_file_that_changes_after_opening(case: str, tmp_path: Path) -> None:
    """The reader neither crashes (a mapped file would raise SIGBUS) nor mixes two models."""
    checkpoint = saved(tmp_path, {"a": torch.ones(1000), "b": torch.ones(1000)})
    checkpoint.read("a")
    path = tmp_path / SINGLE
    if case == "A25-replaced":
        save_file({"a": torch.zeros(1000), "b": torch.zeros(1000)}, tmp_path / "new")
        (tmp_path / "new").replace(path)
    elif case == "A25-truncated":
        os.truncate(path, 4096)
    else:
        path.unlink()
    with pytest.raises(ModelError, match=f"^{SINGLE}: "):
        checkpoint.read("b")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("size", [1, 7, 100, 4099])
def test_nonfinite_values_are_counted(dtype: torch.dtype, value: float, size: int) -> None:
    """A26: at any position, including the tail that vector instructions skip and next to its opposite."""
    for place in {0, size // 2, size - 1}:
        tensor = torch.linspace(-3, 3, size).to(dtype)
        tensor[place] = value
        with pytest.raises(ModelError, match=f"^w: 1 of {size} values"):
            check_finite(tensor, "w", "")
    mixed = torch.tensor([float("inf"), 0, float("-inf"), float("nan")]).to(dtype)
    with pytest.raises(ModelError, match="3 of 4"):
        check_finite(mixed, "w", "")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_largest_values_are_finite(dtype: torch.dtype) -> None:
    """A26: the values are finite although their sum would overflow."""
    top = torch.finfo(dtype).max
    check_finite(torch.tensor([top, top, -top, -top, -0.0]), "w", "")
    check_finite(torch.empty(0, 3, dtype=dtype), "w", "")
    check_finite(torch.full((4,), -1, dtype=torch.int32), "w", "")  # the bits of a NaN


def test_nonfinite_policy(tmp_path: Path) -> None:
    """A26"""
    bad = torch.tensor([1.0, float("nan"), float("inf")])
    with pytest.raises(ModelError, match=f"^{SINGLE}: model.w: 2 of 3 values") as caught:
        saved(tmp_path, {"model.w": bad}).read("model.w")
    assert caught.value.code == "allow-nonfinite"
    assert same(saved(tmp_path, {"model.w": bad}, allow_nonfinite=True).read("model.w"), bad)


@pytest.mark.parametrize("case", ["A32-equal", "A32-different", "A32-other-dtype"])
def test_tensors_are_compared_to_the_last_byte(case: str, tmp_path: Path) -> None:
    embedding = torch.randn(300_000, 16)  # more than one chunk
    head = embedding.to(torch.bfloat16) if case == "A32-other-dtype" else embedding.clone()
    head[-1, -1] += 1 if case == "A32-different" else 0
    manifest = saved(tmp_path, {"embedding": embedding, "head": head}).manifest
    assert manifest.equal("embedding", "head") == (case == "A32-equal")


# Writing

PLAN: Plan = [("a", torch.float32, (4, 8)), ("b", torch.int32, (3,)), ("c", torch.bfloat16, (5,))]


def write_all(writer: CheckpointWriter, plan: Plan = PLAN) -> None:
    for i, (name, dtype, shape) in enumerate(plan):
        writer.write(name, content(dtype, shape, i))


def write(target: Path, **options: Any) -> None:
    with CheckpointWriter(target, PLAN, **options) as writer:
        write_all(writer)
        writer.add_file("config.json", b"{}")
        writer.finish()


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_shards_and_index(tmp_path: Path) -> None:
    plan: Plan = [(f"t{i}", torch.uint8, (size,)) for i, size in enumerate([250, 40, 60, 1, 0, 100])]
    with CheckpointWriter(tmp_path / "out", plan, max_shard_bytes=100) as writer:
        write_all(writer, plan)
        writer.finish()
    index = json.loads((tmp_path / "out" / INDEX).read_text())
    shards = [f"model-0000{i}-of-00004.safetensors" for i in range(1, 5)]
    assert names(tmp_path / "out") == [*shards, INDEX]
    assert index["metadata"]["total_size"] == 451
    places = {"t0": 0, "t1": 1, "t2": 1, "t3": 2, "t4": 2, "t5": 3}
    assert index["weight_map"] == {name: shards[place] for name, place in places.items()}


def test_same_input_same_bytes(tmp_path: Path) -> None:
    write(tmp_path / "one")
    write(tmp_path / "two")
    assert (tmp_path / "one" / SINGLE).read_bytes() == (tmp_path / "two" / SINGLE).read_bytes()


def test_non_contiguous_and_odd_layouts_are_written_as_they_read(tmp_path: Path) -> None:
    tensor = torch.arange(32.0).view(8, 4).T
    with CheckpointWriter(tmp_path / "out", [("a", torch.float32, (4, 8))]) as writer:
        writer.write("a", tensor.requires_grad_())
        writer.finish()
    assert torch.equal(load_file(tmp_path / "out" / SINGLE)["a"], tensor)


def test_short_writes_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, view, offset: real(fd, bytes(view)[:7], offset))
    write(tmp_path / "out")
    checkpoint = Checkpoint(Manifest.open(tmp_path / "out"))
    assert all(same(checkpoint.read(n), content(d, s, i)) for i, (n, d, s) in enumerate(PLAN))


def test_threads_write_at_once(tmp_path: Path) -> None:
    plan: Plan = [(f"t{i}", torch.int64, (500,)) for i in range(40)]
    with CheckpointWriter(tmp_path / "out", plan, max_shard_bytes=20_000) as writer:
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(lambda i: writer.write(f"t{i}", torch.full((500,), i)), range(40)))
        writer.finish()
    checkpoint = Checkpoint(Manifest.open(tmp_path / "out"))
    assert all(torch.equal(checkpoint.read(f"t{i}"), torch.full((500,), i)) for i in range(40))


def test_copy_keeps_every_bit(tmp_path: Path) -> None:
    """Check that NaN payloads and tensors of several chunks are copied unchanged."""
    odd = torch.tensor([0x7FC00001, -1, 0x7F800000], dtype=torch.int32).view(torch.float32)
    large = content(torch.uint8, (9 << 20,), 1)
    source = saved(tmp_path, {"odd": odd, "large": large})
    plan = [("large", torch.uint8, (9 << 20,)), ("odd", torch.float32, (3,))]
    with CheckpointWriter(tmp_path / "out", plan) as writer:
        writer.copy("large", source)
        writer.copy("odd", source)
        writer.finish()
    written = load_file(tmp_path / "out" / SINGLE)
    assert same(written["odd"], odd) and same(written["large"], large)
    other = [("large", torch.uint8, (8,))]
    with CheckpointWriter(tmp_path / "other", other) as writer, pytest.raises(ValueError, match="planned as"):
        writer.copy("large", source)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_nonfinite_values_are_not_written(value: float, tmp_path: Path) -> None:
    """A26, A28: a scale that overflowed float16 is infinite and would make the model unusable."""
    with pytest.raises(ModelError, match="c: 1 of 5 values"), CheckpointWriter(tmp_path / "out", PLAN) as writer:
        writer.write("c", torch.tensor([1, 2, value, 4, 5], dtype=torch.bfloat16))
    assert names(tmp_path) == []


def test_plan_must_be_kept(tmp_path: Path) -> None:
    with CheckpointWriter(tmp_path / "out", PLAN) as writer:
        for tensor in (torch.zeros(8, 4), torch.zeros(4, 8, dtype=torch.float16)):
            with pytest.raises(ValueError, match="a is planned as F32"):
                writer.write("a", tensor)
        with pytest.raises(KeyError):
            writer.write("d", torch.zeros(1))
        writer.write("b", torch.zeros(3, dtype=torch.int32))
        with pytest.raises(ValueError, match="2 tensors not written, a among them"):
            writer.finish()
    assert names(tmp_path) == []
    with pytest.raises(ValueError, match="twice"):
        CheckpointWriter(tmp_path / "out", [*PLAN, PLAN[0]])


@pytest.mark.parametrize("name", ["../config.json", "/config.json", "a/b", SINGLE, "..", ".", ""])
def test_other_files_have_plain_names(name: str, tmp_path: Path) -> None:
    with CheckpointWriter(tmp_path / "out", PLAN) as writer, pytest.raises(ValueError, match="not a name"):
        writer.add_file(name, b"")


def test_finish_reads_what_it_wrote(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="truncated"), CheckpointWriter(tmp_path / "out", PLAN) as writer:
        write_all(writer)
        os.truncate(next(tmp_path.glob(f".out.partial-*/{SINGLE}")), 300)
        writer.finish()
    assert names(tmp_path) == []


@pytest.mark.parametrize(
    "code", [errno.ENOSPC, errno.EDQUOT, errno.EIO], ids=lambda code: f"D2-{errno.errorcode[code]}"
)
@pytest.mark.parametrize("after", [0, 2])
def test_disk_error_while_writing(code: int, after: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """D2: the old output remains, the new one is removed, and no descriptor stays open."""
    write(tmp_path / "out")
    before = (tmp_path / "out" / SINGLE).read_bytes()
    descriptors = len(os.listdir("/proc/self/fd"))
    real, calls = os.pwrite, iter(range(100))

    def fail(descriptor: int, data: Any, offset: int) -> int:
        if isinstance(data, memoryview) and next(calls) >= after:
            raise OSError(code, os.strerror(code))
        return real(descriptor, data, offset)

    monkeypatch.setattr(os, "pwrite", fail)
    with pytest.raises(ResourceError, match=f"cannot write .*/out: {os.strerror(code)}") as caught:
        write(tmp_path / "out", overwrite=True)
    assert caught.value.hint
    assert names(tmp_path) == ["out"]
    assert (tmp_path / "out" / SINGLE).read_bytes() == before
    assert len(os.listdir("/proc/self/fd")) == descriptors


def test_space_is_checked_with_headers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """D1: the check uses the exact size of the weight files."""
    write(tmp_path / "out")
    size = (tmp_path / "out" / SINGLE).stat().st_size
    for free, fits in ((size, True), (size - 1, False)):
        monkeypatch.setattr("shutil.disk_usage", lambda path, free=free: type("Usage", (), {"free": free}))
        if fits:
            write(tmp_path / "fits")
        else:
            with pytest.raises(ResourceError, match=f"{human_bytes(size)} needed"):
                write(tmp_path / "too-large")


def test_overwrite_and_source(tmp_path: Path) -> None:
    """D5: the writer follows the rules of Staging."""
    write(tmp_path / "out")
    with pytest.raises(UsageError, match="exists already"):
        write(tmp_path / "out")
    with pytest.raises(UsageError, match="overlaps the input"):
        write(tmp_path / "out", overwrite=True, source=tmp_path / "out")
    write(tmp_path / "out", overwrite=True)
    assert names(tmp_path) == ["out"]


HALF = """
import sys, time, pathlib, torch
from mycli.runtime.checkpoint.writer import CheckpointWriter
plan = [("a", torch.float32, (1000,)), ("b", torch.float32, (1000,))]
with CheckpointWriter(pathlib.Path(sys.argv[1]), plan, max_shard_bytes=4000) as writer:
    writer.write("a", torch.ones(1000))
    print("ready", flush=True)
    time.sleep(60)
"""


@pytest.fixture
def half_done(tmp_path: Path) -> Iterator["subprocess.Popen[str]"]:
    process = subprocess.Popen([sys.executable, "-c", HALF, str(tmp_path / "out")], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    yield process
    process.kill()
    process.wait()
    process.stdout.close()


def test_kill_in_the_middle(half_done: "subprocess.Popen[str]", tmp_path: Path) -> None:
    """D3, D7, D8: a concurrent writer is refused; after the kill the next writer cleans up and succeeds."""
    with pytest.raises(UsageError, match=f"process {half_done.pid} is writing"):
        write(tmp_path / "out")
    half_done.send_signal(signal.SIGKILL)
    half_done.wait()
    left = [name for name in names(tmp_path) if ".partial-" in name]
    assert len(left) == 1 and not (tmp_path / "out").exists()
    with CheckpointWriter(tmp_path / "out", PLAN) as writer:
        assert not (tmp_path / left[0]).exists()
        write_all(writer)
        writer.finish()
    assert names(tmp_path) == ["out"]
