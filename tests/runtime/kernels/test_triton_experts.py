"""Test Triton experts against the plain loop in the interpreter: products, routes, sums and number of launches."""

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from mycli.runtime.errors import Declined
from mycli.runtime.kernels import reference
from mycli.runtime.kernels.reference import DequantizeMatmul
from mycli.runtime.kernels.routed import ExpertWeights
from mycli.runtime.kernels.triton.experts import (
    ExpertTable,
    grouped_product,
    route_tokens,
    small_product_agrees,
    small_route_agrees,
    sum_weighted,
    triton_route,
    triton_routed_product,
    triton_weighted_sum,
)
from mycli.runtime.kernels.triton.product.dense import DenseProduct
from mycli.runtime.kernels.triton.product.matmul import TritonMatmul, uses_ptx
from mycli.runtime.kernels.triton.product.tiles import Chip, max_packed_rows
from mycli.runtime.models.experts_spec import RoutingSpec
from mycli.runtime.quantization.packed_weight import dequantize
from mycli.runtime.quantization.scheme import Packing
from tests.support.grids import chosen
from tests.support.random_tensors import normal, permutation, weight
from tests.support.triton_interpreter import Interpret, backwards, interpret

pytest.importorskip("triton")

__all__ = ["interpret"]

ROUND = {torch.bfloat16: 2**-7, torch.float16: 2**-10}


@dataclass(frozen=True)
class Routes:
    packing: Packing | None  # None: 16 bits
    tokens: int = 1
    experts: int = 5
    top_k: int = 2
    n: int = 40
    k: int = 256
    dtype: torch.dtype = torch.bfloat16
    capability: tuple[int, int] = (9, 0)
    processors: int = 1
    pdl: bool = False

    def __str__(self) -> str:
        chip = f"sm{self.capability[0]}{self.capability[1]}x{self.processors}" + "-pdl" * self.pdl
        dtype = str(self.dtype).removeprefix("torch.")
        sizes = f"{self.tokens}x{self.top_k}of{self.experts}-{self.k}-to-{self.n}"
        return f"{self.packing.name if self.packing else 'dense'}-{sizes}-{dtype}-{chip}"


QUICK = [
    Routes(Packing(4, 128), n=20, k=128),
    Routes(Packing(4, 128), tokens=20, experts=2, top_k=1, n=20, k=128),
    Routes(None, tokens=3, experts=9, n=72, k=96),
]
CASES = [
    *QUICK,
    Routes(Packing(4, 32), tokens=3, experts=9, n=33, k=96, dtype=torch.float16),
    Routes(Packing(8, 64), tokens=8, processors=8, k=512),
    Routes(Packing(3, 128), tokens=5, top_k=3),
    Routes(Packing(2, None), tokens=4, experts=3, top_k=3, k=200),
    Routes(Packing(4, 64), tokens=30, experts=3, top_k=1, n=130, capability=(8, 0)),
    Routes(Packing(4, 128), tokens=40, experts=4, processors=132, pdl=True),
    Routes(Packing(4, 128), tokens=2, experts=1, top_k=1, capability=(12, 0)),
    Routes(None, tokens=40, experts=4, n=130, processors=132, dtype=torch.float16, pdl=True),
    Routes(None, experts=3, top_k=3, k=512, processors=16, capability=(8, 0)),
]


def scores(tokens: int, experts: int, seed: int = 0) -> Tensor:
    """Return scores without ties within a token; the last expert is rarely chosen and the first often."""
    drawn = torch.stack([permutation(experts, seed=1000 * seed + token) for token in range(tokens)]).float()
    return drawn - 2.37 * torch.arange(experts)


def products(case: Routes) -> tuple[float, bool]:
    """Return relative errors against fp64, gathered and not, and whether a run in reverse order is equal."""
    chip = Chip(case.capability, case.processors, case.pdl and uses_ptx())
    if case.packing is None:
        dense = [(normal(case.n, case.k, seed=seed) / 8).to(case.dtype) for seed in range(case.experts)]
        table = ExpertTable.from_products([DenseProduct(one, chip) for one in dense])
    else:
        stored = [weight(case.packing, case.n, case.k, seed=seed, dtype=case.dtype) for seed in range(case.experts)]
        dense = [dequantize(one) for one in stored]
        table = ExpertTable.from_weights([TritonMatmul(one, chip) for one in stored])
    assert not isinstance(table, Declined)
    route = reference.route(scores(case.tokens, case.experts), RoutingSpec(case.top_k, normalize=True))
    starts = torch.zeros(case.experts + 1, dtype=torch.int32)
    for expert, pairs in route.slices.items():
        starts[expert + 1 :] = pairs.stop
    x = normal(case.tokens, case.k, seed=1).to(case.dtype)
    rows = x.index_select(0, route.tokens)
    exact = torch.cat([rows[route.slices[e]].double() @ dense[e].double().t() for e in route.hit])
    errors, same = [], True
    for given, tokens in ((x, route.tokens), (rows, None)):
        y = grouped_product(table, given, starts, tokens)
        assert y.dtype == case.dtype and y.shape == exact.shape
        errors.append(float((y.double() - exact).norm() / exact.norm()))
        with backwards():
            same = same and torch.equal(y, grouped_product(table, given, starts, tokens))
    return max(errors), same


