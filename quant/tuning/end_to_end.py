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
from mycli.runtime.cache.kv_cache import Stored
from mycli.runtime.device.system import trim_heap
from mycli.runtime.layers.layer_part import PassContext
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
    def forward(ctx: Any, run: Callable[..., tuple[Tensor, ...]], *inputs: Tensor) -> tuple[Tensor, ...]:
        ctx.run = run
        ctx.save_for_backward(*inputs)
        return run(*inputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        inputs = [saved.detach().requires_grad_() for saved in ctx.saved_tensors]
        with torch.enable_grad():
            outputs = ctx.run(*inputs)
        torch.autograd.backward(outputs, gradients)
        return None, *(leaf.grad for leaf in inputs)


def recomputed(run: Callable[..., tuple[Tensor, ...]], *inputs: Tensor) -> tuple[Tensor, ...]:
    """Return `run(*inputs)`, computed again in backward; the inputs must require gradients."""
    outputs: tuple[Tensor, ...] = _Recomputed.apply(run, *inputs)  # type: ignore[no-untyped-call]  # torch's stub
    return outputs


class _Student:
    def __init__(
        self,
        model: StreamedModel,
        blocks: Sequence[Solved],
        packings: Mapping[str, Packing],
        scale_dtype: torch.dtype,
        windows: Tensor,
        codes: bool,
    ) -> None:
        self._model, self._windows = model, windows
        self._side_inputs = model.side_inputs(windows)
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

    def log_probabilities(self, rows: Tensor) -> Tensor:
        """Return the log-probabilities fp32 [count, context, vocabulary] for the windows of indices int64 [count]."""
        model, tokens = self._model, self._windows[rows]
        context = model.context(tokens.shape[1], exact=True)
        x = model.embed(tokens).to(model.placement.device).requires_grad_(torch.is_grad_enabled())
        shared: dict[int, Sequence[Tensor]] = {}  # keys and values by the layer that computes them
        for block in self.blocks:
            source = block.spec.kv_source
            run = partial(self._through, block, context, rows)
            x, *written = recomputed(run, x, *(() if source is None else shared[source]))
            shared[block.spec.index] = written
        if self.gain is not None:
            self.gain.install()
        left = x if model.streams is None else model.streams.leave(x)
        return finish_logits(self._head(self.norm(left)), model.config).log_softmax(-1)

    def _through(
        self, block: TunableBlock, context: PassContext, rows: Tensor, x: Tensor, *read: Tensor
    ) -> tuple[Tensor, ...]:
        # The output of a block, and the keys and values that later layers read.
        if self._side_inputs is None:
            return (block(x, context),)
        shared: dict[int, tuple[Stored, Stored]] = {}
        if block.spec.kv_source is not None:
            key, value = read
            shared[block.spec.kv_source] = Stored(key), Stored(value)
        y = block(x, self._side_inputs.joined(context, rows, shared))
        return y, *(part.data for part in shared.get(block.spec.index, ()))


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
    student = _Student(model, blocks, packings, scale_dtype, windows, codes)
    target = model.hidden(windows)

    def loss(rows: Tensor) -> Tensor:
        with torch.no_grad():
            teacher = model.logits(target[rows]).log_softmax(-1)
        ours = student.log_probabilities(rows)
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
