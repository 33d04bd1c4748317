"""Trains scales, gains and, optionally, codes of a whole quantized model to predict what the original predicts."""

# The loss is the mean KL(P || Q) over calibration tokens, P the original's distribution, Q the quantized model's (arXiv
# 2407.11062, with the original as teacher instead of the text). Codes and one block's weights are in memory.

import math
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
from mycli.quant.output.model_card import Tuning
from mycli.quant.output.work_folder import Solved
from mycli.quant.planning.memory import BATCH
from mycli.quant.progress import ReportProgress, silent
from mycli.quant.rounding.grid import Grid, dequantize_codes
from mycli.quant.tuning.loop import count_steps, train
from mycli.quant.tuning.parameters import TunableBlock, TunableGain
from mycli.runtime.device.system import trim_heap
from mycli.runtime.layers.linear import Linear
from mycli.runtime.layers.vocabulary import finish_logits
from mycli.runtime.quantization.scheme import Packing

EPOCHS = 4
RATE = 1e-3  # of Adam, in shares of a scale
# A level moves by at most its rate in every step, in random directions as far as the root of the number of steps. With
# this factor that distance is below the half step that changes a code, so that codes fit the model, not the calibration
# windows (docs/quality.md).
CODE_NOISE = 0.3


def code_rate(windows: int) -> float:
    """Return the rate of the levels' first step when `windows` calibration windows train the codes."""
    return CODE_NOISE / math.sqrt(count_steps(windows, EPOCHS))


def can_change_codes(windows: int) -> bool:
    """Return whether a level that moves in one direction all the time goes farther than half a step of the grid."""
    # Rates fall along a half cosine, so their mean is half of the first.
    return code_rate(windows) * count_steps(windows, EPOCHS) / 2 > 0.5


@dataclass(frozen=True)
class Tuned:
    """The blocks, changed only if the KL of the held-out windows fell."""

    blocks: list[Solved]
    kl: Tuning


class _Recomputed(Function):
    """Activation checkpointing (arXiv 1604.06174): saves only the input and computes the function again in backward."""

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
    """Return `run(x)`, computed again in backward; x must require a gradient."""
    y: Tensor = _Recomputed.apply(run, x)  # type: ignore[no-untyped-call]  # torch's stub
    return y


class _Student:
    def __init__(
        self,
        model: StreamedModel,
        blocks: Sequence[Solved],
        packings: Mapping[str, Packing],
        scale_dtype: torch.dtype,
        codes: bool,
    ) -> None:
        self._model = model
        self.blocks: list[TunableBlock] = []
        for index in range(model.config.layers):
            block = model.block(index)
            restore(block, blocks[index].changed)
            linears = blocks[index].linears
            shifts = {name: torch.zeros(linear.codes.shape) for name, linear in linears.items()} if codes else None
            self.blocks.append(TunableBlock(block, blocks[index], packings, scale_dtype, model.stored_dtype, shifts))
        self.norm = model.final_norm()
        named = self.norm.spec.name is not None
        self.gain = TunableGain(self.norm, model.stored_dtype(self.norm.tensor)) if named else None
        self._head: Linear = model.head
        name = model.config.head().name
        if name in packings:
            head = dequantize_codes(blocks[-1].linears[name], Grid(packings[name], scale_dtype))
            self._head = Linear((model.config.head(),))
            self._head.replace(head.to(model.placement.device, model.placement.dtype))
            self._head.bias = model.head.bias

    def leaves(self) -> list[Tensor]:
        gains = [] if self.gain is None else [self.gain.change]
        return [leaf for block in self.blocks for leaf in block.scale_changes()] + gains

    def shifts(self) -> list[Tensor]:
        return [shift for block in self.blocks for shift in block.shifts()]

    def log_probabilities(self, tokens: Tensor) -> Tensor:
        context = self._model.context(tokens.shape[1], exact=True)
        x = self._model.embed(tokens).to(self._model.placement.device).requires_grad_(torch.is_grad_enabled())
        for block in self.blocks:
            x = recomputed(partial(block, context=context), x)
        if self.gain is not None:
            self.gain.install()
        return finish_logits(self._head(self.norm(x)), self._model.config).log_softmax(-1)


def tune_model(
    model: StreamedModel,
    blocks: Sequence[Solved],
    packings: Mapping[str, Packing],
    scale_dtype: torch.dtype,
    windows: Tensor,
    seed: int,
    progress: ReportProgress = silent,
    *,
    codes: bool,
) -> Tuned:
    """Tune `blocks` of `model` (the original) and of a quantized head; one more may be returned, for the final norm.

    windows int64 [samples, seq], at least `HELD_OUT_EVERY`; codes: those of the blocks are trained too. The same seed
    gives the same bytes.
    """
    trim_heap(mmap_threshold=4 << 20)
    student = _Student(model, blocks, packings, scale_dtype, codes)
    target = model.hidden(windows)

    def loss(rows: Tensor) -> Tensor:
        with torch.no_grad():
            teacher = model.logits(target[rows]).log_softmax(-1)
        ours = student.log_probabilities(windows[rows])
        return functional.kl_div(ours, teacher, reduction="none", log_target=True).sum(-1).mean()

    at_once = min(BATCH, max(1, LOGITS_AT_ONCE // (windows.shape[1] * model.config.vocab_size)))
    device = model.placement.device
    rates = [(student.leaves(), RATE), (student.shifts(), code_rate(len(windows)))]
    gain = train(rates, loss, len(windows), at_once, EPOCHS, seed, device, progress)
    if gain.after == gain.before:
        return Tuned(list(blocks), gain)
    tuned = [block.current() for block in student.blocks]
    last = blocks[-1] if len(blocks) > len(tuned) else Solved({}, {}, ())
    gains = {} if student.gain is None else {student.gain.name: student.gain.stored()}
    tuned.append(replace(last, changed={**last.changed, **gains}))
    return Tuned(tuned, gain)
