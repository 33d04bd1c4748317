"""Quantized scales: QLoRA's double quantization (arXiv 2305.14314)."""

from dataclasses import dataclass

import torch
from torch import Tensor

# A scale is offset + table[code] * outer: one byte per scale, one fp32 `outer` per `NESTED` scales, and one `offset`,
# their mean, for all. The table is the signed dynamic one of 8-bit optimizers (arXiv 2110.02861).
NESTED = 256  # scales that share an outer scale
_DECADES = 7  # of the table; each decade has twice as many values as the next one towards zero


def dynamic_table() -> Tensor:
    """Return bitsandbytes' table bit for bit: 256 values, fp32 in ascending order: zero, 127 of each sign, and 1."""
    # The values are the middles of 2^d intervals of each decade [10^(d-7), 10^(d-6)], with both signs.
    values = [0.0, 1.0]
    for decade in range(_DECADES):
        edges = torch.linspace(0.1, 1, 2**decade + 1)
        power = 10.0 ** (decade + 1 - _DECADES)
        for sign in (1, -1):
            values += ((sign * power) * ((edges[:-1] + edges[1:]) / 2)).tolist()
    return torch.tensor(sorted(values))


@dataclass(frozen=True)
class NestedScales:
    codes: Tensor  # uint8 [scales]
    outer: Tensor  # fp32 [ceil(scales / NESTED)]
    offset: float  # an fp32 number

    def values(self, table: Tensor) -> Tensor:
        outer = self.outer.repeat_interleave(NESTED)[: self.codes.shape[0]]
        return table[self.codes.int()] * outer + self.offset


def nest(scales: Tensor) -> NestedScales:
    """Quantize finite scales fp32 [scales], at least one, to the nearest table entries, on the CPU."""
    exact = scales.float().cpu()
    offset = exact.mean()
    runs = torch.nn.functional.pad(exact - offset, (0, -len(exact) % NESTED)).view(-1, NESTED)
    # The outer scale is the largest distance from the mean; the clamp avoids dividing by zero where all scales are
    # equal.
    outer = runs.abs().amax(1).clamp(min=torch.finfo(torch.float32).tiny)
    table = dynamic_table()
    codes = torch.bucketize(runs / outer.unsqueeze(1), (table[:-1] + table[1:]) / 2)
    return NestedScales(codes.to(torch.uint8).flatten()[: len(exact)], outer, float(offset))
