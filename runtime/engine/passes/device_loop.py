"""Decoding that stays on the device: one launch makes several tokens, each sampled there and fed to the next step.

A step is a fused pass (`fused`) and the sampling of its token (`triton.sample`); a launch is one step or `STEPS`,
captured as a CUDA graph the second time that it is needed for a cache. TokenSteps, lengths, seed and temperature are in
device buffers, so the next launch starts before the tokens of this one are read.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from mycli.runtime.cache.batch import Batch, contiguous_slot
from mycli.runtime.cache.kv_cache import KVCache
from mycli.runtime.engine.passes.base import OnDecline, PassInput, TokenSteps
from mycli.runtime.engine.passes.graphs import Capture, Launches, Step
from mycli.runtime.errors import Declined, summarize_error
from mycli.runtime.kernels.triton.sample import SamplingBuffers, sample_tokens
from mycli.runtime.kernels.triton.top_k_top_p import Filters
from mycli.runtime.layers.transformer import Transformer
from mycli.runtime.sampling.sampler import DeviceSampling

STEPS = 4
_T = TypeVar("_T")
_Kind = tuple[int, int, bool, Filters]  # steps, vocabulary, random or greedy, filters


@dataclass(frozen=True)
class _Buffers:
    feedback: SamplingBuffers
    tables: tuple[Tensor, Tensor]  # graphs hold their addresses
    graphs: dict[_Kind, Launches | None] = field(default_factory=dict)


@dataclass(frozen=True)
class _Launch:
    """A launch under way: its tokens int64 [steps, sequences] in host memory, complete after the second event."""

    tokens: Tensor
    events: tuple[torch.cuda.Event, torch.cuda.Event] | None  # start and end; None on a CPU, where it is done

    def read(self) -> TokenSteps:
        if self.events is None:
            return self.tokens.tolist(), 0.0
        began, ended = self.events
        ended.synchronize()
        return self.tokens.tolist(), began.elapsed_time(ended) / 1000


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]  # torch's constructor has no types


class DeviceLoop:
    """The token loop of one model; `capture` None launches kernel by kernel.

    After a failure it reports once and declines all further work; the caller then samples on the host.
    """

    def __init__(self, step: Step, capture: Capture | None, report: OnDecline = lambda declined: None) -> None:
        self._step, self._capture, self._report = step, capture, report
        self.declined: Declined | None = None
        self._buffers: WeakKeyDictionary[KVCache, _Buffers] = WeakKeyDictionary()

    def tokens(self, work: PassInput) -> Iterator[TokenSteps]:
        """Yield the next tokens of each sequence by launches; fewer than `work.count` if a launch fails.

        `NO_NUMBER` stands for a token whose logits were not finite; what follows it is meaningless. Tokens after a stop
        token are the caller's to drop: they are beyond the length it reports, and are overwritten.
        """
        first, tables = contiguous_slot(work.chunks), work.rope.fixed(work.cache.block_size)
        assert first is not None and tables is not None and work.sampling is not None
        sampling, count = work.sampling, work.count
        cache = work.cache.view_blocks(first, len(work.chunks))
        batch = Batch.of(work.chunks, work.cache.block_size, work.rope.device)
        buffers = self._buffers.get(cache)
        if buffers is None:
            feedback = SamplingBuffers.make(STEPS, cache.blocks, batch.tokens.device)
            buffers = self._buffers[cache] = _Buffers(feedback, tables)
        self._begin(buffers.feedback, batch, sampling)

        def launch() -> _Launch | None:
            nonlocal count
            steps = STEPS if count >= STEPS else min(count, 1)
            count -= steps
            return self._launch(buffers, sampling, tables, cache, steps) if steps else None

        began = time.perf_counter()
        ahead = self._or_fail(launch)
        while ahead is not None:
            current, ahead = ahead, self._or_fail(launch)
            result = self._or_fail(current.read)
            if result is None:
                return
            tokens, seconds = result
            # Host time counts where the host is slower than the device; device time counts while the caller worked.
            yield tokens, max(seconds, time.perf_counter() - began)
            began = time.perf_counter()

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

    @torch.inference_mode()
    def _begin(self, to: SamplingBuffers, batch: Batch, sampling: DeviceSampling) -> None:
        to.tokens.copy_(batch.tokens[:, None])
        to.lengths.copy_(batch.lengths)
        to.seed.fill_(sampling.seed)
        to.temperature.fill_(sampling.temperature)
        to.top_k.fill_(sampling.top_k)
        to.top_p.fill_(sampling.top_p)
        to.min_p.fill_(sampling.min_p)

    @torch.inference_mode()
    def _launch(
        self, buffers: _Buffers, sampling: DeviceSampling, tables: tuple[Tensor, Tensor], cache: KVCache, steps: int
    ) -> _Launch:
        to, random = buffers.feedback, sampling.temperature > 0
        filters = Filters(sampling.top_k > 0, sampling.top_p < 1, sampling.min_p > 0)

        def work() -> Tensor:
            for index in range(steps):
                logits = self._step(to.tokens, to.lengths, tables, cache, last=True)[:, -1]
                sample_tokens(logits, sampling.vocab_size, random, to, index, filters)
            return to.chosen

        run = self._captured(buffers, (steps, sampling.vocab_size, random, filters), work)
        events = None
        if to.chosen.is_cuda:
            events = _event(), _event()
            events[0].record()
        tokens = run()[:steps].to("cpu", non_blocking=True, copy=True)  # to pinned memory, before the next launch
        if events is not None:
            events[1].record()
        return _Launch(tokens, events)

    def _captured(self, buffers: _Buffers, kind: _Kind, work: Launches) -> Launches:
        # The first launch of a kind compiles its kernels, which a capture must not do.
        captured = buffers.graphs.get(kind)
        if captured is not None:
            return captured
        if self._capture is None or kind not in buffers.graphs:
            buffers.graphs[kind] = None
            return work
        to = buffers.feedback
        tokens, lengths = to.tokens.clone(), to.lengths.clone()
        captured = buffers.graphs[kind] = self._capture(work)
        to.tokens.copy_(tokens)  # capturing may have run it
        to.lengths.copy_(lengths)
        return captured


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
    sample_tokens(logits, vocab, True, buffers, 0, Filters(top_k=True, top_p=True, min_p=True))
    drawn = buffers.chosen[0].clamp(min=0)[:, None]
    if not logits.gather(1, drawn).equal(logits.gather(1, expected[:, None])):
        return Declined("draw-differs", {"tokens": str(drawn[:, 0].tolist()), "expected": str(expected.tolist())})
    return None
