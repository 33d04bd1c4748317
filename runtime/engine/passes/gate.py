"""The gate of a step: compares its layers, its logits and its replays with the plain pass before it is used."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from mycli.runtime.cache.batch import Batch, Chunk
from mycli.runtime.cache.kv_cache import PACKED, KVCache, cache_dtype
from mycli.runtime.engine.passes.device_sequences import advance_by_drafts
from mycli.runtime.engine.passes.graphs import Capture, Launches, LayeredStep, Step, StepInput
from mycli.runtime.errors import Declined
from mycli.runtime.kernels.paged import KEY_BLOCK
from mycli.runtime.layers.block import Block
from mycli.runtime.layers.feed_forward import Experts
from mycli.runtime.layers.rope import Rope
from mycli.runtime.layers.transformer import HiddenStateHook, Transformer, pass_context
from mycli.runtime.models.config import KvDtype
from mycli.runtime.models.experts_spec import ExpertsSpec
from mycli.runtime.models.latent_spec import LatentAttentionSpec
from mycli.runtime.models.part_spec import AttentionSpec

# A layer reads the plain pass's own input, so that differences do not add up over layers and a wrong layer has a name.
# What it adds to the stream may differ by this. pico's layers differ by 0.2 to 1.0 % between bf16 and fp32.
LAYER_TOLERANCE = {torch.float16: 0.01, torch.bfloat16: 0.02}
# Keys and values of the new tokens, by the dtype of the cache: a code may round to its neighbour.
_CACHE_TOLERANCE = {torch.int8: 0.02, PACKED: 0.1}
# Relative difference of logits. They are compared for what no layer has: the embedding, the head, the operands between
# layers, the replay. Where every layer of a deep model is right they differ all the same: rounding adds up. Twice what
# rounding the stream to a neighbour after every layer changes is allowed, about the difference between bf16 and fp32.
TOLERANCE = 0.03
_ROUNDING_SHARE = 2
# In a mixture of experts rounding can change which of two equally scored experts is chosen. Between bf16 and fp32,
# logits of random mixtures differ by up to 0.14 over 16 tokens and 0.26 for one; unrelated logits differ by 1.4.
ROUTED_TOLERANCE = 0.4
_CHECK_CONTEXT = 1024  # long enough that attention splits the keys into several parts
_CHECK_PREFIX = 300  # tokens before the compared ones, in more than one part
_ROUNDED_TOKENS = 4  # whose logits say what rounding changes


@torch.inference_mode()
def tolerance(model: Transformer, kv: KvDtype = "auto") -> float:
    """Return the relative difference of logits up to which a pass counts as right, at least what rounding causes."""
    if any(isinstance(spec.mlp, ExpertsSpec) for spec in model.config.layer_specs):
        return ROUTED_TOLERANCE
    context = min(_CHECK_CONTEXT, model.config.max_context)
    rope = Rope(model.config, context, model.device, model.dtype)
    rounding = _Compared(model, kv, rope, context, _ROUNDED_TOKENS).rounding(_ROUNDED_TOKENS)
    return min(max(TOLERANCE, _ROUNDING_SHARE * rounding), ROUTED_TOLERANCE)


def _relative_error(actual: Tensor, expected: Tensor) -> float:
    return float((actual.float() - expected.float()).norm() / expected.float().norm())


def compare_logits(logits: Tensor, expected: Tensor, most: float) -> Declined | None:
    error = _relative_error(logits, expected)
    return None if error < most else Declined("logits-differ", {"percent": f"{error:.1%}"})


def compare_hidden(rows: Tensor, expected: Tensor, most: float) -> Declined | None:
    error = _relative_error(rows, expected)
    return None if error < most else Declined("hidden-states-differ", {"percent": f"{error:.1%}"})


class _Compared:
    """A sequence of some hundred tokens in a cache of its own, whose next tokens are compared.

    block_size: the sequence is in one cache block, or in several out of order next to a padding sequence.
    """

    def __init__(self, model: Transformer, kv: KvDtype, rope: Rope, block_size: int, most: int) -> None:
        self._model, self._rope = model, rope
        self._blocks = tuple(reversed(range(-(-rope.positions // block_size))))
        dtype = cache_dtype(kv, model.dtype)
        self.cache = KVCache(model.config, len(self._blocks), block_size, model.device, dtype, slots=2)
        self.sequences = min(len(self._blocks), 2)
        self._prefix = min(_CHECK_PREFIX, rope.positions - most)
        self._tokens = [index * 7919 % model.config.vocab_size for index in range(self._prefix + most)]
        self.plain(Chunk(self._tokens[: self._prefix], 0, self._blocks, 0))
        self.cache.states.copy(0, 1)

    def _states(self) -> list[Tensor]:
        layers = [spec.index for spec in self._model.config.layer_specs if spec.recurrent is not None]
        return [state[0].clone() for layer in layers for state in self.cache.states.layer(layer)]

    def rewind(self) -> None:
        """Put the recurrent states back to after the prefix."""
        self.cache.states.copy(1, 0)

    def chunk(self, count: int) -> Chunk:
        return Chunk(self._tokens[self._prefix : self._prefix + count], self._prefix, self._blocks, count)

    def plain(self, chunk: Chunk, hook: HiddenStateHook | None = None) -> Tensor:
        if chunk.start:
            self.rewind()
        batch = Batch.of([chunk], self.cache.block_size, self._model.device)
        logits: Tensor = self._model(batch, self._rope, self.cache, hook)
        return logits

    def inputs(self, chunk: Chunk) -> StepInput:
        shape, recurrent = (self.sequences, chunk.count, len(self._blocks)), self.cache.states.recurrent
        drafted = chunk.drafted > 0
        inputs = StepInput.zeros(*shape, self._model.device, recurrent=recurrent, drafted=drafted, hidden=True)
        inputs.fill([chunk])
        return inputs

    def rounding(self, count: int) -> float:
        """Return the relative change of logits if the stream after every layer is rounded to a neighbour."""
        with _rounded_streams(self._model):
            rounded = self.plain(self.chunk(count))
        return _relative_error(rounded, self.plain(self.chunk(count)))

    def logits(self, step: Step, count: int, capture: Capture | None, most: float) -> Declined | None:
        chunk, hidden = self.chunk(count), list[Tensor]()
        expected, inputs = self.plain(chunk, hidden.append)[None], self.inputs(chunk)
        self.rewind()
        logits = step(inputs, self._rope, self.cache, last=False)
        assert inputs.hidden is not None and inputs.hidden.rows is not None
        declined = compare_logits(logits[:1], expected, most)
        declined = declined or compare_hidden(inputs.hidden.rows[0], hidden[0], most)
        if declined is not None or capture is None:
            return declined
        logits = logits.clone()
        replay = capture(partial(step, inputs, self._rope, self.cache, last=False))
        self.rewind()
        replayed = replay()
        return None if torch.equal(replayed[:1], logits[:1]) else Declined("replay-differs")

    def drafts(self, step: Step, count: int, capture: Capture | None, most: float) -> Declined | None:
        """Compare the states after a step over drafted tokens of which all but the last are accepted."""
        self.plain(self.chunk(count - 1))
        expected, inputs = self._states(), self.inputs(replace(self.chunk(count), drafted=count - 1))
        assert inputs.drafts is not None
        inputs.drafts.accepted[0] = count - 1
        launches = (
            partial(step, inputs, self._rope, self.cache, last=False),
            partial(advance_by_drafts, inputs, self.cache.states),
        )

        def run(works: Sequence[Launches]) -> list[Tensor]:
            self.rewind()
            for work in works:
                work()
            return self._states()

        states = run(launches)
        error = max(_relative_error(ours, theirs) for ours, theirs in zip(states, expected, strict=True))
        if not error < most:
            return Declined("draft-states-differ", {"percent": f"{error:.1%}"})
        if capture is None:
            return None
        captured = [capture(work) for work in launches]
        inputs.drafts.layers.clear()
        replayed = run(captured)
        same = all(torch.equal(ours, theirs) for ours, theirs in zip(replayed, states, strict=True))
        return None if same else Declined("replay-differs")

    def layers(self, step: LayeredStep, count: int) -> Declined | None:
        model, chunk = self._model, self.chunk(count)
        batch, inputs = Batch.of([chunk], self.cache.block_size, model.device), self.inputs(chunk)
        x, per_layer = model.enter(batch.tokens[None], batch.positions)
        context = pass_context(batch, self._rope, self.cache, per_layer)
        self.rewind()
        for index, block in enumerate(model.layers()):
            with _router_scores(block) as scores:
                expected = block(x, context)
            written = self._written(index, chunk)
            self.rewind()
            repeated = [score.repeat(self.sequences, 1) for score in scores]
            stream = x[0].repeat(self.sequences, 1)
            actual = step.run_layer(index, stream, inputs, self._rope, self.cache, *repeated)[:count]
            error = _change_error(actual, expected[0], x[0])
            most = LAYER_TOLERANCE[model.dtype]
            if not error < most:
                return Declined("layer-differs", {"layer": index, "percent": f"{error:.1%}"})
            most = _CACHE_TOLERANCE.get(self.cache.dtype, most)
            for ours, theirs in zip(self._written(index, chunk), written, strict=True):
                if not (error := _relative_error(ours, theirs)) < most:
                    return Declined("layer-cache-differs", {"layer": index, "percent": f"{error:.1%}"})
            x = expected
        return None

    def _written(self, layer: int, chunk: Chunk) -> list[Tensor]:
        """Return what a layer wrote to the cache for the tokens of `chunk`, and its states."""
        spec, written = self._model.config.layer(layer), list[Tensor]()
        if spec.recurrent is not None:
            written = [state[0].clone() for state in self.cache.states.layer(layer)]
        if isinstance(spec.mixer, AttentionSpec | LatentAttentionSpec) and spec.mixer.kv_source is None:
            stored = self.cache.read(layer, chunk.blocks, chunk.length)
            written += [part.last(chunk.count).dense(torch.float32).clone() for part in stored]
        return written


def _change_error(actual: Tensor, expected: Tensor, x: Tensor) -> float:
    """Return the relative error of what a layer adds to the stream x [rows, size]: root mean square over rows."""
    actual, plain, before = actual.float(), expected.float(), x.float()
    # The stream is rounded whatever the layer adds; in some channels it is hundreds of times larger.
    rounding = torch.finfo(expected.dtype).eps * torch.maximum(plain.abs(), before.abs())
    excess = ((actual - plain).abs() - rounding).clamp(min=0)
    change = (plain - before).norm(dim=-1).clamp(min=torch.finfo(torch.float32).tiny)
    return float((excess.norm(dim=-1) / change).square().mean().sqrt())


@contextmanager
def _rounded_streams(model: Transformer) -> Iterator[None]:
    """Change each value of the stream after every layer by half a unit of rounding, up or down at random."""
    generator = torch.Generator().manual_seed(0)

    def change(block: Any, inputs: Any, x: Tensor) -> Tensor:
        signs = torch.randint(0, 2, x.shape, generator=generator).to(x.device) * 2 - 1
        return (x.float() * (1 + signs * torch.finfo(x.dtype).eps / 2)).to(x.dtype)

    handles = [block.register_forward_hook(change) for block in model.layers()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def _router_scores(block: Block) -> Iterator[list[Tensor]]:
    """Yield a list that receives the scores of the router of `block`, if it has one."""
    scores: list[Tensor] = []
    if not isinstance(block.mlp, Experts):
        yield scores
        return

    def note(module: Any, inputs: Any, output: Tensor) -> None:
        scores.append(output)

    handle = block.mlp.router.register_forward_hook(note)
    try:
        yield scores
    finally:
        handle.remove()


def _compared(model: Transformer, step: Step, kv: KvDtype, counts: Sequence[int]) -> Iterator[tuple[_Compared, int]]:
    context = min(_CHECK_CONTEXT, model.config.max_context)
    rope = Rope(model.config, context, model.device, model.dtype)
    if rope.every(context) is None:
        return
    for block_size in (context, KEY_BLOCK):
        sequence = _Compared(model, kv, rope, block_size, max(counts))
        yield from ((sequence, count) for count in counts if step.takes(sequence.sequences, count))


@torch.inference_mode()
def difference(
    model: Transformer,
    step: Step,
    kv: KvDtype = "auto",
    capture: Capture | None = None,
    counts: Sequence[int] = (1, 4),
    most: float | None = None,
) -> Declined | None:
    """Compare `step` for each number of new tokens in `counts` with the plain pass; None if equal.

    Compared are logits, hidden states, and recurrent states after drafts of which some are accepted.

    most: what they may differ by; None for `tolerance` of the model.
    """
    most = tolerance(model, kv) if most is None else most

    def compare(sequence: _Compared, count: int) -> Declined | None:
        declined = sequence.logits(step, count, capture, most)
        if declined is not None or count == 1 or not sequence.cache.states.recurrent:
            return declined
        return sequence.drafts(step, count, capture, most)

    compared = (compare(sequence, count) for sequence, count in _compared(model, step, kv, counts))
    return next((declined for declined in compared if declined is not None), None)


@torch.inference_mode()
def layer_difference(
    model: Transformer, step: LayeredStep, kv: KvDtype = "auto", counts: Sequence[int] = (1, 4)
) -> Declined | None:
    """Compare each layer of `step` with the plain layer on the plain layer's input; return the first that differs.

    Experts are given the plain pass's router scores, so that both run the same ones.
    """
    compared = (sequence.layers(step, count) for sequence, count in _compared(model, step, kv, counts))
    return next((declined for declined in compared if declined is not None), None)
