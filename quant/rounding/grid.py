"""The symmetric grid that every solver rounds to, and the search for its scales.

A group of weights w becomes codes u and one scale s, w ~ (u - Q) s with Q = 2^(bits-1), u in [0, 2Q). The grid has one
step more below zero than above, so s may be negative: then the longer side lies where the group needs it. Scales are
rounded to the dtype they are stored in *before* anything is rounded with them. Knows one matrix at a time; nothing of
models, files or activations, except that a solver may hand in how much each input column matters.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from mycli.runtime.errors import ModelError
from mycli.runtime.kernels.cpu.rounding import ScaleSearch, native_round
from mycli.runtime.quantization.codes import code_values
from mycli.runtime.quantization.nested_scales import NestedScales
from mycli.runtime.quantization.scheme import Packing

Search = Literal["absmax", "mse"]

# Where the largest weight of a group may land, as multiples of Q (above 1 it is clipped), and how many scales of each
# sign are tried. With weighted columns the largest weight may matter little, so far more clipping can pay. A search ten
# times as dense lowers the error by less than 0.3 % at 4, 3 and 2 bits (on Gaussian and heavy-tailed groups).
_PLAIN = {8: (0.98, 1.06, 16), 4: (0.85, 1.45, 16), 3: (0.8, 1.7, 16), 2: (0.7, 2.7, 16)}
_WEIGHTED = {8: (0.98, 1.3, 32), 4: (0.85, 3.0, 32), 3: (0.8, 4.0, 32), 2: (0.6, 6.0, 32)}
_REFITS = 2  # least-squares refinements of the best candidate
SEARCH_WEIGHTS = 1 << 20  # searched: memory is bounded, and few enough operations to keep two cores busy
_SMALLEST = {torch.float16: 2.0**-24, torch.bfloat16: 2.0**-126, torch.float32: 2.0**-126}


@dataclass(frozen=True)
class Grid:
    """What a solver may choose from. `search`: scales from the largest weight, or by least (weighted) squared error."""

    packing: Packing
    scale_dtype: torch.dtype
    search: Search = "mse"

    @property
    def half(self) -> int:
        """Q: codes are u = q + Q for q in [-Q, Q - 1]."""
        return 1 << (self.packing.bits - 1)


@dataclass(frozen=True)
class Quantized:
    """A solved matrix: codes uint8 [N, K] below 2^bits, scales [N, groups] in their storage dtype.

    Where the scales are quantized too, `nested` is what is stored of them, those of all rows in one row.
    """

    codes: Tensor
    scales: Tensor
    nested: NestedScales | None = None

    @property
    def stored_scales(self) -> Tensor | NestedScales:
        """What the file holds of them."""
        return self.scales if self.nested is None else self.nested


def grouped(weight: Tensor, groups: int) -> Tensor:
    """[N, K] to fp32 [N, groups, K / groups]; a view where `weight` is fp32 already."""
    return weight.float().reshape(weight.shape[0], groups, -1)


def dequantize_codes(quantized: Quantized, grid: Grid) -> Tensor:
    """(u - Q) s as fp32 [N, K], exact: what the codes mean before a kernel rounds the product to its dtype.

    Of a table its entry times s, rounded once.
    """
    levels = code_values(quantized.codes, grid.packing, torch.float32)
    return (grouped(levels, quantized.scales.shape[1]) * quantized.scales.float().unsqueeze(-1)).flatten(1)


def find_scales(weight: Tensor, grid: Grid, importance: Tensor | None = None) -> Tensor:
    """Scales [N, groups] in `grid.scale_dtype` for weight [N, K].

    "absmax": 2 max|w| / (2^bits - 1), positive, as GPTQ and compressed-tensors have it. "mse": the signed scale of
    least squared error, each column weighted by `importance` [K] (the diagonal of a Hessian) where given. A group of
    zeros gets the smallest positive scale. Raises ModelError for weights that are not finite, or too large for the
    dtype of the scales.
    """
    groups = grid.packing.groups(weight.shape[1])
    scales = torch.empty(weight.shape[0], groups, dtype=grid.scale_dtype, device=weight.device)
    importance = None if importance is None else importance.float().contiguous()
    if native_round(weight, scales, grid.packing.bits, _search(grid, importance is not None), importance) is None:
        return scales
    weights = None if importance is None else importance.view(1, groups, -1)
    rows = max(1, SEARCH_WEIGHTS // weight.shape[1])
    for start in range(0, weight.shape[0], rows):
        part = grouped(weight[start : start + rows], groups)
        extreme = part.gather(-1, part.abs().argmax(-1, keepdim=True)).squeeze(-1)
        require_representable(extreme, grid.scale_dtype)
        if grid.search == "absmax":
            found = storable(extreme.abs() / (grid.half - 0.5), grid)
        else:
            found = _least_squares(part, extreme, grid, weights)
        scales[start : start + rows] = found
    return scales


def round_to_grid(weight: Tensor, scales: Tensor, grid: Grid) -> Tensor:
    """The nearest codes uint8 [N, K] of weight [N, K] for given scales [N, groups]; ties go to the even level."""
    codes = torch.empty(weight.shape, dtype=torch.uint8, device=weight.device)
    if native_round(weight, scales, grid.packing.bits, codes=codes) is None:
        return codes
    rows = max(1, SEARCH_WEIGHTS // weight.shape[1])
    for start in range(0, weight.shape[0], rows):
        part = grouped(weight[start : start + rows], scales.shape[1])
        levels = _levels(part, scales[start : start + rows].float(), grid.half)
        codes[start : start + rows] = levels.add_(grid.half).flatten(1)
    return codes


def round_to_nearest(weight: Tensor, grid: Grid, importance: Tensor | None = None) -> tuple[Quantized, float]:
    """weight [N, K] with the scales of `find_scales`, and its `relative_error`, on a CPU all in one pass.

    Raises as `find_scales` does.
    """
    rows, columns = weight.shape
    scales = torch.empty(rows, grid.packing.groups(columns), dtype=grid.scale_dtype, device=weight.device)
    codes = torch.empty(weight.shape, dtype=torch.uint8, device=weight.device)
    sums = torch.empty(rows, 2, dtype=torch.float64, device=weight.device)
    importance = None if importance is None else importance.float().contiguous()
    search = _search(grid, importance is not None)
    if native_round(weight, scales, grid.packing.bits, search, importance, codes, sums) is None:
        lost, total = sums.sum(0).tolist()
        return Quantized(codes, scales), lost / total if total else 0.0
    scales = find_scales(weight, grid, importance)
    found = Quantized(round_to_grid(weight, scales, grid), scales)
    return found, relative_error(weight, found, grid)


def _targets(grid: Grid, weighted: bool) -> list[float]:
    """Where the largest weight of a group may land; first where "absmax" puts it, so that no search loses to it."""
    low, high, count = (_WEIGHTED if weighted else _PLAIN)[grid.packing.bits]
    steps = [grid.half * low * (high / low) ** (step / (count - 1)) for step in range(count)]
    return [grid.half - 0.5, *steps]


def _factors(targets: Sequence[float]) -> list[float]:
    return [sign / target for sign in (1, -1) for target in targets]


def _largest_scale(grid: Grid) -> float:
    """Of which -Q times is finite: a power of two below the dtype's maximum, so exact."""
    return torch.finfo(grid.scale_dtype).max / grid.half


