"""Trains tensors on calibration windows; held-out windows choose the iterate that is returned."""

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from mycli.quant.calibration.hessian import HELD_OUT_EVERY, reduced_precision
from mycli.quant.output.model_card import Tuning
from mycli.quant.planning.memory import BATCH
from mycli.quant.progress import ReportProgress, silent
from mycli.quant.tuning.adam import Adam
from mycli.runtime.device.system import trim_heap

Loss = Callable[[Tensor], Tensor]  # window indices int64 [count] to their mean loss

_CHECKS = 2  # of the held-out loss per epoch


def count_steps(windows: int, epochs: int) -> int:
    """Return the number of steps in which `train` moves its leaves."""
    return epochs * -(-(windows - windows // HELD_OUT_EVERY) // BATCH)


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
    """Run Adam on leaves at their rates, which fall to zero along a half cosine; `at_once` windows per call of `loss`.

    Leaves end at the iterate of least held-out loss, maybe the first. The same seed gives the same bits.
    """
    leaves = [leaf for group, _ in rates for leaf in group]
    is_held_out = torch.arange(windows) % HELD_OUT_EVERY == HELD_OUT_EVERY - 1
    fitted, held_out = (~is_held_out).nonzero().flatten(), is_held_out.nonzero().flatten()

    @torch.no_grad()
    def held_out_loss() -> float:
        with reduced_precision(device):
            return sum(len(part) * float(loss(part)) for part in torch.split(held_out, at_once)) / len(held_out)

    trim_heap(mmap_threshold=4 << 20)  # every step allocates the same sizes again, with other sizes in between
    before = best = held_out_loss()
    if not before > 0:
        return Tuning(before, before)
    best_leaves = [leaf.detach().clone() for leaf in leaves]
    generator = torch.Generator().manual_seed(seed)
    batches = [
        batch
        for _ in range(epochs)
        for batch in torch.split(fitted[torch.randperm(len(fitted), generator=generator)], BATCH)
    ]
    optimizer = Adam(rates)
    interval = max(1, len(batches) // (epochs * _CHECKS))
    for done, batch in enumerate(batches, start=1):
        with reduced_precision(device):
            for part in torch.split(batch, at_once):
                # Relative to the loss at the start, so that rates mean the same for every block.
                (loss(part) * (len(part) / len(batch) / before)).backward()  # type: ignore[no-untyped-call]  # torch's stub
        optimizer.step((1 + math.cos(math.pi * (done - 1) / len(batches))) / 2)
        progress("tuning", done, len(batches))
        if done % interval == 0 or done == len(batches):
            current = held_out_loss()
            if current < best:
                best, best_leaves = current, [leaf.detach().clone() for leaf in leaves]
    with torch.no_grad():
        for leaf, value in zip(leaves, best_leaves, strict=True):
            leaf.copy_(value)
    trim_heap()
    return Tuning(before, best)
