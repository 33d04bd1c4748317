"""How models write calls of tools, and which model writes which way: by what its chat template spells.

An entry of `TOOL_FORMATS` is a way, data for `tool_parser`. The formats are those of the templates on the hub (Hermes,
Qwen, Llama 3, Mistral, Granite, GLM, DeepSeek, FunctionGemma). A model whose tokenizer_config.json has a
`response_template` says itself.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass

from mycli.runtime.tokenizer.chat_template import Message, Tool
from mycli.runtime.tokenizer.parsing.response_template import Region, literal, pattern

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
    """A way of writing calls.

    `marks` are spelled in the chat templates that use it. `ignored` surrounds calls and means nothing. `bare`: a reply
    that begins with a brace is a call. `written` is how one call of JSON is written, as what stands before it, after
    it, and the names of its two fields; None where calls are not JSON of both.
    """

    name: str
    marks: tuple[str, ...]
    regions: tuple[Region, ...]
    ignored: tuple[str, ...] = ()
    bare: bool = False
    written: tuple[str, str, str, str] | None = None


HERMES = ToolFormat(
    "hermes",
    ("<tool_call>",),
    (Region("tool_calls", literal("<tool_call>"), literal("</tool_call>"), "json", transform=_CALL),),
    written=("<tool_call>\n", "\n</tool_call>", "name", "arguments"),
)
TOOL_FORMATS = (
    ToolFormat(
        "qwen-xml",
        ("<function=", "<parameter="),
        (
            Region(
                "tool_calls",
                pattern(rf"<tool_call>\s*<function={_NAME}>", "<tool_call>"),
                pattern(r"</function>\s*</tool_call>", "</function>"),
                "xml-inline",
                {"tag": ("<parameter=", ">", "", "</parameter>")},
                _NAMED,
            ),
        ),
    ),
    ToolFormat(
        "glm",
        ("<arg_key>", "<arg_value>"),
        (
            Region(
                "tool_calls",
                pattern(rf"<tool_call>\s*{_NAME}\s*(?=<)", "<tool_call>"),
                literal("</tool_call>"),
                "xml-inline",
                {"tag": ("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")},
                _NAMED,
            ),
        ),
    ),
    ToolFormat(
        "mistral-named",
        ("[TOOL_CALLS]", "[ARGS]"),
        (
            Region(
                "tool_calls",
                pattern(rf"\[TOOL_CALLS\]\s*{_NAME}\s*\[ARGS\]", "[TOOL_CALLS]"),
                None,
                "json",
                transform=_NAMED,
            ),
        ),
    ),
    ToolFormat(
        "mistral",
        ("[TOOL_CALLS]",),
        (Region("tool_calls", literal("[TOOL_CALLS]"), None, "json", transform=_EACH, each=True),),
    ),
    ToolFormat(
        "granite",
        ("<|tool_call|>",),
        (Region("tool_calls", literal("<|tool_call|>"), None, "json", transform=_EACH, each=True),),
    ),
    ToolFormat(
        "deepseek",
        ("<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "```json"),
        (
            Region(
                "tool_calls",
                pattern(rf"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{_NAME}\s*```json", "<｜tool▁call▁begin｜>"),
                pattern(r"```\s*<｜tool▁call▁end｜>", "```"),
                "json",
                transform=_NAMED,
            ),
        ),
        ignored=("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
    ),
    ToolFormat(
        "deepseek-v3.1",
        ("<｜tool▁call▁begin｜>", "<｜tool▁sep｜>"),
        (
            Region(
                "tool_calls",
                pattern(rf"<｜tool▁call▁begin｜>{_NAME}<｜tool▁sep｜>", "<｜tool▁call▁begin｜>"),
                literal("<｜tool▁call▁end｜>"),
                "json",
                transform=_NAMED,
            ),
        ),
        ignored=("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
    ),
    ToolFormat(
        "function-gemma",
        ("<start_function_call>",),
        (
            Region(
                "tool_calls",
                pattern(rf"<start_function_call>call:{_NAME}(?=\{{)", "<start_function_call>"),
                literal("<end_function_call>"),
                "json",
                {"string_delims": [["<escape>", "<escape>"]], "unquoted_keys": True},
                _NAMED,
            ),
        ),
    ),
    HERMES,
    ToolFormat(
        "llama",
        ('"parameters":', '"name":'),
        (Region("tool_calls", literal("<|python_tag|>"), None, "json", transform=_LLAMA),),
        bare=True,
        written=("", "", "name", "parameters"),
    ),
)


def find_tool_format(template: str) -> ToolFormat | None:
    """The way of the model whose chat template is `template`; None for one that knows no tools."""
    if "tools" not in template:
        return None
    return next((one for one in TOOL_FORMATS if all(mark in template for mark in one.marks)), None)


def declared_tool_format(regions: Sequence[Region]) -> ToolFormat | None:
    """The way that a model's own response template describes; None where it describes no calls."""
    calls = tuple(region for region in regions if region.name == "tool_calls")
    return ToolFormat("declared", (), calls) if calls else None


def describe_tools_in_system_message(messages: Sequence[Message], tools: Sequence[Tool]) -> list[Message]:
    """A conversation for a template that knows no tools: the system message tells of them, answers are the user's."""
    text = _TOOLS_PROMPT.format(tools="\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools))
    rest = list(messages)
    if rest and rest[0].role == "system":
        text = f"{rest.pop(0).content}\n\n{text}"
    plain = []
    for one in rest:
        if one.role == "tool":
            plain.append(Message("user", f"<tool_response>\n{one.content}\n</tool_response>"))
        elif one.tool_calls:
            calls = "\n".join(
                f"<tool_call>\n{json.dumps(call['function'], ensure_ascii=False)}\n</tool_call>"
                for call in one.tool_calls
            )
            plain.append(Message("assistant", f"{one.content}\n{calls}".strip()))
        else:
            plain.append(one)
    return [Message("system", text), *plain]
