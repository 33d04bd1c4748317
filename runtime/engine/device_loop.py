"""Decoding that stays on the device: a launch makes several tokens, each chosen there and fed to the next pass.

A step is a fused pass (`runtime.engine.decode_step`) and the choice of its token (`triton.sample`); a launch is one
step or `STEPS` of them, captured as a CUDA graph the second time it is wanted for a cache. Token, lengths, seed and
temperature lie in buffers that it reads and writes, so the next launch needs nothing from the host: it is under way
before the tokens of this one are looked at.

Knows caches and choices; not stop tokens: what a launch made too much is for its reader to ignore. It lies beyond what
the reader says is filled, and is written over.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from mycli.runtime.cache.kv_cache import KVCache
from mycli.runtime.engine.cuda_graph import Capture, GraphCapture, Launches, Step, make_replay
from mycli.runtime.engine.model_runner import FastPaths
from mycli.runtime.errors import summarize_error
from mycli.runtime.kernels.triton.sample import SamplingBuffers, sample_tokens
from mycli.runtime.kernels.triton.top_k_top_p import Filters
from mycli.runtime.layers.batch import Batch
from mycli.runtime.layers.rope import Rope
from mycli.runtime.layers.transformer import Transformer
from mycli.runtime.models.config import KvDtype
from mycli.runtime.sampling.sampler import DeviceSampling

STEPS = 4
_T = TypeVar("_T")
_Kind = tuple[int, int, bool, Filters]  # steps, vocabulary, drawn, and from what


@dataclass(frozen=True)
class _Held:
    """The buffers of one cache, and what was captured on them; None after the first launch of a kind."""

    feedback: SamplingBuffers
    tables: tuple[Tensor, Tensor]  # kept: a graph holds their addresses
    graphs: dict[_Kind, Launches | None] = field(default_factory=dict)


@dataclass(frozen=True)
class _Launch:
    """One that is under way: its tokens int64 [steps, sequences] on the host, there when the second event is."""

    tokens: Tensor
    events: tuple[torch.cuda.Event, torch.cuda.Event] | None  # begin and end; None on a CPU, where it is done

    def read(self) -> tuple[list[list[int]], float]:
        """The tokens, waited for, and the seconds that the device took."""
        if self.events is None:
            return self.tokens.tolist(), 0.0
        began, ended = self.events
        ended.synchronize()
        return self.tokens.tolist(), began.elapsed_time(ended) / 1000


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]  # torch's constructor has no types


class DeviceLoop:
    """The loop of one model. `capture` None: kernel by kernel.

    Passes that `trusts` (sequences, new tokens) denies are left to the host, which has them compared. Where the loop
    fails, `warn` is told, and the host makes the tokens from then on, these too.
    """

    def __init__(
        self,
        step: Step,
        capture: Capture | None,
        warn: Callable[[str], None] = lambda text: None,
        trusts: Callable[[int, int], bool] = lambda sequences, new: True,
    ) -> None:
        self._step = step
        self._capture, self._warn, self._trusts = capture, warn, trusts
        self._failed = False
        self._held: WeakKeyDictionary[KVCache, _Held] = WeakKeyDictionary()

    def launches(
        self,
        batch: Batch,
        choice: DeviceSampling,
        rope: Rope,
        cache: KVCache,
        count: int,
        stops: frozenset[int],  # noqa: ARG002  (reason: the reader leaves out what comes after them)
    ) -> Iterator[tuple[list[list[int]], float]] | None:
        """The `count` tokens after the one token of each sequence of `batch`, by launches: [steps][sequences], seconds.

        `NO_NUMBER` in place of a token, and anything after it, where logits were not numbers. The caller sees to it
        that `count` more tokens fit the cache. None where the model's own passes are to do it.
        """
        tables, first, sequences = rope.fixed(cache.block_size), batch.lanes, len(batch.spans)
        if self._failed or first is None or tables is None or batch.rows > sequences:
            return None
        if not self._step.takes(sequences, 1) or not self._trusts(sequences, 1):
            return None
        return self._run(batch, choice, tables, cache.lanes(first, sequences), count)

    def _run(
        self, batch: Batch, choice: DeviceSampling, tables: tuple[Tensor, Tensor], cache: KVCache, count: int
    ) -> Iterator[tuple[list[list[int]], float]]:
        held = self._held.get(cache)
        if held is None:
            held = self._held[cache] = _Held(SamplingBuffers.make(STEPS, cache.blocks, batch.tokens.device), tables)
        self._begin(held.feedback, batch, choice)

        def launch() -> _Launch | None:
            nonlocal count
            steps = STEPS if count >= STEPS else min(count, 1)
            count -= steps
            return self._launch(held, choice, tables, cache, steps) if steps else None

        began = time.perf_counter()
        ahead = self._or_fail(launch)
        while ahead is not None:
            current, ahead = ahead, self._or_fail(launch)
            read = self._or_fail(current.read)
            if read is None:
                return
            tokens, seconds = read
            # What the device did while the consumer had the word counts, and so does a host that is slower than it.
            yield tokens, max(seconds, time.perf_counter() - began)
            began = time.perf_counter()

    def _or_fail(self, work: Callable[[], _T | None]) -> _T | None:
        """What `work` returns; None, and nothing more from this loop, where it fails."""
        try:
            return work()
        except Exception as error:  # noqa: BLE001  (reason: compilers and drivers raise all kinds)
            if not self._failed:
                self._warn(f"tokens are chosen by the host, decoding is slower from now on: {summarize_error(error)}")
            self._failed = True
            self._held.clear()
            return None

    @torch.inference_mode()
    def _begin(self, to: SamplingBuffers, batch: Batch, choice: DeviceSampling) -> None:
        to.tokens.copy_(batch.tokens[:, None])
        to.lengths.copy_(batch.lengths)
        to.seed.fill_(choice.seed)
        to.temperature.fill_(choice.temperature)
        to.top_k.fill_(choice.top_k)
        to.top_p.fill_(choice.top_p)
        to.min_p.fill_(choice.min_p)

    @torch.inference_mode()
    def _launch(
        self, held: _Held, choice: DeviceSampling, tables: tuple[Tensor, Tensor], cache: KVCache, steps: int
    ) -> _Launch:
        to, drawn = held.feedback, choice.temperature > 0
        filters = Filters(choice.top_k > 0, choice.top_p < 1, choice.min_p > 0)

        def work() -> Tensor:
            for index in range(steps):
                logits = self._step(to.tokens, to.lengths, tables, cache, last=True)[:, -1]
                sample_tokens(logits, choice.vocab_size, drawn, to, index, filters)
            return to.chosen

        run = self._captured(held, (steps, choice.vocab_size, drawn, filters), work)
        events = None
        if to.chosen.is_cuda:
            events = _event(), _event()
            events[0].record()
        tokens = run()[:steps].to("cpu", non_blocking=True, copy=True)  # to pinned memory, before the next launch
        if events is not None:
            events[1].record()
        return _Launch(tokens, events)

    def _captured(self, held: _Held, kind: _Kind, work: Launches) -> Launches:
        """`work` itself the first time, so that all that it launches is compiled; then what was captured of it."""
        captured = held.graphs.get(kind)
        if captured is not None:
            return captured
        if self._capture is None or kind not in held.graphs:
            held.graphs[kind] = None
            return work
        to = held.feedback
        tokens, lengths = to.tokens.clone(), to.lengths.clone()
        captured = held.graphs[kind] = self._capture(work)
        to.tokens.copy_(tokens)  # capturing may have run it
        to.lengths.copy_(lengths)
        return captured


def accelerate(model: Transformer, kv: KvDtype, warn: Callable[[str], None]) -> FastPaths:
    """The fused passes and the loop of a model on a CUDA device, where all of its layers can be done this way.

    kv: of the caches it is run with. `warn` is told where they cannot be used although they exist.
    """
    replay = make_replay(model, kv, warn)
    if replay is None:
        return FastPaths()
    try:
        trouble = _wrong_choices(model)
    except Exception as error:  # noqa: BLE001  (reason: compilers and drivers raise all kinds)
        trouble = summarize_error(error)
    if trouble is not None:
        warn(f"tokens are chosen by the host, decoding is slower: {trouble}")
        return FastPaths(replay)
    return FastPaths(replay, DeviceLoop(replay.step, GraphCapture(), warn, replay.trusts))


@torch.inference_mode()
def _wrong_choices(model: Transformer) -> str | None:
    """What is wrong with the likeliest tokens of random logits, and with draws from those alone; None if nothing is."""
    vocab = model.config.vocab_size
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(3, vocab, generator=generator).to(model.device, model.dtype)
    to = SamplingBuffers.make(1, len(logits), model.device)
    sample_tokens(logits, vocab, False, to, 0)
    expected = logits.float().argmax(dim=-1)
    if not to.chosen[0].equal(expected):
        return f"the device chose {to.chosen[0].tolist()} where {expected.tolist()} are the likeliest"
    to.top_p.fill_(0.5)  # of one that is left, or equals
    sample_tokens(logits, vocab, True, to, 0, Filters(top_k=True, top_p=True, min_p=True))
    drawn = to.chosen[0].clamp(min=0)[:, None]
    if not logits.gather(1, drawn).equal(logits.gather(1, expected[:, None])):
        return f"the device drew {drawn[:, 0].tolist()} where {expected.tolist()} alone may be drawn"
    return None
