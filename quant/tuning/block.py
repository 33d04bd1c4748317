"""Trains codes, scales and gains of one block to reproduce the original block's output."""

# A solver rounds linear by linear; here the errors of a block's linears, with attention and activation between them,
# are weighed together (block-wise reconstruction, arXiv 2102.05426, with learned rounding, arXiv 2309.05516). With the
# moments G of the gradients of the model's loss by the block's output, an error e of the output costs e^T G e: what it
# does to the predictions, to second order. Without them every direction counts the same.

from dataclasses import replace

import torch
from torch import Tensor

from mycli.quant.layer_streaming import SideInputs
from mycli.quant.output.work_folder import Solved
from mycli.quant.planning.memory import BATCH
from mycli.quant.rounding.grid import Grid, Quantized, dequantize_codes
from mycli.quant.rounding.rows import ROW_DAMPING, split_rows
from mycli.quant.tuning.loop import train
from mycli.quant.tuning.parameters import TunableBlock
from mycli.runtime.layers.layer_part import PassContext

BLOCK_EPOCHS = 4
# Rates of Adam, in steps of the grid and in shares of a scale (docs/quality.md).
ROUNDING_RATE = 0.007
SCALE_RATE = 3e-3
PULL = 0.9  # how far levels start on their way to the neighbour: at 1 close calls would start at a tie


def preferred_shifts(target: Tensor, quantized: Quantized, grid: Grid, hessian: Tensor) -> Tensor:
    """The movement of each level, if it were free and all others fixed: fp32 [N, K], at most half a step x `PULL`."""
    # Training starts there, so only codes that were close calls move. 0 for inputs that were always zero.
    diagonal = hessian.diagonal()
    pull = (target.float() - dequantize_codes(quantized, grid)) @ hessian
    pull /= torch.where(diagonal > 0, diagonal, 1.0)
    group = target.shape[1] // quantized.scales.shape[1]
    return pull.div_(quantized.scales.float().repeat_interleave(group, 1)).clamp_(-0.5, 0.5).mul_(PULL)


def output_loss(error: Tensor, weights: Tensor | None) -> Tensor:
    """The mean of e^2 for an error e [windows, context, hidden], or of e^T G e for the blocks of G in `weights`."""
    if weights is None:
        return error.float().square().mean()
    rows = split_rows(error.float().flatten(0, -2).T)
    return (torch.bmm(weights, rows) * rows).sum() / error.numel()


def output_weights(moments: Tensor, width: int) -> Tensor | None:
    """Return G, damped, of mean diagonal 1 + `ROW_DAMPING`, for moments of `width` outputs; None without gradients."""
    mean = moments.diagonal(dim1=1, dim2=2).sum() / width
    if not bool(torch.isfinite(mean) & (mean > 0)):
        return None
    weights = moments / mean
    weights.diagonal(dim1=1, dim2=2).add_(ROW_DAMPING)
    return weights


def tune_block(
    block: TunableBlock,
    context: PassContext,
    stream: Tensor,
    target: Tensor,
    seed: int,
    device: torch.device,
    moments: Tensor | None = None,
    side_inputs: SideInputs | None = None,
) -> Solved:
    """Train `block` to turn `stream` into `target`; unchanged unless the error of the held-out windows falls.

    moments: of the gradients of the block's output (`LayerMoments.stream`). side_inputs: of the model that is tuned.
    """
    weights = None if moments is None else output_weights(moments, stream.shape[-1])

    def loss(windows: Tensor) -> Tensor:
        batch = context
        if side_inputs is not None:
            batch = side_inputs.joined(context, windows, side_inputs.shared_by_window(windows, block.spec))
        return output_loss(block(stream[windows].to(device), batch) - target[windows].to(device), weights)

    rates = [(block.shifts(), ROUNDING_RATE), (block.scale_changes(), SCALE_RATE)]
    gain = train(rates, loss, len(stream), BATCH, BLOCK_EPOCHS, seed, device)
    tuned = block.current() if gain.after < gain.before else block.start
    share = gain.after / gain.before if gain.before > 0 else 1.0
    return replace(tuned, layers=tuple(replace(layer, tuned=share) for layer in tuned.layers))
