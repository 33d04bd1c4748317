"""Test native recurrent kernels against their torch references, and those against the recurrence."""

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from mycli.runtime.errors import Declined
from mycli.runtime.kernels.cpu.recurrent import (
    decline_convolution,
    native_convolve,
    native_delta_rule,
    native_gated_norm,
    native_group_norm,
    native_scan,
)
from mycli.runtime.kernels.recurrent import (
    DELTA_CHUNK,
    DeltaSizes,
    Runs,
    ScanSizes,
    convolve,
    delta_rule,
    gated_norm,
    group_norm,
    scan,
)
from tests.support.random_tensors import normal

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
RUNS = Runs((0, 1, 1, DELTA_CHUNK + 20, DELTA_CHUNK + 27), (3, 0, 2, 1))
ROWS = RUNS.starts[-1]
SIZES = [DeltaSizes(2, 1, 16, 16), DeltaSizes(6, 2, 32, 48), DeltaSizes(4, 4, 128, 128), DeltaSizes(2, 2, 256, 16)]
CHANNELS = [DeltaSizes(3, 3, 16, 32, by_channel=True), DeltaSizes(2, 2, 64, 64, by_channel=True, floor=-5.0)]
SIZES += CHANNELS
SCANS = [ScanSizes(6, 2, 32, 16, (0.0, torch.inf)), ScanSizes(2, 2, 16, 64, (0.1, 0.5))]
SCANS += [
    ScanSizes(1, 1, size, 16, limits, by_channel=True) for size, limits in ((96, (0.0, torch.inf)), (48, (0.1, 0.5)))
]


def close(found: Tensor | str, expected: Tensor, tolerance: float = 2e-6) -> None:
    assert isinstance(found, Tensor), found
    assert found.shape == expected.shape and found.dtype == expected.dtype
    step = 2**-7 if expected.dtype == torch.bfloat16 else 0.0
    torch.testing.assert_close(found, expected, rtol=step, atol=tolerance * float(expected.abs().max()))


def delta_case(sizes: DeltaSizes, dtype: torch.dtype = torch.float32, rows: int = ROWS) -> tuple[Any, ...]:
    width = 2 * sizes.key_heads * sizes.key_dim + sizes.heads * sizes.value_dim
    count = sizes.heads + sizes.decays
    gates = normal(rows, count + 5, seed=1).to(dtype)[:, 3 : 3 + count] * 2  # not contiguous
    rate = -normal(sizes.heads, seed=2).exp()
    state = normal(5, sizes.heads, sizes.key_dim, sizes.value_dim, seed=4)
    return normal(rows, width).to(dtype), gates, rate, normal(sizes.decays, seed=3), state


def one_by_one(
    qkv: Tensor, gates: Tensor, rate: Tensor, dt_bias: Tensor, state: Tensor, runs: Runs, sizes: DeltaSizes
) -> Tensor:
    """Compute the recurrence of arXiv 2412.06464 in fp64, one token and head at a time."""
    width, copies, out = sizes.key_heads * sizes.key_dim, sizes.heads // sizes.key_heads, []
    for (first, end), slot in zip(itertools.pairwise(runs.starts), runs.slots, strict=True):
        for row, gate in zip(qkv[first:end].double(), gates[first:end].double(), strict=True):
            heads = []
            for head in range(sizes.heads):
                at = head // copies * sizes.key_dim
                query, key = (part[at : at + sizes.key_dim] for part in (row[:width], row[width : 2 * width]))
                query, key = (x / (x.square().sum() + 1e-6).sqrt() for x in (query, key))
                at = 2 * width + head * sizes.value_dim
                value, beta = row[at : at + sizes.value_dim], gate[head].sigmoid()
                each = sizes.decays // sizes.heads
                step = gate[sizes.heads :].view(-1, each)[head] + dt_bias.view(-1, each)[head].double()
                decay = rate[head].double() * functional.softplus(step)
                if sizes.floor:
                    decay = sizes.floor * (step * -rate[head].double()).sigmoid()
                before = state[slot, head].double() * decay.exp().unsqueeze(-1)
                now = before + torch.outer(key, beta * (value - key @ before))
                state[slot, head] = now.to(state.dtype)
                heads.append(query @ now / sizes.key_dim**0.5)
            out.append(torch.cat(heads))
    return torch.stack(out).to(qkv.dtype)


@pytest.mark.parametrize("sizes", [*SIZES[:2], *CHANNELS], ids=str)
def test_chunks_are_the_recurrence(sizes: DeltaSizes) -> None:
    *given, state = delta_case(sizes)
    ours, theirs = state.clone(), state.double()
    close(delta_rule(*given, ours, RUNS, sizes), one_by_one(*given, theirs, RUNS, sizes))
    close(ours, theirs.float())


