"""Training numbers of a quantized model on calibration windows. Windows held apart decide which iterate is kept.

Knows losses of windows; not what is trained, nor why.
"""

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from mycli.quant.calibration.hessian import HELD, rough_products
from mycli.quant.model_card import Tuning
from mycli.quant.planning.memory import BATCH
from mycli.quant.progress import ReportProgress, silent
from mycli.quant.tuning.adam import Adam
from mycli.runtime.device.system import trim_heap

Loss = Callable[[Tensor], Tensor]  # windows by their indices, int64 [count], to the mean over them

_CHECKS = 2  # of the windows held apart, in one pass over the others


def train(
    rates: Sequence[tuple[Sequence[Tensor], float]],
    loss: Loss,
    windows: int,
    at_once: int,
    epochs: int,
    seed: int,
    device: torch.device,
    progress: ReportProgress = silent,
) -> Tuning:
    """Adam on leaves at their rates, falling to zero along a half cosine; `at_once` windows through `loss` at a time.

    Leaves are left at their best iterate, or where they began if none was better. The same seed gives the same bits.
    """
    leaves = [leaf for group, _ in rates for leaf in group]
    apart = torch.arange(windows) % HELD == HELD - 1
    fitted, held = (~apart).nonzero().flatten(), apart.nonzero().flatten()

    @torch.no_grad()
    def held_out_loss() -> float:
        with rough_products(device):
            return sum(len(part) * float(loss(part)) for part in torch.split(held, at_once)) / len(held)

    trim_heap(mmap_threshold=4 << 20)  # what one step asks for, the next asks for again, in other sizes between
    before = best = held_out_loss()
    if not before > 0:
        return Tuning(before, before)
    kept = [leaf.detach().clone() for leaf in leaves]
    generator = torch.Generator().manual_seed(seed)
    batches = [
        batch
        for _ in range(epochs)
        for batch in torch.split(fitted[torch.randperm(len(fitted), generator=generator)], BATCH)
    ]
    optimizer = Adam(rates)
    between = max(1, len(batches) // (epochs * _CHECKS))
    for done, batch in enumerate(batches, start=1):
        with rough_products(device):
            for part in torch.split(batch, at_once):
                # Relative to where it began: the rates then mean the same everywhere.
                (loss(part) * (len(part) / len(batch) / before)).backward()  # type: ignore[no-untyped-call]  # torch's stub
        optimizer.step((1 + math.cos(math.pi * (done - 1) / len(batches))) / 2)
        progress("tuning", done, len(batches))
        if done % between == 0 or done == len(batches):
            found = held_out_loss()
            if found < best:
                best, kept = found, [leaf.detach().clone() for leaf in leaves]
    with torch.no_grad():
        for leaf, value in zip(leaves, kept, strict=True):
            leaf.copy_(value)
    trim_heap()
    return Tuning(before, best)
