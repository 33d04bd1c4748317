"""Decoding that stays on the device: one launch makes several tokens, each sampled there and fed to the next step.

A step is a fused pass (`fused`) and the sampling of its token (`triton.sample`); a launch is one step or `STEPS`,
captured as a CUDA graph the second time that it is needed for a cache and a padded number of sequences. Tokens,
lengths, block tables, random numbers and the settings of each sequence are in device buffers, so the next launch starts
before the tokens of this one are read.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import product
from typing import TypeVar
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor

from mycli.runtime.cache.kv_cache import KVCache
from mycli.runtime.engine.passes.base import OnDecline, PassInput, TokenSteps
from mycli.runtime.engine.passes.graphs import Capture, Launches, Step, StepInput, block_table_width, capture_or_launch
from mycli.runtime.errors import Declined, summarize_error
from mycli.runtime.kernels.triton.sample import GREEDY, NUMBER_BITS, Penalties, SamplingBuffers, sample_tokens
from mycli.runtime.kernels.triton.top_k_top_p import Filters
from mycli.runtime.layers.rope import Rope
from mycli.runtime.layers.transformer import Transformer
from mycli.runtime.memory.graphs import padded_sequences
from mycli.runtime.sampling.params import MAX_BIASES
from mycli.runtime.sampling.sampler import DeviceSampling

# Keys and values of surplus tokens are overwritten, but a recurrent state cannot be taken back, and later requests
# resume at it. So it stops advancing on the device once its sequence has sampled a stop token, and the next launch
# waits until the tokens of this one are accepted: the states are always those after the tokens in the cache.
STEPS = 4
ALL_FILTERS = tuple(Filters(*which) for which in product((False, True), repeat=4))
_T = TypeVar("_T")
_Kind = tuple[int, int, bool, Filters, bool]  # steps, vocabulary, random or greedy, filters, whether with biases
_Biases = tuple[Tensor, Tensor]  # int64 tokens and fp32 values [sequences, MAX_BIASES], added to logits


@dataclass
class _Buffers:
    feedback: SamplingBuffers
    inputs: StepInput  # its tokens and lengths are those of `feedback`
    rope: Rope  # graphs hold the addresses of its tables
    stops: Tensor | None  # int64 [sequences, MOST_STOPS], filled with -1, for models with recurrent states
    penalties: Penalties | None = None  # made for the first request that has some
    biases: _Biases | None = None  # likewise
    graphs: dict[_Kind, Launches | None] = field(default_factory=dict)


@dataclass(frozen=True)
class _Launch:
    """A launch under way: its tokens int64 [steps, padded] in host memory, complete after the second event."""

    tokens: Tensor
    sequences: int
    events: tuple[torch.cuda.Event, torch.cuda.Event] | None  # start and end; None on a CPU, where it is done

    def read(self) -> TokenSteps:
        if self.events is None:
            return self.tokens[:, : self.sequences].tolist(), 0.0
        began, ended = self.events
        ended.synchronize()
        return self.tokens[:, : self.sequences].tolist(), began.elapsed_time(ended) / 1000


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]  # torch's constructor has no types


class DeviceLoop:
    """The token loop of one model; `capture` None launches kernel by kernel.

    After a failure it reports once and declines all further work; the caller then samples on the host.
    """

    # Sequences with penalties or biases; each takes five bytes, or logits in fp32, for every token of the vocabulary.
    MOST_PENALIZED = 32
    MOST_STOPS = 16  # stop tokens of a sequence with recurrent states

    def __init__(self, step: Step, capture: Capture | None, report: OnDecline = lambda declined: None) -> None:
        self._step, self._capture, self._report = step, capture, report
        self.declined: Declined | None = None
        # By padded number of sequences.
        self._buffers: WeakKeyDictionary[KVCache, dict[int, _Buffers]] = WeakKeyDictionary()

    def tokens(self, work: PassInput) -> Iterator[TokenSteps]:
        """Yield the next tokens of each sequence by launches; fewer than `work.count` if a launch fails.

        `NO_NUMBER` stands for a token whose logits were not finite; what follows it is meaningless. Tokens after a stop
        token are the caller's to drop: they are beyond the length it reports, and are overwritten.
        """
        assert work.sampling is not None
        sampling, count, launched = work.sampling, work.count, 0
        filters = filters_of(sampling)
        buffers = self._or_fail(lambda: self._begin(work, sampling, filters))
        if buffers is None:
            return
        # The caller takes numbers from the requests as it accepts tokens, while launches are ahead of it.
        first = [0 if row.numbers is None else row.numbers.taken for row in sampling]

        def launch() -> _Launch | None:
            nonlocal launched
            steps = STEPS if count - launched >= STEPS else min(count - launched, 1)
            if not steps:
                return None
            self._set_numbers(buffers, sampling, [place + launched for place in first], steps)
            launched += steps
            return self._launch(buffers, work, filters, steps)

        began = time.perf_counter()
        current = self._or_fail(launch)
        while current is not None:
            ahead = None if work.cache.states.recurrent else self._or_fail(launch)
            result = self._or_fail(current.read)
            if result is None:
                return
            tokens, seconds = result
            # Host time counts where the host is slower than the device; device time counts while the caller worked.
            yield tokens, max(seconds, time.perf_counter() - began)
            began = time.perf_counter()
            current = self._or_fail(launch) if work.cache.states.recurrent else ahead

    @torch.inference_mode()
    def compile_sampling(self, work: PassInput, vocab: int, biased: bool, filters: Filters) -> None:
        """Compile the kernels of sampling with `filters` by a step of `work`; threads may do so concurrently."""
        inputs = _inputs(work, len(work.chunks))
        inputs.fill(work.chunks)
        logits = self._step(inputs.resting(), work.rope, work.cache, last=True)[:, -1]
        logits = logits.float() if biased else logits
        buffers = SamplingBuffers.make(1, len(logits), logits.device)
        penalties = Penalties.make(len(logits), vocab, logits.device) if filters.penalties else None
        for draw in (True, False) if filters in (Filters(), Filters(penalties=True)) else (True,):
            sample_tokens(logits, vocab, draw, buffers, 0, filters, penalties)

    def _or_fail(self, work: Callable[[], _T | None]) -> _T | None:
        try:
            return work()
        except Exception as error:  # noqa: BLE001  (reason: compilers and drivers raise all kinds)
            declined = Declined("device-loop-failed", {"error": summarize_error(error)})
            if self.declined is None:
                self._report(declined)
            self.declined = declined
            self._buffers.clear()
            return None

    def _buffers_of(self, work: PassInput) -> _Buffers:
        padded = padded_sequences(len(work.chunks))
        assert padded is not None  # checked by `CudaPass.takes`
        by_count = self._buffers.setdefault(work.cache, {})
        buffers = by_count.get(padded)
        if buffers is None or buffers.rope is not work.rope:
            device, recurrent = work.rope.device, work.cache.states.recurrent
            feedback = SamplingBuffers.make(STEPS, padded, device)
            inputs = replace(_inputs(work, padded), tokens=feedback.tokens, lengths=feedback.lengths)
            stops = torch.full((padded, self.MOST_STOPS), -1, device=device) if recurrent else None
            buffers = by_count[padded] = _Buffers(feedback, inputs, work.rope, stops)
        return buffers

    @torch.inference_mode()
    def _begin(self, work: PassInput, sampling: Sequence[DeviceSampling], filters: Filters) -> _Buffers:
        buffers = self._buffers_of(work)
        to, rows = buffers.feedback, len(sampling)
        buffers.inputs.fill(work.chunks)
        if buffers.stops is not None:
            columns = [[*row, *[-1] * (self.MOST_STOPS - len(row))] for row in work.stop_ids]
            buffers.stops[:rows].copy_(torch.tensor(columns), non_blocking=True)
        vocab = sampling[0].vocab_size
        settings = (
            (to.temperature, [row.temperature or 1.0 for row in sampling]),
            (to.top_k, [float(row.top_k or vocab) for row in sampling]),
            (to.top_p, [row.top_p for row in sampling]),
            (to.min_p, [row.min_p for row in sampling]),
        )
        for buffer, values in settings:
            buffer[:rows].copy_(torch.tensor(values), non_blocking=True)
        if filters.penalties:
            self._set_penalties(buffers, sampling)
        if any([row.biases for row in sampling]):
            self._set_biases(buffers, sampling)
        return buffers

    def _set_biases(self, buffers: _Buffers, sampling: Sequence[DeviceSampling]) -> None:
        if buffers.biases is None:
            tokens = torch.zeros(
                len(buffers.feedback.lengths), MAX_BIASES, dtype=torch.int64, device=buffers.rope.device
            )
            buffers.biases = tokens, torch.zeros_like(tokens, dtype=torch.float32)
        # Biases of 0 fill the rows.
        rows = [[*row.biases, *[(0, 0.0)] * (MAX_BIASES - len(row.biases))] for row in sampling]
        for place, buffer in enumerate(buffers.biases):
            values = torch.tensor([[bias[place] for bias in row] for row in rows], dtype=buffer.dtype)
            buffer[: len(rows)].copy_(values, non_blocking=True)

    def _set_penalties(self, buffers: _Buffers, sampling: Sequence[DeviceSampling]) -> None:
        vocab, device = sampling[0].vocab_size, buffers.feedback.tokens.device
        if buffers.penalties is None:
            buffers.penalties = Penalties.make(len(buffers.feedback.lengths), vocab, device)
        to = buffers.penalties
        for place, row in enumerate(sampling):
            seen = None if row.seen is None else row.seen.seen
            counts = None if row.seen is None else row.seen.counts
            for buffer, values in ((to.seen, seen), (to.counts, counts)):
                if values is None:
                    buffer[place].zero_()
                else:
                    buffer[place].copy_(values[0])
        for buffer, factors in (
            (to.repetition, [row.repetition for row in sampling]),
            (to.presence, [row.presence for row in sampling]),
            (to.frequency, [row.frequency for row in sampling]),
        ):
            buffer[: len(sampling)].copy_(torch.tensor(factors), non_blocking=True)

    @torch.inference_mode()
    def _set_numbers(
        self, buffers: _Buffers, sampling: Sequence[DeviceSampling], places: Sequence[int], steps: int
    ) -> None:
        columns = []
        for row, place in zip(sampling, places, strict=True):
            if row.numbers is None or not row.temperature:
                columns.append([GREEDY] * steps)
            else:
                numbers = row.numbers.peek(steps, place - row.numbers.taken)
                columns.append([int(number * (1 << NUMBER_BITS)) for number in numbers])
        to = buffers.feedback.numbers
        to[:steps, : len(sampling)].copy_(torch.tensor(columns).t(), non_blocking=True)

    @torch.inference_mode()
    def _launch(self, buffers: _Buffers, work: PassInput, filters: Filters, steps: int) -> _Launch:
        assert work.sampling is not None
        to, vocab, sequences = buffers.feedback, work.sampling[0].vocab_size, len(work.sampling)
        random = any(row.temperature > 0 for row in work.sampling)
        penalties, advances = buffers.penalties if filters.penalties else None, buffers.inputs.advances
        biases = buffers.biases if any([row.biases for row in work.sampling]) else None

        weak = ref(work.cache)  # launches are kept by cache, which they must not keep

        def run_steps() -> Tensor:
            cache = weak()
            assert cache is not None
            for index in range(steps):
                logits = self._step(buffers.inputs, buffers.rope, cache, last=True)[:, -1]
                if biases is not None:
                    logits = logits.float().scatter_add(1, *biases)
                sample_tokens(logits, vocab, random, to, index, filters, penalties)
                if advances is not None and buffers.stops is not None:
                    advances.mul_((to.tokens != buffers.stops).all(dim=1))
            return to.chosen

        run = self._captured(buffers, (steps, vocab, random, filters, biases is not None), run_steps)
        events = None
        if to.chosen.is_cuda:
            events = _event(), _event()
            events[0].record()
        tokens = run()[:steps].to("cpu", non_blocking=True, copy=True)  # to pinned memory, before the next launch
        if events is not None:
            events[1].record()
        return _Launch(tokens, sequences, events)

    def _captured(self, buffers: _Buffers, kind: _Kind, work: Launches) -> Launches:
        # The first launch of a kind compiles its kernels, which a capture must not do.
        captured = buffers.graphs.get(kind)
        if captured is not None:
            return captured
        if kind not in buffers.graphs:
            if buffers.stops is not None:  # where it fails, the host continues from the states before it
                with _undone(buffers):
                    work()
            buffers.graphs[kind] = None
            return work
        if self._capture is None:
            return work
        with _undone(buffers):  # capturing may run it
            (captured,) = capture_or_launch(self._capture, (work,), self._report)
            buffers.graphs[kind] = captured
        return captured


def _inputs(work: PassInput, sequences: int) -> StepInput:
    windowed, recurrent = work.cache.window_blocks > 0, work.cache.states.recurrent
    width = block_table_width(work)
    return StepInput.zeros(sequences, 1, width, work.rope.device, recurrent=recurrent, windowed=windowed)


@contextmanager
def _undone(buffers: _Buffers) -> Iterator[None]:
    """Undo what a launch changes in `buffers`; recurrent states do not advance in it."""
    changed = [buffers.feedback.tokens, buffers.feedback.lengths]
    if buffers.penalties is not None:
        changed += [buffers.penalties.seen, buffers.penalties.counts]
    if buffers.inputs.advances is not None:
        changed.append(buffers.inputs.advances)
    saved = [tensor.clone() for tensor in changed]
    if buffers.inputs.advances is not None:
        buffers.inputs.advances.zero_()
    yield
    for tensor, before in zip(changed, saved, strict=True):
        tensor.copy_(before)


def filters_of(sampling: Sequence[DeviceSampling]) -> Filters:
    return Filters(
        top_k=any(row.top_k > 0 for row in sampling),
        top_p=any(row.top_p < 1 for row in sampling),
        min_p=any(row.min_p > 0 for row in sampling),
        penalties=any(row.seen is not None for row in sampling),
    )


def compile_loop(model: Transformer, step: Step, capture: Capture | None, report: OnDecline) -> DeviceLoop | None:
    """Return the loop of a model, or report why tokens cannot be sampled on its device and return None."""
    try:
        declined = _check_sampling(model)
    except Exception as error:  # noqa: BLE001  (reason: compilers and drivers raise all kinds)
        declined = Declined("device-loop-failed", {"error": summarize_error(error)})
    if declined is not None:
        report(declined)
        return None
    return DeviceLoop(step, capture, report)


@torch.inference_mode()
def _check_sampling(model: Transformer) -> Declined | None:
    """Compare the greedy tokens of random logits, and draws from the greedy tokens alone, with torch's."""
    vocab = model.config.vocab_size
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(3, vocab, generator=generator).to(model.device, model.dtype)
    buffers = SamplingBuffers.make(1, len(logits), model.device)
    sample_tokens(logits, vocab, False, buffers, 0)
    expected = logits.float().argmax(dim=-1)
    if not buffers.chosen[0].equal(expected):
        tokens = str(buffers.chosen[0].tolist())
        return Declined("greedy-differs", {"tokens": tokens, "expected": str(expected.tolist())})
    buffers.top_p.fill_(0.5)  # keeps the greedy token and its equals
    buffers.numbers.fill_(1 << (NUMBER_BITS - 1))
    sample_tokens(logits, vocab, True, buffers, 0, Filters(top_k=True, top_p=True, min_p=True))
    drawn = buffers.chosen[0].clamp(min=0)[:, None]
    if not logits.gather(1, drawn).equal(logits.gather(1, expected[:, None])):
        return Declined("draw-differs", {"tokens": str(drawn[:, 0].tolist()), "expected": str(expected.tolist())})
    return None
