"""Test the recurrences of captured passes against the references in the interpreter: results and states."""

from collections.abc import Callable, Sequence
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from mycli.runtime.kernels.recurrent import DeltaSizes, DeviceRuns, ScanSizes, convolve, delta_rule, scan
from mycli.runtime.kernels.triton.recurrent import triton_convolve, triton_delta_rule, triton_scan
from tests.support.grids import chosen
from tests.support.random_tensors import normal
from tests.support.triton_interpreter import Interpret, interpret

pytest.importorskip("triton")

__all__ = ["interpret"]

SLOTS = 6
# Rows of a sequence, then of each sequence: position of the first row, rows that are not padding. The third is padding.
SHAPES = [
    (1, ((5, 1), (0, 1), (9, 0), (2, 1))),
    (4, ((3, 4), (0, 2), (9, 0), (1, 1))),
    (19, ((0, 19), (7, 18), (9, 0))),
    (7, ((0, 7), (7, 6), (9, 0))),  # for kernels that take tokens one by one
]
ROWS = {"decode": 0, "drafts": 1, "prompts": 3}  # of SHAPES
DTYPES = {torch.float32: 1e-5, torch.bfloat16: 2**-7}
Step = Callable[[tuple[Tensor, ...], tuple[Tensor, ...], Any], Tensor]


def runs(shape: int, advancing: Sequence[int]) -> DeviceRuns:
    tokens, sequences = SHAPES[shape]
    starts, counts = (torch.tensor(values, dtype=torch.int32) for values in zip(*sequences, strict=True))
    slots = torch.tensor([4, 0, 4, 3][: len(sequences)])  # padding has the slot of another sequence
    advances = torch.tensor([int(place in advancing) for place in range(len(sequences))], dtype=torch.int32)
    return DeviceRuns(tokens, starts, slots, counts, advances)


def compare(kernel: Step, reference: Step, rows: tuple[Tensor, ...], state: Tensor, shape: int) -> None:
    """Check results and states of a kernel, and that states which do not advance stay as they are."""
    every = ((0, 1, 2, 3), (1,), ())
    for advancing in every if rows[0].dtype == torch.float32 else every[1:2]:  # states are fp32 with every dtype
        given, ours, theirs = runs(shape, advancing), state.clone(), state.clone()
        found, expected = kernel(rows, (ours,), given), given.run(reference, rows, (theirs,))
        assert found.dtype == expected.dtype and found.shape == expected.shape
        for place, count in enumerate(given.counts.tolist()):
            own = slice(place * given.tokens, place * given.tokens + count)
            assert found[own].isfinite().all()
            tolerance = DTYPES[found.dtype]
            torch.testing.assert_close(found[own], expected[own], rtol=tolerance, atol=tolerance * 4)
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
        changed = {slot for slot in range(SLOTS) if not torch.equal(ours[slot], state[slot])}
        assert changed == {int(given.slots[place]) for place in advancing if given.counts[place : place + 1].any()}


def convolved(taps: int, channels: int, bias: bool, silu: bool, dtype: torch.dtype, shape: int) -> None:
    rows = len(SHAPES[shape][1]) * SHAPES[shape][0]
    x = normal(rows, channels + 5).to(dtype)[:, 3 : 3 + channels]  # rows of a wider product
    weight, shift = normal(taps, channels, seed=1), normal(channels, seed=2) if bias else None
    compare(
        lambda given, states, at: triton_convolve(given[0], weight, shift, states[0], at, silu),
        lambda given, states, at: convolve(given[0], weight, shift, states[0], at, silu),
        (x,),
        normal(SLOTS, taps - 1, channels, seed=3),
        shape,
    )


@pytest.mark.parametrize("shape", [0, 1, 2], ids=["decode", "drafts", "prompts"])
@pytest.mark.parametrize(
    ("taps", "channels", "bias", "silu"), [(4, 48, True, True), (3, 300, False, False), (2, 16, True, False)]
)
def test_convolutions(taps: int, channels: int, bias: bool, silu: bool, shape: int, interpret: Interpret) -> None:
    for dtype in DTYPES:
        interpret(convolved, taps, channels, bias, silu, dtype, shape)