@pytest.mark.usefixtures("library")
@DTYPES
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_the_native_delta_rule(sizes: DeltaSizes, dtype: torch.dtype) -> None:
    *given, state = delta_case(sizes, dtype)
    ours, theirs = state.clone(), state.clone()
    close(native_delta_rule(*given, ours, RUNS, sizes), delta_rule(*given, theirs, RUNS, sizes), 4e-6)
    close(ours, theirs, 4e-6)
    assert torch.equal(ours[0], state[0]) and torch.equal(ours[4], state[4]), "states without rows to add stay"


def scan_case(sizes: ScanSizes, dtype: torch.dtype = torch.float32, rows: int = ROWS) -> tuple[Any, ...]:
    x = normal(rows, sizes.heads * sizes.head_dim + 2 * sizes.groups * sizes.state_dim).to(dtype)
    steps = normal(rows, sizes.steps + 5, seed=1).to(dtype)[:, 3 : 3 + sizes.steps]  # not contiguous
    rates = (sizes.state_dim, sizes.head_dim) if sizes.by_channel else (sizes.heads,)
    rate, dt_bias, skip = -normal(*rates, seed=2).exp(), normal(sizes.steps, seed=3), normal(sizes.steps, seed=5)
    return x, steps, rate, dt_bias, skip, normal(5, sizes.heads, sizes.state_dim, sizes.head_dim, seed=4)


@pytest.mark.usefixtures("library")
@DTYPES
@pytest.mark.parametrize("sizes", SCANS, ids=str)
def test_the_native_scan(sizes: ScanSizes, dtype: torch.dtype) -> None:
    *arguments, state = scan_case(sizes, dtype)
    ours, theirs = state.clone(), state.clone()
    close(native_scan(*arguments, ours, RUNS, sizes), scan(*arguments, theirs, RUNS, sizes), 4e-6)
    close(ours, theirs, 4e-6)
    assert torch.equal(ours[0], state[0]) and torch.equal(ours[4], state[4]), "states without rows to add stay"


@pytest.mark.usefixtures("library")
@DTYPES
@pytest.mark.parametrize("silu", [True, False], ids=["silu", "plain"])
@pytest.mark.parametrize("taps, channels, bias", [(4, 64, False), (3, 32, True), (2, 16, False), (9, 48, True)])
def test_the_native_convolution(taps: int, channels: int, bias: bool, silu: bool, dtype: torch.dtype) -> None:
    x = normal(ROWS, channels + 32).to(dtype)[:, 16 : 16 + channels]
    weight, added = normal(taps, channels, seed=1), normal(channels, seed=2) if bias else None
    state = normal(5, taps - 1, channels, seed=3)
    ours, theirs = state.clone(), state.clone()
    close(native_convolve(x, weight, added, ours, RUNS, silu), convolve(x, weight, added, theirs, RUNS, silu))
    assert torch.equal(ours, theirs)


@pytest.mark.usefixtures("library")
@DTYPES
@pytest.mark.parametrize("heads, size", [(1, 16), (3, 48), (32, 128)])
def test_the_native_gated_norm(heads: int, size: int, dtype: torch.dtype) -> None:
    x, gate = normal(7, heads * size).to(dtype), (normal(7, heads * size + 16, seed=1) * 8).to(dtype)[:, 16:]
    gain = normal(size, seed=2).to(dtype)
    for silu in (True, False):
        close(native_gated_norm(x, gain, 1e-6, gate, silu), gated_norm(x, gain, 1e-6, gate, silu))


@pytest.mark.usefixtures("library")
@DTYPES
@pytest.mark.parametrize("groups, size", [(1, 16), (3, 48), (3, 20)])
def test_the_native_norm_of_groups(groups: int, size: int, dtype: torch.dtype) -> None:
    x, gate = normal(7, groups * size).to(dtype), (normal(7, groups * size + 16, seed=1) * 8).to(dtype)[:, 16:]
    gain = normal(groups * size, seed=2).to(dtype)
    with torch.inference_mode():  # groups of another size than whole vectors are computed by rows
        close(native_group_norm(x, gain, 1e-6, gate, groups), group_norm(x, gain, 1e-6, gate, groups))


def test_the_convolution_is_that_of_torch() -> None:
    x, weight, bias = normal(20, 6), normal(4, 6, seed=1), normal(6, seed=2)
    expected = functional.conv1d(x.T[None], weight.T.unsqueeze(1), bias, padding=3, groups=6)[0, :, :20].T
    close(convolve(x, weight, bias, torch.zeros(1, 3, 6), Runs.alike(1, 20), False), expected)


