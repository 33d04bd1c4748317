"""Check that main loops have no bank conflicts and read whole sectors of memory, by counts on the emulator."""

from pathlib import Path

import pytest

pytest.importorskip("triton")

from tests.ptx.emulated import emulate  # noqa: E402  (reason: only where Triton is installed)
from tests.ptx.emulator.parse import functions  # noqa: E402  (reason: as above)
from tests.ptx.emulator.run import Runner  # noqa: E402  (reason: as above)
from tests.ptx.emulator.translate import Access, main_loop  # noqa: E402  (reason: as above)
from tests.ptx.memory_counts import CAPABILITIES, GROUPS, LAUNCHES, MOST, Launch, costs, ratios  # noqa: E402  (as above)
from tests.ptx.test_emulator import HEAD, SHARED, run  # noqa: E402  (as above)
from tests.support.grids import chosen  # noqa: E402  (reason: as above)

EVERY = [(capability, launch) for capability in CAPABILITIES for launch in LAUNCHES]
QUICK = [(90, LAUNCHES[2])]  # wgmma


@pytest.fixture
def folder(request: pytest.FixtureRequest) -> Path:
    return request.config.cache.mkdir("ptx_emulator")  # type: ignore[union-attr]  # the plugin is always there


@pytest.mark.parametrize(("capability", "launch"), chosen(EVERY, QUICK), ids=str)
def test_main_loops_cost_no_more_than_they_must(capability: int, launch: Launch, folder: Path) -> None:
    found = ratios(emulate(folder, capability, costs, launch))
    for name in GROUPS:
        assert found[name] <= MOST, f"{name}: {found[name]:.2f} times the least"


def counted(folder: Path, body: str) -> dict[str, tuple[int, int, int]]:
    """Return requests, cost and minimum cost by instruction, of one program of two warps."""
    runner = Runner(folder, count=True)
    run(folder, body, [0] * 2048, [0] * 64, runner=runner, shared=4096)
    return {cost.access.text.split()[0]: (cost.requests, cost.made, cost.least) for cost in runner.costs}


def test_counts_are_those_of_the_hardware(folder: Path) -> None:
    """Words 32 apart share a bank: 32 lanes that read them are served one after the other, and take a sector each."""
    spread = "mul.lo.u32 %r5, %r1, 128; mov.u32 %r6, global_smem; add.u32 %r6, %r6, %r5; and.b32 %r6, %r6, 4095;"
    shared = f"{spread} st.shared.b32 [%r6], %r1; mov.u32 %r7, %r1; ld.shared.b32 %r4, [%r6];"
    near = "shl.b32 %r8, %r1, 2; mov.u32 %r9, global_smem; add.u32 %r9, %r9, %r8; ld.shared.u32 %r10, [%r9];"
    far = "mul.wide.u32 %d6, %r1, 64; add.s64 %d7, %d1, %d6; st.global.u32 [%d7], %r1;"
    found = counted(folder, f"{shared} {near} {far}")
    assert found["st.shared.b32"] == found["ld.shared.b32"] == (2, 64, 2)
    assert found["ld.shared.u32"] == (2, 2, 2)
    assert found["st.global.u32"] == (2, 64, 8)
    assert found["ld.global.b32"][2] == 8, "though they need not begin at a sector"


def test_counts_of_matrices_are_those_of_the_hardware(folder: Path) -> None:
    """The rows of a matrix are read together: 128 bytes apart they share banks, 16 bytes apart they have all 32."""
    place = "mov.u32 %r6, global_smem; shl.b32 %r5, %r1, {step}; and.b32 %r5, %r5, 4095; add.u32 %r6, %r6, %r5;"
    words = "{%r10, %r11, %r12, %r13}"
    load = f"ldmatrix.sync.aligned.m8n8.x4.shared.b16 {words}, [%r6];"
    store = f"stmatrix.sync.aligned.m8n8.x4.shared.b16 [%r6], {words};"
    found = counted(folder, place.format(step=7) + load + place.format(step=4) + store)
    assert found["ldmatrix.sync.aligned.m8n8.x4.shared.b16"] == (2, 64, 8)
    assert found["stmatrix.sync.aligned.m8n8.x4.shared.b16"] == (2, 8, 8)


@pytest.mark.parametrize("guard", ["", "@%p1 ", "@!%p1 "])
def test_stores_are_told_from_loads(guard: str) -> None:
    assert Access(f"{guard}st.global.b32 [ %d1 + 0 ], {{ %r1 }};", 4, False).writes
    assert not Access(f"{guard}ld.global.b32 {{ %r1 }}, [ %d1 + 0 ];", 4, False).writes


def test_the_main_loop_is_the_smallest_with_a_product() -> None:
    mma = "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%f1}, {%r1}, {%r2}, {%f1};"
    body = f"A: mov.u32 %r4, 0; B: {mma} @%p1 bra B; C: mov.u32 %r5, 0; @%p1 bra C; @%p1 bra A;"
    (function,) = functions(f"{SHARED}{HEAD}{body}\nret;\n}}\n")
    assert main_loop(function) == range(function.labels["B"], function.labels["B"] + 1)