def ruled(sizes: DeltaSizes, dtype: torch.dtype, shape: int) -> None:
    rows = len(SHAPES[shape][1]) * SHAPES[shape][0]
    width = 2 * sizes.key_heads * sizes.key_dim + sizes.heads * sizes.value_dim
    gates = normal(rows, sizes.heads + sizes.decays + 5, seed=1).to(dtype)[:, 3 : 3 + sizes.heads + sizes.decays] * 2
    rate, shift = -normal(sizes.heads, seed=2).exp(), normal(sizes.decays, seed=3)
    compare(
        lambda given, states, at: triton_delta_rule(*given, rate, shift, *states, at, sizes),
        lambda given, states, at: delta_rule(*given, rate, shift, *states, at, sizes),
        (normal(rows, width).to(dtype), gates),
        normal(SLOTS, sizes.heads, sizes.key_dim, sizes.value_dim, seed=4),
        shape,
    )


DELTA_RULES = {
    "copies": DeltaSizes(4, 2, 16, 32),
    "odd": DeltaSizes(3, 1, 24, 20, beta_scale=2.0),
    "channels": DeltaSizes(3, 3, 16, 16, by_channel=True),
    "floor": DeltaSizes(2, 2, 24, 8, by_channel=True, floor=-5.0),
}
QUICK_RULES = [
    *(("copies", name) for name in ("decode", "prompts")),
    ("odd", "drafts"),
    *(("channels", name) for name in ("decode", "drafts")),
    *(("floor", name) for name in ROWS),
]


@pytest.mark.parametrize(("sizes", "rows"), chosen(product(DELTA_RULES, ROWS), QUICK_RULES))
def test_delta_rules(sizes: str, rows: str, interpret: Interpret) -> None:
    for dtype in DTYPES:
        interpret(ruled, DELTA_RULES[sizes], dtype, ROWS[rows])


def scanned(sizes: ScanSizes, dtype: torch.dtype, shape: int) -> None:
    rows = len(SHAPES[shape][1]) * SHAPES[shape][0]
    width = sizes.heads * sizes.head_dim + 2 * sizes.groups * sizes.state_dim
    steps = normal(rows, sizes.steps + 3, seed=1).to(dtype)[:, 2 : 2 + sizes.steps] * 3
    rates = (sizes.state_dim, sizes.head_dim) if sizes.by_channel else (sizes.heads,)
    rate = -normal(*rates, seed=2).exp()
    shift, skip = normal(sizes.steps, seed=3), normal(sizes.steps, seed=5)
    compare(
        lambda given, states, at: triton_scan(*given, rate, shift, skip, *states, at, sizes),
        lambda given, states, at: scan(*given, rate, shift, skip, *states, at, sizes),
        (normal(rows, width).to(dtype), steps),
        normal(SLOTS, sizes.heads, sizes.state_dim, sizes.head_dim, seed=4),
        shape,
    )


SCANS = {
    "groups": ScanSizes(4, 2, 16, 16, (0.0, float("inf"))),
    "odd-limits": ScanSizes(3, 1, 24, 20, (0.1, 0.9)),
    "channels": ScanSizes(1, 1, 48, 16, (0.0, float("inf")), by_channel=True),
    "odd-channels-limits": ScanSizes(1, 1, 20, 12, (0.1, 0.9), by_channel=True),
}
QUICK_SCANS = [
    *(("groups", name) for name in ("decode", "prompts")),
    *(("odd-limits", name) for name in ("decode", "drafts")),
    ("channels", "drafts"),
    *(("odd-channels-limits", name) for name in ("decode", "prompts")),
]


@pytest.mark.parametrize(("sizes", "rows"), chosen(product(SCANS, ROWS), QUICK_SCANS))
def test_scans(sizes: str, rows: str, interpret: Interpret) -> None:
    for dtype in DTYPES:
        interpret(scanned, SCANS[sizes], dtype, ROWS[rows])
