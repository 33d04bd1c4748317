"""A quantized block whose scales, gains and, optionally, codes can be trained."""

# Trained values are changes from the start: scales relative to themselves, gains relative to their mean, codes in steps
# of the grid. The forward pass uses the values that will be stored, rounded to their dtypes and to whole codes;
# gradients pass straight through the rounding (arXiv 1308.3432).

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from mycli.quant.output.work_folder import Solved
from mycli.quant.rounding.grid import Grid, Quantized
from mycli.quant.rounding.plain import grouped
from mycli.runtime.layers.block import Block
from mycli.runtime.layers.layer_part import PassContext
from mycli.runtime.layers.linear import Linear
from mycli.runtime.layers.norm import RMSNorm
from mycli.runtime.quantization.scheme import Packing


def straight_through(value: Tensor, rounded: Tensor) -> Tensor:
    """Return `rounded`, with the gradient of `value`."""
    return value + (rounded - value).detach()


class TunableWeight:
    """A quantized linear. `shift` fp32 [N, K]: start of its levels in steps off the codes; None: codes stay."""

    def __init__(self, quantized: Quantized, grid: Grid, device: torch.device, shift: Tensor | None = None) -> None:
        self._grid = grid
        self._codes = quantized.codes.to(device)
        self._scales = quantized.scales.float().to(device)
        self.scale_change = torch.zeros_like(self._scales, requires_grad=True)
        self.shift = None if shift is None else shift.to(device).requires_grad_()

    def _stored_scales(self) -> Tensor:
        exact = self._scales * (1 + self.scale_change)
        return straight_through(exact, self._grid.storable(exact.detach()))

    def weight(self) -> Tensor:
        weight: Tensor = _Dequantized.apply(self, self._stored_scales(), self.shift)  # type: ignore[no-untyped-call]
        return weight

    @torch.no_grad()
    def levels(self) -> Tensor:
        """Return the whole steps fp32 [N, K] that the weight is made of."""
        half = self._grid.half
        levels = self._codes.float().sub_(half)
        return levels if self.shift is None else levels.add_(self.shift).round_().clamp_(-half, half - 1)

    @torch.no_grad()
    def quantized(self) -> Quantized:
        codes = (self.levels() + self._grid.half).to(torch.uint8)
        return Quantized(codes, self._stored_scales().to(self._grid.scale_dtype))


class _Dequantized(Function):
    # Levels times scales; the gradient passes straight through the rounding of levels to the shift. As one function,
    # because separate operations read and write tensors of the weight's size three times as often.
    @staticmethod
    def forward(ctx: Any, weight: TunableWeight, scales: Tensor, shift: Tensor | None) -> Tensor:
        levels = grouped(weight.levels(), scales.shape[1])
        ctx.save_for_backward(levels, scales)
        return (levels * scales.unsqueeze(-1)).flatten(1)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, Tensor | None, Tensor | None]:
        levels, scales = ctx.saved_tensors
        gradient, (_, _, moves) = gradients[0].view_as(levels), ctx.needs_input_grad
        by_shift = (gradient * scales.unsqueeze(-1)).flatten(1) if moves else None
        return None, (gradient * levels).sum(-1), by_shift


class TunableGain:
    def __init__(self, norm: RMSNorm, dtype: torch.dtype) -> None:
        self.name = norm.tensor
        self._norm = norm
        self._dtype = dtype
        self._start = norm.weight.clone()
        self._unit = self._start.abs().mean()
        self.change = torch.zeros_like(self._start, requires_grad=True)

    def install(self) -> None:
        exact = self._start + self._unit * self.change
        stored = self._norm.stored(exact.detach(), self._dtype).to(exact.dtype)
        self._norm.weight = straight_through(exact, self._norm.gain(stored))

    @torch.no_grad()
    def stored(self) -> Tensor:
        return self._norm.stored(self._start + self._unit * self.change, self._dtype)


class TunableBlock:
    """`block` with the codes and scales of `start`; its dense weights are dropped, and exist in fp32 during a call.

    `stored` returns the dtype of a tensor in the file; `shifts` by linear lets the codes of those that it names move.
    """

    def __init__(
        self,
        block: Block,
        start: Solved,
        packings: Mapping[str, Packing],
        scale_dtype: torch.dtype,
        stored: Callable[[str], torch.dtype],
        shifts: Mapping[str, Tensor] | None = None,
    ) -> None:
        self._block = block
        self.spec = block.spec
        self.start = start
        device = self._linears()[0].weight().device
        self.weights: dict[str, TunableWeight] = {}
        for linear in self._linears():
            for spec in linear.specs:
                grid = Grid(packings[spec.name], scale_dtype)
                shift = None if shifts is None else shifts.get(spec.name)
                self.weights[spec.name] = TunableWeight(start.linears[spec.name], grid, device, shift)
            linear.replace(None)
        # Norms of single heads have a tensor for each head; they stay.
        self.gains = [TunableGain(norm, stored(norm.tensor)) for norm in block.norms if not norm.spec.heads]

    def _linears(self) -> list[Linear]:
        return list(self._block.products.values())

    def __call__(self, x: Tensor, context: PassContext) -> Tensor:
        for gain in self.gains:
            gain.install()
        for linear in self._linears():
            weights = [self.weights[spec.name].weight() for spec in linear.specs]
            linear.replace(torch.cat(weights))
        y: Tensor = self._block(x, context)
        for linear in self._linears():
            linear.replace(None)
        return y

    def scale_changes(self) -> list[Tensor]:
        return [weight.scale_change for weight in self.weights.values()] + [gain.change for gain in self.gains]

    def shifts(self) -> list[Tensor]:
        return [weight.shift for weight in self.weights.values() if weight.shift is not None]

    def current(self) -> Solved:
        linears = {name: weight.quantized() for name, weight in self.weights.items()}
        changed = {**self.start.changed, **{gain.name: gain.stored() for gain in self.gains}}
        return replace(self.start, linears=linears, changed=changed)
