"""AWQ (arXiv 2306.00978): inputs that are large get finer weights, by a scale that the operation before takes back.

For s > 0, W x = (W s)(x / s): rounding W s instead of W moves error from columns of large inputs to those of small
ones. What made x absorbs 1 / s: a norm's gain, the rows of v (one scale for all query heads that read a kv head, so
grouped queries stay exact), the rows of up. The block computes what it did, and nothing is left to do at run time.
Knows blocks; what rounds the weights afterwards is not its business.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from mycli.quant.rounding.grid import Grid, Quantized, dequantize_codes, find_scales, round_to_grid
from mycli.quant.transforms import TransformSpec
from mycli.runtime.layers.block import Block
from mycli.runtime.layers.linear import Linear
from mycli.runtime.layers.norm import RMSNorm
from mycli.runtime.models.part_spec import NormSpec, OutputRows

TRANSFORM = TransformSpec(help="scale important inputs up before rounding")

RATIOS = tuple(step / 10 for step in range(10))  # s = rms(x)^ratio; 0 changes nothing


def choose_scale(weight: Tensor, grid: Grid, hessian: Tensor, source: NormSpec | OutputRows) -> Tensor | None:
    """s fp32 [K] of least output error under rounding, None where no scale beats none.

    weight [N, K]: all linears of a product; hessian fp32 [K, K] of their input, which `source` makes.
    """
    power = hessian.diagonal()
    if isinstance(source, OutputRows):
        # Copies of one row must be scaled alike: the mean over them, back in the place of each.
        grouped = power.view(source.groups, source.copies, source.width)
        power = grouped.mean(1, keepdim=True).expand(grouped.shape).reshape(-1)
    used = power > 0
    if not bool(used.any()):
        return None
    # Inputs that calibration never used are scaled as the smallest that it did.
    rms = torch.where(used, power, power[used].min()).sqrt()
    wanted = weight.float()
    best, least = None, float("inf")
    for ratio in RATIOS:
        scale = rms.pow(ratio)
        scale = scale / (scale.max() * scale.min()).sqrt()
        scaled = wanted * scale
        scales = find_scales(scaled, grid, hessian.diagonal() / scale.square())
        lost = (dequantize_codes(Quantized(round_to_grid(scaled, scales, grid), scales), grid) / scale).sub_(wanted)
        error = float((lost @ hessian).mul_(lost).sum(dtype=torch.float64))
        if error < least:
            best, least = (scale if ratio else None), error
    return best


def fold(block: Block, product: str, scale: Tensor, stored: Callable[[str], torch.dtype]) -> dict[str, Tensor]:
    """Scale the columns of `product`, and unscale what makes them; `stored` tells the dtype of a tensor in the file.

    Returns the tensors that are stored as they are and have changed: a norm's gain, or biases. A gain is rounded first,
    and the columns follow what it became. Raises ValueError for a product whose inputs nothing makes one by one.
    """
    linear, source = block.products[product], block.spec.input_source(product)
    if source is None:
        raise ValueError(f"nothing makes the inputs of {product} one by one")
    if isinstance(source, NormSpec):
        norm = next(norm for norm in block.norms if norm.spec == source)
        scale, changed = _fold_norm(norm, scale, stored(norm.tensor))
    else:
        rows = scale.view(source.groups, source.copies, source.width)[:, 0].flatten()
        changed = _divide_rows(block.products[source.product], source.start, rows)
    linear.replace(linear.weight() * scale)
    return {name: tensor.to(stored(name)) for name, tensor in changed.items()}


def _fold_norm(norm: RMSNorm, scale: Tensor, dtype: torch.dtype) -> tuple[Tensor, dict[str, Tensor]]:
    offset = norm.spec.offset
    gain = norm.stored(norm.weight / scale, dtype).to(norm.weight.dtype) + offset
    # Where the gain is zero, or too small once divided, the input stays as it was.
    usable = (norm.weight != 0) & (gain != 0)
    scale = torch.where(usable, norm.weight / gain, 1.0)
    norm.weight = torch.where(usable, gain, norm.weight)
    return scale, {norm.tensor: norm.weight - offset}


def _divide_rows(linear: Linear, start: int, scale: Tensor) -> dict[str, Tensor]:
    """Divide the rows from `start` on by scale [rows], and their biases: those of each linear that changed, by name."""
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
        if first < end and start < after:
            changed[f"{spec.name}.bias"] = linear.bias[first:after]
        first = after
    return changed
