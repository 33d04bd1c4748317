"""Codes, scales and gains of one block, trained so that it puts out what the original block does.

A solver rounds linear by linear; here the errors of a block's linears, its attention and activation between them, are
weighed together (block-wise reconstruction, arXiv 2102.05426, with rounding that learns, arXiv 2309.05516). Training
begins at the solver's codes, each drawn towards the neighbour that the solver nearly took, so that only codes that were
close calls move. Windows held apart choose the best iterate, and nothing changes unless their error falls.
Knows one block and the streams around it; nothing of the order of blocks.
"""

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from mycli.quant.layer_streaming import StreamedModel, restore
from mycli.quant.planning.memory import BATCH
from mycli.quant.rounding.grid import Grid, Quantized, dequantize_codes
from mycli.quant.tuning.loop import train
from mycli.quant.tuning.parameters import TunableBlock
from mycli.quant.work_folder import Solved
from mycli.runtime.quantization.scheme import Packing

BLOCK_EPOCHS = 4
# Of Adam, falling to zero along a half cosine: steps of the grid, and shares of a scale (docs/quality.md).
ROUNDING_RATE = 0.007
SCALE_RATE = 3e-3
PULL = 0.9  # of the way towards the neighbour a level begins, so that none begins at a tie


def preferred_shifts(target: Tensor, quantized: Quantized, grid: Grid, hessian: Tensor) -> Tensor:
    """How far each level would move if it were free and all others stayed: fp32 [N, K] steps, at most half of one,
    times `PULL`.

    target [N, K], hessian fp32 [K, K]; 0 for inputs that were always zero.
    """
    diagonal = hessian.diagonal()
    pull = (target.float() - dequantize_codes(quantized, grid)) @ hessian
    pull /= torch.where(diagonal > 0, diagonal, 1.0)
    group = target.shape[1] // quantized.scales.shape[1]
    return pull.div_(quantized.scales.float().repeat_interleave(group, 1)).clamp_(-0.5, 0.5).mul_(PULL)


def tune_block(
    model: StreamedModel,
    layer: int,
    solved: Solved,
    shifts: Mapping[str, Tensor],
    packings: Mapping[str, Packing],
    scale_dtype: torch.dtype,
    stream: Tensor,
    wanted: Tensor,
) -> Solved:
    """`solved`, trained to turn `stream`, which enters the layer, into `wanted`, both [windows, context, hidden].

    `shifts` by linear: `preferred_shifts`, which are taken over. Every layer's record says by how much the error of
    windows held apart fell.
    """
    context = model.context(stream.shape[1], exact=True)
    block = model.block(layer)
    restore(block, solved.changed)
    trained = TunableBlock(block, solved, packings, scale_dtype, model.stored_dtype, shifts)
    device = model.placement.device

    def loss(rows: Tensor) -> Tensor:
        return (trained(stream[rows].to(device), context) - wanted[rows].to(device)).float().square().mean()

    rates = [(trained.shifts(), ROUNDING_RATE), (trained.scale_changes(), SCALE_RATE)]
    gained = train(rates, loss, len(stream), BATCH, BLOCK_EPOCHS, layer, device)
    tuned = trained.solved() if gained.after < gained.before else solved
    share = gained.after / gained.before if gained.before > 0 else 1.0
    return replace(tuned, layers=tuple(replace(each, tuned=share) for each in tuned.layers))
