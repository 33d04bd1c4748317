"""Formats of tool calls on the hub (Hermes, Qwen, Llama 3, Mistral, Granite, GLM, DeepSeek, FunctionGemma).

A model's format is recognized by strings in its chat template, unless tokenizer_config.json has a `response_template`.
"""

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mycli.runtime.errors import ModelError
from mycli.runtime.tokenizer.chat_template import Message, Tool
from mycli.runtime.tokenizer.parsing.response_template import (
    Anchor,
    Region,
    literal,
    pattern,
    read_response_template,
)
from mycli.runtime.utils.json_fields import Fields

if TYPE_CHECKING:
    from mycli.runtime.tokenizer.tokenizer import Tokenizer

_CALL = {"name": "{content.name}", "arguments": "{content.arguments}"}
_LLAMA = {"name": "{content.name}", "arguments": "{content.parameters}"}
_EACH = {"name": "{name}", "arguments": "{arguments}"}
_NAMED = {"name": "{name}", "arguments": "{content}"}
_NAME = r"(?P<name>[\w.:/-]+)"

_TOOLS_PROMPT = (
    "You may call these tools:\n{tools}\nTo call one, write exactly:\n"
    '<tool_call>\n{{"name": "the name", "arguments": {{...}}}}\n</tool_call>'
)


@dataclass(frozen=True)
class ToolFormat:
    """A format of tool calls.

    json_syntax: prefix, suffix and the two field names of a call that is one JSON object; None for other syntaxes.
    """

    name: str
    template_markers: tuple[str, ...]  # all occur in the chat templates of its models
    regions: tuple[Region, ...]
    ignored: tuple[str, ...] = ()  # markers around calls, without meaning
    bare_json: bool = False  # a reply that starts with a brace is a call
    json_syntax: tuple[str, str, str, str] | None = None


def _call(
    start: Anchor,
    end: Anchor | None = None,
    content: str = "json",
    arguments: Mapping[str, Any] | None = None,
    transform: Mapping[str, str] = _NAMED,
) -> tuple[Region, ...]:
    return (Region("tool_calls", start, end, content, arguments or {}, transform, transform_each=transform is _EACH),)


HERMES = ToolFormat(
    "hermes",
    ("<tool_call>",),
    _call(literal("<tool_call>"), literal("</tool_call>"), transform=_CALL),
    json_syntax=("<tool_call>\n", "\n</tool_call>", "name", "arguments"),
)
# The first format whose markers all occur wins, so formats with more markers precede those with a subset.
TOOL_FORMATS = (
    ToolFormat(
        "qwen-xml",
        ("<function=", "<parameter="),
        _call(
            pattern(rf"<tool_call>\s*<function={_NAME}>", "<tool_call>"),
            pattern(r"</function>\s*</tool_call>", "</function>"),
            "xml-inline",
            {"tag": ("<parameter=", ">", "", "</parameter>")},
        ),
    ),
    ToolFormat(
        "glm",
        ("<arg_key>", "<arg_value>"),
        _call(
            pattern(rf"<tool_call>\s*{_NAME}\s*(?=<)", "<tool_call>"),
            literal("</tool_call>"),
            "xml-inline",
            {"tag": ("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")},
        ),
    ),
    ToolFormat(
        "mistral-named",
        ("[TOOL_CALLS]", "[ARGS]"),
        _call(pattern(rf"\[TOOL_CALLS\]\s*{_NAME}\s*\[ARGS\]", "[TOOL_CALLS]")),
    ),
    ToolFormat("mistral", ("[TOOL_CALLS]",), _call(literal("[TOOL_CALLS]"), transform=_EACH)),
    ToolFormat("granite", ("<|tool_call|>",), _call(literal("<|tool_call|>"), transform=_EACH)),
    ToolFormat(
        "deepseek",
        ("<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "```json"),
        _call(
            pattern(rf"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{_NAME}\s*```json", "<｜tool▁call▁begin｜>"),
            pattern(r"```\s*<｜tool▁call▁end｜>", "```"),
        ),
        ignored=("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
    ),
    ToolFormat(
        "deepseek-v3.1",
        ("<｜tool▁call▁begin｜>", "<｜tool▁sep｜>"),
        _call(
            pattern(rf"<｜tool▁call▁begin｜>{_NAME}<｜tool▁sep｜>", "<｜tool▁call▁begin｜>"),
            literal("<｜tool▁call▁end｜>"),
        ),
        ignored=("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
    ),
    ToolFormat(
        "function-gemma",
        ("<start_function_call>",),
        _call(
            pattern(rf"<start_function_call>call:{_NAME}(?=\{{)", "<start_function_call>"),
            literal("<end_function_call>"),
            arguments={"string_delims": [["<escape>", "<escape>"]], "unquoted_keys": True},
        ),
    ),
    HERMES,
    ToolFormat(
        "llama",
        ('"parameters":', '"name":'),
        _call(literal("<|python_tag|>"), transform=_LLAMA),
        bare_json=True,
        json_syntax=("", "", "name", "parameters"),
    ),
)


def find_tool_format(template: str) -> ToolFormat | None:
    """Return the format whose markers occur in a chat template; None for a template without tools."""
    if "tools" not in template:
        return None
    formats = (entry for entry in TOOL_FORMATS if all(marker in template for marker in entry.template_markers))
    return next(formats, None)


def declared_tool_format(regions: Sequence[Region]) -> ToolFormat | None:
    """Return the format of a model's own response template; None if it declares no tool calls."""
    calls = tuple(region for region in regions if region.name == "tool_calls")
    return ToolFormat("declared", (), calls) if calls else None


def model_tool_format(response_template: Fields | None, template: str) -> ToolFormat | None:
    """Return the format that a model declares, or else the one of its chat template; None if both show none."""
    with suppress(ModelError):  # unreadable: the chat template may still show the format
        if response_template is not None:
            declared = declared_tool_format(read_response_template(response_template))
            if declared is not None:
                return declared
    return find_tool_format(template)


def own_tool_format(tokenizer: "Tokenizer") -> ToolFormat | None:
    """Return the format of calls that a model's files show; None without one. Raises ModelError as `source` does."""
    template = tokenizer.template
    return model_tool_format(tokenizer.response_template, "" if template is None else template.source(tools=True))


def describe_tools_in_system_message(messages: Sequence[Message], tools: Sequence[Tool]) -> list[Message]:
    """Return a conversation for a template without tools: they are described in the system message."""
    text = _TOOLS_PROMPT.format(tools="\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools))
    if messages and messages[0].role == "system":
        text, messages = f"{messages[0].content}\n\n{text}", messages[1:]
    converted = [Message("system", text)]
    for message in messages:
        if message.role == "tool":
            message = Message("user", f"<tool_response>\n{message.content}\n</tool_response>")
        elif message.tool_calls:
            calls = [json.dumps(call["function"], ensure_ascii=False) for call in message.tool_calls]
            written = "\n".join(f"<tool_call>\n{call}\n</tool_call>" for call in calls)
            message = Message("assistant", f"{message.content}\n{written}".strip())
        converted.append(message)
    return converted
