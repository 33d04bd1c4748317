"""Scale search, rounding and columns in turn, in plain torch: for a GPU, and where native code declines."""

import torch
from torch import Tensor

from mycli.runtime.errors import ModelError
from mycli.runtime.kernels.cpu.rounding import ScaleSearch

SEARCH_WEIGHTS = 1 << 20  # per chunk of rows: bounds the memory of a search and keeps two cores busy
_WIDER_DTYPE = "the checkpoint's dtype does not hold its own weights; convert it to bfloat16 first"


def grouped(weight: Tensor, groups: int) -> Tensor:
    """Return weight [N, K] as fp32 [N, groups, K / groups]; a view if it is fp32."""
    return weight.float().reshape(weight.shape[0], groups, -1)


def require_representable(extreme: Tensor, dtype: torch.dtype, remedy: str = _WIDER_DTYPE) -> None:
    if not torch.isfinite(extreme).all():
        raise ModelError("the weight holds NaN or infinity", "the model is damaged; it cannot be quantized")
    limit = torch.finfo(dtype).max
    if extreme.numel() and extreme.abs().max() > limit:
        raise ModelError(
            f"a weight of {float(extreme.abs().max()):g} is beyond the range of {dtype} scales ({limit:g})",
            remedy,
        )


def storable(scales: Tensor, dtype: torch.dtype, smallest: float, largest: float) -> Tensor:
    """Round fp32 scales to the values that `dtype` stores, magnitudes clamped to [smallest, largest]."""
    magnitude = scales.abs().clamp(smallest, largest)
    return torch.where(scales < 0, -magnitude, magnitude).to(dtype).float()


def round_weight(
    weight: Tensor,
    scales: Tensor,
    bits: int,
    search: ScaleSearch | None = None,
    importance: Tensor | None = None,
    codes: Tensor | None = None,
) -> None:
    """Fill scales [N, groups] if there is a `search`, then codes uint8 [N, K] if given, as `native_round` does."""
    # Operation by operation the arithmetic of quantize_cpu.cpp, so the bits are the same.
    half, groups = 1 << (bits - 1), scales.shape[1]
    importance = None if importance is None else importance.view(1, groups, -1)
    rows = max(1, SEARCH_WEIGHTS // weight.shape[1])
    for start in range(0, len(weight), rows):
        chunk = slice(start, start + rows)
        part = grouped(weight[chunk], groups)
        if search is not None:
            scales[chunk] = _search_scales(part, search, scales.dtype, half, importance)
        if codes is not None:
            codes[chunk] = _levels(part, scales[chunk].float(), half).add_(half).flatten(1)


def _levels(part: Tensor, scales: Tensor, half: int, out: Tensor | None = None) -> Tensor:
    return torch.div(part, scales.unsqueeze(-1), out=out).round_().clamp_(-half, half - 1)


def _search_scales(
    part: Tensor, search: ScaleSearch, dtype: torch.dtype, half: int, importance: Tensor | None
) -> Tensor:
    extreme = part.gather(-1, part.abs().argmax(-1, keepdim=True)).squeeze(-1)
    require_representable(extreme, dtype)
    bounds = dtype, search.smallest, search.largest
    if search.absmax:
        return storable(extreme.abs() / search.divisor, *bounds)
    buffer = torch.empty_like(part)

    def error(scales: Tensor) -> Tensor:
        lost = _levels(part, scales, half, buffer).mul_(scales.unsqueeze(-1)).sub_(part).square_()
        return (lost if importance is None else lost.mul_(importance)).sum(-1)

    best = storable(extreme / search.divisor, *bounds)
    least = error(best)

    def consider(candidate: Tensor) -> None:
        nonlocal best, least
        lost = error(candidate)
        better = lost < least
        best, least = torch.where(better, candidate, best), torch.where(better, lost, least)

    for factor in search.factors:
        consider(storable(extreme * factor, *bounds))
    for _ in range(search.refits):
        # The scales of least error for the codes that `best` gives.
        levels = _levels(part, best, half, buffer)
        weighted = levels if importance is None else levels * importance
        norms = (weighted * levels).sum(-1)
        consider(storable(torch.where(norms > 0, (weighted * part).sum(-1) / norms, best), *bounds))
    return best


def solve_columns(
    residual: Tensor, matrix: Tensor, scales: Tensor, codes: Tensor | None, half: int
) -> tuple[Tensor, Tensor]:
    new_codes = torch.empty(residual.shape, dtype=torch.uint8)
    shifts = torch.zeros_like(residual)
    for index in range(len(residual)):
        value = torch.addmv(residual[index], shifts[:index].T, matrix[:index, index], alpha=-1)
        scale, pivot = scales[index], matrix[index, index]
        if codes is None:
            level = (value / scale).round_().clamp_(-half, half - 1)
            torch.div(value.sub_(level * scale), pivot, out=shifts[index])
        else:
            old = codes[index].float().sub_(half)
            level = value.div_(pivot).div_(scale).add_(old).round_().clamp_(-half, half - 1)
            torch.mul(level - old, scale, out=shifts[index])
        new_codes[index] = level + half
    return new_codes, shifts