@pytest.mark.parametrize("case", chosen(CASES, QUICK), ids=str)
def test_products_of_experts(case: Routes, interpret: Interpret) -> None:
    error, same = interpret(products, case)  # type: ignore[misc]  # the pool carries any result
    assert error < ROUND[case.dtype] and same


def routed(tokens: int, experts: int, choice: RoutingSpec, corrected: bool = False) -> None:
    given = scores(tokens, experts, seed=tokens) / 8
    correction = scores(1, experts, seed=1)[0] / experts if corrected else None
    found, wanted = route_tokens(given, choice, correction), reference.route(given, choice, correction)
    assert found.hit == list(range(experts))
    assert found.slices.keys() >= wanted.slices.keys()
    assert all(found.slices[expert] == pairs for expert, pairs in wanted.slices.items())
    assert torch.equal(found.tokens, wanted.tokens) and torch.equal(found.places, wanted.places)
    torch.testing.assert_close(found.weights, wanted.weights, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("normalized", [True, False], ids=["of chosen", "of all"])
@pytest.mark.parametrize(
    ("tokens", "experts", "top_k"), [(1, 8, 2), (5, 60, 4), (7, 3, 3), (1, 1, 1)], ids=lambda number: str(number)
)
def test_routes(tokens: int, experts: int, top_k: int, normalized: bool, interpret: Interpret) -> None:
    interpret(routed, tokens, experts, RoutingSpec(top_k, normalized))


# Sigmoid scores, corrected or not, and corrected softmax scores; weights normalized or not.
CHOICES = {
    "sigmoid": (RoutingSpec(3, normalize=False, scoring="sigmoid"), False),
    "sigmoid-corrected-scaled": (RoutingSpec(4, normalize=True, scoring="sigmoid", epsilon=0.5, scale=2.5), True),
    "softmax-corrected": (RoutingSpec(4, normalize=True, epsilon=0.1), True),
    "softmax-corrected-of-all": (RoutingSpec(2, normalize=False), True),
    "groups-sigmoid-corrected": (
        RoutingSpec(3, normalize=True, scoring="sigmoid", groups=4, top_groups=2, scale=2.5),
        True,
    ),
    "groups-by-one-of-three": (RoutingSpec(4, normalize=False, groups=3, top_groups=1, group_best=1), False),
    "corrected-scores-capped": (
        RoutingSpec(3, normalize=True, scoring="sigmoid_of_corrected", softcap=1.5, epsilon=0.01),
        True,
    ),
    "groups-all": (RoutingSpec(4, normalize=True, groups=2, top_groups=2), False),
}


@pytest.mark.parametrize("case", CHOICES)
def test_choices_of_experts(case: str, interpret: Interpret) -> None:
    interpret(routed, 7, 12, *CHOICES[case])


def many_pairs() -> None:
    routed(700, 3, RoutingSpec(2, normalize=True))


@pytest.mark.slow
def test_a_route_of_many_pairs(interpret: Interpret) -> None:
    interpret(many_pairs)


def strange_scores() -> tuple[list[int], list[int], list[int]]:
    """Return the chosen experts for tied scores, and the pairs with NaN scores."""
    equal = route_tokens(torch.zeros(1, 6), RoutingSpec(3, normalize=True))
    bad = scores(20, 6)
    bad[3], bad[4, 2], bad[5, 1] = torch.nan, torch.inf, -torch.inf
    route = route_tokens(bad, RoutingSpec(4, normalize=False))
    rest = route_tokens(bad[6:], RoutingSpec(4, normalize=False))
    assert torch.equal(rest.weights, route.weights[6:])
    chosen = [expert for expert, pairs in equal.slices.items() if pairs.stop > pairs.start]
    return chosen, sorted(route.tokens.tolist()), sorted(route.places.flatten().tolist())


def test_scores_that_are_equal_or_no_numbers(interpret: Interpret) -> None:
    chosen, tokens, places = interpret(strange_scores)  # type: ignore[misc]  # the pool carries any result
    assert chosen == [0, 1, 2] and tokens == sorted(list(range(20)) * 4) and places == list(range(80))


def summed(tokens: int, top_k: int, size: int, dtype: torch.dtype) -> None:
    x, weights = normal(tokens * top_k, size).to(dtype), normal(tokens, top_k, seed=1)
    places = permutation(tokens * top_k, seed=2).view(tokens, top_k).int()
    found = sum_weighted(x, places, weights)
    assert found.dtype == dtype
    wanted = reference.weighted_sum(x, places, weights)
    torch.testing.assert_close(found.float(), wanted.float(), rtol=ROUND.get(dtype, 1e-5), atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("shape", [(1, 1, 16), (3, 8, 48), (2, 2, 1100)], ids=str)
def test_weighted_sums(shape: tuple[int, int, int], dtype: torch.dtype, interpret: Interpret) -> None:
    interpret(summed, *shape, dtype)


def test_the_check_passes_where_the_kernels_work(interpret: Interpret) -> None:
    assert interpret(small_route_agrees, torch.device("cpu"))


def dense_check(processors: int) -> bool:
    return small_product_agrees(torch.device("cpu"), Chip((9, 0), processors))


def test_the_check_of_16_bit_products_passes_where_the_kernel_works(interpret: Interpret) -> None:
    assert interpret(dense_check, 4)


def test_the_table_is_made_once_and_of_weights_that_are_alike() -> None:
    chip = Chip((9, 0), 1)
    alike = [TritonMatmul(weight(Packing(4, 128), 16, 128, seed), chip) for seed in range(3)]
    held = ExpertWeights(alike)
    table = held.derived(ExpertTable.from_weights)
    assert isinstance(table, ExpertTable) and held.derived(ExpertTable.from_weights) is table
    for one, codes, scales in zip(alike, table.codes.tolist(), table.scales.tolist(), strict=True):
        assert one.codes.data_ptr() == alike[0].codes.data_ptr() + 16 * codes
        assert one.scales.data_ptr() == alike[0].scales.data_ptr() + 16 * scales
    for other in (weight(Packing(8, 128), 16, 128, 0), weight(Packing(4, 128), 32, 128, 0)):
        assert isinstance(ExpertTable.from_weights([*alike, TritonMatmul(other, chip)]), Declined)
    assert isinstance(ExpertTable.from_weights([*alike, torch.randn(16, 128)]), Declined)


def test_declines_what_others_do_sooner() -> None:
    chip = Chip((9, 0), 1)
    one = TritonMatmul(weight(Packing(4, 128), 16, 128, 0), chip)
    many = torch.zeros(max_packed_rows(chip) + 1, 128, dtype=torch.bfloat16)
    starts = torch.tensor([0, len(many)], dtype=torch.int32)
    assert "too-many-rows-per-expert" in str(triton_routed_product([one], many, starts, None))
    decoded = DequantizeMatmul(weight(Packing(4, 128), 16, 128, 0))
    assert "not-triton-layout" in str(triton_routed_product([decoded], many, starts, None))
    assert "not-triton-layout" in str(triton_routed_product([torch.randn(16, 128)], many, starts, None)), "fp32"
    assert "cuda-rows" in str(triton_routed_product([torch.randn(16, 128).bfloat16()], many, starts, None))
    assert "cuda-rows" in str(triton_route(torch.zeros(1, 4), RoutingSpec(2, normalize=True)))
    assert "cuda-rows" in str(triton_weighted_sum(many, starts.view(1, 2), torch.ones(1, 2)))


@pytest.mark.parametrize(("pairs", "experts", "rows"), [(8, 128, 8), (512, 4, 64), (65, 3, 16), (1, 1, 8)])
def test_there_are_tiles_enough_for_any_route(pairs: int, experts: int, rows: int) -> None:
    """The bound is tested on the worst split: one pair for each expert, the rest for one expert."""
    one = ExpertTable.from_weights([TritonMatmul(weight(Packing(4, 128), 16, 128, 0), Chip((9, 0), 1))] * experts)
    assert isinstance(one, ExpertTable)
    hit = min(pairs, experts)
    worst = max(
        sum(-(-count // rows) for count in ([1] * (alone - 1) + [pairs - alone + 1])) for alone in range(1, hit + 1)
    )
    spread = sum(-(-(pairs // hit + (index < pairs % hit)) // rows) for index in range(hit))
    most = one.rows(torch.zeros(1), None, pairs).max_tiles(rows)
    assert max(worst, spread) <= most <= hit + pairs // rows
