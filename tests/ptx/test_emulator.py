"""The emulator itself: instructions against their definitions, and kernel faults that it must detect."""

import ctypes
import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

import triton  # noqa: E402  (reason: only where Triton is installed)
import triton.language as tl  # noqa: E402  (reason: as above)

from tests.ptx.emulated import device, emulate  # noqa: E402  (reason: as above)
from tests.ptx.emulator.operands import UnknownInstruction  # noqa: E402  (reason: as above)
from tests.ptx.emulator.run import LaunchFailed, Runner  # noqa: E402  (reason: as above)
from tests.ptx.emulator.translate import translate  # noqa: E402  (reason: as above)

HEAD = ".visible .entry k(.param .u64 a, .param .u64 b) .maxntid 64 {\n"
HEAD += ".reg .b64 %d<9>; .reg .b32 %r<40>; .reg .f32 %f<4>; .reg .pred %p<3>;\n"
# Lane t of the program has element t of a and of b, 32 bits each.
HEAD += "ld.param.u64 %d1, [a]; ld.param.u64 %d2, [b]; mov.u32 %r1, %tid.x; mul.wide.u32 %d3, %r1, 4;\n"
HEAD += "add.s64 %d4, %d1, %d3; add.s64 %d5, %d2, %d3; ld.global.b32 %r2, [%d4]; ld.global.b32 %r3, [%d5];\n"
SHARED = ".extern .shared .align 16 .b8 global_smem[];\n"
FULL = 0xFFFFFFFF


@pytest.fixture
def folder(request: pytest.FixtureRequest) -> Path:
    """Return a persistent folder: unchanged kernels are not compiled again in the next run."""
    return request.config.cache.mkdir("ptx_emulator")  # type: ignore[union-attr]  # the plugin is always there


def run(
    folder: Path,
    body: str,
    a: list[int],
    b: list[int],
    programs: int = 1,
    seed: int = 1,
    runner: Runner | None = None,
    shared: int = 1024,
) -> list[int]:
    """Return the contents of `a` after a program of 64 threads, two warps."""
    buffers = [(ctypes.c_uint32 * len(values))(*values) for values in (a, b)]
    addresses = [ctypes.c_uint64(ctypes.addressof(buffer)) for buffer in buffers]
    parameters = (ctypes.c_void_p * 2)(*(ctypes.addressof(address) for address in addresses))
    ptx = f"{SHARED}{HEAD}{body}\nret;\n}}\n"
    (runner or Runner(folder, seed)).launch(ptx, (programs, 1, 1), 64, shared, parameters)
    return list(buffers[0])


def bytes_of(x: int, y: int) -> list[int]:
    return [*x.to_bytes(4, "little"), *y.to_bytes(4, "little")]


def signed(x: int) -> int:
    return x - (1 << 32) if x >> 31 else x


# PTX that leaves a result in %r4, and the same function of the two words in Python.
WORDS: dict[str, Callable[[int, int], int]] = {
    "lop3.b32 %r4, %r2, %r3, 0x64006400, 0xea;": lambda x, y: (x & y) | 0x64006400,
    "lop3.b32 %r4, %r2, %r3, %r2, 0x1b;": lambda x, y: sum(
        (0x1B >> ((x >> i & 1) << 2 | (y >> i & 1) << 1 | (x >> i & 1)) & 1) << i for i in range(32)
    ),
    "prmt.b32 %r4, %r2, %r3, 0x4362;": lambda x, y: int.from_bytes(
        bytes(bytes_of(x, y)[n] for n in (2, 6, 3, 4)), "little"
    ),
    "bfe.u32 %r4, %r2, 5, 9;": lambda x, y: x >> 5 & 511,
    "bfe.s32 %r4, %r2, 5, 9;": lambda x, y: ((x >> 5 & 511) - (512 if x >> 13 & 1 else 0)) & FULL,
    "bfi.b32 %r4, %r2, %r3, 4, 7;": lambda x, y: (y & ~(127 << 4)) | (x & 127) << 4,
    "and.b32 %r5, %r3, 63; shr.u32 %r4, %r2, %r5;": lambda x, y: x >> (y & 63),
    "and.b32 %r5, %r3, 63; shr.s32 %r4, %r2, %r5;": lambda x, y: signed(x) >> min(y & 63, 31) & FULL,
    "and.b32 %r5, %r3, 63; shl.b32 %r4, %r2, %r5;": lambda x, y: x << (y & 63) & FULL,
    "shf.l.wrap.b32 %r4, %r2, %r3, 7;": lambda x, y: ((y << 32 | x) << 7) >> 32 & FULL,
    "mul.hi.u32 %r4, %r2, %r3;": lambda x, y: x * y >> 32,
    "mad.lo.s32 %r4, %r2, %r3, 5;": lambda x, y: (x * y + 5) & FULL,
    "max.s32 %r4, %r2, %r3;": lambda x, y: max(signed(x), signed(y)) & FULL,
    "setp.lt.s32 %p1, %r2, %r3; selp.b32 %r4, %r2, %r3, %p1;": lambda x, y: min(signed(x), signed(y)) & FULL,
    "mov.u32 %r4, 7; setp.hi.u32 %p1, %r2, %r3; @!%p1 mov.u32 %r4, 9;": lambda x, y: 7 if x > y else 9,
    "clz.b32 %r4, %r2;": lambda x, y: 32 - x.bit_length(),
    "popc.b32 %r4, %r2;": lambda x, y: x.bit_count(),
    "cvt.u32.u8 %r4, %r2;": lambda x, y: x & 255,
    "cvt.s32.s8 %r4, %r2;": lambda x, y: ((x & 255) - (256 if x >> 7 & 1 else 0)) & FULL,
}


