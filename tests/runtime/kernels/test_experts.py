"""Test CPU experts against their plain references, and each expert's rows against the same rows alone, bit for bit."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from mycli.runtime.errors import Declined
from mycli.runtime.kernels import reference
from mycli.runtime.kernels.cpu.elementwise import native_clamped_swiglu, native_swiglu_halves
from mycli.runtime.kernels.cpu.experts import native_route, native_routed_product, native_weighted_sum
from mycli.runtime.kernels.cpu.library.build import native
from mycli.runtime.kernels.cpu.table import MAX_DECODED_ROWS, TableMatmul
from mycli.runtime.kernels.registry import DENSE_PRODUCT, prepare_product
from mycli.runtime.kernels.routed import Route
from mycli.runtime.models.experts_spec import RoutingSpec
from mycli.runtime.quantization.packed_weight import Matmul, PackedWeight, pack
from mycli.runtime.quantization.scheme import Codes, Packing
from tests.support.packed_weights import super_block_weight

pytestmark = pytest.mark.skipif(isinstance(native(), Declined), reason=f"no native code here: {native()}")

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def scores(tokens: int, experts: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.stack([torch.randperm(experts, generator=generator) for _ in range(tokens)]).float() * 0.37 - 3


def found(result: Route | Tensor | str) -> Route | Tensor:
    assert not isinstance(result, Declined), result
    return result


def packed(outputs: int, inputs: int, kind: int | Codes, seed: int, dtype: torch.dtype = torch.bfloat16) -> Matmul:
    generator = torch.Generator().manual_seed(seed)
    packing = Packing(kind, 32) if isinstance(kind, int) else Packing(4, 32, codes=kind)
    codes = torch.randint(0, 1 << packing.bits, (outputs, inputs), generator=generator).to(torch.uint8)
    scales = (torch.randn(outputs, inputs // 32, generator=generator) * 0.02).to(dtype)
    return prepare_product(PackedWeight(pack(codes, packing.bits), scales, packing, inputs), dtype)


@given(
    tokens=st.integers(1, 40),
    experts=st.integers(1, 40),
    share=st.floats(0, 1),
    normalized=st.booleans(),
    seed=st.integers(0, 1 << 30),
)
@settings(max_examples=60, deadline=None)
def test_routes_are_the_twins(tokens: int, experts: int, share: float, normalized: bool, seed: int) -> None:
    top_k = 1 + int(share * (experts - 1))
    given_scores = scores(tokens, experts, seed)
    choice = RoutingSpec(top_k, normalized)
    ours, wanted = native_route(given_scores, choice), reference.route(given_scores, choice)
    assert isinstance(ours, Route)
    assert ours.hit == wanted.hit
    for name in ("starts", "tokens", "places"):
        assert torch.equal(getattr(ours, name), getattr(wanted, name)), name
    torch.testing.assert_close(ours.weights, wanted.weights)
    assert not normalized or torch.allclose(ours.weights.sum(-1), torch.ones(tokens))


def test_parts_of_a_route_have_each_pair_once() -> None:
    route = reference.route(scores(7, 6), RoutingSpec(2, normalize=True))
    assert len(route.hit) >= 5
    pairs = []
    for places in ([0, 3], [4, 1], [2, *range(5, len(route.hit))]):
        part, indices = route.part(places)
        assert part.hit == [route.hit[place] for place in places]
        assert all(torch.equal(part.of(expert), route.of(expert)) for expert in part.hit)
        assert torch.equal(part.tokens, route.tokens[indices])
        pairs += indices.tolist()
    assert sorted(pairs) == list(range(len(route.tokens)))


@pytest.mark.parametrize("tokens", [1, 40], ids=["few-hit", "all-hit"])
def test_factors_of_experts_multiply_their_weights(tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that nothing is copied from the host where all are hit, as on a GPU: a CUDA graph cannot capture that."""
    route, factors = reference.route(scores(tokens, 6), RoutingSpec(2, normalize=True)), torch.rand(6) + 0.5
    assert (len(route.hit) == 6) == (tokens == 40)
    experts = [
        expert for place, expert in enumerate(route.hit) for _ in range(*route.starts[place : place + 2].tolist())
    ]
    expected = route.weights * factors[torch.tensor(experts)][route.places.long()]
    if len(route.hit) == 6:
        monkeypatch.setattr(Tensor, "new_tensor", lambda *_: pytest.fail("a tensor was made on the host"))
    assert torch.equal(route.scaled(factors).weights, expected)


