"""Check that a trained block computes the same as the stored one, and that each parameter gets a gradient."""

import torch

from mycli.quant.layer_streaming import StreamedModel
from mycli.quant.rounding.grid import Grid, dequantize_codes
from mycli.quant.solvers import rtn
from mycli.quant.tuning.parameters import TunableBlock, TunableWeight, straight_through
from mycli.runtime.checkpoint.open_folder import open_model_folder
from mycli.runtime.quantization.scheme import Packing
from tests.support.models import CPU
from tests.support.paths import DRAFT
from tests.support.rounding import rounded, stored


def test_what_is_trained_is_what_will_be_stored() -> None:
    model = StreamedModel(open_model_folder(DRAFT), CPU)
    packings, solved = rounded(model, 1)
    block = TunableBlock(model.block(1), solved, packings, torch.bfloat16, model.stored_dtype)
    x = torch.randn(2, 8, model.config.hidden_size, generator=torch.Generator().manual_seed(0))
    context = model.context(8, exact=True)
    with torch.no_grad():  # the kernels of a pass with gradients round otherwise
        torch.testing.assert_close(block(x, context), stored(model, solved)(x, context))
    block(x, context).square().sum().backward()
    assert all(leaf.grad is not None and bool(leaf.grad.any()) for leaf in block.scale_changes())
    with torch.no_grad():
        for leaf in block.scale_changes():  # by odd fractions, which no storage dtype holds
            leaf += 0.1234567 * torch.rand(leaf.shape, generator=torch.Generator().manual_seed(1))
    after = block.current()
    for name, quantized in after.linears.items():
        assert torch.equal(quantized.codes, solved.linears[name].codes)
        assert quantized.scales.dtype == torch.bfloat16
        assert not torch.equal(quantized.scales, solved.linears[name].scales)
    with torch.no_grad():
        torch.testing.assert_close(block(x, context), stored(model, after)(x, context))


def test_codes_move_where_they_may() -> None:
    model = StreamedModel(open_model_folder(DRAFT), CPU)
    packings, solved = rounded(model, 1)
    generator = torch.Generator().manual_seed(2)
    shifts = {name: torch.rand(each.codes.shape, generator=generator) - 0.5 for name, each in solved.linears.items()}
    taken = {name: shift.clone() for name, shift in shifts.items()}
    block = TunableBlock(model.block(1), solved, packings, torch.bfloat16, model.stored_dtype, taken)
    x = torch.randn(2, 8, model.config.hidden_size, generator=generator)
    context = model.context(8, exact=True)
    with torch.no_grad():  # the kernels of a pass with gradients round otherwise
        torch.testing.assert_close(block(x, context), stored(model, solved)(x, context))
    block(x, context).square().sum().backward()
    assert len(block.shifts()) == len(solved.linears)
    assert all(leaf.grad is not None and bool(leaf.grad.any()) for leaf in block.shifts())
    with torch.no_grad():
        for leaf in block.shifts():
            leaf += 0.6  # most by one step; beyond the end of the grid none
    after = block.current()
    for name, quantized in after.linears.items():
        moved = quantized.codes.int() - solved.linears[name].codes.int()
        wanted = (solved.linears[name].codes.int() + (shifts[name] > -0.1)).clamp(max=7)
        assert torch.equal(quantized.codes.int(), wanted) and bool(moved.any())
    with torch.no_grad():
        torch.testing.assert_close(block(x, context), stored(model, after)(x, context))


def test_gradients_pass_straight_through_the_rounding() -> None:
    """Compare with separate operations; some levels are beyond the end of the grid."""
    generator = torch.Generator().manual_seed(3)
    grid = Grid(Packing(3, 32), torch.bfloat16)
    quantized = rtn.solve(torch.randn(6, 64, generator=generator), grid).quantized
    slope = torch.randn(6, 64, generator=generator)
    weight = TunableWeight(quantized, grid, CPU.device, torch.randn(6, 64, generator=generator))
    scale_change, shift = (leaf.detach().clone().requires_grad_() for leaf in (weight.scale_change, weight.shift))
    scales = quantized.scales.float() * (1 + scale_change)
    exact = quantized.codes.float() - 4 + shift
    levels = straight_through(exact, exact.detach().round().clamp(-4, 3))
    expected = levels * scales.repeat_interleave(32, 1)
    torch.testing.assert_close(weight.weight(), expected)
    weight.weight().backward(slope)
    expected.backward(slope)
    torch.testing.assert_close(weight.scale_change.grad, scale_change.grad)
    torch.testing.assert_close(weight.shift.grad, shift.grad)
    fixed = TunableWeight(quantized, grid, CPU.device)
    torch.testing.assert_close(fixed.weight().detach(), dequantize_codes(quantized, grid))
    fixed.weight().backward(slope)
    levels = quantized.codes.float() - 4
    per_group = (slope * levels * quantized.scales.float().repeat_interleave(32, 1)).view(6, 2, 32).sum(2)
    torch.testing.assert_close(fixed.scale_change.grad, per_group)