def _search(grid: Grid, weighted: bool) -> ScaleSearch:
    """`find_scales` in numbers."""
    targets = _targets(grid, weighted)
    bounds = _SMALLEST[grid.scale_dtype], _largest_scale(grid), torch.finfo(grid.scale_dtype).max
    if grid.search == "absmax":
        return ScaleSearch(targets[0], *bounds, absmax=True)
    return ScaleSearch(-targets[0], *bounds, factors=_factors(targets), refits=_REFITS)


def require_representable(extreme: Tensor, dtype: torch.dtype) -> None:
    """Raise ModelError unless the largest weights of groups are finite and within the range of scales of `dtype`."""
    if not torch.isfinite(extreme).all():
        raise ModelError("the weight holds NaN or infinity", "the model is damaged; it cannot be quantized")
    limit = torch.finfo(dtype).max
    if extreme.numel() and extreme.abs().max() > limit:
        raise ModelError(
            f"a weight of {float(extreme.abs().max()):g} is beyond the range of {dtype} scales ({limit:g})",
            "the checkpoint's dtype does not hold its own weights; convert it to bfloat16 first",
        )


def storable(scales: Tensor, grid: Grid) -> Tensor:
    """fp32 scales as the file will hold them: never zero, and -Q s never overflows."""
    magnitude = scales.abs().clamp(_SMALLEST[grid.scale_dtype], _largest_scale(grid))
    return torch.where(scales < 0, -magnitude, magnitude).to(grid.scale_dtype).float()


