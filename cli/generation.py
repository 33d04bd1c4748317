"""How `run` answers, one prompt or a batch: prompt to ids, the limits that hold, and a reply as an object.

Knows what the options mean. Does not know where prompts come from, nor how a reply is shown.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mycli.cli.load import Loaded
from mycli.runtime.tokenizer.chat_template import Message

if TYPE_CHECKING:  # torch takes a second to import
    from mycli.runtime.engine.completion import Reply
    from mycli.runtime.engine.samples import Sample
    from mycli.runtime.engine.stats import SpeculationStats, Timing
    from mycli.runtime.sampling.grammar import Grammar
    from mycli.runtime.sampling.logprobs import LogprobRecorder, TokenLogprob
    from mycli.runtime.sampling.params import SamplingParams
    from mycli.runtime.tokenizer.tokenizer import Tokenizer

DEFAULT_LIMIT = 512


@dataclass(frozen=True)
class Manner:
    """How every prompt of a command is answered. `top`: logprobs of so many tokens a place, None for no logprobs."""

    sampling: "SamplingParams"
    limit: int | None = None
    stops: tuple[str, ...] = ()
    system: str | None = None
    raw: bool = False
    allow_special: bool = False
    grammar: "Grammar | None" = None
    samples: int = 1
    top: int | None = None


class Answering:
    """A loaded model that answers in one manner."""

    def __init__(self, loaded: Loaded, manner: Manner) -> None:
        self._loaded = loaded
        self._manner = manner
        self.recorder: LogprobRecorder | None = None  # of the reply under way

    @property
    def constrained(self) -> bool:
        """Whether a reply that is cut off is of no use."""
        return self._manner.grammar is not None

    def encode(self, prompt: str | Sequence[Message]) -> list[int]:
        """The ids of a text or a conversation. A text is a question, unless raw or the model has no chat template."""
        manner, tokenizer = self._manner, self._loaded.assistant.tokenizer
        if isinstance(prompt, str):
            if manner.raw or tokenizer.template is None:
                return tokenizer.encode(prompt, add_special=True, allow_special=manner.allow_special)
            prompt = [Message("user", prompt)]
        if manner.system is not None and not any(message.role == "system" for message in prompt):
            prompt = [Message("system", manner.system), *prompt]
        return tokenizer.chat(prompt, allow_special=manner.allow_special)

    def limit(self, prompt: Sequence[int]) -> int | None:
        """Most tokens to write. The default gives way to a full context, a number that was asked for does not."""
        room = self._loaded.session.capacity - len(prompt) + 1
        if self._manner.limit is None and room > DEFAULT_LIMIT:
            return DEFAULT_LIMIT
        return self._manner.limit

    def reply(self, prompt: Sequence[int]) -> "Reply":
        """One reply, to be streamed."""
        from mycli.runtime.engine.completion import Reply
        from mycli.runtime.sampling.logprobs import LogprobRecorder

        manner = self._manner
        self.recorder = None if manner.top is None else LogprobRecorder(manner.top)
        return Reply(
            self._loaded.assistant,
            self._loaded.session,
            prompt,
            manner.sampling,
            limit=self.limit(prompt),
            stops=manner.stops,
            constraint=None if manner.grammar is None else manner.grammar.start(),
            recorder=self.recorder,
        )

    def samples(self, prompt: Sequence[int]) -> "list[Sample]":
        """As many replies as the manner asks for, after one prefill."""
        from mycli.runtime.engine.samples import draw_samples

        manner, session = self._manner, self._loaded.session
        limit = self.limit(prompt)
        return draw_samples(
            self._loaded.assistant,
            session,
            prompt,
            manner.sampling,
            manner.samples,
            max(session.capacity - len(prompt) + 1, 0) if limit is None else limit,
            stops=manner.stops,
            grammar=manner.grammar,
            top=manner.top,
        )

    def describe(self, prompt: Sequence[int]) -> dict[str, Any]:
        """The whole answer as an object: `text`, `finish_reason` and counts, or `samples` with these for each."""
        if self._manner.samples > 1:
            drawn = self.samples(prompt)
            timing = self._loaded.session.timing
            each = [{**_written(s.text, s.finish_reason, s.tokens), **self._logprobs(s.logprobs)} for s in drawn]
            return {"prompt_tokens": timing.prompt, "cached_tokens": timing.cached, "samples": each}
        reply = self.reply(prompt)
        return self.describe_reply(reply, "".join(reply))

    def describe_reply(self, reply: "Reply", text: str) -> dict[str, Any]:
        """The object for a reply that was streamed."""
        rows = [] if self.recorder is None else self.recorder.rows[0][: len(reply.tokens)]
        return {**describe(reply, text), **self._logprobs(rows)}

    def _logprobs(self, logprobs: "Sequence[TokenLogprob]") -> dict[str, Any]:
        """Nothing unless they were asked for."""
        if self._manner.top is None:
            return {}
        tokenizer = self._loaded.assistant.tokenizer
        return {
            "logprobs": [
                {
                    **token_fields(tokenizer, one.token, one.logprob),
                    "top": [token_fields(tokenizer, token, logprob) for token, logprob in one.top],
                }
                for one in logprobs
            ]
        }


def _written(text: str, reason: str | None, tokens: Sequence[int]) -> dict[str, Any]:
    return {"text": text, "finish_reason": reason, "completion_tokens": len(tokens)}


def describe(reply: "Reply", text: str) -> dict[str, Any]:
    """A reply that ended as an object."""
    timing = reply.timing
    return {
        **_written(text, reply.finish_reason, reply.tokens),
        "prompt_tokens": timing.prompt,
        "cached_tokens": timing.cached,
        "first_token_seconds": round(timing.first_token_seconds, 5),
        "tokens_per_second": round(timing.tokens_per_second, 2),
        **({} if timing.record is None else {"draft": draft_fields(timing, timing.record)}),
    }


def draft_fields(timing: "Timing", record: "SpeculationStats") -> dict[str, Any]:
    """What speculation did in a reply; `speedup` against plain steps in the same reply, null where there was none."""
    return {
        "passes": record.passes,
        "drafted": record.drafted,
        "kept": record.accepted,
        "acceptance": round(record.acceptance_rate, 4),
        "mean_length": round(record.mean_length, 3),
        "speedup": None if timing.speedup is None else round(timing.speedup, 3),
    }


def token_fields(tokenizer: "Tokenizer", token: int, logprob: float) -> dict[str, Any]:
    """A token for a program: `bytes` too, since a token may be a part of a character."""
    piece = tokenizer.piece(token, first=False)
    data = (tokenizer.vocabulary[token] or "").encode() if piece is None else piece
    return {"id": token, "token": data.decode("utf-8", "replace"), "bytes": list(data), "logprob": round(logprob, 5)}
