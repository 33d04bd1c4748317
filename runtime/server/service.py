"""The served model, and how a request of any interface becomes requests to the engine.

Templates, tokenization and grammars are slow: routes call these methods in `Service.pool`, off the event loop.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property
from threading import Lock
from typing import Any

from mycli.runtime.engine.loading.loader import LoadedModel
from mycli.runtime.engine.replies.journal import ReplyJournal
from mycli.runtime.engine.sequence import BeamOptions, Request, reply_room
from mycli.runtime.errors import UserError
from mycli.runtime.sampling.grammars.grammar import JSON_MODE, Alternative, Grammar, GrammarCompiler
from mycli.runtime.sampling.grammars.lark import Prelude
from mycli.runtime.sampling.grammars.reasoning import reasoning_prelude
from mycli.runtime.sampling.params import SamplingParams, recommended
from mycli.runtime.sampling.token_filter import TokenFilter
from mycli.runtime.server.delivery import Delivery
from mycli.runtime.server.http.api_error import (
    ApiError,
    ContextError,
    as_api_errors,
    from_user_error,
    invalid_value,
    unsupported_parameter,
)
from mycli.runtime.server.http.request_log import RequestFigures
from mycli.runtime.server.http.settings import ServerSettings, ServerState, untagged
from mycli.runtime.server.requests.chat_prompt import RecentPrompts, render_chat, template_source
from mycli.runtime.server.requests.formats import ResponseFormat
from mycli.runtime.server.requests.grammar_pool import GrammarPool
from mycli.runtime.server.requests.item_store import ItemStore
from mycli.runtime.server.requests.schemas import Sampling
from mycli.runtime.server.worker import EngineWorker, OutputReader
from mycli.runtime.tokenizer.chat_template import Message, Tool
from mycli.runtime.tokenizer.fill_in_middle import FimPrompt
from mycli.runtime.tokenizer.parsing.reasoning_parser import ReasoningFormat, find_reasoning_format
from mycli.runtime.tokenizer.parsing.tool_formats import HERMES, ToolFormat, model_tool_format
from mycli.runtime.tokenizer.prompt_difference import Difference, PromptParts


@dataclass(frozen=True)
class Prepared:
    """Requests ready for the engine, with a reader for each reply; `prompts`: token ids, in the client's order.

    clipped: the context has no room for the requested tokens; omitted: parts of the request that were left
    out, for the response's header and the log; difference: from the most similar earlier prompt; figures: counted
    while the requests run; edits: descriptions of what shortened the conversation, None for a request without edits.
    """

    requests: Sequence[tuple[Request, Sequence[OutputReader]]]
    prompts: Sequence[Sequence[int]]
    clipped: bool = False
    omitted: Sequence[str] = ()
    difference: Difference | None = None
    figures: RequestFigures = field(default_factory=RequestFigures)
    edits: Sequence[Mapping[str, Any]] | None = None

    @property
    def grammars(self) -> Sequence[Grammar]:
        by_id = {id(request.grammar): request.grammar for request, _ in self.requests}
        return [grammar for grammar in by_id.values() if grammar is not None]

    @property
    def prompt_tokens(self) -> int:
        return sum(map(len, self.prompts))

    @property
    def replies(self) -> int:
        return sum(len(readers) for _, readers in self.requests)

    def prompt_of(self, reply: int) -> int:
        """Return the number of the prompt that reply `reply` continues; each prompt has as many replies."""
        return reply * len(self.prompts) // self.replies


class Service(ServerState):
    """One served model. `created`: seconds since 1970, shown in the list of models."""

    def __init__(self, settings: ServerSettings, loaded: LoadedModel, worker: EngineWorker, created: int) -> None:
        super().__init__(settings)
        self.loaded, self.worker, self.created = loaded, worker, created
        self.items = ItemStore()
        # By the id of their last response: {"id": ..., "input": [items up to that response], "response": {...}}.
        self.conversations = ItemStore()
        self.journal = None if settings.replies is None else ReplyJournal(settings.replies)
        self.prompts = RecentPrompts()
        self.recorded: dict[str, Delivery] = {}  # replies that are being recorded, by id
        self.pool = ThreadPoolExecutor(4, thread_name_prefix="text")
        # One at a time: a body of megabytes takes seconds and hundreds of megabytes, and must not fill the pool.
        self.large_bodies = ThreadPoolExecutor(1, thread_name_prefix="large")
        self.grammars = GrammarPool(len(loaded.tokenizer.vocabulary))
        self._lock = Lock()

    def close(self) -> None:
        """Stop the thread pools; tasks that have not started are dropped."""
        for pool in (self.pool, self.large_bodies):
            pool.shutdown(wait=False, cancel_futures=True)
        self.grammars.close()

    @property
    def busy(self) -> bool:
        """Whether a request is being read, prepared, or answered."""
        return self.requests > 0 or self.worker.underway > 0

    @property
    def context(self) -> int:
        return self.worker.engine.context

    def check_model(self, name: str | None) -> None:
        """Raise ApiError for a model that is not served; None means the one that is."""
        if name is not None and name not in self.settings.names and untagged(name) not in self.settings.names:
            served = ", ".join(self.settings.names)
            message = f"model {name[:100]!r} is not served here; served: {served:.300}"
            raise ApiError(404, message, "model_not_found", param="model")

    @cached_property
    def _template(self) -> str:
        return template_source(self.loaded.tokenizer)

    @cached_property
    def tool_format(self) -> ToolFormat:
        return model_tool_format(self.loaded.tokenizer.response_template, self._template) or HERMES

    @cached_property
    def reasoning_format(self) -> ReasoningFormat:
        return find_reasoning_format(self._template)

    @property
    def compiler(self) -> GrammarCompiler:
        with self._lock:  # compiled by the first request that needs it; several threads may come at the same time
            return self._compiler

    @cached_property
    def _compiler(self) -> GrammarCompiler:
        return GrammarCompiler(self.loaded.tokenizer, self.loaded.stop_ids, self.settings.extra_properties)

    # Prompts

    def chat_prompt(
        self,
        messages: Sequence[Message],
        tools: Sequence[Tool],
        arguments: Mapping[str, Any],
        more: bool = True,
        place: str = "messages",
    ) -> list[int]:
        """Return the token ids of a conversation; `more`: open the assistant's reply. Raises ApiError about `place`."""
        parts = PromptParts(messages, tools, arguments)
        return render_chat(self.loaded.tokenizer, parts, more, place, self._template)

    def prelude(self, prompt_end: str) -> Prelude | None:
        """Return what may precede a reply with a grammar: reasoning, unless the prompt has closed the block."""
        return reasoning_prelude(self._template, prompt_end)

    def text_prompt(self, text: str, *, add_special: bool = True, allow_special: bool = False) -> list[int]:
        """Return the token ids of a text. Raises ApiError."""
        with as_api_errors("prompt"):
            return self.loaded.tokenizer.encode(text, add_special=add_special, allow_special=allow_special)

    def beginning(self, text: str, tokens: int | None, param: str) -> str:
        """Return the beginning of a text that has at most `tokens` tokens, None for all. Raises ApiError."""
        if not tokens:
            return text
        with as_api_errors(param):
            return self.loaded.tokenizer.beginning(text, tokens)

    def fim_prompt(
        self,
        prefix: str,
        suffix: str,
        param: str,
        extra: Sequence[tuple[str, str]] = (),
        room: int | None = None,
    ) -> FimPrompt:
        """Return the prompt for the text between `prefix` and `suffix`. Raises ApiError about `param`."""
        if self.loaded.tokenizer.fim_tokens is None:
            raise unsupported_parameter(param, f"{self.name} has no fill-in-the-middle tokens, such as <|fim_prefix|>")
        with as_api_errors(param):
            return self.loaded.tokenizer.fim_prompt(prefix, suffix, extra, room)

    def tag_ids(self, text: str) -> list[int]:
        """Return the token ids of markup, in which control tokens count as such."""
        return self.loaded.tokenizer.encode(text, add_special=False, allow_special=True) if text else []

    def check_ids(self, ids: Sequence[int], param: str) -> None:
        """Raise ApiError for a token id outside the vocabulary."""
        largest = max(ids, default=0)
        if largest >= self.loaded.vocabulary_size:
            message = f"token id {largest} is out of range: the vocabulary ends at {self.loaded.vocabulary_size - 1}"
            raise ApiError(400, message, "invalid_value", param=param)

    def check_generates(self) -> None:
        """Raise ApiError for a model that computes embeddings or scores alone."""
        config = self.loaded.runner.config
        if config.bidirectional:
            message = f"{self.name} {config.purpose} and does not generate text: its attention is bidirectional"
            raise ApiError(400, message, "embedding_model" if config.classifier is None else "reranker", param="model")

    def check_fits(self, prompt: Sequence[int], limit: int | None, param: str) -> None:
        """Raise ApiError, with the token counts, if the prompt and `limit` tokens more exceed the context."""
        if not prompt:
            raise invalid_value(param, "has no tokens, and this model has no start token")
        room = reply_room(self.context, len(prompt))
        if room < 1:
            raise ContextError(len(prompt), None, self.context, param=param, room=0)
        if limit is not None and limit > room:
            raise ContextError(len(prompt), limit, self.context, param=param, room=room)

    # Replies

    def sampling(self, body: Sampling) -> SamplingParams:
        """Return the sampling settings of a request; fields left out take the model's defaults. Raises ApiError."""
        names = ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
        values: dict[str, object] = {name: getattr(body, name) for name in names}
        if body.repetition_penalty is None:
            values["repetition_penalty"] = body.repeat_penalty
        values["seed"] = None if body.seed == -1 else body.seed  # -1: any, as in vLLM, llama.cpp and Ollama
        if body.top_k is not None:
            values["top_k"] = max(body.top_k, 0)  # -1 turns it off, as in vLLM
        if body.logit_bias:
            biases = tuple((int(token), bias) for token, bias in body.logit_bias.items())
            self.check_ids([token for token, _ in biases], "logit_bias")
            values["logit_bias"] = biases
        with as_api_errors():
            return recommended(self.loaded.defaults).with_overrides(values)

    def grammar(self, response: ResponseFormat | None, prelude: Prelude | None = None) -> Grammar | None:
        """Return the grammar of a response format, None if it allows any text. Raises ApiError."""
        if response is None or response.type == "text":
            return None
        kind, text = _grammar_text(response)
        compile_text = {"regex": self.compiler.regex, "lark": self.compiler.lark, "gbnf": self.compiler.gbnf}.get(kind)
        try:
            if compile_text is None:
                return self.compiler.schema(text, response.place, prelude, response.strict)
            grammar = compile_text(text, prelude)
            grammar.field = response.place
            return grammar
        except UserError as error:
            raise from_user_error(error, response.place) from None
        except RecursionError:
            raise ApiError(400, "the schema is nested too deeply", "invalid_value", param=response.place) from None

    def format_source(self, response: ResponseFormat | None) -> Alternative | None:
        """Return a response format as an alternative to tool calls; None if it allows any text. Raises ApiError."""
        if response is None or response.type == "text":
            return None
        with as_api_errors(response.place):
            return self.compiler.alternative(*_grammar_text(response), response.place, response.strict)

    def request(
        self,
        prompt: Sequence[int],
        body: Sampling,
        limit: int | None,
        grammar: Grammar | None,
        top: int | None,
        prompt_logprobs: bool = False,
        beams: BeamOptions | None = None,
        fills_in: bool = False,
    ) -> Request:
        """Return the engine's request for replies to one prompt; `fills_in`: it is of `fim_prompt`. Raises ApiError."""
        self.check_generates()
        if beams is not None:
            _check_beams(body, grammar, top)
        # Evaluation harnesses score a prompt by asking for one token, and expect it even if it is an end token.
        scored = prompt_logprobs and limit == 1
        # A format ends where its grammar ends: what followed would match nothing.
        endless = body.ignore_eos and (grammar is None or grammar.free)
        stop_ids = frozenset() if endless or scored else self.loaded.stop_ids
        if fills_in and self.loaded.tokenizer.fim_tokens is not None and not endless:
            stop_ids |= self.loaded.tokenizer.fim_tokens.ends
        if body.stop_token_ids:
            self.check_ids(body.stop_token_ids, "stop_token_ids")
            stop_ids |= frozenset(body.stop_token_ids)
        least = body.min_tokens or 0
        most = reply_room(self.context, len(prompt)) if limit is None else limit
        if least > most:
            cause = f"{least} is more than the reply may have, {most}; lower it or raise max_tokens"
            raise invalid_value("min_tokens", cause)
        sampling, deadline = self.sampling(body) if beams is None else SamplingParams(), self.deadline(body)
        return Request(
            tuple(prompt),
            sampling,
            limit,
            stop_ids,
            grammar,
            top,
            prompt_logprobs,
            deadline,
            beams=beams,
            min_tokens=least,
            token_filter=self.token_filter(body, grammar),
        )

    def token_filter(self, body: Sampling, grammar: Grammar | None) -> TokenFilter | None:
        """Return the tokens that a reply may not have, None without any. Raises ApiError."""
        if not (body.allowed_token_ids or body.bad_words):
            return None
        name = "allowed_token_ids" if body.allowed_token_ids else "bad_words"
        if grammar is not None:  # near the limits of a reply a grammar chooses tokens by itself
            raise unsupported_parameter(name, "cannot be combined with tools, a format or a thinking budget")
        words = list(self._bad_words(body.bad_words or ()))
        with as_api_errors(name):
            return TokenFilter.of(self.loaded.vocabulary_size, body.allowed_token_ids, words)

    def _bad_words(self, words: Sequence[str]) -> Iterator[tuple[int, ...]]:
        # As vLLM: each word without leading space, and with one where that is another token of as many.
        for index, word in enumerate(words):
            if not word.strip():
                raise invalid_value(f"bad_words.{index}", "not blank")
            first, spaced = (tuple(self.tag_ids(space + word.lstrip())) for space in ("", " "))
            yield first
            if spaced[0] != first[0] and len(spaced) == len(first):
                yield spaced

    def deadline(self, body: Sampling) -> float | None:
        """Return the seconds after which a reply is to end, None for any time."""
        return self.settings.deadline if body.deadline is None else body.deadline


