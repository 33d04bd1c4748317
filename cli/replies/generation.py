"""Answers the prompts of `mycli run`, one or a batch, and describes replies as JSON objects."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from mycli.cli.flags.options import NO_LIMIT
from mycli.cli.flags.records import ReasoningFlags
from mycli.runtime.engine.replies.opened_model import DEFAULT_MAX_TOKENS, OpenedModel
from mycli.runtime.engine.sequence import BeamOptions, Request, reply_room
from mycli.runtime.errors import UserError
from mycli.runtime.sampling.params import SamplingParams
from mycli.runtime.tokenizer.chat_template import Message
from mycli.runtime.tokenizer.parsing.reasoning_parser import reasoning_format
from mycli.runtime.tokenizer.stream import TextRules

if TYPE_CHECKING:  # torch takes a second to import
    from mycli.runtime.engine.replies.completion import Completion
    from mycli.runtime.engine.replies.journal import RecordedReply
    from mycli.runtime.engine.stats import SpeculationStats, Timing
    from mycli.runtime.sampling.grammars.grammar import Grammar
    from mycli.runtime.sampling.logprobs import TokenLogprob
    from mycli.runtime.tokenizer.tokenizer import Tokenizer

# The default limit of a reply with a schema whose values are all scalars: a small model writes a string without an end.
VALUE_TOKENS = 30
LEAST_FORMAT_TOKENS = 60
TOGETHER = 64  # prompts of a batch file that run concurrently


GrammarOfPrompt = Callable[[Sequence[int]], "Grammar | None"]


def limit_reasoning(loaded: OpenedModel, limits: ReasoningFlags) -> GrammarOfPrompt:
    """Return the grammar of a chat reply by its prompt; None for replies whose reasoning has no limit."""
    if limits == ReasoningFlags():
        return lambda prompt: None
    from mycli.runtime.sampling.grammars.reasoning import ReasoningGrammars

    return ReasoningGrammars(loaded.model.tokenizer, loaded.model.stop_ids, limits.budget).grammar


@dataclass(frozen=True)
class Generator:
    """A loaded model with the settings of a command.

    `count`: replies per prompt; `top`: most likely tokens to list at each position, None for no logprobs; `beams`:
    search for the most likely replies instead of sampling.
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
    reasoning: ReasoningFlags = ReasoningFlags()
    beams: BeamOptions | None = None

    def encode(self, prompt: str | Sequence[Message]) -> list[int]:
        """Return the token ids of a prompt; a text is a user message unless `raw` or without a chat template."""
        tokenizer = self.loaded.model.tokenizer
        if isinstance(prompt, str):
            if self.raw or tokenizer.template is None:
                return tokenizer.encode(prompt, add_special=True, allow_special=self.allow_special)
            prompt = [Message("user", prompt)]
        if self.system is not None and not any(message.role == "system" for message in prompt):
            prompt = [Message("system", self.system), *prompt]
        return tokenizer.apply_chat_template(prompt, allow_special=self.allow_special)

    def room(self, prompt: Sequence[int]) -> int | None:
        """Return the limit of a reply to `prompt`: the default fits the context, one that was given may be refused."""
        if self.limit is not None:
            return None if self.limit == NO_LIMIT else self.limit
        default = DEFAULT_MAX_TOKENS
        if self.grammar is not None and self.grammar.values is not None:
            default = min(max(self.grammar.values * VALUE_TOKENS, LEAST_FORMAT_TOKENS), default)
        return default if reply_room(self.loaded.engine.context, len(prompt)) > default else None

    def reply(self, prompt: Sequence[int], recorded: "tuple[RecordedReply, int] | None" = None) -> "Completion":
        """Return one reply; iterating over it generates its text. `recorded`: its record and seed, if it has them."""
        from mycli.runtime.engine.replies.completion import Completion
        from mycli.runtime.engine.replies.reader import ReplyReader

        record, seed = recorded or (None, 0)
        model = self.loaded.model
        request = Request(
            tuple(prompt),
            self.sampling,
            self.room(prompt),
            model.stop_ids,
            self.grammar or (None if self.raw else self._reasoning_grammar(prompt)),
            self.top,
            deadline=self.reasoning.deadline,
            start=None if record is None else record.start(seed),
            beams=self.beams,
        )
        shown = () if self.raw else reasoning_format(model.tokenizer).marks
        before = prompt if self.raw or model.tokenizer.template is None else ()
        reader = ReplyReader(model.tokenizer, TextRules(self.stops), shown=shown, before=before)
        return Completion(self.loaded.engine, request, reader, record)

    @cached_property
    def _reasoning_grammar(self) -> GrammarOfPrompt:
        return limit_reasoning(self.loaded, self.reasoning)

    def samples(self, prompt: Sequence[int]) -> "Sequence[Completion]":
        """Generate `count` replies; the prompt is computed once."""
        from mycli.runtime.engine.replies.completion import finish_replies

        replies = [self.reply(prompt) for _ in range(self.count)]
        finish_replies(self.loaded.engine, [replies])
        return replies

    def describe(self, replies: "Sequence[Completion]") -> dict[str, Any]:
        """Return the answer as a JSON object: of the reply, or with `samples` if `count` is above 1."""
        return self._sampled(replies) if self.count > 1 else self._replied(replies[0])

    def describe_all(self, prompts: Iterable[str | Sequence[Message]]) -> "Iterator[dict[str, Any] | UserError]":
        """Yield the JSON object or the error of each prompt, in order; `TOGETHER` prompts run concurrently."""
        from mycli.runtime.engine.replies.completion import complete_all

        for group in complete_all(self.loaded.engine, map(self._group, prompts), TOGETHER):
            error = next((reply.error for reply in group if reply.error is not None), None)
            if error is not None:
                yield error
            else:
                yield self.describe(group)

    def _group(self, prompt: str | Sequence[Message]) -> "list[Completion]":
        try:
            ids = self.encode(prompt)
        except UserError as error:
            reply = self.reply([])
            reply.fail(error)
            return [reply]
        return [self.reply(ids) for _ in range(self.count)]

    def _sampled(self, replies: "Sequence[Completion]") -> dict[str, Any]:
        timing = replies[0].timing
        samples = [{**_text_fields(reply), **self._logprobs(reply.logprobs)} for reply in replies]
        return {"prompt_tokens": timing.prompt, "cached_tokens": timing.cached, "samples": samples}

    def _replied(self, reply: "Completion") -> dict[str, Any]:
        return {**describe(reply), **self._logprobs(reply.logprobs)}

    def _logprobs(self, logprobs: "Sequence[TokenLogprob]") -> dict[str, Any]:
        if self.top is None:
            return {}
        tokenizer = self.loaded.model.tokenizer
        return {
            "logprobs": [
                {
                    **token_fields(tokenizer, position.token, position.logprob),
                    "top": [token_fields(tokenizer, token, logprob) for token, logprob in position.top],
                }
                for position in logprobs
            ]
        }