@pytest.mark.usefixtures("library")
@DTYPES
@pytest.mark.parametrize("sizes", [DeltaSizes(4, 2, 32, 32), CHANNELS[1]], ids=str)
def test_a_row_has_the_same_bits_however_its_text_is_cut(sizes: DeltaSizes, dtype: torch.dtype) -> None:
    """The bits also do not depend on the batch or the thread count."""
    cuts = (0, 1, 2, 9, 40, 50)
    qkv, gates, rate, dt_bias, state = delta_case(sizes, dtype, rows=50)
    weight, before = normal(4, qkv.shape[1], seed=5), normal(5, 3, qkv.shape[1], seed=6)

    def run(pieces: list[tuple[int, int]], others: bool) -> tuple[Tensor, ...]:
        inputs, states, parts = before.clone(), state.clone(), []
        for first, end in pieces:
            rows, gated, runs = qkv[first:end], gates[first:end], Runs.alike(1, end - first)
            if others:
                rows, gated = torch.cat((qkv[:11], rows)), torch.cat((gates[:11], gated))
                runs = Runs((0, 11, 11 + end - first), (4, 0))
            mixed = native_convolve(rows, weight, None, inputs, runs, True)
            assert isinstance(mixed, Tensor)
            found = native_delta_rule(mixed, gated, rate, dt_bias, states, runs, sizes)
            assert isinstance(found, Tensor)
            parts.append(found[-(end - first) :])
        return torch.cat(parts), inputs[0], states[0]

    whole = run([(0, 50)], False)
    for others in (False, True):
        for ours, theirs in zip(run(list(itertools.pairwise(cuts)), others), whole, strict=True):
            assert torch.equal(ours, theirs)


def test_what_the_native_code_does_not_take() -> None:
    """The call must not read or write outside of its arguments."""
    sizes = DeltaSizes(2, 1, 16, 16)
    *given, state = delta_case(sizes, rows=4)
    one = Runs.alike(1, 4)
    assert isinstance(native_delta_rule(*given, state, one, sizes), Tensor)
    for runs in (Runs((0, 5), (0,)), Runs((0, 3), (0,)), Runs((0, 3, 2, 4), (0, 1, 2)), Runs((0, 2, 4), (1, 1))):
        assert isinstance(native_delta_rule(*given, state, runs, sizes), Declined)
    for slot in (-1, 5):
        assert isinstance(native_delta_rule(*given, state, Runs((0, 4), (slot,)), sizes), Declined)
    assert isinstance(native_delta_rule(*given, state[:, :1], one, sizes), Declined)
    assert isinstance(native_delta_rule(*given, state.double(), one, sizes), Declined)
    qkv = given[0].clone().requires_grad_()
    assert native_delta_rule(qkv, *given[1:], state, one, sizes) == Declined("no-gradient")
    x, weight, before = normal(4, 16), normal(4, 16, seed=1), torch.zeros(2, 3, 16)
    assert isinstance(native_convolve(x, weight, None, before, one, False), Tensor)
    assert isinstance(native_convolve(x, weight[:3], None, before, one, False), Declined)
    assert isinstance(native_convolve(x, weight, None, before, Runs((0, 4), (2,)), False), Declined)
    scanned = ScanSizes(2, 1, 16, 16, (0.0, torch.inf))
    *arguments, states = scan_case(scanned, rows=4)
    for runs, spoiled in ((Runs((0, 4), (5,)), states), (one, states[:, :1]), (one, states.double())):
        assert isinstance(native_scan(*arguments, spoiled, runs, scanned), Declined)
    channels = ScanSizes(1, 1, 32, 16, (0.0, torch.inf), by_channel=True)
    *arguments, states = scan_case(channels, rows=4)
    assert isinstance(native_scan(*arguments, states, one, channels), Tensor)
    for place in (2, 3, 4):  # rate, dt_bias, skip
        wrong = [*arguments[:place], arguments[place][:-1], *arguments[place + 1 :]]
        assert isinstance(native_scan(*wrong, states, one, channels), Declined)


def test_the_native_convolution_takes_2_to_64_taps_of_whole_vectors() -> None:
    assert all(decline_convolution(48, taps) is None for taps in (2, 64))
    assert all(decline_convolution(channels, taps) for channels, taps in ((48, 1), (48, 65), (40, 4)))


def test_gradients_pass_the_twins() -> None:
    sizes, runs = DeltaSizes(2, 1, 4, 3), Runs((0, 2, 5), (1, 0))
    torch.manual_seed(0)
    qkv, gates = (torch.randn(5, n, dtype=torch.float64).float().requires_grad_() for n in (14, 4))
    rate, dt_bias = -torch.rand(2), torch.rand(2)

    def loss(qkv: Tensor, gates: Tensor) -> Tensor:
        found = delta_rule(qkv, gates, rate, dt_bias, torch.ones(2, 2, 4, 3), runs, sizes)
        return (found * torch.arange(found.numel()).view_as(found)).sum()

    loss(qkv, gates).backward()  # type: ignore[no-untyped-call]  # torch's stub
    for given in (qkv, gates):
        assert given.grad is not None
        with torch.no_grad():
            for index in range(0, given.numel(), 5):
                step = torch.zeros(given.numel())
                step[index] = 1e-2
                moved = [
                    loss(*(one + way * step.view_as(given) if one is given else one for one in (qkv, gates)))
                    for way in (1, -1)
                ]
                slope = float(moved[0] - moved[1]) / 2e-2
                assert slope == pytest.approx(float(given.grad.flatten()[index]), rel=2e-2, abs=2e-2)
