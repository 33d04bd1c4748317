"""Test products with 8-bit activations: bits equal the reference for every width, group, row count, instruction set."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

import pytest
import torch
from torch import Tensor

from mycli.runtime.errors import Declined
from mycli.runtime.kernels.cpu.library.build import Native, native
from mycli.runtime.kernels.cpu.matmul import CpuMatmul
from mycli.runtime.quantization.packed_weight import PackedWeight, dequantize, pack
from tests.runtime.kernels.test_cpu_matmul import GROUPS, KINDS, Kind, activations, packed_weight, packing_of, threads
from tests.support import one_byte
from tests.support.packed_weights import super_block_weight

pytestmark = pytest.mark.skipif(isinstance(native(), Declined), reason=f"no native code here: {native()}")

# GGUF super-blocks: bits, group, offsets.
SUPER_BLOCKS = {"Q2_K": (2, 16, True), "Q3_K": (3, 16, False), "Q4_K": (4, 32, True), "Q5_K": (5, 32, True)}
FEW_ROWS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 13, 20, 25)
MANY_ROWS = (*range(1, 97), 128, 512)


def of_one_byte(weight: PackedWeight) -> PackedWeight:
    return replace(weight, packing=replace(weight.packing, activations=8))


def weights(kind: Kind, shape: tuple[int, int]) -> Iterator[PackedWeight]:
    for index, group in enumerate(GROUPS):
        yield packed_weight(kind, shape, group, offsets=index % 2 == 0, seed=index)


def check(library: Native, weight: PackedWeight, rows: tuple[int, ...]) -> None:
    matmul, x = CpuMatmul(library, of_one_byte(weight)), activations(max(rows), weight.in_features, torch.bfloat16)
    wanted = one_byte.product(x, weight)
    if library.isa == "plain":  # it has no fused multiply-add
        assert (matmul(x) - wanted).abs().max() <= wanted.abs().max() * 2**-7
        return
    for count in rows:
        assert torch.equal(matmul(x[:count]), wanted[:count]), (weight.packing.name, count)


@pytest.mark.parametrize("kind", KINDS)
def test_product_has_the_bits_of_the_twin(library: Native, kind: Kind) -> None:
    for weight in weights(kind, (85, 640)):
        check(library, weight, FEW_ROWS)


@pytest.mark.parametrize("name", SUPER_BLOCKS)
def test_super_blocks(library: Native, name: str) -> None:
    bits, group, offsets = SUPER_BLOCKS[name]
    check(library, super_block_weight(bits, (45, 512), group, offsets=offsets), FEW_ROWS)


@pytest.mark.slow
@pytest.mark.parametrize("offsets", [False, True], ids=["scales", "offsets"])
@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("kind", KINDS)
def test_every_number_of_rows(library: Native, kind: Kind, group: int | None, offsets: bool) -> None:
    check(library, packed_weight(kind, (85, 1152), group, offsets=offsets), MANY_ROWS)


@pytest.mark.parametrize(("bits", "group", "offsets"), [(4, 64, False), (3, 16, True), (8, None, True)])
def test_more_inputs_than_a_panel_holds(library: Native, bits: int, group: int | None, offsets: bool) -> None:
    """The case has three panels, the last partly full, several row parts, an odd number of row blocks, 3 threads."""
    weight = packed_weight(bits, (48, 4608), group, offsets=offsets)
    matmul, x = CpuMatmul(library, of_one_byte(weight)), activations(290, 4608, torch.bfloat16)
    wanted = one_byte.product(x[::17], weight)
    with threads(3):
        found = matmul(x)[::17], matmul(x[:1])
    if library.isa != "plain":
        assert torch.equal(found[0], wanted) and torch.equal(found[1], wanted[:1])


@pytest.mark.parametrize("kind", KINDS)
def test_sums_of_the_largest_numbers_fit(library: Native, kind: Kind) -> None:
    """The largest codes and activations, all of one sign, must not overflow 16-bit sums."""
    packing = packing_of(kind, 128)
    for code in (7, 15) if kind == "e2m1" else (0, (1 << packing.bits) - 1):
        codes = torch.full((33, 256), code, dtype=torch.uint8)
        weight = PackedWeight(pack(codes, packing.bits), torch.ones(33, 2, dtype=torch.bfloat16), packing, 256)
        for value in (1.0, -1.0):
            x = torch.full((20, 256), value, dtype=torch.bfloat16)
            wanted = one_byte.product(x, weight)
            for rows in (1, 5, 20):
                found = CpuMatmul(library, of_one_byte(weight))(x[:rows])
                assert torch.equal(found, wanted[:rows]) or library.isa == "plain"


@pytest.mark.parametrize("size", [1e-37, 1e-30, 1.0, 1e30])
def test_activations_of_any_size(library: Native, size: float) -> None:
    """The case has segments that are all zero and values 1000 times their neighbours."""
    weight = packed_weight(4, (64, 1024), 128)
    x = activations(10, 1024, torch.float32) * size
    x[:, ::100] *= 1000
    x[:, 256:384] = 0
    rows = x.to(torch.bfloat16)
    found, wanted = CpuMatmul(library, of_one_byte(weight))(rows), one_byte.product(rows, weight)
    assert torch.equal(found, wanted) or library.isa == "plain"
    exact = rows.double() @ dequantize(weight).double().T
    if size > 2.0**-100:  # smaller activations become 0
        assert float((found.double() - exact).square().mean() / exact.square().mean()) < 0.01**2


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("rows", [1, 64])
def test_values_that_are_not_finite_stay_visible(library: Native, value: float, rows: int) -> None:
    x = activations(rows, 256, torch.bfloat16)
    x[0, 200] = value
    y = CpuMatmul(library, of_one_byte(packed_weight(4, (32, 256), 128)))(x)
    assert not y[0].isfinite().any() and y[1:].isfinite().all()


def test_fp32_activations_are_not_rounded(library: Native) -> None:
    weight, x = packed_weight(4, (40, 256), 64), activations(9, 256, torch.float32)
    assert torch.equal(CpuMatmul(library, of_one_byte(weight))(x), CpuMatmul(library, weight)(x))


def test_an_error_of_half_a_step() -> None:
    """The error of an activation is at most half a unit, where 127 units are the largest of its segment."""
    x: Tensor = activations(50, 256, torch.bfloat16)
    numbers, units = one_byte.integers(x, 32)
    values = numbers * units.unsqueeze(-1)
    assert ((values - x.double().view(values.shape)).abs() <= 0.5001 * units.unsqueeze(-1)).all()
    assert torch.equal(numbers.abs().amax(-1), torch.full(units.shape, 127.0).double())


@pytest.mark.parametrize("rows", [1, 9])
def test_refilled_weights_keep_their_precision(library: Native, rows: int) -> None:
    first, second = (of_one_byte(packed_weight(4, (40, 256), 64, seed=seed)) for seed in range(2))
    matmul, x = CpuMatmul(library, first), activations(rows, 256, torch.bfloat16)
    assert matmul.refill(second) and torch.equal(matmul(x), CpuMatmul(library, second)(x))
    assert not matmul.refill(packed_weight(4, (40, 256), 64)), "an 8-bit product is not one of 16 bits"


def test_groups_and_rows_agree_on_tables_of_both_precisions() -> None:
    """The 16-bit path keeps its previous error, and the 8-bit path stays within a hundredth."""
    own = native()
    assert isinstance(own, Native)
    for bits, group in product((4, 3), (32, 128)):
        weight, x = packed_weight(bits, (64, 512), group), activations(12, 512, torch.bfloat16)
        exact = x.double() @ dequantize(weight).double().T
        sixteen, eight = (CpuMatmul(own, each)(x).double() for each in (weight, of_one_byte(weight)))
        norm = exact.square().mean().sqrt()
        assert (sixteen - exact).square().mean().sqrt() < 0.003 * norm
        assert 0.003 * norm < (eight - exact).square().mean().sqrt() < 0.01 * norm