def _check_beams(body: Sampling, grammar: Grammar | None, top: int | None) -> None:
    # A search takes the most likely tokens: settings that ask for others are refused, those that ask for nothing not.
    neutral: dict[str, tuple[object, ...]] = {"temperature": (None, 0, 1), "top_k": (None, 0, -1)}
    neutral |= dict.fromkeys(("top_p", "repetition_penalty", "repeat_penalty"), (None, 1))
    neutral |= dict.fromkeys(("min_p", "presence_penalty", "frequency_penalty", "min_tokens"), (None, 0))
    neutral |= {"seed": (None, -1), **dict.fromkeys(("logit_bias", "stop", "allowed_token_ids"), (None,))}
    neutral["bad_words"] = (None, [])
    for name, values in neutral.items():
        if getattr(body, name) not in values:
            message = f"use_beam_search: cannot be combined with {name}"
            raise ApiError(400, message, "unsupported_parameter", param=name)
    if grammar is not None:
        cause = "cannot be combined with a format, a required call or a thinking budget"
        raise unsupported_parameter("use_beam_search", cause)
    if top is not None:
        message = "use_beam_search: cannot be combined with logprobs"
        raise ApiError(400, message, "unsupported_parameter", param="logprobs")


def _grammar_text(response: ResponseFormat) -> tuple[str, str]:
    # The kind of grammar (regex, lark, gbnf or schema) and its text.
    if response.type in ("regex", "lark", "gbnf"):
        return response.type, getattr(response, response.type)
    schema = response.schema_ if response.json_schema is None else response.json_schema.schema_
    return "schema", JSON_MODE if schema is None else json.dumps(schema)
