"""A conversation that is to be continued, as every protocol asks for it, and the sequences that continue it.

Knows reasoning, response formats and tools. Does not know the fields of any protocol.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mycli.runtime.errors import UserError
from mycli.runtime.sampling.grammar import Grammar, Prelude
from mycli.runtime.server.api_error import ApiError, from_user_error
from mycli.runtime.server.reply_reader import ReplyReader
from mycli.runtime.server.schemas import Effort, ResponseFormat, Sampling
from mycli.runtime.server.service import Prepared, Service
from mycli.runtime.tokenizer.chat_template import Message, Tool
from mycli.runtime.tokenizer.parsing.tool_formats import HERMES, ToolFormat
from mycli.runtime.tokenizer.parsing.tool_parser import ToolParser


@dataclass(frozen=True)
class ChatAsk:
    """A conversation that is to be continued, as every protocol asks for it.

    choice: auto, none, required, or with `named` that tool; top: logprobs of so many tokens a place; limit None: to the
    end of the context.
    """

    messages: Sequence[Message]
    sampling: Sampling
    tools: Sequence[Tool] = ()
    choice: str = "auto"
    named: str | None = None
    parallel: bool = True
    format: ResponseFormat | None = None
    arguments: Mapping[str, Any] = field(default_factory=dict)
    count: int = 1
    limit: int | None = None
    top: int | None = None

    @property
    def offered(self) -> Sequence[Tool]:
        """The tools that the model is told of."""
        return () if self.choice == "none" else self.tools


def effort_arguments(effort: Effort | None) -> dict[str, Any]:
    """What a template is told of how hard to think."""
    if effort is None:
        return {}
    return {"reasoning_effort": effort, **({"enable_thinking": False} if effort in ("none", "minimal") else {})}


def prepare_chat(service: Service, ask: ChatAsk) -> Prepared:
    """The sequences that continue a conversation. Raises ApiError."""
    required = ask.choice == "required" or ask.named is not None
    if required and not ask.tools:
        raise ApiError(400, "tool_choice: there are no tools", "invalid_value", param="tool_choice")
    tools = ask.offered
    ids = service.chat_prompt(ask.messages, tools, ask.arguments)
    end = service.spelled(ids[-16:])
    service.room(ids, ask.limit, "messages")
    prelude = service.prelude(end)
    form = service.tool_format
    if required:
        form = form if form.written is not None else HERMES
        grammar: Grammar | None = _calls(service, ask, form, prelude)
    else:
        grammar = service.grammar(ask.format, prelude)
        if grammar is not None and tools:
            message = "with tools to choose from, a response_format cannot be kept; set tool_choice to none or required"
            raise ApiError(400, message, "unsupported_parameter", param="response_format")
    wanted = []
    for choice in range(ask.count):
        reader = ReplyReader(
            service.loaded.tokenizer,
            choice,
            ask.sampling.stops,
            prompt_end=end,
            tools=ToolParser(form, tools) if tools else None,
            form=form if tools else None,
        )
        wanted.append((service.request(ids, ask.sampling, choice, ask.limit, grammar, ask.top), reader))
    return Prepared(wanted, [ids])


def _calls(service: Service, ask: ChatAsk, form: ToolFormat, prelude: Prelude | None) -> Grammar:
    """Calls of the tools that may be called, and nothing else."""
    functions = [tool["function"] for tool in ask.tools]
    if ask.named is not None:
        functions = [function for function in functions if function["name"] == ask.named]
        if not functions:
            raise ApiError(400, f"there is no tool {ask.named[:60]!r}", "invalid_value", param="tool_choice")
    assert form.written is not None
    before, after, name_key, arguments_key = form.written
    parts = []
    for function in functions:
        parameters = dict(function.get("parameters") or {"type": "object"})
        schema = {
            "type": "object",
            "properties": {name_key: {"const": function["name"]}, arguments_key: parameters},
            "required": [name_key, arguments_key],
            "additionalProperties": False,
            # References point at the root of the whole schema.
            **{key: parameters.pop(key) for key in ("$defs", "definitions") if key in parameters},
        }
        parts.append((before, json.dumps(schema), after))
    single = ask.named is not None or not ask.parallel or not after
    try:
        return service.compiler.sequence(parts, 1 if single else None, "tools", prelude)
    except UserError as error:
        raise from_user_error(error, "tools") from None
    except RecursionError:
        raise ApiError(400, "a tool is nested too deeply", "invalid_value", param="tools") from None
