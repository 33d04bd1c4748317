"""Test native products of fp32 matrices rounded to bf16 against exact products of the rounded matrices."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from mycli.quant.calibration.hessian import reduced_precision
from mycli.quant.rounding import error_compensation
from mycli.quant.rounding.error_compensation import Moments
from mycli.runtime.errors import Declined
from mycli.runtime.kernels.cpu.rounded import add_rounded_outer, rounded_product, rounds
from mycli.runtime.kernels.registry import DENSE_PRODUCT
from tests.support.models import CPU

needs_kernel = pytest.mark.skipif(not rounds(), reason="this processor has no fast bf16 dot products")

# (rows, inputs, outputs): less than one tile, no multiple of anything, whole tiles, more panels than threads.
SHAPES = ((1, 1, 1), (7, 33, 50), (16, 64, 48), (130, 97, 211), (9, 896, 1))


@pytest.fixture(autouse=True)
def reduced() -> Iterator[None]:
    with reduced_precision(CPU.device):
        yield


def draw(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def exact(x: Tensor) -> Tensor:
    return x.bfloat16().double()


@needs_kernel
@pytest.mark.parametrize(("rows", "inputs", "outputs"), SHAPES, ids=str)
def test_products_are_those_of_the_rounded_matrices(rows: int, inputs: int, outputs: int) -> None:
    x, weight = draw(rows, inputs), draw(outputs, inputs)
    y = rounded_product(x, weight)
    assert isinstance(y, Tensor)
    assert torch.allclose(y.double(), exact(x) @ exact(weight).T, rtol=1e-5, atol=1e-4)
    assert torch.equal(DENSE_PRODUCT(x, weight), y)


@needs_kernel
@pytest.mark.parametrize(("rows", "right", "left"), SHAPES, ids=str)
def test_sums_are_added_to(rows: int, left: int, right: int) -> None:
    x, y, sums = draw(rows, left), draw(rows, right), draw(left, right)
    expected = sums.double() + exact(x).T @ exact(y)
    assert add_rounded_outer(sums, x, y, left) is None
    assert torch.allclose(sums.double(), expected, rtol=1e-5, atol=1e-4)


@needs_kernel
@pytest.mark.parametrize("size", [31, 96, 300])
def test_moments_are_whole_and_symmetric_after_the_last_sum(size: int) -> None:
    x, y = draw(70, size), draw(70, size).roll(1, 0)
    moments = Moments.zeros(size, CPU.device)
    for rows in (slice(0, 33), slice(33, 33), slice(33, 70)):
        moments.add(x[rows], y[rows])
    moments.complete()
    assert torch.allclose(moments.hessian.double(), exact(x).T @ exact(x), rtol=1e-5, atol=1e-3)
    assert torch.allclose(moments.drift.double(), exact(y - x).T @ exact(x), rtol=1e-5, atol=1e-3)


@needs_kernel
def test_the_bits_do_not_depend_on_the_number_of_threads() -> None:
    x, weight, before = draw(100, 130), draw(500, 130), torch.get_num_threads()
    results = []
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            sums = torch.zeros(130, 130)
            add_rounded_outer(sums, x, x, 7)
            results.append((rounded_product(x, weight), sums.tril()))
    finally:
        torch.set_num_threads(before)
    for product, sums in results[1:]:
        assert isinstance(product, Tensor) and torch.equal(product, results[0][0]) and torch.equal(sums, results[0][1])


def test_it_declines_where_torch_may_not_round_or_needs_a_gradient() -> None:
    x, weight = draw(4, 32), draw(8, 32)
    assert isinstance(rounded_product(x, weight.requires_grad_()), Declined)
    assert isinstance(rounded_product(x.bfloat16(), weight.detach()), Declined)
    assert isinstance(rounded_product(x, draw(32, 8).T), Declined)
    torch.backends.mkldnn.matmul.fp32_precision = "none"
    assert isinstance(rounded_product(x, weight.detach()), Declined)
    assert torch.equal(DENSE_PRODUCT(x, weight.detach()), torch.nn.functional.linear(x, weight.detach()))


def test_without_the_kernel_narrow_moments_are_the_sums_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies of small models keep their bytes where nothing new computes."""
    monkeypatch.setattr(error_compensation, "rounds", lambda: False)
    monkeypatch.setattr(error_compensation, "add_rounded_outer", lambda *_: Declined("no-fast-bf16-dots"))
    x = draw(70, 96)
    moments = Moments.zeros(96, CPU.device)
    moments.add(x)
    assert torch.equal(moments.complete().hessian, torch.zeros(96, 96).addmm_(x.T, x))
