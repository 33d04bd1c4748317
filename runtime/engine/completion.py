"""A model that speaks: transformer, tokenizer, end tokens and sampling defaults of one folder, and its replies.

Turns a prompt of ids into pieces of text until the model ends, a stop string appears or a limit is reached. Knows text;
does not know commands, terminals or how the pieces are shown.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from mycli.runtime.device.placement import Placement
from mycli.runtime.engine.generate import Session
from mycli.runtime.engine.loader import load_model
from mycli.runtime.engine.stats import Timing
from mycli.runtime.errors import UsageError
from mycli.runtime.layers.transformer import Transformer
from mycli.runtime.models.config import load_config
from mycli.runtime.models.generation_config import GenerationDefaults, read_generation_config, stop_ids
from mycli.runtime.sampling.params import SamplingParams
from mycli.runtime.sampling.sampler import Constraint, Recorder, Sampler
from mycli.runtime.tokenizer.stream import StopMatcher, StreamDecoder
from mycli.runtime.tokenizer.tokenizer import Tokenizer

FinishReason = Literal["stop", "length", "context"]


@dataclass(frozen=True)
class Assistant:
    """What a folder holds, loaded. `warnings` are for a person: fields dropped, no end token, and the like."""

    model: Transformer
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
    def load(cls, folder: Path, placement: Placement, *, allow_nonfinite: bool = False) -> "Assistant":
        """Cheap checks first: a broken tokenizer is found before gigabytes are read. Raises ModelError."""
        config = load_config(folder)
        tokenizer = Tokenizer.load(folder, config.vocab_size)
        defaults, dropped = read_generation_config(folder, config.vocab_size)
        ids, missing = stop_ids(defaults.eos, config.eos, tokenizer.eos, config.vocab_size)
        warnings = [*dropped, *missing]
        model = load_model(folder, placement, allow_nonfinite=allow_nonfinite, warn=warnings.append)
        return cls(model, tokenizer, defaults, frozenset(ids), tuple(warnings))


class Reply:
    """One reply, streamed: iterate for its text, then read `finish_reason`, `tokens` and `timing`.

    The pieces joined are the whole text: whole characters only, nothing of a stop string, control tokens never shown.
    """

    def __init__(
        self,
        assistant: Assistant,
        session: Session,
        prompt: Sequence[int],
        sampling: SamplingParams,
        *,
        limit: int | None = None,
        stops: Sequence[str] = (),
        constraint: Constraint | None = None,
        recorder: Recorder | None = None,
    ) -> None:
        """`limit` None fills the context; a limit that does not fit is refused with the numbers. Raises UsageError.

        `constraint` and `recorder` are the sampler's.
        """
        room = session.capacity - len(prompt) + 1  # the last token drawn needs no place in the cache
        if limit is not None and limit > room:
            raise UsageError(
                f"{len(prompt)} prompt tokens and {limit} more do not fit the context of {session.capacity}",
                f"ask for at most {max(room, 0)}, or for more context with --ctx",
            )
        self.finish_reason: FinishReason | None = None
        self.tokens: list[int] = []
        self.timing = Timing()
        self._session = session
        self._limit = room if limit is None else limit
        self._full: FinishReason = "context" if limit is None else "length"
        self._matcher = StopMatcher(stops)
        self._decoder = StreamDecoder(assistant.tokenizer)
        self._prompt = prompt
        self._stop_ids = assistant.stop_ids
        self._sampler = Sampler(
            sampling, assistant.vocabulary_size, assistant.model.device, constraint=constraint, recorder=recorder
        )

    def __iter__(self) -> Iterator[str]:
        """Pieces of text as they become certain, none empty."""
        stream = self._session.generate(self._prompt, self._sampler, self._limit, self._stop_ids)
        try:
            for (token,) in stream:
                self.tokens.append(token)
                text, found = self._matcher.feed(self._decoder.feed(token))
                if text:
                    yield text
                if found:
                    self.finish_reason = "stop"
                    return
            self.finish_reason = "stop" if self._session.stopped else self._full
            text, found = self._matcher.feed(self._decoder.flush())
            rest = text if found else text + self._matcher.flush()
            if rest:
                yield rest
        finally:
            self.timing = self._session.timing
            stream.close()
