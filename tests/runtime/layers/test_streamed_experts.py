"""Test experts streamed into slots on demand: the bits of a fully resident model for any number of slots."""

import os
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from mycli.runtime.cache.batch import Chunk
from mycli.runtime.checkpoint.open_folder import open_model_folder
from mycli.runtime.checkpoint.reader import Checkpoint
from mycli.runtime.device.placement import Placement
from mycli.runtime.engine.loading.loader import load_model
from mycli.runtime.engine.model_runner import ModelRunner
from mycli.runtime.errors import Declined, ModelError
from mycli.runtime.kernels.cpu.layer import Fetch
from mycli.runtime.kernels.cpu.library import build
from mycli.runtime.layers.feed_forward import Experts
from mycli.runtime.layers.streamed_experts import ExpertReads, StreamedExperts
from mycli.runtime.memory.cache_shape import CacheShape
from mycli.runtime.memory.resident import most_experts
from tests.support.families import CASES, make
from tests.support.family_parts import SMALL
from tests.support.grids import chosen
from tests.support.native_parts import plain_passes
from tests.support.packed_folder import write_packed

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
SIZES = (80, 1, 1, 7, 1)  # pass sizes: above the row limit of native calls, single tokens, and a few
MIXTURES = [
    case
    for case, (_, changes) in CASES.items()
    if any("experts" in key for key in changes) and case != "gemma4-experts-ple-shared-kv-double-untied"
]
WIDE = {
    **SMALL,
    "model_type": "qwen3_moe",
    "hidden_size": 128,
    "head_dim": 32,
    "num_experts": 12,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 96,
    "tie_word_embeddings": True,
    "dtype": "bfloat16",
}
EVEN, MIXED = {"": 4}, {"experts.3.": 8, "": 4}  # bit widths of weights by parts of names


def load(folder: Path, slots: int | None, dtype: str = "bf16") -> ModelRunner:
    return load_model(open_model_folder(folder), Placement(torch.device("cpu"), DTYPES[dtype]), expert_slots=slots)


def run(runner: ModelRunner, sizes: Sequence[int] = SIZES) -> Tensor:
    cache = runner.make_cache(CacheShape.contiguous(sum(sizes)))
    tokens = torch.randint(4, SMALL["vocab_size"], (sum(sizes),), generator=torch.Generator().manual_seed(0)).tolist()
    parts, start = [], 0
    for size in sizes:
        parts.append(runner.run([Chunk(tokens[start : start + size], start, (0,), size)], cache))
        start += size
    return torch.cat(parts)


def reads_of(runner: ModelRunner) -> ExpertReads:
    assert runner.model.expert_reads is not None
    return runner.model.expert_reads


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    @cache
    def make_once(case: str) -> Path:
        folder = tmp_path_factory.mktemp("mixture")
        make(folder, *CASES[case])
        return folder

    return make_once


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_packed(tmp_path_factory.mktemp("packed") / "model", WIDE, EVEN)


QUICK = ("qwen3_moe-8top2", "gpt_oss-window7-gqa4:2", "qwen2_moe-shared", "gemma4-8top2")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", chosen(MIXTURES, quick=QUICK), ids=str)
def test_every_family_has_the_bits_of_all_in_memory(case: str, dtype: str, made: Callable[[str], Path]) -> None:
    folder = made(case)
    whole = load(folder, None, dtype)
    expected, most = run(whole), most_experts(whole.config)
    for slots in (1, most - 1):
        runner = load(folder, slots, dtype)
        assert torch.equal(run(runner), expected), slots
        reads = reads_of(runner)
        assert reads.resident < reads.requested and reads.nbytes > 0  # some were read during the run
        assert runner.nbytes < whole.nbytes


