"""Balances the columns of a weight with what computes their inputs, where they are far out of balance.

Outlier channels of large models have a gain that is large where the weights behind it are small, or the reverse. A
group of weights has one scale, so a large column takes the precision of its neighbours and a small one is rounded to
zero. The factor between a gain (or the rows of another weight) and a column is arbitrary: it moves from one to the
other (cross-layer equalization, arXiv 1906.04721). Powers of two leave the model the same bit for bit.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from mycli.quant.transforms import awq
from mycli.runtime.layers.block import Block
from mycli.runtime.models.part_spec import NormSpec, OutputRows

# Where all factors of a product are smaller, it stays as it is: those of pico are between 0.62 and 1.45.
FACTOR = 8.0
_MOST = 1 << 12  # gains must stay in the range of fp16


def balance(block: Block, stored: Callable[[str], torch.dtype]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Fold factors into `block`; return the changed unquantized tensors by name, and the factors [K] by product."""
    changed: dict[str, Tensor] = {}
    scales: dict[str, Tensor] = {}
    for product, linear in block.products.items():
        source = block.spec.input_source(product)
        if source is None or (isinstance(source, NormSpec) and source.offset):  # rounding 1 + gain is not exact
            continue
        scale = column_scale(_source_size(block, source), _column_size(linear.weight()), source)
        if scale is not None:
            folded, scales[product] = awq.fold(block, product, scale, stored)
            changed |= folded
    return changed, scales


def _column_size(weight: Tensor) -> Tensor:
    # Medians: a row may be as far off as a column, and each must not count in the size of the other.
    size = weight.abs().float()
    rows = size.median(1, keepdim=True).values
    return (size / torch.where(rows > 0, rows, 1.0)).median(0).values


def _source_size(block: Block, source: NormSpec | OutputRows) -> Tensor:
    # The size [K] of the gain or of the row that each input is computed with.
    if isinstance(source, NormSpec):
        return next(norm for norm in block.norms if norm.spec == source).weight.float().abs()
    rows = block.products[source.product].weight().abs().median(1).values.float()
    stride = source.stride or source.width
    used = rows.as_strided((source.groups, 1, source.width), (stride, 0, 1), source.start)
    return used.expand(-1, source.copies, -1).reshape(-1)


def column_scale(source_size: Tensor, size: Tensor, source: NormSpec | OutputRows) -> Tensor | None:
    """Return factors fp32 [K], powers of two, that balance columns of `size` [K]; None if none is far from one."""
    if isinstance(source, OutputRows):  # all copies of a row have one factor
        grouped = size.view(source.groups, source.copies, source.width)
        size = grouped.square().mean(1, keepdim=True).sqrt().expand(grouped.shape).reshape(-1)
    used = (size > 0) & (source_size > 0)
    if not bool(used.any()):
        return None
    ratio = torch.where(used, source_size / size, 1.0).sqrt()
    ratio = torch.where(used, ratio / ratio[used].median(), 1.0)
    if bool(((ratio < FACTOR) & (ratio > 1 / FACTOR)).all()):
        return None
    return ratio.clamp(1 / _MOST, _MOST).log2().round().exp2()
