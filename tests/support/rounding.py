"""Builds problems for solvers, and a block of pico-draft as a solver returns it."""

import torch
from torch import Tensor

from mycli.quant.layer_streaming import StreamedModel
from mycli.quant.output.work_folder import Solved
from mycli.quant.rounding.grid import Grid, Quantized, dequantize_codes
from mycli.quant.solvers import rtn
from mycli.runtime.layers.block import Block
from mycli.runtime.quantization.scheme import Packing

GRID = Grid(Packing(3, 64), torch.bfloat16)


def problem(rows: int, columns: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Return heavy-tailed weights [rows, columns], and the fp32 Hessian of correlated inputs of very different size."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(rows, columns, generator=generator) * torch.randn(rows, 1, generator=generator).exp()
    weight *= 1 + torch.rand(rows, columns, generator=generator).pow(20) * 5
    mixing = torch.randn(columns, columns, generator=generator) * torch.logspace(0, -2, columns)
    spread = torch.logspace(-1, 1, columns)[torch.randperm(columns, generator=generator)]
    inputs = torch.randn(4 * columns, columns, generator=generator) @ mixing * spread
    return weight, inputs.T @ inputs


def output_error(weight: Tensor, quantized: Quantized, grid: Grid, hessian: Tensor) -> float:
    """Return the squared output error, summed over the inputs of `hessian`."""
    lost = dequantize_codes(quantized, grid).double() - weight.double()
    return float((lost @ hessian.double() * lost).sum())


def rounded(model: StreamedModel, layer: int) -> tuple[dict[str, Packing], Solved]:
    """Return a block rounded to nearest."""
    specs = [spec for group in model.config.layer(layer).products().values() for spec in group]
    weights = model.weights(specs)
    linears: dict[str, Quantized] = {name: rtn.solve(weight, GRID).quantized for name, weight in weights.items()}
    return dict.fromkeys(linears, GRID.packing), Solved(linears, {}, ())


def stored(model: StreamedModel, solved: Solved) -> Block:
    """Return the block of layer 1 as loaded from disk."""
    block = model.block(1)
    for linear in block.products.values():
        linear.replace(torch.cat([dequantize_codes(solved.linears[s.name], GRID) for s in linear.specs]))
    for norm in block.norms:
        norm.weight = solved.changed.get(norm.tensor, norm.weight).float()
    return block
