"""Balances columns of a weight that are far larger or smaller than the others of the same matrix.

Such columns belong to the outlier channels of large models: a gain that is large where the weights behind it are small,
or the reverse. A group of weights has one scale, so a large column takes the precision of its neighbours and a small
one is rounded to zero. A factor moves into the operation that computes the input, as with AWQ, but needs no data and is
a power of two: the model stays the same bit for bit.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from mycli.quant.transforms import awq
from mycli.runtime.layers.block import Block
from mycli.runtime.models.part_spec import NormSpec, OutputRows

# Columns within this factor of the median keep their size: those of pico differ by 5.6 at most.
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
        scale = column_scale(linear.weight(), source)
        if scale is not None:
            changed |= awq.fold(block, product, scale, stored)
            scales[product] = scale
    return changed, scales


def column_scale(weight: Tensor, source: NormSpec | OutputRows) -> Tensor | None:
    """Factors fp32 [K], powers of two, that bring outlying columns of weight [N, K] to the size of the median one."""
    size = weight.float().square().mean(0)
    if isinstance(source, OutputRows):  # all copies of a row have one factor
        grouped = size.view(source.groups, source.copies, source.width)
        size = grouped.mean(1, keepdim=True).expand(grouped.shape).reshape(-1)
    used = size > 0
    if not bool(used.any()):
        return None
    ratio = torch.where(used, size[used].median() / size, 1.0).sqrt()
    outlying = (ratio > FACTOR) | (ratio < 1 / FACTOR)
    if not bool(outlying.any()):
        return None
    return torch.where(outlying, ratio.clamp(1 / _MOST, _MOST).log2().round().exp2(), 1.0)
