"""The kernel tests, compiled for a GPU and run from their PTX; whole fused passes against the plain model.

Covers what the interpreter cannot show: layouts, inline assembly, Triton's specialization, missing barriers, and the
order of programs. Slow, except for a pass of the smallest model.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from mycli.runtime.kernels.triton.product.tiles import Chip  # noqa: E402  (only where Triton is)
from tests.ptx.emulated import device, emulate  # noqa: E402  (as above)
from tests.runtime.engine.passes import test_fused  # noqa: E402  (as above)
from tests.runtime.kernels.test_triton_experts import Routes  # noqa: E402  (as above)
from tests.runtime.kernels.test_triton_prompt_attention import Prompts, cuts  # noqa: E402  (as above)
from tests.support.compiled_tests import *  # noqa: E402, F403  (as above; all of its tests)
from tests.support.decode_models import CASES, FAMILIES, MIXED, PADDED, PUBLISHED_SIZES, TABLES, WIDE, Case, models  # noqa: E402  (as above)

CAPABILITIES = (80, 90, 120)
LONG = 1088, 700  # a cache whose keys are split into several parts, and the number of parts


@pytest.fixture
def folder(request: pytest.FixtureRequest) -> Path:
    """Return a persistent folder: unchanged kernels are not compiled again in the next run."""
    return request.config.cache.mkdir("ptx_emulator")  # type: ignore[union-attr]  # the plugin is always there


@pytest.fixture(params=[pytest.param(one, marks=pytest.mark.slow, id=f"sm{one}") for one in CAPABILITIES])
def interpret(request: pytest.FixtureRequest, folder: Path) -> Callable[..., object]:
    """Replace the fixture of `tests.support.triton_interpreter`: the function runs on the emulator."""

    def run(function: Callable[..., object], *arguments: object) -> object:
        if request.param < 90 and any(isinstance(one, Routes) and one.pdl for one in arguments):
            pytest.skip("launches that wait for the one before are of compute capability 9.0 on")
        return emulate(folder, request.param, function, *arguments)

    return run


def compare(case: Case, size: tuple[int, int] | None, spoil: str = "") -> tuple[float, float, int]:
    """Return the errors of logits and cache of a fused pass, as `test_fused.compare`, and its number of launches.

    size: of the cache, and how much of it is filled before.
    """
    import triton.runtime.interpreter  # where `compare` would count launches

    assert triton
    capability = device().capability
    chip = Chip(divmod(capability, 10), 132, capability >= 90)
    patch = pytest.MonkeyPatch()
    patch.setattr(test_fused, "models", lambda one: models(one, "cpu", chip))
    if size is not None:
        patch.setattr(test_fused, "CAPACITY", size[0])
        patch.setattr(test_fused, "PREFIX", size[1])
        case = replace(case, changes={**case.changes, "max_context": size[0]})
    patch.setattr(device(), "change", CHANGES[spoil])
    device().launches.clear()
    torch.manual_seed(0)
    with patch.context():
        logits, cache, _ = test_fused.compare(case)
    patch.undo()
    return logits, cache, len(device().launches)


def no_arrival_barrier(ptx: str) -> str:
    """Remove the barriers that precede an arrival."""
    head, mark, tail = ptx.partition("atom.global.gpu.acq_rel")
    lines = head.splitlines()
    stores = [number for number, line in enumerate(lines) if "st.global" in line]
    if not mark or not stores:
        return ptx
    kept = [line for n, line in enumerate(lines) if n < stores[0] or "bar.sync" not in line]
    return "\n".join(kept) + mark + tail


def late_wait(ptx: str) -> str:
    """Wait for one group of copies fewer."""
    return ptx.replace("cp.async.wait_group", "cp.async.wait_group 9; //") if "attend_kernel" in ptx else ptx


CHANGES: dict[str, Callable[[str], str]] = {"": lambda ptx: ptx, "barrier": no_arrival_barrier, "wait": late_wait}


@pytest.mark.parametrize("window", [None, 50])
def test_bits_of_a_row_depend_on_no_cut_and_no_neighbour(window: int | None, interpret: Callable[..., object]) -> None:
    """The interpreter cannot show it: its products depend on where a row lies."""
    assert interpret(cuts, Prompts((170,), (300,), window=window))


def cases() -> list[object]:
    every = [
        (capability, case, size)
        for capability in CAPABILITIES
        for case in (*CASES, *WIDE, *TABLES)
        for size in (None, LONG)
    ]
    every += [
        (capability, case, None) for capability in CAPABILITIES for case in (*MIXED, *PADDED)
    ]  # the same attention
    return [
        pytest.param(*one, id=f"sm{one[0]}-{one[1]}-{'long' if one[2] else 'short'}", marks=pytest.mark.slow)
        for one in every
    ]


@pytest.mark.parametrize(("capability", "case", "size"), cases())
def test_a_fused_pass_is_the_plain_models(
    capability: int, case: Case, size: tuple[int, int] | None, folder: Path
) -> None:
    logits, cache, launches = emulate(folder, capability, compare, case, size)
    assert logits < 0.02 and cache < (0.05 if case.int4 else 0.02)  # a step of int4 is 1/8 of the largest value
    assert launches >= 2 * sum(test_fused.launches_of(case).values()), "twice"


@pytest.mark.slow
@pytest.mark.parametrize("case", PUBLISHED_SIZES, ids=["8b", "30b-a3b"])
@pytest.mark.parametrize("capability", CAPABILITIES)
def test_a_fused_layer_of_a_published_size_is_the_plain_one(capability: int, case: Case, folder: Path) -> None:
    logits, cache, _ = emulate(folder, capability, compare, case, (2176, 2048))  # 17 shuffled blocks
    assert logits < 0.02 and cache < 0.02


@pytest.mark.slow
@pytest.mark.parametrize("case", FAMILIES, ids=str)
@pytest.mark.parametrize("capability", CAPABILITIES)
def test_a_fused_family_is_the_plain_models(capability: int, case: Case, folder: Path) -> None:
    logits, cache, _ = emulate(folder, capability, compare, case, None)
    assert logits < 0.02 and cache < 0.02


@pytest.mark.slow
@pytest.mark.parametrize("spoil", ["barrier", "wait"])
def test_a_spoiled_pass_shows(spoil: str, folder: Path) -> None:
    """A pass with the fault fails or is far from the plain model's."""
    try:
        logits, *_ = emulate(folder, 80, compare, CASES[0], LONG, spoil)
    except AssertionError:  # different bits the second time, or counters that are not reset to zero
        return
    assert not logits < 0.02
