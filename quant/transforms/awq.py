"""AWQ (arXiv 2306.00978): inputs that are large get finer weights, by a scale that the operation before takes back.

For s > 0, W x = (W s)(x / s): rounding W s instead of W moves error from columns of large inputs to those of small
ones. What made x absorbs 1 / s: a norm's gain, the rows of v (one scale for all query heads that read a kv head, so
grouped queries stay exact), the rows of up. The block computes what it did, and nothing is left to do at run time.
Knows blocks; what rounds the weights afterwards is not its business.
"""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from mycli.quant.rounding.grid import Grid, Quantized, dequantize, find_scales, round_to_grid
from mycli.runtime.layers.linear import DenseMatmul, Linear
from mycli.runtime.layers.transformer import Block, RMSNorm
from mycli.runtime.models.config import ModelConfig

RATIOS = tuple(step / 10 for step in range(10))  # s = rms(x)^ratio; 0 changes nothing


def choose_scale(weight: Tensor, grid: Grid, hessian: Tensor, config: ModelConfig, product: str) -> Tensor | None:
    """s fp32 [K] of least output error under rounding, None where no scale beats none.

    weight [N, K]: all linears of `product`; hessian fp32 [K, K] of their input.
    """
    power = hessian.diagonal()
    if product == "o":
        power = _per_kv_head(power, config)
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
        lost = (dequantize(Quantized(round_to_grid(scaled, scales, grid), scales), grid) / scale).sub_(wanted)
        error = float((lost @ hessian).mul_(lost).sum(dtype=torch.float64))
        if error < least:
            best, least = (scale if ratio else None), error
    return best


def _per_kv_head(values: Tensor, config: ModelConfig) -> Tensor:
    """The mean over the query heads that share a kv head, back in the place of each."""
    shape = config.kv_heads, config.heads // config.kv_heads, config.head_dim
    grouped = values.view(shape)
    return grouped.mean(1, keepdim=True).expand(shape).reshape(-1)


def fold(block: Block, product: str, scale: Tensor, stored: Callable[[str], torch.dtype]) -> dict[str, Tensor]:
    """Scale the columns of `product`, and unscale what comes before; `stored` tells the dtype of a tensor in the file.

    Returns the tensors that are stored as they are and have changed: a norm's gain, or a bias. A gain is rounded first,
    and the columns follow what it became.
    """
    config = block.config
    linear = block.product(product)
    if product in ("qkv", "gate_up"):
        norm = block.input_norm if product == "qkv" else block.post_norm
        scale, changed = _fold_norm(norm, scale, stored(f"{norm.name}.weight"))
    elif product == "o":
        shape = config.kv_heads, -1, config.head_dim
        before = block.product("qkv")
        changed = _divide_rows(before, before.out_features - config.kv_heads * config.head_dim, scale.view(shape)[:, 0])
    else:
        before = block.product("gate_up")
        changed = _divide_rows(before, before.out_features // 2, scale)
    linear.matmuls = (DenseMatmul(linear.matmuls[0].dequantize() * scale),)
    return {name: tensor.to(stored(name)) for name, tensor in changed.items()}


def restore(block: Block, changed: Mapping[str, Tensor]) -> None:
    """Put gains and biases by name, of `fold` or of tuning, into a block as it was read."""
    for norm in block.norms():
        if (gain := changed.get(f"{norm.name}.weight")) is not None:
            norm.weight = gain.to(norm.weight)
    for product in Block.INPUTS:
        linear, start = block.product(product), 0
        for spec in linear.specs:
            end = start + spec.out_features
            if (bias := changed.get(f"{spec.name}.bias")) is not None and linear.bias is not None:
                linear.bias[start:end] = bias.to(linear.bias)
            start = end


def _fold_norm(norm: RMSNorm, scale: Tensor, dtype: torch.dtype) -> tuple[Tensor, dict[str, Tensor]]:
    gain = (norm.weight / scale).to(dtype).to(norm.weight.dtype)
    # Where the gain is zero, or too small once divided, the input stays as it was.
    usable = (norm.weight != 0) & (gain != 0)
    scale = torch.where(usable, norm.weight / gain, 1.0)
    norm.weight = torch.where(usable, gain, norm.weight)
    return scale, {f"{norm.name}.weight": norm.weight}


def _divide_rows(linear: Linear, start: int, scale: Tensor) -> dict[str, Tensor]:
    """Divide the rows from `start` on, which are those of the last of its linears, and their bias."""
    weight = linear.matmuls[0].dequantize().clone()
    weight[start:] /= scale.reshape(-1, 1)
    linear.matmuls = (DenseMatmul(weight),)
    if linear.bias is None:
        return {}
    linear.bias = linear.bias.clone()
    linear.bias[start:] /= scale.flatten()
    return {f"{linear.specs[-1].name}.bias": linear.bias[start:]}