def test_a_route_sends_each_token_to_its_highest_scores() -> None:
    """The expected route is written out for three tokens: pairs by expert, then by token; weights by rank."""
    route = native_route(
        torch.tensor([[0.0, 2.0, 1.0], [5.0, 1.0, 4.0], [0.0, 3.0, 1.0]]), RoutingSpec(2, normalize=True)
    )
    assert isinstance(route, Route)
    assert route.hit == [0, 1, 2]
    assert route.starts.tolist() == [0, 1, 3, 6]
    assert route.tokens.tolist() == [1, 0, 2, 0, 1, 2]
    assert route.places.tolist() == [[1, 3], [0, 4], [2, 5]]
    assert route.of(1).tolist() == [0, 2] and route.of(9).tolist() == []
    high, low = torch.tensor([2.0, 1.0]).softmax(-1).tolist()
    assert route.weights[0].tolist() == pytest.approx([high, low])


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")], ids=str)
def test_scores_that_are_no_numbers_stay_within_the_experts(bad: float) -> None:
    given_scores = scores(20, 6)
    given_scores[3] = bad
    given_scores[4, 2] = bad
    route = native_route(given_scores, RoutingSpec(4, normalize=False))
    assert isinstance(route, Route)
    assert route.tokens.sort().values.tolist() == sorted(list(range(20)) * 4)
    assert sorted(route.places.flatten().tolist()) == list(range(80))
    untouched = native_route(scores(20, 6)[5:], RoutingSpec(4, normalize=False))
    assert isinstance(untouched, Route) and torch.equal(untouched.weights, route.weights[5:])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("codes", [4, 3, 8, "e2m1", "iq4"])
@pytest.mark.parametrize("tokens", [1, 2, 7, 60], ids=lambda tokens: f"{tokens}-tokens")
def test_packed_products_are_those_of_each_expert_alone(tokens: int, codes: int | Codes, dtype: str) -> None:
    """The 37 outputs leave the last block partial; experts have one row, few rows, and many."""
    kind = DTYPES[dtype]
    experts = [packed(37, 96, codes, seed, kind) for seed in range(9)]
    check(experts, tokens, 96, kind)


@pytest.mark.parametrize("outputs", [48, 13], ids=lambda outputs: f"{outputs}-outputs")
@pytest.mark.parametrize("tokens", [1, 5, 60], ids=lambda tokens: f"{tokens}-tokens")
def test_dense_products_are_those_of_each_expert_alone(tokens: int, outputs: int) -> None:
    check([(torch.randn(outputs, 64) / 8).bfloat16() for _ in range(9)], tokens, 64, torch.bfloat16)


@pytest.mark.parametrize("tokens", [1, 5, 60], ids=lambda tokens: f"{tokens}-tokens")
def test_unpacked_experts_in_fp32_are_multiplied_in_inference_alone(tokens: int) -> None:
    experts = [torch.randn(13, 64) / 8 for _ in range(9)]
    with torch.inference_mode():
        check(experts, tokens, 64, torch.float32)
    starts = torch.tensor([0, tokens], dtype=torch.int32)
    assert isinstance(native_routed_product(experts[:1], torch.randn(tokens, 64), starts, None), Declined)


def check(experts: Sequence[Matmul | Tensor], tokens: int, inputs: int, dtype: torch.dtype) -> None:
    route = reference.route(scores(tokens, len(experts)), RoutingSpec(2, normalize=True))
    chosen = [experts[expert] for expert in route.hit]
    x = torch.randn(tokens, inputs, generator=torch.Generator().manual_seed(5)).to(dtype)
    gathered = x.index_select(0, route.tokens)
    for given_x, rows in ((x, route.tokens), (gathered, None)):
        y = found(native_routed_product(chosen, given_x, route.starts, rows))
        assert isinstance(y, Tensor) and y.dtype == dtype
        for expert, weight in zip(route.hit, chosen, strict=True):
            own = gathered[route.slices[expert]]
            alone = DENSE_PRODUCT(own, weight) if isinstance(weight, Tensor) else weight(own)
            assert torch.equal(y[route.slices[expert]], alone), expert
        twin = reference.routed_product(chosen, given_x, route.starts, rows)
        torch.testing.assert_close(y.float(), twin.float(), rtol=0.02, atol=0.02)


def test_experts_may_have_different_widths() -> None:
    check([packed(32, 64, bits, bits) for bits in (2, 3, 4, 5, 6, 8)], 7, 64, torch.bfloat16)


@pytest.mark.parametrize("tokens", [1, 7], ids=lambda tokens: f"{tokens}-tokens")
def test_experts_may_cut_their_inputs_differently(tokens: int) -> None:
    """The experts have two kinds of super-blocks, one stored in full, and no super-blocks."""
    nested = [super_block_weight(bits, (32, 256), 32, offsets=True) for bits in (4, 5)]
    nested.append(replace(nested[0], scales=nested[0].scales * 1.001))
    experts = [prepare_product(weight, torch.bfloat16) for weight in nested]
    check([*experts, packed(32, 256, 4, 0), packed(32, 256, 8, 1)], tokens, 256, torch.bfloat16)


