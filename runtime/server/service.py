"""What routes share: the served model, its worker, and how a wish of any protocol becomes sequences for the engine.

Everything slow (templates, tokenization, grammars) is a plain function here, which routes run in `Service.pool`. Does
not know HTTP.
"""

import json
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from threading import Lock
from typing import Any

from mycli.runtime.engine.loader import LoadedModel
from mycli.runtime.engine.sequence import Request
from mycli.runtime.errors import ModelError, UserError
from mycli.runtime.sampling.grammar import JSON_MODE, Grammar, GrammarCompiler, Prelude
from mycli.runtime.sampling.params import SamplingParams, recommended
from mycli.runtime.server.api_error import ApiError, from_user_error
from mycli.runtime.server.reply_reader import ReplyReader
from mycli.runtime.server.schemas import ResponseFormat, Sampling
from mycli.runtime.server.settings import ServerSettings
from mycli.runtime.server.worker import EngineWorker
from mycli.runtime.tokenizer.chat_template import ARGUMENTS, Message, Tool
from mycli.runtime.tokenizer.parsing.reasoning_parser import CLOSE, OPEN
from mycli.runtime.tokenizer.parsing.response_template import read_response_template
from mycli.runtime.tokenizer.parsing.tool_formats import (
    HERMES,
    ToolFormat,
    declared_tool_format,
    describe_tools_in_system_message,
    find_tool_format,
)


@dataclass(frozen=True)
class Prepared:
    """Sequences ready for the engine, each with what reads its reply; `prompts` in the order of the request."""

    wanted: Sequence[tuple[Request, ReplyReader]]
    prompts: Sequence[Sequence[int]]

    @property
    def prompt_tokens(self) -> int:
        """Tokens of all prompts."""
        return sum(map(len, self.prompts))


