"""Chat requests of all interfaces in one record, and the engine requests they become: reasoning, formats, tools."""

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from mycli.runtime.engine.replies.reader import ReplyReader
from mycli.runtime.engine.sequence import BeamOptions, reply_room
from mycli.runtime.errors import UserError
from mycli.runtime.sampling.grammars.grammar import Grammar
from mycli.runtime.sampling.grammars.lark import CallGrammar, Prelude
from mycli.runtime.sampling.grammars.references import relocated
from mycli.runtime.server.http.api_error import from_user_error, invalid_value
from mycli.runtime.server.requests.formats import ResponseFormat
from mycli.runtime.server.requests.schemas import PromptTruncation, Sampling
from mycli.runtime.server.service import Prepared, Service
from mycli.runtime.tokenizer.chat_template import Message, Tool
from mycli.runtime.tokenizer.parsing.reasoning_parser import prompt_end
from mycli.runtime.tokenizer.parsing.tool_formats import HERMES, ToolFormat
from mycli.runtime.tokenizer.parsing.tool_parser import ToolParser
from mycli.runtime.tokenizer.prompt_difference import PromptParts


@dataclass(frozen=True)
class ChatSpec:
    """A conversation and how to continue it.

    choice: auto, none or required; named: the only tool that may be called, None for any; allowed: the tools that may
    be called, None for all; omitted_tools: types of tools that cannot be called here; omitted: other parts that were
    left out; strict: tools whose calls must match their schemas; arguments: of the chat template; count: replies;
    limit: tokens, None for the rest of the context; clipped: shorten a limit that the context has no room for; top:
    number of logprobs per token, None for none; prompt_logprobs: also of the prompt's tokens; place: the field of the
    conversation; thinking_budget: tokens of reasoning, None for any number; continued: the reply continues the last
    message, which is the assistant's; beams: search instead of sampling; truncation: of the prompt.
    """

    messages: Sequence[Message]
    sampling: Sampling
    tools: Sequence[Tool] = ()
    choice: str = "auto"
    named: str | None = None
    allowed: Sequence[str] | None = None
    omitted_tools: Sequence[str] = ()
    omitted: Sequence[str] = ()
    strict: Collection[str] = ()
    parallel: bool = True
    format: ResponseFormat | None = None
    arguments: Mapping[str, Any] = field(default_factory=dict)
    count: int = 1
    limit: int | None = None
    clipped: bool = False
    top: int | None = None
    prompt_logprobs: bool = False
    place: str = "messages"
    thinking_budget: int | None = None
    continued: bool = False
    beams: BeamOptions | None = None
    truncation: PromptTruncation = field(default_factory=PromptTruncation)

    @property
    def constrained(self) -> bool:
        return self.format is not None and self.format.type != "text"

    @property
    def offered_tools(self) -> Sequence[Tool]:
        if self.choice == "none":
            return ()
        if self.allowed is None:
            return self.tools
        return [tool for tool in self.tools if tool["function"]["name"] in self.allowed]


def prepare_chat(service: Service, spec: ChatSpec) -> Prepared:
    """Return the engine request that continues a conversation. Raises ApiError."""
    tools = spec.offered_tools
    _check_tools(spec)
    _check_continued(spec)
    ids = spec.truncation.cut(chat_ids(service, spec), service.context + 1 - (spec.limit or 1))
    limit = spec.limit
    if spec.clipped and limit is not None:
        # A prompt that fits leaves room for at least one token; one that does not is refused below.
        limit = min(limit, max(reply_room(service.context, len(ids)), 1))
    service.check_fits(ids, limit, spec.place)
    end = "" if spec.continued else prompt_end(service.loaded.tokenizer, ids)  # the reply may begin inside a reasoning
    prelude = None if spec.continued else _prelude(service, spec, end)
    tool_format = service.tool_format
    if tools and (spec.choice == "required" or spec.constrained) and tool_format.json_syntax is None:
        tool_format = HERMES  # other syntaxes have no schema for their arguments
    grammar = _grammar(service, spec, tool_format, prelude)
    readers = [
        ReplyReader(
            service.loaded.tokenizer,
            spec.sampling.text_rules,
            index,
            prompt_end=end,
            reasoning=service.reasoning_format,
            tools=ToolParser(tool_format, tools, not spec.parallel, spec.choice == "required") if tools else None,
            tool_format=tool_format if tools or tool_format.recipient else None,
            before=ids if spec.continued and spec.messages[-1].content else (),
        )
        for index in range(spec.count)
    ]
    omitted = [*(f"tool {kind}" for kind in dict.fromkeys(spec.omitted_tools)), *dict.fromkeys(spec.omitted)]
    if not _calls_have_schemas(spec, tool_format):
        omitted += [f"strict of tool {name}" for name in _strict_names(spec)]
    request = service.request(ids, spec.sampling, limit, grammar, spec.top, spec.prompt_logprobs, spec.beams)
    parts = PromptParts(spec.messages, spec.offered_tools, spec.arguments)
    difference = service.prompts.compare(service.loaded.tokenizer, ids, parts)
    service.prompts.add(ids, parts)
    return Prepared([(request, readers)], [ids], limit != spec.limit, omitted, difference)


