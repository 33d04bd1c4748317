"""Test native rounding, columns and packing bit by bit against plain torch."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from mycli.quant.rounding import grid as grids
from mycli.quant.rounding.grid import Grid, Quantized, round_to_nearest
from mycli.runtime.errors import Declined, ModelError
from mycli.runtime.kernels.cpu.library import build
from mycli.runtime.kernels.cpu.library.build import Native, native
from mycli.runtime.kernels.cpu.rounding import native_columns, native_round, pack_codes
from mycli.runtime.quantization.packed_weight import pack, unpack
from mycli.runtime.quantization.scheme import BITS, Packing
from tests.support.columns import problem

SHAPES = ((40, 256, 32), (40, 256, 64), (7, 1024, 128), (5, 544, None), (3, 4864, None), (1, 27, None), (0, 64, 32))
DTYPES = (torch.float32, torch.bfloat16, torch.float16)

needs_native = pytest.mark.skipif(isinstance(native(), Declined), reason=f"no native code here: {native()}")


def weights(rows: int, columns: int, seed: int = 0) -> Tensor:
    """Return rows of very different sizes: zeros, the smallest numbers, constants, ties for the largest."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(rows, columns, generator=generator) * torch.logspace(-6, 2, max(rows, 1))[:rows, None]
    if rows > 4:
        weight[0], weight[1], weight[2] = 0, 1e-40, 0.25
        weight[3, 1::2] = -weight[3, ::2][: columns // 2]
    return weight


def in_torch(weight: Tensor, grid: Grid, importance: Tensor | None) -> tuple[Quantized, float]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(grids, "native_round", lambda *_, **__: Declined("no-compiler"))
        return round_to_nearest(weight, grid, importance)


@needs_native
@pytest.mark.parametrize("search", ["absmax", "mse"])
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: "x".join(map(str, shape[:2])) + f"-g{shape[2]}")
def test_the_bits_are_torchs(library: Native, shape: tuple[int, int, int | None], search: grids.Search) -> None:
    rows, columns, group = shape
    importance = torch.rand(columns, generator=torch.Generator().manual_seed(1)) * 4
    for index, bits in enumerate(BITS):
        for weighing in (None, importance):
            weight = weights(rows, columns, bits).to(DTYPES[index % 3])
            grid = Grid(Packing(bits, group), DTYPES[(index + (weighing is None)) % 3], search)
            ours, error = round_to_nearest(weight, grid, weighing)
            theirs, expected = in_torch(weight, grid, weighing)
            assert torch.equal(ours.scales, theirs.scales), bits
            assert torch.equal(ours.codes, theirs.codes), bits
            assert error == pytest.approx(expected, rel=1e-12)


@needs_native
@pytest.mark.parametrize("move", [False, True], ids=["gptq", "descent"])
def test_columns_are_summed_in_turn(vectors: Native, move: bool) -> None:
    """The fixed order gives the same rounding on every instruction set and at every row position."""
    residual, matrix, scales, codes, half = problem(128, 150, 8, move)
    found = native_columns(residual, matrix, scales, codes, half)
    assert not isinstance(found, Declined)
    shifts = torch.empty_like(residual)
    for i in range(128):
        left = residual[i]
        for j in range(i):
            left = left - matrix[j, i] * shifts[j]
        old = torch.zeros(150) if codes is None else codes[i].float() - half
        ratio = left / scales[i] if codes is None else left / matrix[i, i] / scales[i] + old
        level = ratio.round().clamp(-half, half - 1)
        shifts[i] = (left - level * scales[i]) / matrix[i, i] if codes is None else (level - old) * scales[i]
        assert torch.equal(found[0][i], (level + half).to(torch.uint8))
    assert torch.equal(found[1], shifts)
    last = slice(149, 150)
    moved = None if codes is None else codes[:, last].contiguous()
    alone = native_columns(residual[:, last].contiguous(), matrix, scales[:, last].contiguous(), moved, half)
    assert not isinstance(alone, Declined)
    assert torch.equal(alone[0], found[0][:, last]) and torch.equal(alone[1], found[1][:, last])


def test_columns_that_are_too_many_or_lie_otherwise_are_left() -> None:
    given = torch.ones(129, 3), torch.eye(129), torch.ones(129, 3)
    assert native_columns(*given, None, 8) == Declined("columns-layout", {"columns": 129, "most": 128})
    unlike = native_columns(torch.ones(3, 5).T, torch.eye(5), torch.ones(5, 3), None, 8)
    assert isinstance(unlike, Declined) and unlike.code == "columns-layout"


@needs_native
@pytest.mark.parametrize("threads", [1, 3])
def test_threads_change_nothing(threads: int) -> None:
    grid, weight = Grid(Packing(4, 64), torch.bfloat16), weights(33, 256)
    expected, error = round_to_nearest(weight, grid)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        found, again = round_to_nearest(weight, grid)
    finally:
        torch.set_num_threads(before)
    assert torch.equal(found.codes, expected.codes) and torch.equal(found.scales, expected.scales) and error == again


@needs_native
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), 1e30])
def test_weights_that_no_scale_reaches_are_said(value: float) -> None:
    weight = weights(4, 64)
    weight[2, 5] = value
    with pytest.raises(ModelError, match="NaN or infinity|beyond the range"):
        round_to_nearest(weight, Grid(Packing(4, 32), torch.float16))


@needs_native
def test_what_it_cannot_do_is_left_to_torch() -> None:
    scales = torch.ones(4, 2)
    assert "without-gradient" in str(native_round(weights(4, 64).requires_grad_(), scales, 4))
    assert "contiguous" in str(native_round(weights(64, 4).t(), scales, 4))
    assert "rounding-dtypes" in str(native_round(weights(4, 64).double(), scales, 4))
    assert "rounding-group-size" in str(native_round(weights(4, 8), scales, 4))


@needs_native
@pytest.mark.usefixtures("library")
@pytest.mark.parametrize("columns", [1, 7, 8, 10, 32, 100, 896])
@pytest.mark.parametrize("bits", range(2, 9))
def test_words(bits: int, columns: int) -> None:
    codes = torch.randint(0, 1 << bits, (9, columns), generator=torch.Generator().manual_seed(bits)).to(torch.uint8)
    assert torch.equal(pack_codes(codes, bits), pack(codes, bits))
    assert torch.equal(pack_codes(codes.t().contiguous().t(), bits), pack(codes, bits)), "another order in memory"


@needs_native
@settings(max_examples=50, deadline=None)
@given(st.integers(2, 8), st.integers(1, 5), st.integers(1, 70), st.integers(0, 1 << 30))
def test_words_hold_the_codes(bits: int, rows: int, columns: int, seed: int) -> None:
    codes = torch.randint(0, 1 << bits, (rows, columns), generator=torch.Generator().manual_seed(seed)).to(torch.uint8)
    packed = pack_codes(codes, bits)
    assert torch.equal(unpack(packed, bits, columns), codes)


def test_without_native_code_torch_does_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "native", lambda: Declined("no-compiler"))
    weight, grid = weights(6, 128), Grid(Packing(4, 64), torch.bfloat16)
    found, error = round_to_nearest(weight, grid)
    assert error > 0 and torch.equal(pack_codes(found.codes, 4), pack(found.codes, 4))
    assert native_round(weight, found.scales, 4) == Declined("no-compiler")
