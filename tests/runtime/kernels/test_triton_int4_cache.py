"""Test int4 cache vectors in Triton against `runtime.cache.int4` in the interpreter, bit by bit."""

import pytest
import torch

from mycli.runtime.cache.int4 import hadamard, pack_int4, unpack_int4
from mycli.runtime.quantization.int4_vectors import int4_groups
from tests.support.random_tensors import normal
from tests.support.triton_interpreter import Interpret, interpret

triton = pytest.importorskip("triton")

import triton.language as tl  # noqa: E402  (only where Triton is)

from mycli.runtime.kernels.triton.int4_cache import (  # noqa: E402  (as above)
    hadamard_rows,
    load_int4,
    store_int4,
    whole_rows,
)

__all__ = ["interpret"]


@triton.jit  # type: ignore[untyped-decorator]  # Triton has no types
def _round_trip(x, codes, scales, y, rotated, rows, ROWS: tl.constexpr, SIZE: tl.constexpr, WORDS: tl.constexpr):  # type: ignore[no-untyped-def]  # as above
    """Write x fp32 [rows, SIZE] to a cache and return what is read back, still rotated, in fp32."""
    row, lane = tl.arange(0, ROWS), tl.arange(0, SIZE)
    at, known = row[:, None] * SIZE + lane[None, :], row < rows
    turned = hadamard_rows(tl.load(x + at, mask=known[:, None], other=0.0), ROWS, SIZE) * SIZE**-0.5
    tl.store(rotated + at, turned, mask=known[:, None])
    first = row.to(tl.int64)
    store_int4(turned, codes, scales, first * (SIZE // 2), first * (SIZE // 32), known, ROWS, SIZE)
    tl.debug_barrier()
    lower, upper = load_int4(codes, scales, 0, 0, known, ROWS, SIZE, tl.float32, False, WORDS)
    tl.store(y + at, whole_rows(lower, upper, ROWS, SIZE), mask=known[:, None])


def packed(size: int, extraordinary: bool) -> tuple[bool, bool, bool]:
    """Return whether the rotation, the codes with their scales, and the values read equal the reference's."""
    x = normal(5, size)
    x[0, 3] = 40.0
    x[1] = 0.0
    if extraordinary:
        x[2] = 1e-39
        x[3, 1] = torch.nan
        x[4, size - 1] = torch.inf
    codes = torch.full((6, size // 2), 7, dtype=torch.uint8)
    scales = torch.full((6, int4_groups(size)), 7, dtype=torch.bfloat16)
    y, rotated = torch.full((5, size), 7.0), torch.zeros(5, size)
    words = torch.empty_like(y)
    for result, by_words in ((words, True), (y, False)):
        _round_trip[(1,)](x, codes, scales, result, rotated, 5, ROWS=8, SIZE=size, WORDS=by_words)
    expected = pack_int4(x)
    read = hadamard(unpack_int4(*expected, torch.float64)).float()
    same = torch.equal(words.nan_to_num(1.0), y.nan_to_num(1.0)) and torch.allclose(
        y, read, rtol=1e-5, atol=1e-6, equal_nan=True
    )
    turned = torch.equal(rotated.nan_to_num(1.0), hadamard(x).nan_to_num(1.0))
    steps = expected[1].view(torch.int16)  # as bits: NaN equals NaN
    stored = torch.equal(codes[:5], expected[0]) and torch.equal(scales[:5].view(torch.int16), steps)
    return turned, stored and bool((codes[5] == 7).all() and (scales[5] == 7).all()), same


@pytest.mark.parametrize("extraordinary", [False, True], ids=["ordinary", "extraordinary"])
@pytest.mark.parametrize("size", [64, pytest.param(128, marks=pytest.mark.slow), 256])
def test_int4_vectors(size: int, extraordinary: bool, interpret: Interpret) -> None:
    assert interpret(packed, size, extraordinary) == (True, True, True)