def _grammar(service: Service, spec: ChatSpec, tool_format: ToolFormat, prelude: Prelude | None) -> Grammar | None:
    if _calls_have_schemas(spec, tool_format):
        return _calls_grammar(service, spec, tool_format, prelude)
    if spec.constrained:
        return service.grammar(spec.format, prelude)
    if prelude is not None and (prelude.budget is not None or service.deadline(spec.sampling) is not None):
        return service.compiler.any_text(prelude)
    return None


def _strict_names(spec: ChatSpec) -> list[str]:
    names = [tool["function"]["name"] for tool in spec.offered_tools]
    return [name for name in names if name in spec.strict]


def _calls_have_schemas(spec: ChatSpec, tool_format: ToolFormat) -> bool:
    if not spec.offered_tools:
        return False
    if spec.choice == "required" or spec.constrained:
        return True
    # Calls in a text are found by the mark before them; other syntaxes than JSON have no schemas.
    marked = tool_format.json_syntax is not None and bool(tool_format.json_syntax[0])
    return marked and bool(_strict_names(spec)) and not spec.continued


def chat_ids(service: Service, spec: ChatSpec) -> list[int]:
    """Return the token ids of a conversation, up to the place where the reply begins. Raises ApiError."""
    messages = spec.messages[:-1] if spec.continued else spec.messages
    service.check_generates()  # first: such models have no chat template either
    ids = service.chat_prompt(messages, spec.offered_tools, spec.arguments, place=spec.place)
    if spec.continued:
        last, form = spec.messages[-1], service.reasoning_format
        opened = form.opened_by(prompt_end(service.loaded.tokenizer, ids))
        if opened or last.reasoning:
            line = "" if form.header else "\n"
            thought = f"{last.reasoning}{line}" if last.reasoning else line
            ids += service.tag_ids("" if opened else f"{form.open.rstrip()}{line}")
            ids += service.text_prompt(thought, add_special=False)
            ids += service.tag_ids(f"{form.ending}{line * 2}")
        else:
            ids += service.tag_ids(form.header)
        ids += service.text_prompt(last.content, add_special=False)
    return ids


def _check_continued(spec: ChatSpec) -> None:
    if not spec.continued:
        return
    last, cause = spec.messages[-1], ""
    if last.role != "assistant" or last.tool_calls:
        cause = "the last message must be text of the assistant"
    elif len(spec.messages) < 2:
        cause = "a message must precede it"
    elif spec.constrained or spec.choice == "required":
        cause = "it cannot be combined with a format or a required call"
    if cause:
        raise invalid_value(spec.place, f"the last message cannot be continued: {cause}")


def _prelude(service: Service, spec: ChatSpec, prompt_end: str) -> Prelude | None:
    prelude = service.prelude(prompt_end)
    budget = spec.thinking_budget if spec.thinking_budget is not None else service.settings.reasoning_budget
    return None if prelude is None else replace(prelude, budget=budget)


def _check_tools(spec: ChatSpec) -> None:
    names = [tool["function"]["name"] for tool in spec.tools]
    for name in (*([] if spec.named is None else [spec.named]), *(spec.allowed or ())):
        if name not in names:
            raise invalid_value("tool_choice", f"the request has no tool {name[:60]!r}")
    if spec.choice == "required" and not names:
        cause = "the request has no tools"
        if spec.omitted_tools:
            cause = f"tools of type {spec.omitted_tools[0][:60]} cannot be called here"
        raise invalid_value("tool_choice", cause)


def _calls_grammar(service: Service, spec: ChatSpec, tool_format: ToolFormat, prelude: Prelude | None) -> Grammar:
    functions = [tool["function"] for tool in spec.offered_tools]
    if spec.named is not None:
        functions = [function for function in functions if function["name"] == spec.named]
    assert tool_format.json_syntax is not None
    # Without a closing mark nothing says where one call ends and the next begins.
    single = spec.named is not None or not spec.parallel or not tool_format.json_syntax[1]
    otherwise = None if spec.choice == "required" else service.format_source(spec.format)
    try:
        calls = [_call(function, tool_format.json_syntax, function["name"] in spec.strict) for function in functions]
        if spec.choice == "auto" and otherwise is None:
            return service.compiler.calls_in_text(calls, prelude)
        return service.compiler.calls(calls, single, prelude, otherwise)
    except UserError as error:
        raise from_user_error(error, "tools") from None
    except RecursionError:
        raise invalid_value("tools", "a schema is nested too deeply") from None


def _call(function: Mapping[str, Any], syntax: tuple[str, str, str, str], strict: bool) -> CallGrammar:
    before, after, name_key, arguments_key = syntax
    # Arguments are always an object, also where the schema admits others: its type is replaced, not filled in.
    parameters = {**(function.get("parameters") or {}), "type": "object"}
    parameters.pop("nullable", None)
    parameters.pop("$id", None)  # references in them are relative to the whole call now
    schema = {
        "type": "object",
        "properties": {
            name_key: {"const": function["name"]},
            arguments_key: relocated(parameters, f"/properties/{arguments_key}"),
        },
        "required": [name_key, arguments_key],
        "additionalProperties": False,
    }
    return CallGrammar(before, json.dumps(schema), after, strict)
