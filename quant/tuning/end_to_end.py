"""Scales and gains of a whole quantized model, trained so that it predicts what the original does; codes stay.

Least mean KL(P || Q) over calibration tokens, P the original's distribution, Q the quantized model's (arXiv 2407.11062
trains scales end to end, on a text; here the original is the teacher). Windows held apart choose the best iterate, and
nothing changes unless their KL falls. Of the model, codes and one block's weights are in memory: blocks are computed
again in backward. Knows the grid through `quant.tuning.parameters`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn import functional

from mycli.quant.evaluate import LOGITS_AT_ONCE
from mycli.quant.layer_streaming import StreamedModel, restore
from mycli.quant.model_card import Tuning
from mycli.quant.planning.memory import BATCH
from mycli.quant.progress import ReportProgress, silent
from mycli.quant.rounding.grid import Grid, dequantize_codes
from mycli.quant.tuning.loop import train
from mycli.quant.tuning.parameters import TunableBlock, TunableGain
from mycli.quant.work_folder import Solved
from mycli.runtime.device.system import trim_heap
from mycli.runtime.layers.linear import Linear
from mycli.runtime.layers.vocabulary import finish_logits
from mycli.runtime.quantization.scheme import Packing

SCALE_EPOCHS = 4
RATE = 1e-3  # of Adam, in shares of a scale; falls to zero along a half cosine


@dataclass(frozen=True)
class Tuned:
    """The blocks, changed only where the KL of the windows held apart fell."""

    blocks: list[Solved]
    kl: Tuning


class _Recomputed(Function):
    """A function's output, of which nothing is kept but the input: backward computes it again (arXiv 1604.06174)."""

    @staticmethod
    def forward(ctx: Any, run: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        ctx.run = run
        ctx.save_for_backward(x)
        return run(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, Tensor | None]:
        (x,) = ctx.saved_tensors
        x = x.detach().requires_grad_()
        with torch.enable_grad():
            y = ctx.run(x)
        torch.autograd.backward(y, gradients)
        return None, x.grad


def recomputed(run: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """`run(x)`; its leaves and x, which must require a gradient, get theirs, at the price of a second pass."""
    y: Tensor = _Recomputed.apply(run, x)  # type: ignore[no-untyped-call]  # torch's stub
    return y


class _Student:
    """The quantized model, differentiable in its scales and gains."""

    def __init__(
        self, model: StreamedModel, blocks: Sequence[Solved], packings: Mapping[str, Packing], scale_dtype: torch.dtype
    ) -> None:
        self._model = model
        self.blocks: list[TunableBlock] = []
        for index in range(model.config.layers):
            block = model.block(index)
            restore(block, blocks[index].changed)
            self.blocks.append(TunableBlock(block, blocks[index], packings, scale_dtype, model.stored_dtype))
        self.norm = model.final_norm()
        self.gain = TunableGain(self.norm, model.stored_dtype(self.norm.tensor))
        self._head: Linear = model.head
        name = model.config.head().name
        if name in packings:
            head = dequantize_codes(blocks[-1].linears[name], Grid(packings[name], scale_dtype))
            self._head = Linear((model.config.head(),))
            self._head.replace(head.to(model.placement.device, model.placement.dtype))

    def leaves(self) -> list[Tensor]:
        return [leaf for block in self.blocks for leaf in block.scale_changes()] + [self.gain.change]

    def hidden(self, tokens: Tensor) -> Tensor:
        """[windows, context, hidden] after the last norm."""
        context = self._model.context(tokens.shape[1], exact=True)
        x = self._model.embed(tokens).to(self._model.placement.device).requires_grad_(torch.is_grad_enabled())
        for block in self.blocks:
            x = recomputed(partial(block, context=context), x)
        self.gain.install()
        y: Tensor = self.norm(x)
        return y

    def logs(self, hidden: Tensor) -> Tensor:
        return finish_logits(self._head(hidden), self._model.config).log_softmax(-1)


def tune_scales(
    model: StreamedModel,
    blocks: Sequence[Solved],
    packings: Mapping[str, Packing],
    scale_dtype: torch.dtype,
    windows: Tensor,
    seed: int,
    progress: ReportProgress = silent,
) -> Tuned:
    """`blocks` of `model` (the original) in order, and one for the head if that is quantized; windows int64
    [samples, seq], at least `HELD` of them.

    One more block may come back, for the last norm. The same seed gives the same bytes.
    """
    trim_heap(mmap_threshold=4 << 20)
    student = _Student(model, blocks, packings, scale_dtype)
    target = model.hidden(windows)

    def loss(rows: Tensor) -> Tensor:
        return _kl(model, student, target[rows], windows[rows])

    at_once = min(BATCH, max(1, LOGITS_AT_ONCE // (windows.shape[1] * model.config.vocab_size)))
    device = model.placement.device
    gained = train([(student.leaves(), RATE)], loss, len(windows), at_once, SCALE_EPOCHS, seed, device, progress)
    if gained.after == gained.before:
        return Tuned(list(blocks), gained)
    tuned = [block.solved() for block in student.blocks]
    last = blocks[-1] if len(blocks) > len(tuned) else Solved({}, {}, ())
    tuned.append(replace(last, changed={**last.changed, student.gain.name: student.gain.stored()}))
    return Tuned(tuned, gained)


def _kl(model: StreamedModel, student: _Student, target: Tensor, tokens: Tensor) -> Tensor:
    """Mean over tokens; target [windows, context, hidden] is the original's stream after its last block."""
    with torch.no_grad():
        theirs = model.logits(target).log_softmax(-1)
    ours = student.logs(student.hidden(tokens))
    return functional.kl_div(ours, theirs, reduction="none", log_target=True).sum(-1).mean()
