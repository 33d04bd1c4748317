"""A quantized block whose scales and gains follow gradients, while its codes stay.

What is trained is the change from where it began: scales relative to themselves, gains relative to their mean. The
forward pass always uses the values as they will be stored, rounded to their dtypes; gradients pass straight through the
rounding (arXiv 1308.3432). Weights exist in fp32 for one block at a time. Knows one block, nothing of losses.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from mycli.quant.grid import Grid, Quantized, grouped, storable
from mycli.quant.resume import Solved
from mycli.runtime.linear import DenseMatmul, Linear
from mycli.runtime.packing import Packing
from mycli.runtime.transformer import Block, RMSNorm


def straight_through(value: Tensor, rounded: Tensor) -> Tensor:
    """`rounded`, with the gradient of `value`."""
    return value + (rounded - value).detach()


class TunableWeight:
    """One quantized linear."""

    def __init__(self, quantized: Quantized, grid: Grid, device: torch.device) -> None:
        self._grid = grid
        self._codes = quantized.codes.to(device)
        self._scales = quantized.scales.float().to(device)
        self.stretch = torch.zeros_like(self._scales, requires_grad=True)

    def _stored_scales(self) -> Tensor:
        wanted = self._scales * (1 + self.stretch)
        return straight_through(wanted, storable(wanted.detach(), self._grid))

    def weight(self) -> Tensor:
        """fp32 [N, K], differentiable."""
        scales = self._stored_scales()
        levels = self._codes.float() - self._grid.half
        return (grouped(levels, scales.shape[1]) * scales.unsqueeze(-1)).flatten(1)

    @torch.no_grad()
    def quantized(self) -> Quantized:
        """As it stands now."""
        return Quantized(self._codes, self._stored_scales().to(self._grid.scale_dtype))


class TunableGain:
    """The gain of a norm, stored in `dtype`."""

    def __init__(self, norm: RMSNorm, dtype: torch.dtype) -> None:
        self.name = f"{norm.name}.weight"
        self._norm = norm
        self._dtype = dtype
        self._start = norm.weight.clone()
        self._unit = self._start.abs().mean()
        self.change = torch.zeros_like(self._start, requires_grad=True)

    def install(self) -> None:
        """Into the norm, differentiable."""
        wanted = self._start + self._unit * self.change
        self._norm.weight = straight_through(wanted, wanted.detach().to(self._dtype).to(wanted.dtype))

    @torch.no_grad()
    def stored(self) -> Tensor:
        """As it stands now."""
        return (self._start + self._unit * self.change).to(self._dtype)


class TunableBlock:
    """`block` with the codes and scales of `solved`; its own weights are let go of.

    `stored` tells the dtype of a tensor in the file. Calling it is the block's forward, safe to be run again in
    backward (activation checkpointing).
    """

    def __init__(
        self,
        block: Block,
        solved: Solved,
        packings: Mapping[str, Packing],
        scale_dtype: torch.dtype,
        stored: Callable[[str], torch.dtype],
    ) -> None:
        self._block = block
        self._solved = solved
        device = block.input_norm.weight.device
        self.weights: dict[str, TunableWeight] = {}
        for linear in self._linears():
            for spec in linear.specs:
                grid = Grid(packings[spec.name], scale_dtype)
                self.weights[spec.name] = TunableWeight(solved.linears[spec.name], grid, device)
            linear.matmuls = ()
        norms = [block.input_norm, block.post_norm, block.q_norm, block.k_norm]
        names = [norm for norm in norms if norm is not None]
        self.gains = [TunableGain(norm, stored(f"{norm.name}.weight")) for norm in names]

    def _linears(self) -> list[Linear]:
        found = [getattr(self._block, product) for product in Block.INPUTS]
        return [linear for linear in found if isinstance(linear, Linear)]

    def __call__(self, x: Tensor, tables: tuple[Tensor, Tensor], masks: Mapping[int | None, Tensor | None]) -> Tensor:
        """x [windows, tokens, hidden] to the same, differentiable in x and in all that is tuned."""
        for gain in self.gains:
            gain.install()
        for linear in self._linears():
            weights = [self.weights[spec.name].weight() for spec in linear.specs]
            linear.matmuls = (DenseMatmul(torch.cat(weights)),)
        y: Tensor = self._block(x, tables, masks, None)
        for linear in self._linears():
            linear.matmuls = ()
        return y

    def stretches(self) -> list[Tensor]:
        """Changes of scales and gains, leaves."""
        return [weight.stretch for weight in self.weights.values()] + [gain.change for gain in self.gains]

    def solved(self) -> Solved:
        """As it stands now, described as before."""
        linears = {name: weight.quantized() for name, weight in self.weights.items()}
        changed = {**self._solved.changed, **{gain.name: gain.stored() for gain in self.gains}}
        return replace(self._solved, linears=linears, changed=changed)