@pytest.mark.parametrize("slots", [1, 3, 5, 11])
def test_packed_experts_are_native_parts_with_the_bits_of_all_in_memory(
    slots: int, packed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The slots are fewer than a token's experts, as many, and more; experts run natively and step by step."""
    if isinstance(found := build.native(), Declined):
        pytest.skip(f"no native code here: {found}")
    ran, plain = list[int](), Fetch._fetch

    def counting(self: Fetch, piece: int, *arguments: Any) -> int:
        ran.append(piece)
        return plain(self, piece, *arguments)

    monkeypatch.setattr(Fetch, "_fetch", counting)
    expected, runner = run(load(packed, None)), load(packed, slots)
    held = runner.nbytes
    assert torch.equal(run(runner), expected)
    assert ran.count(0) == (len(SIZES) - 1) * runner.config.layers
    assert max(ran) > 0 or slots > 3  # a token has 3 experts: passes use more experts than there are slots
    runner.passes = plain_passes(runner.model)
    assert torch.equal(run(runner), expected)
    assert runner.nbytes == held  # new experts replace old ones


def test_experts_of_different_widths_go_step_by_step(tmp_path: Path) -> None:
    folder = write_packed(tmp_path / "model", WIDE, MIXED)
    assert torch.equal(run(load(folder, 4)), run(load(folder, None)))


def test_what_is_chosen_again_is_found(packed: Path) -> None:
    """The same token is repeated: nothing is read after the first pass."""
    runner = load(packed, 3)
    cache = runner.make_cache(CacheShape.contiguous(64))
    runner.run([Chunk([7], 0, (0,), 1)], cache)
    before = ExpertReads(**vars(reads_of(runner)))
    runner.run([Chunk([7], 0, (0,), 1)], cache)
    since = reads_of(runner).since(before)
    assert since.requested == since.resident == 3 * runner.config.layers and since.hit_rate == 1
    assert since.nbytes == 0 and since.gigabytes_per_second is None


def test_only_the_next_piece_is_prefetched(packed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlp, order = next(load(packed, 3).model.layers()).mlp, list[tuple[str, tuple[int, ...]]]()
    assert isinstance(mlp, StreamedExperts)
    monkeypatch.setattr(mlp, "_prefetch", lambda experts: order.append(("prefetch", tuple(experts))))
    monkeypatch.setattr(mlp, "_take", lambda experts: order.append(("take", tuple(experts))) or 0)
    pieces = [tuple(piece) for piece in mlp.pieces(range(12))]
    steps = [(("prefetch", later), ("take", piece)) for piece, later in zip(pieces, pieces[1:], strict=False)]
    assert len(pieces) == 4 and order == [step for pair in steps for step in pair] + [("take", pieces[-1])]


WAYS = pytest.mark.parametrize("sizes", [(1, 1, 1, 1, 1, 1), (70,)], ids=["steps", "prompt"])


@WAYS
@pytest.mark.parametrize("harm", ["truncated", "rewritten", "removed"])
def test_a_file_that_changes_is_an_error(harm: str, sizes: Sequence[int], tmp_path: Path) -> None:
    folder = write_packed(tmp_path / "model", WIDE, EVEN)
    runner, file = load(folder, 2), folder / "model.safetensors"
    if harm == "truncated":
        os.truncate(file, file.stat().st_size // 2)
    elif harm == "rewritten":
        with file.open("r+b") as opened:
            opened.write(opened.read(100))
        os.utime(file, ns=(1, 1))
    else:
        file.unlink()
    with pytest.raises(ModelError, match=r"model\.safetensors: "):
        run(runner, sizes)


@WAYS
@pytest.mark.parametrize("error", [ModelError("the disk is gone"), KeyboardInterrupt()], ids=["error", "interrupt"])
def test_reading_that_fails_costs_neither_bits_nor_memory(
    error: BaseException, sizes: Sequence[int], packed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fail each of the first reads in turn; the experts whose slots were overwritten are read again."""
    expected, runner = run(load(packed, None)), load(packed, 2)
    held = runner.nbytes
    for good in (0, 1, 2, 5, 9):
        plain, left = Checkpoint.read_into, [good]

        def failing(self: Checkpoint, name: str, out: Tensor) -> None:
            if not left[0]:  # noqa: B023  # of this round
                raise error
            left[0] -= 1  # noqa: B023
            plain(self, name, out)  # noqa: B023

        with monkeypatch.context() as patch:
            patch.setattr(Checkpoint, "read_into", failing)
            with pytest.raises(type(error)):
                run(runner, sizes)
        assert torch.equal(run(runner), expected)
        assert runner.nbytes == held


def test_nobody_is_told_of_experts_where_all_are_in_memory(packed: Path) -> None:
    assert load(packed, None).model.expert_reads is None
    runner = load(packed, 12)  # as many as there are experts
    run(runner)
    assert reads_of(runner) == ExpertReads()
    assert all(isinstance(block.mlp, Experts) for block in runner.model.layers())
