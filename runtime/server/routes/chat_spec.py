"""Chat requests of all interfaces in one record, and the engine requests they become: reasoning, formats, tools."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mycli.runtime.engine.reply_reader import ReplyReader
from mycli.runtime.errors import UserError
from mycli.runtime.sampling.grammar import Grammar, Prelude
from mycli.runtime.server.api_error import ApiError, from_user_error
from mycli.runtime.server.schemas import Effort, ResponseFormat, Sampling
from mycli.runtime.server.service import Prepared, Service
from mycli.runtime.tokenizer.chat_template import Message, Tool
from mycli.runtime.tokenizer.parsing.tool_formats import HERMES, ToolFormat
from mycli.runtime.tokenizer.parsing.tool_parser import ToolParser


@dataclass(frozen=True)
class ChatSpec:
    """A conversation and how to continue it.

    choice: auto, none or required; named: the only tool that may be called; arguments: of the chat template; count:
    replies; limit: tokens, None for the rest of the context; top: number of logprobs per token, None for none.
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
    def offered_tools(self) -> Sequence[Tool]:
        return () if self.choice == "none" else self.tools


def effort_arguments(effort: Effort | None) -> dict[str, Any]:
    """Return the template arguments for a reasoning effort."""
    if effort is None:
        return {}
    return {"reasoning_effort": effort, **({"enable_thinking": False} if effort in ("none", "minimal") else {})}


def prepare_chat(service: Service, spec: ChatSpec) -> Prepared:
    """Return the engine request that continues a conversation. Raises ApiError."""
    required = spec.choice == "required" or spec.named is not None
    if required and not spec.tools:
        raise ApiError(400, "tool_choice: the request has no tools", "invalid_value", param="tool_choice")
    tools = spec.offered_tools
    ids = service.chat_prompt(spec.messages, tools, spec.arguments)
    end = service.spelled(ids[-16:])  # more than an opening tag is long
    service.check_fits(ids, spec.limit, "messages")
    prelude = service.prelude(end)
    tool_format = service.tool_format
    if required:
        tool_format = tool_format if tool_format.json_syntax is not None else HERMES
        grammar: Grammar | None = _calls_grammar(service, spec, tool_format, prelude)
    else:
        grammar = service.grammar(spec.format, prelude)
        if grammar is not None and tools:
            message = "response_format cannot be combined with optional tools; set tool_choice to none or required"
            raise ApiError(400, message, "unsupported_parameter", param="response_format")
    readers = [
        ReplyReader(
            service.loaded.tokenizer,
            spec.sampling.stops,
            index,
            prompt_end=end,
            tools=ToolParser(tool_format, tools) if tools else None,
            tool_format=tool_format if tools else None,
        )
        for index in range(spec.count)
    ]
    return Prepared([(service.request(ids, spec.sampling, spec.limit, grammar, spec.top), readers)], [ids])


def _calls_grammar(service: Service, spec: ChatSpec, tool_format: ToolFormat, prelude: Prelude | None) -> Grammar:
    functions = [tool["function"] for tool in spec.tools]
    if spec.named is not None:
        functions = [function for function in functions if function["name"] == spec.named]
        if not functions:
            message = f"tool_choice: the request has no tool {spec.named[:60]!r}"
            raise ApiError(400, message, "invalid_value", param="tool_choice")
    assert tool_format.json_syntax is not None
    before, after, name_key, arguments_key = tool_format.json_syntax
    parts = []
    for function in functions:
        parameters = dict(function.get("parameters") or {"type": "object"})
        schema = {
            "type": "object",
            "properties": {name_key: {"const": function["name"]}, arguments_key: parameters},
            "required": [name_key, arguments_key],
            "additionalProperties": False,
            # References in the parameters are relative to the root, which is now this schema.
            **{key: parameters.pop(key) for key in ("$defs", "definitions") if key in parameters},
        }
        parts.append((before, json.dumps(schema), after))
    # Without a closing mark nothing says where one call ends and the next begins.
    single = spec.named is not None or not spec.parallel or not after
    try:
        return service.compiler.sequence(parts, 1 if single else None, "tools", prelude)
    except UserError as error:
        raise from_user_error(error, "tools") from None
    except RecursionError:
        raise ApiError(400, "tools: a schema is nested too deeply", "invalid_value", param="tools") from None
