"""A model that speaks: runner, tokenizer, end tokens and sampling defaults of one folder, and its replies.

Turns a prompt of ids into text until the model ends, a stop string appears or a limit is reached: one reply, streamed,
or several side by side. Knows text; does not know commands, terminals or how the pieces are shown.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from mycli.runtime.checkpoint.model_folder import ModelFolder
from mycli.runtime.device.placement import Placement
from mycli.runtime.engine.generate import Session
from mycli.runtime.engine.loader import load_model
from mycli.runtime.engine.model_runner import ModelRunner
from mycli.runtime.engine.stats import Timing
from mycli.runtime.errors import UsageError
from mycli.runtime.models.generation_config import GenerationDefaults, stop_ids
from mycli.runtime.sampling.grammar import Grammar
from mycli.runtime.sampling.logprobs import LogprobRecorder, TokenLogprob
from mycli.runtime.sampling.params import SamplingParams
from mycli.runtime.sampling.sampler import Sampler
from mycli.runtime.tokenizer.stream import StopMatcher, StreamDecoder
from mycli.runtime.tokenizer.tokenizer import Tokenizer

FinishReason = Literal["stop", "length", "context"]


@dataclass(frozen=True)
class LoadedModel:
    """What a folder holds, loaded. `warnings` are for a person: fields dropped, no end token, and the like."""

    runner: ModelRunner
    tokenizer: Tokenizer
    defaults: GenerationDefaults
    stop_ids: frozenset[int]
    warnings: tuple[str, ...]

    @property
    def vocabulary_size(self) -> int:
        """Ids that may be drawn: rows that only pad the head to a round number have no token."""
        vocabulary = self.tokenizer.vocabulary
        return max(index for index, token in enumerate(vocabulary) if token is not None) + 1

    @classmethod
    def load(cls, folder: ModelFolder, placement: Placement, *, allow_nonfinite: bool = False) -> "LoadedModel":
        """Cheap checks first: a broken tokenizer is found before gigabytes are read. Raises ModelError."""
        config = folder.config
        tokenizer = folder.tokenizer()
        defaults, dropped = folder.generation
        ids, missing = stop_ids(defaults.eos, config.eos, tokenizer.eos, config.vocab_size)
        warnings = [*dropped, *missing]
        runner = load_model(folder, placement, allow_nonfinite=allow_nonfinite, warn=warnings.append)
        return cls(runner, tokenizer, defaults, frozenset(ids), tuple(warnings))


class Sample:
    """The text of one reply under way: the ids drawn without the end token, and why it ended, None while it goes on.

    The pieces joined are the whole `text`: whole characters only, nothing of a stop string, control tokens never shown.
    """

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str]) -> None:
        self.text = ""
        self.tokens: list[int] = []
        self.finish_reason: FinishReason | None = None
        self.logprobs: list[TokenLogprob] = []
        self._decoder, self._matcher = StreamDecoder(tokenizer), StopMatcher(stops)

    def add(self, token: int) -> str:
        """The text that one more token makes certain; a stop string ends the reply."""
        self.tokens.append(token)
        return self._feed(self._decoder.feed(token))

    def end(self, reason: FinishReason) -> str:
        """The text that was held back, now that no more comes; `reason`, unless there was one before."""
        piece = self._feed(self._decoder.flush())
        if self.finish_reason is None:
            self.finish_reason = reason
            rest = self._matcher.flush()
            self.text += rest
            piece += rest
        return piece

    def _feed(self, text: str) -> str:
        piece, found = self._matcher.feed(text)
        self.text += piece
        if found:
            self.finish_reason = "stop"
        return piece


class Completion:
    """One reply, streamed: iterate for its text, then read `finish_reason`, `tokens` and `timing`."""

    def __init__(
        self,
        loaded: LoadedModel,
        session: Session,
        prompt: Sequence[int],
        sampling: SamplingParams,
        *,
        limit: int | None = None,
        stops: Sequence[str] = (),
        grammar: Grammar | None = None,
        top: int | None = None,
    ) -> None:
        """`limit` None fills the context; a limit that does not fit is refused with the numbers. Raises UsageError.

        `top`: logprobs of so many tokens a place, None for no logprobs.
        """
        room = session.context - len(prompt) + 1  # the last token drawn needs no place in the cache
        if limit is not None and limit > room:
            raise UsageError(
                f"{len(prompt)} prompt tokens and {limit} more do not fit the context of {session.context}",
                code="fewer-tokens-or-more-context",
                data={"tokens": max(room, 0)},
            )
        self.timing = Timing()
        self._sample = Sample(loaded.tokenizer, stops)
        self._session, self._prompt, self._stop_ids = session, prompt, loaded.stop_ids
        self._limit = room if limit is None else limit
        self._full: FinishReason = "context" if limit is None else "length"
        self._recorder = None if top is None else LogprobRecorder(top)
        self._sampler = Sampler(
            sampling,
            loaded.vocabulary_size,
            session.device,
            constraint=None if grammar is None else grammar.start(),
            recorder=self._recorder,
        )

    @property
    def finish_reason(self) -> FinishReason | None:
        """Why it ended; None while it goes on."""
        return self._sample.finish_reason

    @property
    def tokens(self) -> list[int]:
        """The ids drawn, without the end token."""
        return self._sample.tokens

    @property
    def logprobs(self) -> list[TokenLogprob]:
        """One for each of `tokens`, where they were asked for."""
        return [] if self._recorder is None else self._recorder.rows[0][: len(self.tokens)]

    def __iter__(self) -> Iterator[str]:
        """Pieces of text as they become certain, none empty."""
        stream = self._session.generate(self._prompt, self._sampler, self._limit, self._stop_ids)
        try:
            for (token,) in stream:
                if piece := self._sample.add(token):
                    yield piece
                if self.finish_reason is not None:
                    return
            if rest := self._sample.end("stop" if self._session.stopped else self._full):
                yield rest
        finally:
            self.timing = self._session.timing
            stream.close()


def draw_samples(
    loaded: LoadedModel,
    session: Session,
    prompt: Sequence[int],
    sampling: SamplingParams,
    *,
    count: int,
    limit: int,
    stops: Sequence[str] = (),
    grammar: Grammar | None = None,
    top: int | None = None,
) -> list[Sample]:
    """`count` replies of at most `limit` tokens, side by side after one prefill; `session` then holds the prompt.

    Does not stream. `stops`, `grammar` and `top` as for a `Completion`. Raises UsageError for a prompt that does not
    fit the session.
    """
    samples = [Sample(loaded.tokenizer, stops) for _ in range(count)]
    recorder = None if top is None else LogprobRecorder(top, count)
    session.prefill(prompt)
    branches = session.branch(count, len(prompt) + limit)
    sampler = Sampler(
        sampling,
        loaded.vocabulary_size,
        session.device,
        count,
        constraint=None if grammar is None else grammar.start(count),
        recorder=recorder,
    )
    for row in branches.generate(prompt, sampler, limit):
        for sample, token in zip(samples, row, strict=True):
            if sample.finish_reason is None:
                if token in loaded.stop_ids:
                    sample.end("stop")
                else:
                    sample.add(token)
        if all(sample.finish_reason for sample in samples):
            break
    for index, sample in enumerate(samples):
        if sample.finish_reason is None:
            sample.end("length")
        if recorder is not None:
            sample.logprobs = recorder.rows[index][: len(sample.tokens)]
    return samples