def _text_fields(reply: "Completion") -> dict[str, Any]:
    return {"text": reply.text, "finish_reason": reply.finish_reason, "completion_tokens": len(reply.tokens)}


def describe(reply: "Completion") -> dict[str, Any]:
    """Return the JSON object of a finished reply."""
    timing = reply.timing
    return {
        **_text_fields(reply),
        "prompt_tokens": timing.prompt,
        "cached_tokens": timing.cached,
        "first_token_seconds": round(timing.first_token_seconds, 5),
        "tokens_per_second": round(timing.tokens_per_second, 2),
        **({} if timing.record is None else {"draft": draft_fields(timing, timing.record)}),
    }


def draft_fields(timing: "Timing", record: "SpeculationStats") -> dict[str, Any]:
    """Return the speculation statistics of a reply; `speedup` compares with its plain steps, null without any."""
    return {
        "passes": record.passes,
        "drafted": record.drafted,
        "kept": record.accepted,
        "acceptance": round(record.acceptance_rate, 4),
        "mean_length": round(record.mean_length, 3),
        "speedup": None if timing.speedup is None else round(timing.speedup, 3),
    }


def token_fields(tokenizer: "Tokenizer", token: int, logprob: float) -> dict[str, Any]:
    """Return the JSON object of a token; `bytes` too, since a token may be a part of a character."""
    data = tokenizer.token_bytes(token)
    return {"id": token, "token": data.decode("utf-8", "replace"), "bytes": list(data), "logprob": round(logprob, 5)}