class Service:
    """One served model."""

    def __init__(self, settings: ServerSettings, loaded: LoadedModel, worker: EngineWorker, created: int) -> None:
        """`created`: seconds since 1970, shown as the model's."""
        self.settings, self.loaded, self.worker, self.created = settings, loaded, worker, created
        self.pool = ThreadPoolExecutor(4, thread_name_prefix="text")
        self.draining = False
        self._lock = Lock()

    def close(self) -> None:
        """Let go of the threads."""
        self.pool.shutdown(wait=False, cancel_futures=True)

    @property
    def name(self) -> str:
        """What the model is called in replies."""
        return self.settings.names[0]

    @property
    def context(self) -> int:
        """Most tokens of a prompt and its reply."""
        return self.worker.engine.context

    def check_model(self, name: str | None) -> None:
        """Raises ApiError for a model that is not served here; None is whatever is."""
        if name is not None and name not in self.settings.names:
            raise ApiError(404, f"the model {name[:100]!r} is not served here", "model_not_found", param="model")

    @cached_property
    def _template(self) -> str:
        template = self.loaded.tokenizer.template
        return "" if template is None else template.source(tools=True)

    @cached_property
    def tool_format(self) -> ToolFormat:
        """How the model writes calls: as it declares, as its template shows, or described in the prompt."""
        raw = self.loaded.tokenizer.response_template
        with suppress(ModelError):  # one that cannot be followed: its template may still show the way
            if raw is not None and (found := declared_tool_format(read_response_template(raw))) is not None:
                return found
        return find_tool_format(self._template) or HERMES

    @property
    def compiler(self) -> GrammarCompiler:
        """What makes grammars; made at the first that is asked for. Raises UserError where none can be made."""
        with self._lock:
            return self._compiler

    @cached_property
    def _compiler(self) -> GrammarCompiler:
        return GrammarCompiler(self.loaded.tokenizer, self.loaded.stop_ids)

    # Prompts

    def chat_prompt(
        self, messages: Sequence[Message], tools: Sequence[Tool], arguments: Mapping[str, Any], more: bool = True
    ) -> list[int]:
        """The ids of a conversation. Raises ApiError."""
        for name in arguments:
            if name not in ARGUMENTS:
                allowed = ", ".join(sorted(ARGUMENTS))
                message = f"{name[:60]!r} is not a template argument; allowed: {allowed}"
                raise ApiError(400, message, "invalid_value", param="chat_template_kwargs")
        messages = list(messages)
        if "developer" not in self._template:
            messages = [
                Message("system", one.content, name=one.name) if one.role == "developer" else one for one in messages
            ]
        given: list[Tool] | None = list(tools) or None
        if given is not None and "tools" not in self._template:
            messages, given = describe_tools_in_system_message(messages, given), None
        try:
            return self.loaded.tokenizer.apply_chat_template(
                messages, tools=given, add_generation_prompt=more, **arguments
            )
        except UserError as error:
            raise from_user_error(error, "messages") from None

    def spelled(self, ids: Sequence[int]) -> str:
        """The text of ids, control tokens as they are spelled."""
        tokenizer = self.loaded.tokenizer
        pieces = [tokenizer.piece(one, first=False) for one in ids]
        names = [(tokenizer.vocabulary[one] or "").encode() for one in ids]
        whole = b"".join(name if piece is None else piece for piece, name in zip(pieces, names, strict=True))
        return whole.decode("utf-8", "replace")

    def prelude(self, prompt_end: str) -> Prelude | None:
        """What may come before a constrained reply: reasoning, of a model that reasons, if the prompt left it open."""
        if prompt_end.rstrip().endswith(OPEN):
            return Prelude(OPEN, CLOSE, opened=True)
        if OPEN in self._template and not prompt_end.rstrip().endswith(CLOSE):
            return Prelude(OPEN, CLOSE)
        return None

    def text_prompt(self, text: str, add_special: bool = True) -> list[int]:
        """The ids of a text. Raises ApiError."""
        try:
            return self.loaded.tokenizer.encode(text, add_special=add_special)
        except UserError as error:
            raise from_user_error(error, "prompt") from None

    def check_ids(self, ids: Sequence[int], param: str) -> None:
        """Raises ApiError for an id that is not of the vocabulary."""
        worst = max(ids, default=0)
        if worst >= self.loaded.vocabulary_size:
            message = f"there is no token {worst}, the vocabulary ends at {self.loaded.vocabulary_size - 1}"
            raise ApiError(400, message, "invalid_value", param=param)

    def room(self, prompt: Sequence[int], limit: int | None, param: str) -> int:
        """Tokens that fit behind `prompt`. Raises ApiError with the numbers where `limit` or one is more."""
        room = self.context - len(prompt) + 1  # the last token drawn needs no place
        if not prompt:
            raise ApiError(400, "the prompt is empty", "invalid_value", param=param)
        if room < 1 or (limit is not None and limit > room):
            asked = f"{len(prompt)} tokens of prompt" + (f" and {limit} more" if limit is not None else "")
            message = f"the context holds {self.context} tokens; the request asks for {asked}"
            raise ApiError(400, message, "context_length_exceeded", param=param)
        return room

    # How a reply is made

    def sampling(self, given: Sampling, choice: int) -> SamplingParams:
        """The settings of the reply number `choice`, over what the model recommends. Raises ApiError."""
        names = ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
        values: dict[str, object] = {name: getattr(given, name) for name in names}
        if given.top_k is not None:
            values["top_k"] = max(given.top_k, 0)  # -1 turns it off
        if given.seed is not None:
            values["seed"] = (given.seed + choice + (1 << 63)) % (1 << 64) - (1 << 63)
        if given.logit_bias:
            biases = tuple((int(token), bias) for token, bias in given.logit_bias.items())
            self.check_ids([token for token, _ in biases], "logit_bias")
            values["logit_bias"] = biases
        try:
            return recommended(self.loaded.defaults).with_given(values)
        except UserError as error:
            raise from_user_error(error) from None

    def grammar(self, form: ResponseFormat | None, prelude: Prelude | None = None) -> Grammar | None:
        """The grammar of a response format; None where anything may be written. Raises ApiError."""
        if form is None or form.type == "text":
            return None
        try:
            if form.type == "regex":
                return self.compiler.regex(form.regex or "", prelude)
            if form.type == "lark":
                return self.compiler.lark(form.lark or "", prelude)
            schema = form.schema_ if form.json_schema is None else form.json_schema.schema_
            text = JSON_MODE if schema is None else json.dumps(schema)
            return self.compiler.schema(text, "response_format", prelude)
        except UserError as error:
            raise from_user_error(error, "response_format") from None
        except RecursionError:
            raise ApiError(400, "the schema is nested too deeply", "invalid_value", param="response_format") from None

    def request(
        self,
        prompt: Sequence[int],
        given: Sampling,
        choice: int,
        limit: int | None,
        grammar: Grammar | None,
        top: int | None,
        prompt_logprobs: bool = False,
    ) -> Request:
        """One sequence for the engine.

        Of a prompt that is scored a single token is always told, be it an end token: evaluations count on it.
        """
        scored = prompt_logprobs and limit == 1
        stop_ids = frozenset() if given.ignore_eos or scored else self.loaded.stop_ids
        sampling = self.sampling(given, choice)
        return Request(tuple(prompt), sampling, limit, stop_ids, grammar, top, prompt_logprobs)
