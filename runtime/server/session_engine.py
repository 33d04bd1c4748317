"""An engine over one `Session`: sequences are served one after another, in the order in which they came.

What the last sequence left in the cache is kept for the next that begins like it. Knows sessions and samplers; does not
know text or who asked.
"""

import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from mycli.runtime.engine.completion import LoadedModel
from mycli.runtime.engine.generate import Session
from mycli.runtime.errors import ModelError, UsageError, UserError
from mycli.runtime.layers.batch import Batch
from mycli.runtime.sampling.logprobs import LogprobRecorder, TokenLogprob
from mycli.runtime.sampling.sampler import Sampler
from mycli.runtime.server.engine_protocol import EndReason, EngineOutput, EngineRequest, EngineStats


@dataclass
class _Running:
    """The sequence whose turn it is, and its outputs to come."""

    sequence: int
    outputs: Iterator[EngineOutput]


class SessionEngine:
    """A `ServedEngine` of one sequence at a time."""

    def __init__(self, loaded: LoadedModel, session: Session) -> None:
        self._loaded, self._session = loaded, session
        self._waiting: deque[tuple[int, EngineRequest, float]] = deque()
        self._running: _Running | None = None
        self._next = 0
        self._looked_up = self._hits = 0

    @property
    def context(self) -> int:
        """Most tokens of a sequence, prompt and reply."""
        return self._session.context

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything."""
        return self._running is not None or bool(self._waiting)

    @property
    def stats(self) -> EngineStats:
        """How busy it is; the cache counts as used as far as it holds tokens."""
        used = self._session.cache.length / self._session.context
        return EngineStats(int(self._running is not None), len(self._waiting), used, self._looked_up, self._hits)

    def submit(self, request: EngineRequest) -> int:
        """Take a sequence. Raises UsageError where its prompt is empty or leaves no room for a token."""
        if not 0 < len(request.prompt) <= self.context:
            raise UsageError(
                f"the prompt has {len(request.prompt)} tokens, the context room for {self.context}", code="more-context"
            )
        self._next += 1
        self._waiting.append((self._next, request, time.monotonic()))
        return self._next

    def cancel(self, sequence: int) -> None:
        """Forget a sequence."""
        if self._running is not None and self._running.sequence == sequence:
            self._running = None  # the generator is closed with it, and leaves the cache valid
        self._waiting = deque(one for one in self._waiting if one[0] != sequence)

    def step(self) -> Sequence[EngineOutput]:
        """The next token of the sequence whose turn it is."""
        if self._running is None:
            if not self._waiting:
                return ()
            sequence, request, asked = self._waiting.popleft()
            if request.deadline is not None and time.monotonic() - asked > request.deadline:
                return (EngineOutput(sequence, finish_reason="deadline"),)
            self._running = _Running(sequence, self._outputs(sequence, request))
        running = self._running
        try:
            output = next(running.outputs)
        except UserError as error:
            output = EngineOutput(running.sequence, finish_reason="error", error=error)
        except RuntimeError as error:
            self._session.forget()
            output = EngineOutput(running.sequence, finish_reason="error", error=ModelError(str(error)))
        if output.finish_reason is not None:
            self._running = None
        return (output,)

    def _outputs(self, sequence: int, request: EngineRequest) -> Iterator[EngineOutput]:
        session, device = self._session, self._session.device
        scored = self._score(request) if request.prompt_logprobs else ()
        recorder = None if request.logprobs is None else LogprobRecorder(request.logprobs)
        sampler = Sampler(
            request.sampling,
            self._loaded.vocabulary_size,
            device,
            constraint=None if request.grammar is None else request.grammar.start(),
            recorder=recorder,
        )
        room = self.context - len(request.prompt) + 1
        limit = room if request.limit is None else min(request.limit, room)
        first = True
        stream = session.generate(request.prompt, sampler, limit, request.stop_ids)
        for made, (token,) in enumerate(stream):
            logprobs = () if recorder is None else (recorder.rows[0][made],)
            self._count(first)
            yield EngineOutput(sequence, (token,), logprobs, scored if first else (), None, session.timing.cached)
            first = False
        self._count(first)
        reason: EndReason = (
            "stop" if session.stopped else "context" if request.limit is None or limit < request.limit else "length"
        )
        yield EngineOutput(
            sequence,
            prompt_logprobs=scored if first else (),
            finish_reason=reason,
            cached_tokens=session.timing.cached,
        )

    def _count(self, first: bool) -> None:
        if first:
            self._looked_up += self._session.timing.prompt
            self._hits += self._session.timing.cached

    def _score(self, request: EngineRequest) -> tuple[TokenLogprob, ...]:
        """How likely each token of the prompt was after those before it, all but the first."""
        session, prompt = self._session, request.prompt
        recorder = LogprobRecorder(request.logprobs or 0)
        session.forget()
        for begin in range(0, len(prompt) - 1, session.chunk):
            chunk = prompt[begin : min(begin + session.chunk, len(prompt) - 1)]
            batch = Batch(torch.tensor([chunk], device=session.device), session.cache.length, "all")
            logits = session.runner.run(batch, session.cache)
            assert logits is not None
            for place in range(len(chunk)):
                drawn = torch.tensor([[prompt[begin + place + 1]]], device=session.device)
                recorder.record(logits[0, place : place + 1, : self._loaded.vocabulary_size], drawn)
        session.forget()
        return tuple(recorder.rows[0])
