"""Test the expert-layer kernels of the fused pass other than products against plain torch in the interpreter."""

from dataclasses import dataclass

import pytest
import torch
from torch.nn import functional

from mycli.runtime.kernels import reference
from mycli.runtime.kernels.routed import Route
from mycli.runtime.quantization.scheme import Packing
from tests.support.grids import chosen
from tests.support.random_tensors import normal, permutation
from tests.support.triton_interpreter import Interpret, backwards, interpret

pytest.importorskip("triton")

from tests.support.triton_products import difference, numbers, product  # noqa: E402  (only where Triton is)

__all__ = ["interpret"]

# The interpreter truncates to bf16 where a GPU rounds, at each of a few steps.
TOLERANCE = {torch.bfloat16: 4 * 2**-8, torch.float16: 4 * 2**-11}


@dataclass(frozen=True)
class Tokens:
    """Describes `rows` tokens of `size` numbers, each routed to `top_k` of `experts`.

    shared: number of parts of the shared expert, 0 without one; gated: the shared expert has a gate. biased: router and
    experts have biases, and their activation is clamped.
    """

    rows: int
    size: int
    dtype: torch.dtype = torch.float16
    experts: int = 5
    top_k: int = 2
    parts: int = 3
    into: Packing | None = Packing(4, 128)
    shared: int = 0
    gated: bool = False
    biased: bool = False

    def __str__(self) -> str:
        into = self.into.name if self.into else "nothing"
        how = f"{self.shared}shared-" * bool(self.shared) + "gated-" * self.gated
        how += "biased-" * self.biased + f"{self.parts}parts-{self.dtype}-{into}".replace("torch.", "")
        return f"{self.rows}x{self.top_k}of{self.experts}-{self.size}-{how}"


CASES = [
    Tokens(1, 256, torch.bfloat16),
    Tokens(3, 200, top_k=3, parts=1, into=Packing(4, None)),
    Tokens(12, 96, torch.bfloat16, into=Packing(3, 32), shared=2, gated=True),
    Tokens(2, 1100, experts=9, top_k=5, into=Packing(8, None), shared=1),
    Tokens(3, 200, experts=4, into=Packing(4, None), shared=5, gated=True),
    Tokens(2, 160, experts=1, top_k=1, parts=17, into=None),
    Tokens(64, 128, experts=4, top_k=4, into=Packing(4, 32)),
    Tokens(3, 160, torch.bfloat16, experts=7, top_k=3, into=Packing(4, 32), biased=True),
    Tokens(12, 96, experts=4, parts=1, into=Packing(3, 32), shared=2, gated=True, biased=True),
]
QUICK = [CASES[4], CASES[7]]