def test_instructions_on_words(folder: Path) -> None:
    """One kernel computes all: each result goes to a row of its own."""
    drawn = random.Random(0)
    edge = [0, 1, 31, 32, 33, 63, 0x7FFFFFFF, 0x80000000, FULL]
    x, y = ([drawn.choice((drawn.getrandbits(32), drawn.choice(edge))) for _ in range(64)] for _ in range(2))
    lines = (f"{one} st.global.b32 [%d4+{256 * (row + 1)}], %r4;" for row, one in enumerate(WORDS))
    found = run(folder, "\n".join(lines), x + [0] * 64 * len(WORDS), y)
    for row, (text, expected) in enumerate(WORDS.items()):
        assert found[64 * (row + 1) : 64 * (row + 2)] == [expected(*pair) for pair in zip(x, y, strict=True)], text


def test_lanes_that_branch_apart_meet_again_and_shuffle(folder: Path) -> None:
    body = """
        and.b32 %r5, %r1, 1; setp.eq.u32 %p1, %r5, 0; @%p1 bra EVEN;
        add.u32 %r2, %r2, 100; bra MEET;
        EVEN: add.u32 %r2, %r2, 200;
        MEET: shfl.sync.bfly.b32 %r4, %r2, 1, 31, -1; st.global.b32 [%d4], %r4;"""
    found = run(folder, body, list(range(64)), [0] * 64)
    assert found == [(lane ^ 1) + (100 if (lane ^ 1) & 1 else 200) for lane in range(64)]


EXCHANGE = """
    mov.u32 %r6, global_smem; shl.b32 %r7, %r1, 2; add.u32 %r8, %r6, %r7; st.shared.b32 [%r8], %r2;
    bar.sync 0;
    xor.b32 %r9, %r7, 128; add.u32 %r9, %r6, %r9; ld.shared.b32 %r4, [%r9]; st.global.b32 [%d4], %r4;"""
COPY = """
    mov.u32 %r6, global_smem; shl.b32 %r7, %r1, 2; add.u32 %r8, %r6, %r7;
    cp.async.ca.shared.global [%r8+0], [%d4+0], 4, 4; cp.async.commit_group;
    cp.async.ca.shared.global [%r8+256], [%d5+0], 4, 4; cp.async.commit_group;
    cp.async.wait_group 0;
    ld.shared.b32 %r4, [%r8+256]; st.global.b32 [%d4], %r4;"""


def test_a_missing_barrier_shows(folder: Path) -> None:
    """Each warp reads what the other has written; without the barrier either of them may come first."""
    given, expected = list(range(64)), [lane ^ 32 for lane in range(64)]
    assert all(run(folder, EXCHANGE, given, given, seed=seed) == expected for seed in range(4))
    without = EXCHANGE.replace("bar.sync 0;", "")
    assert all(FULL in run(folder, without, given, given, seed=seed) for seed in range(4))


def test_a_late_wait_shows(folder: Path) -> None:
    """A copy that is not waited for has not arrived."""
    given = list(range(64)), list(range(100, 164))
    assert run(folder, COPY, *given) == given[1]
    assert run(folder, COPY.replace("wait_group 0", "wait_group 1"), *given) == [FULL] * 64


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("st.shared.b32 [%r1+512], %r2;", "misaligned"),
        ("shl.b32 %r7, %r1, 2; st.shared.b32 [%r7+1024], %r2;", "beyond the shared memory"),
        ("add.s64 %d4, %d4, 2; ld.global.b32 %r4, [%d4];", "misaligned access of global"),
        ("setp.lt.u32 %p1, %r1, 5; @%p1 bra END; bar.sync 0; END: mov.u32 %r4, 0;", "not all lanes"),
    ],
    ids=["misaligned", "beyond", "global", "divergent"],
)
def test_what_a_gpu_refuses_fails(folder: Path, body: str, said: str) -> None:
    with pytest.raises(LaunchFailed, match=said):
        run(folder, body, [0] * 64, [0] * 64)


@pytest.mark.parametrize(
    "unknown", ["frob.b32 %r4, %r2;", "tex.1d.v4.f32.s32 {%f1, %f2, %f3, %f1}, [%d1, {%r1}];", "mov.u32 %r4, %clock;"]
)
def test_an_unknown_instruction_is_named(unknown: str) -> None:
    with pytest.raises(UnknownInstruction) as told:
        translate(f"{HEAD}{unknown}\nret;\n}}\n")
    assert any(word in str(told.value) for word in (unknown.rstrip(";"), "%clock"))


