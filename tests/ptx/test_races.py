"""The race detector finds unordered accesses by vector clocks; planted faults and endless waits are detected."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from mycli.runtime.kernels.triton.product.tiles import Chip  # noqa: E402  (reason: only where Triton is installed)
from tests.ptx.emulated import device, emulate  # noqa: E402  (reason: as above)
from tests.ptx.emulator.run import LaunchFailed, Runner  # noqa: E402  (reason: as above)
from tests.ptx.memory_counts import LAUNCHES, Launch, attend, multiply  # noqa: E402  (reason: as above)
from tests.ptx.test_emulated import no_arrival_barrier  # noqa: E402  (reason: as above)
from tests.ptx.test_emulator import run  # noqa: E402  (reason: as above)

SOME, ATTEND = LAUNCHES[2], next(launch for launch in LAUNCHES if launch.name == "attend")
SPLIT = Chip((9, 0), 16, pdl=True)  # a product and attention are split into several parts


@pytest.fixture
def folder(request: pytest.FixtureRequest) -> Path:
    return request.config.cache.mkdir("ptx_emulator")  # type: ignore[union-attr]  # the plugin is always there


def relaxed(ptx: str) -> str:
    """Remove the memory order of an arrival: the counter is right, the sums may be stale."""
    return ptx.replace(".gpu.acq_rel", ".gpu.relaxed")


def unrelated(ptx: str) -> str:
    return ptx


CHANGES: dict[str, Callable[[str], str]] = {"": unrelated, "relaxed": relaxed, "barrier": no_arrival_barrier}


def found(launch: Launch, change: str, starved: bool) -> str:
    """Return the race detector's message for a launch, empty if there is no race."""
    played = device()
    runner, before = played.runner, played.change
    runner.races, runner.starved, played.change = True, starved, CHANGES[change]
    torch.manual_seed(0)
    try:
        (multiply if launch.kv is None else attend)(launch, SPLIT)
    except RuntimeError as error:
        return str(error)
    finally:
        runner.races, runner.starved, played.change = False, False, before
    return ""


@pytest.mark.slow
@pytest.mark.parametrize("launch", [SOME, ATTEND, LAUNCHES[4]], ids=str)
def test_kernels_have_no_races_and_planted_ones_show(launch: Launch, folder: Path) -> None:
    assert emulate(folder, 90, found, launch, "", False) == ""
    assert emulate(folder, 90, found, launch, "", True) == "", "whoever is last"
    for change in ("relaxed", "barrier"):
        assert "a race" in emulate(folder, 90, found, launch, change, False), change


ADD = "atom.global.gpu.{order}.add.u32 %r9, [%d2+256], 1;"
# The head of a program reads 64 words of either buffer; written words follow them. Thread 0 of each program arrives at
# a counter; the last one adds what both have written.
ARRIVE = "st.global.u32 [%d8+256], 5; bar.sync 0; setp.ne.u32 %p1, %r1, 0; @%p1 bra END; {add} setp.ne.u32 %p2, %r9, 1;"
ARRIVE += "@%p2 bra END; ld.global.u32 %r10, [%d1+256]; ld.global.u32 %r11, [%d1+512]; END: mov.u32 %r12, 0;"
PLACE = "mov.u32 %r7, %ctaid.x; mul.wide.u32 %d6, %r7, 256; add.s64 %d7, %d1, %d6; add.s64 %d8, %d7, %d3;"


def launched(folder: Path, body: str, seed: int = 1, **options: bool) -> None:
    run(folder, body, [0] * 256, [0] * 128, programs=2, runner=Runner(folder, seed, **options))


@pytest.mark.parametrize("order", ["acq_rel", "relaxed"])
def test_an_arrival_orders_what_it_releases_and_acquires(order: str, folder: Path) -> None:
    body = PLACE + ARRIVE.format(add=ADD.format(order=order))
    if order == "acq_rel":
        launched(folder, body, races=True)
        return
    launched(folder, body)  # the fault does not show without the race detector
    with pytest.raises(LaunchFailed, match="a race: a read"):
        launched(folder, body, races=True)


def test_two_writes_in_no_order_are_a_race(folder: Path) -> None:
    with pytest.raises(LaunchFailed, match="a race: two writes"):
        launched(folder, "st.global.u32 [%d4+256], 5;", races=True)
    launched(folder, "st.global.u32 [%d4+256], 5;")


OTHERS = "mov.u32 %r5, global_smem; shl.b32 %r6, %r1, 2; add.u32 %r7, %r5, %r6; st.shared.b32 [%r7], %r1;{barrier}"
OTHERS += "xor.b32 %r6, %r6, 128; add.u32 %r7, %r5, %r6; ld.shared.b32 %r8, [%r7];"  # of the other warp
SAME = "mov.u32 %r5, global_smem; shr.u32 %r6, %r1, 5; mov.u32 %r7, 5; st.shared.b32 [%r5], {value};"


def in_shared(folder: Path, body: str) -> None:
    run(folder, body, [0] * 256, [0] * 128, runner=Runner(folder, races=True), shared=4096)


def test_races_in_shared_memory(folder: Path) -> None:
    """Warps may write the same bytes in any order if they are equal: layouts repeat numbers in several warps."""
    in_shared(folder, OTHERS.format(barrier="bar.sync 0;"))
    with pytest.raises(LaunchFailed, match="a race: .*, in shared memory"):
        in_shared(folder, OTHERS.format(barrier=""))
    in_shared(folder, SAME.format(value="%r7"))
    with pytest.raises(LaunchFailed, match="a race: two writes in no order, in shared memory"):
        in_shared(folder, SAME.format(value="%r6"))


WAIT = "AGAIN: ld.acquire.gpu.global.u32 %r9, [%d2+256]; setp.eq.u32 %p1, %r9, 0; @%p1 bra AGAIN; mov.u32 %r12, 0;"
SET = "mov.u32 %r7, %ctaid.x; setp.ne.u32 %p2, %r7, 0; @%p2 bra SKIP; mov.u32 %r8, 1;{store}SKIP: mov.u32 %r10, 0;"
RELEASE = "setp.ne.u32 %p2, %r1, 0; @%p2 bra SKIP; st.release.gpu.global.u32 [%d2+256], %r8;"


@pytest.mark.parametrize("starved", [False, True])
def test_a_wait_that_ends_and_one_that_does_not(starved: bool, folder: Path) -> None:
    launched(folder, SET.format(store=RELEASE) + WAIT, races=True, starved=starved)
    with pytest.raises(LaunchFailed, match="no progress"):
        launched(folder, SET.format(store="") + WAIT, starved=starved)
