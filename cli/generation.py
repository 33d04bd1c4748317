"""How `run` answers, one prompt or a batch: prompt to ids, the limits that hold, and a reply as an object.

Knows what the options mean. Does not know where prompts come from, nor how a reply is shown.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mycli.runtime.engine.stats import SpeculationStats, Timing
from mycli.runtime.errors import UserError
from mycli.runtime.open import DEFAULT_MAX_TOKENS, OpenedModel
from mycli.runtime.sampling.params import SamplingParams
from mycli.runtime.tokenizer.chat_template import Message

if TYPE_CHECKING:  # torch takes a second to import
    from mycli.runtime.engine.completion import Completion
    from mycli.runtime.sampling.grammar import Grammar
    from mycli.runtime.sampling.logprobs import TokenLogprob
    from mycli.runtime.tokenizer.tokenizer import Tokenizer

DEFAULT_LIMIT = DEFAULT_MAX_TOKENS
TOGETHER = 64  # prompts of a file under way at a time


@dataclass(frozen=True)
class Generator:
    """A loaded model that answers every prompt of a command in the same way.

    `top`: logprobs of so many tokens a place, None for no logprobs.
    """

    loaded: OpenedModel
    sampling: SamplingParams
    limit: int | None = None
    stops: tuple[str, ...] = ()
    system: str | None = None
    raw: bool = False
    allow_special: bool = False
    grammar: "Grammar | None" = None
    count: int = 1
    top: int | None = None

    def encode(self, prompt: str | Sequence[Message]) -> list[int]:
        """The ids of a text or a conversation. A text is a question, unless raw or the model has no chat template."""
        tokenizer = self.loaded.model.tokenizer
        if isinstance(prompt, str):
            if self.raw or tokenizer.template is None:
                return tokenizer.encode(prompt, add_special=True, allow_special=self.allow_special)
            prompt = [Message("user", prompt)]
        if self.system is not None and not any(message.role == "system" for message in prompt):
            prompt = [Message("system", self.system), *prompt]
        return tokenizer.apply_chat_template(prompt, allow_special=self.allow_special)

    def _limit(self, prompt: Sequence[int]) -> int | None:
        """Most tokens to write. The default gives way to a full context, a number that was asked for does not."""
        from mycli.runtime.engine.sequence import reply_room

        room = reply_room(self.loaded.engine.context, len(prompt))
        return DEFAULT_LIMIT if self.limit is None and room > DEFAULT_LIMIT else self.limit

    def reply(self, prompt: Sequence[int]) -> "Completion":
        """One reply, to be streamed."""
        from mycli.runtime.engine.completion import Completion

        return Completion(
            self.loaded.model,
            self.loaded.engine,
            prompt,
            self.sampling,
            limit=self._limit(prompt),
            stops=self.stops,
            grammar=self.grammar,
            top=self.top,
        )

    def samples(self, prompt: Sequence[int]) -> "Sequence[Completion]":
        """As many replies as are asked for, after one prefill."""
        from mycli.runtime.engine.completion import draw_samples

        return draw_samples(self.loaded.engine, [self.reply(prompt) for _ in range(self.count)])

    def describe(self, prompt: Sequence[int]) -> dict[str, Any]:
        """The whole answer as an object: `text`, `finish_reason` and counts, or `samples` with these for each."""
        if self.count > 1:
            return self._sampled(self.samples(prompt))
        reply = self.reply(prompt)
        for _ in reply:
            pass
        return self._replied(reply)

    def describe_all(self, prompts: Iterable[str | Sequence[Message]]) -> "Iterator[dict[str, Any] | UserError]":
        """As `describe`, or what went wrong, for each prompt in order; many are under way at a time."""
        from mycli.runtime.engine.completion import complete_all

        for group in complete_all(self.loaded.engine, map(self._group, prompts), TOGETHER):
            error = next((reply.error for reply in group if reply.error is not None), None)
            if error is not None:
                yield error
            else:
                yield self._sampled(group) if self.count > 1 else self._replied(group[0])

    def _group(self, prompt: str | Sequence[Message]) -> "list[Completion]":
        try:
            ids = self.encode(prompt)
        except UserError as error:
            reply = self.reply([])
            reply.fail(error)
            return [reply]
        return [self.reply(ids) for _ in range(self.count)]

    def _sampled(self, drawn: "Sequence[Completion]") -> dict[str, Any]:
        timing = drawn[0].timing
        each = [{**_written(one), **self._logprobs(one.logprobs)} for one in drawn]
        return {"prompt_tokens": timing.prompt, "cached_tokens": timing.cached, "samples": each}

    def _replied(self, reply: "Completion") -> dict[str, Any]:
        return {**describe(reply), **self._logprobs(reply.logprobs)}

    def _logprobs(self, logprobs: "Sequence[TokenLogprob]") -> dict[str, Any]:
        """Nothing unless they were asked for."""
        if self.top is None:
            return {}
        tokenizer = self.loaded.model.tokenizer
        return {
            "logprobs": [
                {
                    **token_fields(tokenizer, one.token, one.logprob),
                    "top": [token_fields(tokenizer, token, logprob) for token, logprob in one.top],
                }
                for one in logprobs
            ]
        }


def _written(reply: "Completion") -> dict[str, Any]:
    return {"text": reply.text, "finish_reason": reply.finish_reason, "completion_tokens": len(reply.tokens)}


def describe(reply: "Completion") -> dict[str, Any]:
    """A reply that ended as an object."""
    timing = reply.timing
    return {
        **_written(reply),
        "prompt_tokens": timing.prompt,
        "cached_tokens": timing.cached,
        "first_token_seconds": round(timing.first_token_seconds, 5),
        "tokens_per_second": round(timing.tokens_per_second, 2),
        **({} if timing.record is None else {"draft": draft_fields(timing, timing.record)}),
    }


def draft_fields(timing: Timing, record: SpeculationStats) -> dict[str, Any]:
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
    data = tokenizer.token_bytes(token)
    return {"id": token, "token": data.decode("utf-8", "replace"), "bytes": list(data), "logprob": round(logprob, 5)}
