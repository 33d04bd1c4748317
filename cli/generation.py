"""How `run` answers, one prompt or a batch: prompt to ids, the limits that hold, and a reply as an object.

Knows what the options mean. Does not know where prompts come from, nor how a reply is shown.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mycli.cli.load import LoadedSession
from mycli.runtime.engine.stats import SpeculationStats, Timing
from mycli.runtime.sampling.params import SamplingParams
from mycli.runtime.tokenizer.chat_template import Message

if TYPE_CHECKING:  # torch takes a second to import
    from mycli.runtime.engine.completion import Completion, Sample
    from mycli.runtime.sampling.grammar import Grammar
    from mycli.runtime.sampling.logprobs import TokenLogprob
    from mycli.runtime.tokenizer.tokenizer import Tokenizer

DEFAULT_LIMIT = 512


@dataclass(frozen=True)
class Generator:
    """A loaded model that answers every prompt of a command in the same way.

    `top`: logprobs of so many tokens a place, None for no logprobs.
    """

    loaded: LoadedSession
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
        return tokenizer.chat(prompt, allow_special=self.allow_special)

    def _room(self, prompt: Sequence[int]) -> int:
        """Tokens that fit behind `prompt`."""
        return self.loaded.session.context - len(prompt) + 1

    def _limit(self, prompt: Sequence[int]) -> int | None:
        """Most tokens to write. The default gives way to a full context, a number that was asked for does not."""
        return DEFAULT_LIMIT if self.limit is None and self._room(prompt) > DEFAULT_LIMIT else self.limit

    def reply(self, prompt: Sequence[int]) -> "Completion":
        """One reply, to be streamed."""
        from mycli.runtime.engine.completion import Completion

        return Completion(
            self.loaded.model,
            self.loaded.session,
            prompt,
            self.sampling,
            limit=self._limit(prompt),
            stops=self.stops,
            grammar=self.grammar,
            top=self.top,
        )

    def samples(self, prompt: Sequence[int]) -> "list[Sample]":
        """As many replies as are asked for, after one prefill."""
        from mycli.runtime.engine.completion import draw_samples

        limit = self._limit(prompt)
        return draw_samples(
            self.loaded.model,
            self.loaded.session,
            prompt,
            self.sampling,
            count=self.count,
            limit=max(self._room(prompt), 0) if limit is None else limit,
            stops=self.stops,
            grammar=self.grammar,
            top=self.top,
        )

    def describe(self, prompt: Sequence[int]) -> dict[str, Any]:
        """The whole answer as an object: `text`, `finish_reason` and counts, or `samples` with these for each."""
        if self.count > 1:
            drawn = self.samples(prompt)
            timing = self.loaded.session.timing
            each = [{**_written(one, one.text), **self._logprobs(one.logprobs)} for one in drawn]
            return {"prompt_tokens": timing.prompt, "cached_tokens": timing.cached, "samples": each}
        reply = self.reply(prompt)
        return {**describe(reply, "".join(reply)), **self._logprobs(reply.logprobs)}

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


def _written(reply: "Completion | Sample", text: str) -> dict[str, Any]:
    return {"text": text, "finish_reason": reply.finish_reason, "completion_tokens": len(reply.tokens)}


def describe(reply: "Completion", text: str) -> dict[str, Any]:
    """A reply that ended as an object."""
    timing = reply.timing
    return {
        **_written(reply, text),
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
    piece = tokenizer.piece(token, first=False)
    data = (tokenizer.vocabulary[token] or "").encode() if piece is None else piece
    return {"id": token, "token": data.decode("utf-8", "replace"), "bytes": list(data), "logprob": round(logprob, 5)}
