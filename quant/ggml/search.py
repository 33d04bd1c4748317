"""Searches the scales of ggml blocks with the least squared error, weighted by a Hessian's diagonal.

Scales come first, because all levels of a block depend on them; `solve` then chooses the levels.
"""

import torch
from torch import Tensor

from mycli.quant.ggml.block_type import BlockType, Multiples, SolvedRows
from mycli.quant.rounding.plain import SEARCH_WEIGHTS, require_representable

_REFITS = 3  # least-squares refinements of the best candidate
# Candidates for types with minima: where the range of levels ends, as shares of the largest and smallest weight. Below
# 1 the extreme weights are clipped and all others get a finer grid.
_ENDS = (1.08, 1.0, 0.9, 0.8, 0.65, 0.5)
# Candidates for the multiple of the largest scale of a super-block, as shares of the largest multiple.
_FACTORS = torch.linspace(0.7, 1.06, 19)
_STEPS = (-1, 0, 1)  # neighbours of the rounded multiple that are tried


def search_scales(weight: Tensor, kind: BlockType, importance: Tensor) -> SolvedRows:
    """Return factors, multiples and nearest levels for weight fp32 [N, K]; `importance` [K] weighs errors by column.

    Raises ModelError for weights that are not finite or too large for fp16 factors.
    """
    require_representable(weight, torch.float16, "GGUF stores float16 scales; choose a format that keeps bfloat16 ones")
    step = max(1, SEARCH_WEIGHTS // weight.shape[1])
    parts = [_search_rows(weight[start : start + step], kind, importance) for start in range(0, len(weight), step)]
    minima = [part.minima for part in parts if part.minima is not None]
    return SolvedRows(
        torch.cat([part.levels for part in parts], 1),
        torch.cat([part.factors for part in parts], 2),
        torch.cat([part.multiples for part in parts], 1),
        torch.cat(minima, 1) if minima else None,
    )


def _search_rows(weight: Tensor, kind: BlockType, importance: Tensor) -> SolvedRows:
    rows, columns = weight.shape
    groups = weight.view(rows, -1, kind.group)
    # A column without inputs in calibration still counts a little: other texts may use it.
    weights = (importance + 1e-4 * importance.mean() + torch.finfo(torch.float32).tiny).view(1, -1, kind.group)
    scales, minima = _affine(groups, weights, kind) if kind.minima else (_symmetric(groups, weights, kind), None)
    blocks = columns // kind.stored.block
    levels = _levels(groups, scales, minima, weights, kind)
    factor, multiples = _nest(scales, (weights * levels.square()).sum(-1), kind.scales, kind.unit, blocks)
    if minima is None:
        factors, low = factor.unsqueeze(0), None
    else:
        assert kind.minima is not None
        second, low = _nest(minima, weights.sum(-1).expand_as(minima), kind.minima, 1.0, blocks)
        factors = torch.stack([factor, second])
    multiples, low, levels = _adjust(groups, weights, factors, multiples, low, kind)
    return SolvedRows(
        levels.flatten(1).T.contiguous().to(torch.int8),
        factors.transpose(1, 2).contiguous(),
        multiples.T.contiguous(),
        None if low is None else low.T.contiguous(),
    )


def _levels(groups: Tensor, scales: Tensor, minima: Tensor | None, weights: Tensor, kind: BlockType) -> Tensor:
    shifted = groups if minima is None else groups + minima.unsqueeze(-1)
    scaled = (shifted / scales.unsqueeze(-1)).nan_to_num(0.0, 0.0, 0.0)
    return kind.levels().nearest(scaled, weights)


def _error(
    groups: Tensor, scales: Tensor, minima: Tensor | None, weights: Tensor, kind: BlockType
) -> tuple[Tensor, Tensor]:
    levels = _levels(groups, scales, minima, weights, kind)
    lost = levels * scales.unsqueeze(-1) - groups
    if minima is not None:
        lost -= minima.unsqueeze(-1)
    return lost.square_().mul_(weights).sum(-1), levels


def _symmetric(groups: Tensor, weights: Tensor, kind: BlockType) -> Tensor:
    levels = kind.levels()
    extreme = groups.gather(-1, groups.abs().argmax(-1, keepdim=True)).squeeze(-1)
    if not levels.signed:
        extreme = extreme.abs()
    low, high, count = levels.range
    shares = [low * (high / low) ** (step / (count - 1)) for step in range(count)]
    best = extreme / levels.largest
    least, chosen = _error(groups, best, None, weights, kind)
    # Asymmetric levels reach further on one side, so a negative scale may fit better. It takes a negative multiple, or
    # a type whose groups have factors of their own.
    signs = (1, -1) if levels.signed and (kind.scales.first < 0 or kind.scales.count == 1) else (1,)

    def consider(candidate: Tensor) -> None:
        nonlocal best, least, chosen
        error, rounded = _error(groups, candidate, None, weights, kind)
        better = error < least
        best, least = torch.where(better, candidate, best), torch.where(better, error, least)
        chosen = torch.where(better.unsqueeze(-1), rounded, chosen)

    for share in shares:
        for sign in signs:
            consider(extreme * (sign * share / levels.largest))
    for _ in range(_REFITS):
        norms = (weights * chosen.square()).sum(-1)
        consider(torch.where(norms > 0, (weights * chosen * groups).sum(-1) / norms, best))
    return best


def _affine(groups: Tensor, weights: Tensor, kind: BlockType) -> tuple[Tensor, Tensor]:
    # weight = scale * level - minimum, with levels from zero. Multiples of minima have no sign, so the minimum is at
    # least zero there; in types with a minimum per group (Q5_1) it may have any sign.
    top = kind.levels().largest
    high = groups.amax(-1)
    low = groups.amin(-1)
    if kind.nests_minima:
        low = low.clamp(max=0)
        high = torch.maximum(high, low + 1e-12)
    best = (high - low) / top, -low
    least, levels = _error(groups, *best, weights, kind)

    def consider(scale: Tensor, minimum: Tensor) -> None:
        nonlocal best, least, levels
        error, rounded = _error(groups, scale, minimum, weights, kind)
        better = (error < least) & (scale > 0)
        best = torch.where(better, scale, best[0]), torch.where(better, minimum, best[1])
        least = torch.where(better, error, least)
        levels = torch.where(better.unsqueeze(-1), rounded, levels)

    middle = torch.zeros_like(low) if kind.nests_minima else (low + high) / 2
    for above in _ENDS:
        for below in _ENDS:
            start, end = middle + (low - middle) * below, middle + (high - middle) * above
            consider((end - start) / top, -start)
    for _ in range(_REFITS):
        consider(*_least_squares(groups, levels, weights, kind))
    return best


def _least_squares(groups: Tensor, levels: Tensor, weights: Tensor, kind: BlockType) -> tuple[Tensor, Tensor]:
    total = weights.sum(-1).expand(groups.shape[:2])
    first, second = (weights * levels).sum(-1), (weights * levels.square()).sum(-1)
    values, product = (weights * groups).sum(-1), (weights * levels * groups).sum(-1)
    determinant = total * second - first.square()
    solvable = determinant > 1e-6 * total * second
    scale = torch.where(solvable, (total * product - first * values) / determinant, product / second)
    minimum = torch.where(solvable, (first * product - second * values) / determinant, 0.0)
    if kind.nests_minima:
        alone = minimum < 0
        scale, minimum = torch.where(alone, product / second, scale), minimum.clamp(min=0)
    return scale.nan_to_num(0.0, 0.0, 0.0), minimum.nan_to_num(0.0, 0.0, 0.0)


def _nest(values: Tensor, curvature: Tensor, multiples: Multiples, unit: float, blocks: int) -> tuple[Tensor, Tensor]:
    """Return factors [N, blocks] and multiples [N, G] for values [N, G]; `curvature` weighs their squared errors."""
    parts, weights = values.view(len(values), blocks, -1), curvature.reshape(len(values), blocks, -1)
    if multiples.count == 1:
        return (parts[..., 0] / unit).to(torch.float16).float(), torch.full_like(values, multiples.first)
    extreme = parts.gather(-1, parts.abs().argmax(-1, keepdim=True))
    largest = max(abs(multiples.first), multiples.last)
    best = torch.zeros_like(extreme)
    least = torch.full_like(extreme, torch.inf)
    for share in _FACTORS.tolist():
        for sign in (1, -1) if multiples.first < 0 else (1,):
            factor = (extreme * (sign / (share * largest * unit))).to(torch.float16).float()
            rounded = multiples.nearest(parts / (factor * unit))
            error = (weights * (rounded * factor * unit - parts).square()).sum(-1, keepdim=True)
            better = error < least
            best, least = torch.where(better, factor, best), torch.where(better, error, least)
    return best.squeeze(-1), multiples.nearest(parts / (best * unit)).view_as(values)


def _adjust(
    groups: Tensor, weights: Tensor, factors: Tensor, multiples: Tensor, low: Tensor | None, kind: BlockType
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Return the best multiples among the rounded ones and their neighbours, and the levels nearest to them."""
    # Searched again, because `_nest` rounded the scales: with another scale other levels are nearest.
    per_block = multiples.shape[1] // factors.shape[2]
    units = factors[0].repeat_interleave(per_block, 1) * kind.unit
    second = None if low is None else factors[1].repeat_interleave(per_block, 1)
    best, best_low = multiples, low
    least, levels = torch.full_like(multiples, torch.inf), torch.zeros_like(groups)
    for step in _STEPS if kind.scales.count > 1 else (0,):
        for low_step in _STEPS if kind.nests_minima else (0,):
            candidate = (multiples + step * kind.scales.step).clamp(kind.scales.first, kind.scales.last)
            minima, shifted = None, None
            if low is not None and second is not None and kind.minima is not None:
                shifted = (low + low_step).clamp(kind.minima.first, kind.minima.last)
                minima = second * shifted
            error, rounded = _error(groups, units * candidate, minima, weights, kind)
            better = error < least
            least, best = torch.where(better, error, least), torch.where(better, candidate, best)
            if shifted is not None and best_low is not None:
                best_low = torch.where(better, shifted, best_low)
            levels = torch.where(better.unsqueeze(-1), rounded, levels)
    return best, best_low, levels
