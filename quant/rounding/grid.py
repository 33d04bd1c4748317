"""The symmetric grid that every solver rounds to, and the search for its scales."""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from mycli.quant.rounding import plain
from mycli.quant.rounding.plain import SEARCH_WEIGHTS, grouped
from mycli.runtime.kernels.cpu.rounding import ScaleSearch, native_round
from mycli.runtime.quantization.codes import code_values
from mycli.runtime.quantization.nested_scales import NestedScales
from mycli.runtime.quantization.scheme import Packing

Search = Literal["absmax", "mse"]

BLOCK = 128  # columns that one launch solves in turn (`columns.solve_block`); the native code allows no more

# (low, high, count) by bits: where the largest weight of a group may land, as multiples of Q (above 1 it is clipped),
# and how many scales of each sign are tried. With weighted columns the largest weight may matter little, so far more
# clipping can pay. A search ten times as dense lowers the error by less than 0.3 % at 4, 3 and 2 bits (on Gaussian and
# heavy-tailed groups).
_PLAIN = {8: (0.98, 1.06, 16), 4: (0.85, 1.45, 16), 3: (0.8, 1.7, 16), 2: (0.7, 2.7, 16)}
_WEIGHTED = {8: (0.98, 1.3, 32), 4: (0.85, 3.0, 32), 3: (0.8, 4.0, 32), 2: (0.6, 6.0, 32)}
_REFITS = 2  # least-squares refinements of the best candidate
_SMALLEST = {torch.float16: 2.0**-24, torch.bfloat16: 2.0**-126, torch.float32: 2.0**-126}


# A group of weights w becomes codes u and one scale s: w ~ (u - Q) s with Q = 2^(bits-1), u in [0, 2Q). Scales are
# rounded to the dtype they are stored in before anything is rounded with them.
@dataclass(frozen=True)
class Grid:
    """The values that a solver may choose. `search`: scales from the largest weight, or of least squared error."""

    packing: Packing
    scale_dtype: torch.dtype
    search: Search = "mse"

    @property
    def half(self) -> int:
        return 1 << (self.packing.bits - 1)  # Q

    @property
    def _bounds(self) -> tuple[float, float]:
        # -Q times the largest scale must be finite: a power of two below the dtype's maximum, so exact.
        return _SMALLEST[self.scale_dtype], torch.finfo(self.scale_dtype).max / self.half

    def storable(self, scales: Tensor) -> Tensor:
        """Round fp32 scales to stored values: never zero, and -Q s is finite."""
        return plain.storable(scales, self.scale_dtype, *self._bounds)

    def scale_search(self, weighted: bool) -> ScaleSearch:
        limit = torch.finfo(self.scale_dtype).max
        absmax = self.half - 0.5
        if self.search == "absmax":
            return ScaleSearch(absmax, *self._bounds, limit, absmax=True)
        low, high, count = (_WEIGHTED if weighted else _PLAIN)[self.packing.bits]
        steps = [self.half * low * (high / low) ** (step / (count - 1)) for step in range(count)]
        # The grid has one step more below zero than above, so s may be negative: the longer side then lies where the
        # group needs it. The target of "absmax" is tried too, so no search loses to it.
        factors = [sign / target for sign in (1, -1) for target in (absmax, *steps)]
        return ScaleSearch(-absmax, *self._bounds, limit, factors=factors, refits=_REFITS)


@dataclass(frozen=True)
class Quantized:
    """A quantized matrix: codes uint8 [N, K] below 2^bits, scales [N, groups] in their storage dtype."""

    codes: Tensor
    scales: Tensor
    nested: NestedScales | None = None  # all scales as they are stored, if they are quantized too

    @property
    def stored_scales(self) -> Tensor | NestedScales:
        return self.scales if self.nested is None else self.nested


def dequantize_codes(quantized: Quantized, grid: Grid) -> Tensor:
    """Return weights fp32 [N, K]: (u - Q) s, exact; for codes of a table its entry times s, rounded once."""
    levels = code_values(quantized.codes, grid.packing, torch.float32)
    return (grouped(levels, quantized.scales.shape[1]) * quantized.scales.float().unsqueeze(-1)).flatten(1)


def find_scales(weight: Tensor, grid: Grid, importance: Tensor | None = None) -> Tensor:
    """Return scales [N, groups] for weight [N, K]; `importance` [K], a Hessian's diagonal, weights errors of columns.

    Raises ModelError for weights that are not finite, or too large for the dtype of the scales.
    """
    # "absmax": 2 max|w| / (2^bits - 1), positive, as GPTQ and compressed-tensors define it. "mse": the signed scale of
    # least squared error. A group of zeros gets the smallest positive scale.
    scales = _new_scales(weight, grid)
    task = weight, scales, grid.packing.bits, grid.scale_search(importance is not None), _as_fp32(importance)
    if native_round(*task) is not None:
        plain.round_weight(*task)
    return scales


def round_to_grid(weight: Tensor, scales: Tensor, grid: Grid) -> Tensor:
    """Return the nearest codes uint8 [N, K] of weight [N, K] for scales [N, groups]; ties go to the even level."""
    codes = torch.empty(weight.shape, dtype=torch.uint8, device=weight.device)
    if native_round(weight, scales, grid.packing.bits, codes=codes) is not None:
        plain.round_weight(weight, scales, grid.packing.bits, codes=codes)
    return codes


def round_to_nearest(weight: Tensor, grid: Grid, importance: Tensor | None = None) -> tuple[Quantized, float]:
    """Round weight [N, K] with the scales of `find_scales`, in one pass; return it with its `relative_error`."""
    scales = _new_scales(weight, grid)
    codes = torch.empty(weight.shape, dtype=torch.uint8, device=weight.device)
    sums = torch.empty(len(weight), 2, dtype=torch.float64, device=weight.device)
    search = grid.scale_search(importance is not None)
    task = weight, scales, grid.packing.bits, search, _as_fp32(importance), codes
    quantized = Quantized(codes, scales)
    if native_round(*task, sums) is None:
        lost, total = sums.sum(0).tolist()
        return quantized, lost / total if total else 0.0
    plain.round_weight(*task)
    return quantized, relative_error(weight, quantized, grid)


def _new_scales(weight: Tensor, grid: Grid) -> Tensor:
    groups = grid.packing.groups(weight.shape[1])
    return torch.empty(len(weight), groups, dtype=grid.scale_dtype, device=weight.device)


def _as_fp32(importance: Tensor | None) -> Tensor | None:
    return None if importance is None else importance.float().contiguous()


def relative_error(weight: Tensor, quantized: Quantized, grid: Grid) -> float:
    """Return ||W - W'||^2 / ||W||^2 of the whole matrix; 0 for a matrix of zeros."""
    lost = total = 0.0
    rows = max(1, SEARCH_WEIGHTS // weight.shape[1])
    for start in range(0, weight.shape[0], rows):
        end = start + rows
        part = weight[start:end].float()
        restored = dequantize_codes(Quantized(quantized.codes[start:end], quantized.scales[start:end]), grid)
        lost += float((restored - part).square().sum(dtype=torch.float64))
        total += float(part.square().sum(dtype=torch.float64))
    return lost / total if total else 0.0