def _levels(part: Tensor, scales: Tensor, half: int, out: Tensor | None = None) -> Tensor:
    """Integers q in [-Q, Q - 1] as fp32, nearest to part / scales; part [N, G, S], scales fp32 [N, G]."""
    return torch.div(part, scales.unsqueeze(-1), out=out).round_().clamp_(-half, half - 1)


def _error(part: Tensor, scales: Tensor, half: int, weights: Tensor | None, buffer: Tensor) -> Tensor:
    """(Weighted) squared error of each group [N, G]."""
    difference = _levels(part, scales, half, buffer).mul_(scales.unsqueeze(-1)).sub_(part).square_()
    return (difference if weights is None else difference.mul_(weights)).sum(-1)


def _refit(part: Tensor, scales: Tensor, half: int, weights: Tensor | None, buffer: Tensor) -> Tensor:
    """The scales of least error for the codes that `scales` gives."""
    levels = _levels(part, scales, half, buffer)
    weighted = levels if weights is None else levels * weights
    norms = (weighted * levels).sum(-1)
    return torch.where(norms > 0, (weighted * part).sum(-1) / norms, scales)


def _least_squares(part: Tensor, extreme: Tensor, grid: Grid, weights: Tensor | None) -> Tensor:
    """The best of a row of candidates of both signs, then refitted; fp32 [N, G]. part [N, G, S], extreme [N, G]."""
    half, buffer = grid.half, torch.empty_like(part)
    targets = _targets(grid, weights is not None)
    best = storable(extreme / -targets[0], grid)
    least = _error(part, best, half, weights, buffer)

    def consider(candidate: Tensor) -> None:
        nonlocal best, least
        error = _error(part, candidate, half, weights, buffer)
        better = error < least
        best, least = torch.where(better, candidate, best), torch.where(better, error, least)

    for factor in _factors(targets):
        consider(storable(extreme * factor, grid))
    for _ in range(_REFITS):
        consider(storable(_refit(part, best, half, weights, buffer), grid))
    return best


def relative_error(weight: Tensor, quantized: Quantized, grid: Grid) -> float:
    """||W - W'||^2 / ||W||^2 of the whole matrix; 0 for a matrix of zeros."""
    lost = total = 0.0
    rows = max(1, SEARCH_WEIGHTS // weight.shape[1])
    for start in range(0, weight.shape[0], rows):
        end = start + rows
        part = weight[start:end].float()
        restored = dequantize_codes(Quantized(quantized.codes[start:end], quantized.scales[start:end]), grid)
        lost += float((restored - part).square().sum(dtype=torch.float64))
        total += float(part.square().sum(dtype=torch.float64))
    return lost / total if total else 0.0
