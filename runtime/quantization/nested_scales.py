"""Scales that are quantized themselves: QLoRA's double quantization (arXiv 2305.14314).

A scale is offset + table[code] * outer: a byte for each scale, one fp32 `outer` for `NESTED` of them, and one `offset`,
their mean, for all. The table is the signed dynamic one of 8-bit optimizers (arXiv 2110.02861). Knows neither what
the scales multiply nor files.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

NESTED = 256  # scales that share one of theirs
_DECADES = 7  # that the table covers; each further from zero has twice the values of the one before


def dynamic_table() -> Tensor:
    """The 256 values, fp32 in ascending order: zero, 127 of each sign, and 1.

    A decade [10^(d-7), 10^(d-6)] is cut into 2^d intervals of which the middles are taken, with both signs: bit for
    bit the table that bitsandbytes stores.
    """
    values = [0.0, 1.0]
    for decade in range(_DECADES):
        edges = torch.linspace(0.1, 1, 2**decade + 1)
        power = 10.0 ** (decade + 1 - _DECADES)
        for sign in (1, -1):
            values += ((sign * power) * ((edges[:-1] + edges[1:]) / 2)).tolist()
    return torch.tensor(sorted(values))


@dataclass(frozen=True)
class NestedScales:
    """codes uint8 [scales], outer fp32 [ceil(scales / NESTED)], and the offset, an fp32 number."""

    codes: Tensor
    outer: Tensor
    offset: float

    def values(self, table: Tensor) -> Tensor:
        """The scales, fp32 [scales], by `table` fp32 [256]."""
        outer = self.outer.repeat_interleave(NESTED)[: self.codes.shape[0]]
        return table[self.codes.int()] * outer + self.offset


def nest(scales: Tensor) -> NestedScales:
    """Finite scales fp32 [scales], at least one, as the nearest codes of the table, on the CPU.

    Each run of `NESTED` has the largest distance from the mean as its `outer`; a run of equal scales the smallest
    number, so that nothing is divided by zero.
    """
    given = scales.float().cpu()
    offset = given.mean()
    runs = torch.nn.functional.pad(given - offset, (0, -len(given) % NESTED)).view(-1, NESTED)
    outer = runs.abs().amax(1).clamp(min=torch.finfo(torch.float32).tiny)
    table = dynamic_table()
    codes = torch.bucketize(runs / outer.unsqueeze(1), (table[:-1] + table[1:]) / 2)
    return NestedScales(codes.to(torch.uint8).flatten()[: len(given)], outer, float(offset))
