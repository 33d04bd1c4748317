"""Test native products of fp32 matrices rounded to bf16 against exact products of the rounded matrices."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from mycli.quant.calibration.gradients import BackwardPass
from mycli.quant.calibration.hessian import reduced_precision
from mycli.quant.layer_streaming import StreamedModel
from mycli.quant.rounding import error_compensation
from mycli.quant.rounding.error_compensation import Moments
from mycli.runtime.checkpoint.open_folder import open_model_folder
from mycli.runtime.errors import Declined
from mycli.runtime.kernels.cpu import rounded
from mycli.runtime.kernels.cpu.library.build import Native
from mycli.runtime.kernels.cpu.rounded import add_rounded_outer, rounded_product, rounds
from mycli.runtime.kernels.registry import DENSE_PRODUCT
from tests.support.models import CPU
from tests.support.paths import DRAFT

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
@pytest.mark.parametrize(("rows", "inputs", "outputs"), SHAPES, ids=str)
def test_gradients_are_products_of_the_rounded_matrices(rows: int, inputs: int, outputs: int) -> None:
    """The gradient by the output is not contiguous."""
    x, weight, slope = draw(rows, inputs), draw(outputs, inputs), draw(outputs, rows).T
    y = DENSE_PRODUCT(x.requires_grad_(), weight.requires_grad_())
    assert torch.equal(y.detach(), DENSE_PRODUCT(x.detach(), weight.detach()))
    y.backward(slope)  # type: ignore[no-untyped-call]  # torch's stub
    assert x.grad is not None and weight.grad is not None
    assert torch.allclose(x.grad.double(), exact(slope) @ exact(weight.detach()), rtol=1e-5, atol=1e-4)
    assert torch.allclose(weight.grad.double(), exact(slope).T @ exact(x.detach()), rtol=1e-5, atol=1e-4)
    # Against fp64: each rounding to bf16 is off by at most 2^-9 of a value, and errors have random signs.
    for gradient, wanted in (
        (x.grad, slope.double() @ weight.detach().double()),
        (weight.grad, slope.double().T @ x.detach().double()),
    ):
        assert (gradient - wanted).norm() <= 2 * 2**-9 * wanted.norm()


@needs_kernel
def test_only_the_gradients_that_are_needed_are_computed() -> None:
    """Gradients are rounded after the context has ended too: the forward pass decides."""
    x, weight = draw(20, 64), draw(48, 64)
    DENSE_PRODUCT(x.requires_grad_(), weight).sum().backward()  # type: ignore[no-untyped-call]  # torch's stub
    assert x.grad is not None and weight.grad is None
    x.grad, x.requires_grad = None, False
    total = DENSE_PRODUCT(x, weight.requires_grad_()).sum()
    torch.backends.mkldnn.matmul.fp32_precision = "none"
    total.backward()  # type: ignore[no-untyped-call]  # torch's stub
    assert x.grad is None and weight.grad is not None
    assert torch.allclose(weight.grad.double(), exact(x).sum(0).expand(48, -1), rtol=1e-5, atol=1e-4)


@needs_kernel
def test_a_gradient_pass_through_a_layer_multiplies_rounded_matrices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every product of the forward and of the backward pass is native; the rows of two windows are 46."""
    model = StreamedModel(open_model_folder(DRAFT), CPU)
    block, context = model.block(0), model.context(23)
    stream = draw(2, 23, model.config.hidden_size)
    backward = BackwardPass(model, torch.ones_like(stream), context, None)
    calls: list[tuple[int, bool]] = []
    multiply = rounded._multiply

    def counted(library: Native, x: Tensor, weight: Tensor, outputs: int, *, by_inputs: bool = False) -> Tensor:
        calls.append((len(x), by_inputs))
        return multiply(library, x, weight, outputs, by_inputs=by_inputs)

    monkeypatch.setattr(rounded, "_multiply", counted)
    backward.through(block.spec, slice(0, 2), stream, block)
    products = len(block.products)
    assert calls == [(46, False)] * products + [(46, True)] * products


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
            leaves = x.clone().requires_grad_(), weight.clone().requires_grad_()
            slopes = torch.autograd.grad(DENSE_PRODUCT(*leaves).square().sum(), leaves)
            results.append((rounded_product(x, weight), sums.tril(), *slopes))
    finally:
        torch.set_num_threads(before)
    for result in results[1:]:
        for value, first in zip(result, results[0], strict=True):
            assert isinstance(value, Tensor) and isinstance(first, Tensor) and torch.equal(value, first)


def test_it_declines_where_torch_may_not_round() -> None:
    x, weight = draw(4, 32), draw(8, 32)
    assert isinstance(add_rounded_outer(draw(32, 32), x.requires_grad_(), x.detach(), 32), Declined)
    x = x.detach()
    assert isinstance(rounded_product(x.bfloat16(), weight.detach()), Declined)
    assert isinstance(rounded_product(x, draw(32, 8).T), Declined)
    torch.backends.mkldnn.matmul.fp32_precision = "none"
    assert isinstance(rounded_product(x, weight.detach()), Declined)
    assert torch.equal(DENSE_PRODUCT(x, weight.detach()), torch.nn.functional.linear(x, weight.detach()))


def test_without_the_kernel_gradients_are_those_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rounded, "_library", lambda: Declined("no-fast-bf16-dots"))
    leaves = draw(7, 33).requires_grad_(), draw(50, 33).requires_grad_()
    slopes = torch.autograd.grad(DENSE_PRODUCT(*leaves).square().sum(), leaves)
    expected = torch.autograd.grad(torch.nn.functional.linear(*leaves).square().sum(), leaves)
    assert all(torch.equal(slope, wanted) for slope, wanted in zip(slopes, expected, strict=True))


def test_without_the_kernel_narrow_moments_are_the_sums_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies of small models keep their bytes where nothing new computes."""
    monkeypatch.setattr(error_compensation, "rounds", lambda: False)
    monkeypatch.setattr(error_compensation, "add_rounded_outer", lambda *_: Declined("no-fast-bf16-dots"))
    x = draw(70, 96)
    moments = Moments.zeros(96, CPU.device)
    moments.add(x)
    assert torch.equal(moments.complete().hessian, torch.zeros(96, 96).addmm_(x.T, x))