def starts_of(case: Tokens) -> torch.Tensor:
    """Return int32 [experts + 1]: pairs of each expert, of which the second has none."""
    pairs = case.rows * case.top_k
    starts = torch.tensor([pairs * expert // case.experts for expert in range(case.experts + 1)], dtype=torch.int32)
    starts[2:3] = starts[1]
    return starts


def owners(case: Tokens) -> torch.Tensor:
    pairs = torch.arange(case.rows * case.top_k, dtype=torch.int32)
    return torch.searchsorted(starts_of(case)[1:], pairs, right=True)


def scored(case: Tokens) -> tuple[float, bool]:
    """Return the errors of scores and norm, also with another tile height, and whether they repeat."""
    from mycli.runtime.kernels.triton.mixture import score
    from mycli.runtime.kernels.triton.residual import Norm, add, embed

    gain, router = normal(case.size, seed=1).to(case.dtype), normal(case.experts, case.size, seed=2).to(case.dtype)
    following = product(case.size, case.into or Packing(4, 32))
    norm, gate = Norm(gain, 1e-3, following), normal(1, case.size, seed=5).to(case.dtype) if case.gated else None
    embedding = normal(9, case.size).to(case.dtype)
    drawn = torch.tensor([(8 + 5 * index) % 9 for index in range(case.rows)])
    stream, into = embed(drawn, embedding, norm)
    bias = normal(case.experts, seed=8).to(case.dtype) if case.biased else None
    found = score(stream, into, norm, router, gate, bias)
    with backwards():
        same = torch.equal(found, score(stream, into, norm, router, gate, bias))
    first = product(128, Packing(4, 128), n=case.size)
    nothing = first.prepare(torch.zeros((case.rows, 128), dtype=case.dtype, device=stream.device))
    counters = torch.zeros(64, dtype=torch.int32, device=stream.device)
    other = add(nothing, first, stream, norm, counters, following.tile(40))
    assert other is not None and other.tile == following.tile(40)
    same = same and torch.equal(found, score(stream, other, norm, router, gate, bias))
    exact = functional.rms_norm(stream.double(), (case.size,), gain.double(), 1e-3).to(case.dtype)
    weight = router if gate is None else torch.cat((router, gate))
    expected = exact.double() @ weight.double().t()
    if bias is not None:
        expected[:, : case.experts] += bias.double()
    return difference(found, expected), same and found.dtype == case.dtype


@pytest.mark.parametrize("case", chosen(CASES, QUICK), ids=str)
def test_scores_of_a_router(case: Tokens, interpret: Interpret) -> None:
    error, same = interpret(scored, case)  # type: ignore[misc]  # the pool carries any result
    assert error < TOLERANCE[case.dtype] and same


def combined(case: Tokens) -> tuple[float, float, bool]:
    """Return errors of residual and next product, and whether program order does not matter."""
    from mycli.runtime.kernels.triton.mixture import combine
    from mycli.runtime.kernels.triton.residual import Norm

    pairs, last = case.rows * case.top_k, product(128, Packing(4, 128), n=case.size)
    parts, residual = normal(case.parts, pairs, case.size), normal(case.rows, case.size, seed=3).to(case.dtype)
    places = permutation(pairs, seed=2).view(case.rows, case.top_k).int()
    weights = normal(case.rows, case.top_k, seed=1).abs() + 0.5
    route = Route([], starts_of(case), torch.zeros(0, dtype=torch.int32), places, weights)
    biases = normal(case.experts, case.size, seed=9).to(case.dtype) if case.biased else None
    gain = normal(case.size, seed=4).to(case.dtype)
    following = None if case.into is None else product(case.size, case.into)
    norm = None if following is None else Norm(gain, 1e-3, following)
    made = parts.sum(0).to(case.dtype)
    made = made if biases is None else made + biases[owners(case)]
    output = reference.weighted_sum(made, route.places, weights)
    shared = normal(case.shared, case.rows, case.size, seed=6) if case.shared else None
    gates = normal(case.rows, case.experts + 1, seed=7).to(case.dtype)[:, case.experts :] if case.gated else None
    if shared is not None:
        own = shared.sum(0).to(case.dtype)
        output = output + (own if gates is None else reference.weigh_rows(own, gates))
    expected = residual + output
    stream, again = residual.clone(), residual.clone()
    into = combine(parts, route, last, stream, norm, shared, gates, biases=biases)
    with backwards():
        into_again = combine(parts, route, last, again, norm, shared, gates, biases=biases)
    same = torch.equal(stream, again)
    if following is None or into is None or into_again is None:
        assert into is None and following is None
        return difference(stream, expected), 0.0, same
    found = following.multiply(into, torch.float32)
    exact = functional.rms_norm(expected.double(), (case.size,), gain.double(), 1e-3)
    exact = exact @ following.dequantize().double().t()
    same = same and torch.equal(found, following.multiply(into_again, torch.float32))
    return difference(stream, expected), difference(found, exact), same and not numbers(into)[:, case.size :].any()


@pytest.mark.parametrize("case", chosen(CASES, QUICK), ids=str)
def test_what_experts_make_is_added(case: Tokens, interpret: Interpret) -> None:
    stream, normed, same = interpret(combined, case)  # type: ignore[misc]  # the pool carries any result
    assert stream < TOLERANCE[case.dtype] and normed < TOLERANCE[case.dtype] and same


def activated(case: Tokens) -> float:
    """Return the error of SiLU(gate) * up plus the absolute sum of the values past the end of its rows."""
    from mycli.runtime.kernels.triton.gated_silu import activate_parts

    following, pairs = product(case.size, case.into or Packing(4, 32)), case.rows * case.top_k
    parts = normal(case.parts, pairs, 2 * case.size) * 2
    tile = following.tile(-(-pairs // case.experts))
    into = activate_parts(parts, case.dtype, following, tile)
    assert into.tile == tile
    found = numbers(into)
    gate, up = parts.sum(0).to(case.dtype).float().chunk(2, dim=-1)
    beyond = float(found[:, case.size :].abs().sum())
    return difference(found[:, : case.size], functional.silu(gate) * up) + beyond


@pytest.mark.parametrize("case", chosen(CASES, QUICK), ids=str)
def test_gates_of_experts(case: Tokens, interpret: Interpret) -> None:
    error = interpret(activated, case)
    assert isinstance(error, float) and error < TOLERANCE[case.dtype]


def clamped(case: Tokens, alternating: bool) -> float:
    """Return the error of gpt-oss' activation of gate and up with biases."""
    from mycli.runtime.kernels.triton.gated_silu import GatedActivation, activate_parts

    following, pairs = product(case.size, case.into or Packing(4, 32)), case.rows * case.top_k
    parts = normal(case.parts, pairs, 2 * case.size) * 6
    bias = normal(case.experts, 2 * case.size, seed=2).to(case.dtype) if case.biased else None
    kind = GatedActivation(clamped=True, alternating=alternating, bias=bias)
    into = activate_parts(parts, case.dtype, following, following.tile(1), kind, starts_of(case))
    made = parts.sum(0).to(case.dtype)
    made = made if bias is None else made + bias[owners(case)]
    activation = reference.clamped_swiglu if alternating else reference.swiglu_halves
    assert bool((made.abs() > 7).any()), "values beyond the limits"
    return difference(numbers(into)[:, : case.size], activation(made))


@pytest.mark.parametrize("alternating", [True, False], ids=["alternating", "halves"])
@pytest.mark.parametrize("case", [CASES[0], *CASES[7:]], ids=str)
def test_clamped_gates_of_experts(case: Tokens, alternating: bool, interpret: Interpret) -> None:
    error = interpret(clamped, case, alternating)
    assert isinstance(error, float) and error < TOLERANCE[case.dtype]
