"""AWQ (arXiv 2306.00978): scales columns of large inputs up before rounding; the operation before them absorbs it."""

# For s > 0, W x = (W s)(x / s): rounding W s instead of W moves error from columns of large inputs to those of small
# ones. The source of x absorbs 1 / s: a norm's gain, the rows of v (one scale for all query heads of a kv head), the
# rows of up. The block computes the same function, at no cost at run time.

from collections.abc import Callable

import torch
from torch import Tensor

from mycli.quant.rounding.error_compensation import output_size
from mycli.quant.rounding.grid import Grid, Quantized, dequantize_codes, find_scales, round_to_grid
from mycli.quant.rounding.rows import row_scale
from mycli.quant.transforms import TransformSpec
from mycli.runtime.layers.block import Block
from mycli.runtime.layers.linear import Linear
from mycli.runtime.layers.norm import RMSNorm
from mycli.runtime.models.part_spec import NormSpec, OutputRows

TRANSFORM = TransformSpec(help="scale important inputs up before rounding")

RATIOS = tuple(step / 10 for step in range(10))  # s = rms(x)^ratio; 0 changes nothing


def choose_scale(weight: Tensor, grid: Grid, hessian: Tensor, source: NormSpec | OutputRows) -> Tensor | None:
    """See `TransformModule.choose_scale`: the scale of least output error after rounding, None if none helps."""
    power = hessian.diagonal()
    if isinstance(source, OutputRows):
        # All copies of a row have one scale: grouped queries stay exact.
        grouped = power.view(source.groups, source.copies, source.width)
        power = grouped.mean(1, keepdim=True).expand(grouped.shape).reshape(-1)
    used = power > 0
    if not bool(used.any()):
        return None
    # Inputs that calibration never used get the scale of the smallest used one.
    rms = torch.where(used, power, power[used].min()).sqrt()
    target = weight.float()
    best, least = None, float("inf")
    for ratio in RATIOS:
        scale = rms.pow(ratio)
        scale = scale / (scale.max() * scale.min()).sqrt()
        scaled = target * scale
        scales = find_scales(scaled, grid, hessian.diagonal() / scale.square())
        lost = (dequantize_codes(Quantized(round_to_grid(scaled, scales, grid), scales), grid) / scale).sub_(target)
        error = output_size(lost, hessian)
        if error < least:
            best, least = (scale if ratio else None), error
    return best


def fold(
    block: Block, product: str, scale: Tensor, stored: Callable[[str], torch.dtype]
) -> tuple[dict[str, Tensor], Tensor]:
    """See `TransformModule.fold`; changes a norm's gain, or biases."""
    linear, source = block.products[product], block.spec.input_source(product)
    if source is None:
        raise ValueError(f"the inputs of {product} are not computed one by one")
    if isinstance(source, NormSpec):
        norm = next(norm for norm in block.norms if norm.spec == source)
        scale, changed = _fold_norm(norm, scale, stored(norm.tensor))
    else:
        changed = _divide_rows(block.products[source.product], source.start, row_scale(source, scale))
    linear.replace(linear.weight() * scale)
    return {name: tensor.to(stored(name)) for name, tensor in changed.items()}, scale


def _fold_norm(norm: RMSNorm, scale: Tensor, dtype: torch.dtype) -> tuple[Tensor, dict[str, Tensor]]:
    # The gain is rounded to its stored dtype first; the columns follow the rounded value.
    gain = norm.gain(norm.stored(norm.weight / scale, dtype).to(norm.weight.dtype))
    # An input whose gain is zero, or becomes zero, is not scaled.
    usable = (norm.weight != 0) & (gain != 0)
    scale = torch.where(usable, norm.weight / gain, 1.0)
    norm.weight = torch.where(usable, gain, norm.weight)
    changed = {norm.tensor: norm.stored(norm.weight, dtype)}
    if norm.bias is not None:
        norm.bias = norm.bias / scale
        changed[norm.spec.bias_tensor] = norm.bias
    return scale, changed


def _divide_rows(linear: Linear, start: int, scale: Tensor) -> dict[str, Tensor]:
    end = start + len(scale)
    weight = linear.weight().clone()
    weight[start:end] /= scale.unsqueeze(1)
    linear.replace(weight)
    if linear.bias is None:
        return {}
    linear.bias = linear.bias.clone()
    linear.bias[start:end] /= scale
    changed, first = {}, 0
    for spec in linear.specs:
        after = first + spec.out_features
        if spec.bias and first < end and start < after:
            changed[f"{spec.name}.bias"] = linear.bias[first:after]
        first = after
    return changed