def test_what_is_not_alike_is_declined() -> None:
    x, starts = torch.randn(2, 64).bfloat16(), torch.tensor([0, 1, 2], dtype=torch.int32)
    other_shape = [packed(32, 64, 4, 0), packed(48, 64, 4, 0)]
    assert isinstance(native_routed_product(other_shape, x, starts, None), Declined)
    mixed = [packed(32, 64, 4, 0), torch.randn(32, 64).bfloat16()]
    assert isinstance(native_routed_product(mixed, x, starts, None), Declined)
    learning = [torch.randn(32, 64, dtype=torch.bfloat16, requires_grad=True) for _ in range(2)]
    assert isinstance(native_routed_product(learning, x, starts, None), Declined)
    x, table = torch.randn(2, 96).bfloat16(), in_table_codes(48, "nf4", 0)
    for other in (in_table_codes(32, "nf4", 1), in_table_codes(48, "e4m3", 1), packed(48, 96, 4, 1)):
        declined = native_routed_product([table, other], x, starts, None)
        assert declined == Declined("experts-not-tables-alike")


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("shape", [(1, 1, 16), (3, 8, 48), (33, 2, 128)], ids=str)
def test_weighted_sums_are_the_twins(shape: tuple[int, int, int], dtype: str) -> None:
    tokens, top_k, size = shape
    x = torch.randn(tokens * top_k, size).to(DTYPES[dtype])
    places = torch.randperm(tokens * top_k).view(tokens, top_k).int()
    weights = torch.rand(tokens, top_k)
    y = found(native_weighted_sum(x, places, weights))
    assert isinstance(y, Tensor) and y.dtype == x.dtype
    twin = reference.weighted_sum(x, places, weights)
    torch.testing.assert_close(y.float(), twin.float(), rtol=0.01 if dtype == "bf16" else 1e-5, atol=1e-5)
    alone = found(native_weighted_sum(x, places[-1:], weights[-1:]))
    assert isinstance(alone, Tensor) and torch.equal(alone, y[-1:])
    exact = (x.double()[places.long()] * weights.unsqueeze(-1)).sum(1)
    torch.testing.assert_close(y.double(), exact, rtol=0.01, atol=0.01)


def in_table_codes(outputs: int, codes: Codes, seed: int, dtype: torch.dtype = torch.bfloat16) -> Matmul:
    generator, bits = torch.Generator().manual_seed(seed), 8 if codes == "e4m3" else 4
    packed = torch.randint(0, 1 << 30, (outputs, 96 * bits // 32), generator=generator).int() & 0x3F3F3F3F
    scales = (torch.rand(outputs, 3, generator=generator) + 0.5).bfloat16()
    packing = Packing(bits, 32, codes=codes, scale_dtype="bfloat16")
    return prepare_product(PackedWeight(packed, scales, packing, 96), dtype)


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("codes", ["fp4", "nf4", "e4m3"])
@pytest.mark.parametrize("tokens", [1, 3, 21], ids=lambda tokens: f"{tokens}-tokens")
def test_products_in_codes_of_tables_are_those_of_each_expert_alone(tokens: int, codes: Codes, dtype: str) -> None:
    """The 37 outputs do not divide evenly among tasks; an expert with too many rows is declined."""
    kind = DTYPES[dtype]
    experts = [in_table_codes(37, codes, seed, kind) for seed in range(9)]
    assert all(isinstance(each, TableMatmul) for each in experts)
    check(experts, tokens, 96, kind)
    many = torch.tensor([0, MAX_DECODED_ROWS, 2 * MAX_DECODED_ROWS + 1], dtype=torch.int32)
    declined = native_routed_product(experts[:2], torch.randn(2 * MAX_DECODED_ROWS + 1, 96).to(kind), many, None)
    assert declined == Declined("many-rows-of-an-expert", {"rows": MAX_DECODED_ROWS})


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_clamped_swiglu_is_the_twin(dtype: str) -> None:
    """The inputs exceed the clamps; the tolerance is one step of bf16 or fp32."""
    gate_up = torch.randn(19, 2 * 48, generator=torch.Generator().manual_seed(0)) * 6
    gate_up[0, :4] = torch.tensor([30.0, -30.0, -90.0, 30.0])
    given = gate_up.to(DTYPES[dtype])
    found = native_clamped_swiglu(given)
    assert isinstance(found, Tensor)
    step = 2**-7 if dtype == "bf16" else 2**-20
    torch.testing.assert_close(found, reference.clamped_swiglu(given), rtol=step, atol=step * 1e-2)
    given[3, 5] = torch.nan
    assert native_clamped_swiglu(given)[3].isnan().sum() == 1
    halves = torch.cat((given[:, ::2], given[:, 1::2]), 1)
    for swiglu_halves in (native_swiglu_halves, reference.swiglu_halves):
        torch.testing.assert_close(
            swiglu_halves(halves), native_clamped_swiglu(given), rtol=step, atol=step * 1e-2, equal_nan=True
        )