def guarded_sum() -> tuple[bool, bool]:
    """Return whether `reduce_kernel` adds parts as torch does, and whether memory after its result is unchanged."""
    from mycli.runtime.kernels.triton.split_k import reduce_kernel

    parts, size = torch.randn(3, 100), 100
    into = torch.full((128,), 7.0)
    reduce_kernel[(1,)](parts, into, 3, size, BLOCK=1024)
    return torch.allclose(into[:size], parts.sum(0)), bool((into[size:] == 7.0).all())


def small() -> float:
    from mycli.runtime.kernels.triton.product.kernel import small_product
    from mycli.runtime.kernels.triton.product.tiles import Chip
    from mycli.runtime.quantization.scheme import Packing

    return small_product(torch.device("cpu"), Packing(4, 128), Chip((9, 0), 132, True), 1)


def changed(old: str, new: str, function: Callable[[], object]) -> object:
    """Return the result of `function` with a replacement in every kernel's PTX, where `old` must occur."""
    seen: list[bool] = []

    def change(ptx: str) -> str:
        seen.append(old in ptx)
        return ptx.replace(old, new)

    device().change = change
    try:
        return function()
    finally:
        device().change = lambda ptx: ptx
        assert any(seen), "the mutant is no other kernel"


def swapped_scales() -> object:
    """Exchange the scales of each pair of rows: the low half of a word is taken for the high one, and vice versa."""

    def change(ptx: str) -> str:
        assert ", 16;" in ptx or "prepare" in ptx
        lines = ptx.splitlines()
        low = [n for n, line in enumerate(lines) if "shl.b32" in line and line.rstrip().endswith(", 16;")]
        high = [n for n, line in enumerate(lines) if "and.b32" in line and line.rstrip().endswith(", -65536;")]
        for place in (*low, *high):
            turned = lines[place].replace("shl.b32", "SHL").replace("and.b32", "shl.b32").replace("SHL", "and.b32")
            lines[place] = turned.replace(", 16;", ", T;").replace(", -65536;", ", 16;").replace(", T;", ", -65536;")
        assert (low and high) or "prepare" in ptx
        return "\n".join(lines)

    device().change = change
    try:
        return small()
    finally:
        device().change = lambda ptx: ptx


@pytest.mark.slow
def test_a_wrong_mask_shows(folder: Path) -> None:
    assert emulate(folder, 90, guarded_sum) == (True, True)
    assert emulate(folder, 90, changed, "setp.lt.s32", "setp.le.s32", guarded_sum)[1] is False


@pytest.mark.slow
def test_swapped_scales_show(folder: Path) -> None:
    assert emulate(folder, 90, small) < 5e-3
    assert emulate(folder, 90, swapped_scales) > 0.1


def launched() -> list[tuple[str, bool]]:
    device().launches.clear()
    small()
    return [(one.kernel, one.overlap) for one in device().launches]


def test_launches_are_noted_as_the_driver_is_told(folder: Path) -> None:
    assert emulate(folder, 90, launched) == [("prepare_kernel", False), ("multiply_kernel", True)]


def failed() -> str:
    try:
        changed("ret;", "frob.b32 1;\nret;", guarded_sum)
    except RuntimeError as error:
        return str(error)
    return ""


def test_a_launch_that_fails_says_why_where_it_was_launched(folder: Path) -> None:
    said = emulate(folder, 90, failed)
    assert "reduce_kernel: UnknownInstruction: frob.b32 1" in said


@triton.jit
def _sum_kernel(x, out, first, size, SIZE: tl.constexpr):  # type: ignore[no-untyped-def]  # device code has no types
    place = first + tl.arange(0, SIZE)
    tl.store(out, tl.sum(tl.load(x + place, mask=place < size, other=0.0), 0))


def sum_of(first: int, size: int) -> float:
    """Return the sum of 100 ones, read from `first` on and up to `size`."""
    x, out = torch.ones(100), torch.empty(1)
    _sum_kernel[(1,)](x, out, first, size, SIZE=128)
    return float(out)


@pytest.mark.parametrize(
    ("guard", "first", "size"), [("after", 0, 101), pytest.param("before", -4, 100, marks=pytest.mark.slow)]
)
def test_a_read_next_to_a_tensor_fails_the_launch(guard: str, first: int, size: int, folder: Path) -> None:
    """One element after it, or four before it; within the tensor and without a guard the same kernel runs."""
    assert emulate(folder, 90, sum_of, 0, 100, guard=guard) == 100
    with pytest.raises(RuntimeError, match=r"outside of all tensors: .*ld\.global"):
        emulate(folder, 90, sum_of, first, size, guard=guard)
    assert emulate(folder, 90, sum_of, 0, 100, guard=guard) == 100, "and the process goes on"
