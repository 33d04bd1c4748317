"""Formats of tool calls on the hub.

A model's format is recognized by strings in its chat template, unless tokenizer_config.json has a `response_template`.
"""

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mycli.runtime.errors import ModelError
from mycli.runtime.tokenizer.chat_template import Message, Tool, takes_tools
from mycli.runtime.tokenizer.parsing.response_template import (
    Anchor,
    Region,
    Tag,
    literal,
    pattern,
    read_response_template,
)
from mycli.runtime.utils.json_fields import Fields

if TYPE_CHECKING:
    from mycli.runtime.tokenizer.tokenizer import Tokenizer

_CALL = {"name": "{content.name}", "arguments": "{content.arguments}"}
_LLAMA = {"name": "{content.name}", "arguments": "{content.parameters}"}
_EACH = {"name": "{name}", "arguments": "{arguments}"}  # of each object in a list
_COHERE = {"name": "{tool_name}", "arguments": "{parameters}"}  # likewise
_NAMED = {"name": "{name}", "arguments": "{content}"}
_NAME = r"(?P<name>[\w.:/-]+)"
_PARAMETERS = {"tag": Tag("<parameter=", ">", "", "</parameter>"), "loose": True}
_DSML_SECTIONS = ("function_calls", "tool_calls", " calls")  # of DeepSeek V3.2, V4 and V4.1
_HARMONY_TYPE = r"[^<]*(?:<\|constrain\|>[^<]*)?<\|message\|>"  # of the arguments, mostly json

EVERYONE = "all\n"  # the recipient of a text

_TOOLS_PROMPT = (
    "You may call these tools:\n{tools}\nTo call one, write exactly:\n"
    '<tool_call>\n{{"name": "the name", "arguments": {{...}}}}\n</tool_call>'
)


@dataclass(frozen=True)
class ToolFormat:
    """A format of tool calls.

    json_syntax: prefix, suffix and the two field names of a call that is one JSON object; None for other syntaxes;
    recipient: the mark before a recipient, with which prompts end: a reply begins with the name of a function, or
    with `EVERYONE` before a text.
    """

    name: str
    template_markers: tuple[str, ...]  # all occur in the chat templates of its models
    regions: tuple[Region, ...]
    ignored: tuple[str, ...] = ()  # markers around calls, without meaning
    sections: tuple[str, ...] = ()  # ignored markers that open a list of calls
    bare_json: bool = False  # a reply that starts with a brace is a call
    json_syntax: tuple[str, str, str, str] | None = None
    recipient: str = ""


def _call(
    start: Anchor,
    end: Anchor | None = None,
    content: str = "json",
    arguments: Mapping[str, Any] | None = None,
    transform: Mapping[str, str] = _NAMED,
) -> tuple[Region, ...]:
    is_list = transform in (_EACH, _COHERE)
    return (Region("tool_calls", start, end, content, arguments or {}, transform, transform_each=is_list),)


def _invoke(mark: str) -> tuple[Region, ...]:
    # An element for each argument, which says whether it is a text or JSON.
    return _call(
        pattern(rf'<{mark}invoke name="{_NAME}">', f"<{mark}invoke name="),
        literal(f"</{mark}invoke>"),
        "xml-inline",
        {
            "tag": Tag(f'<{mark}parameter name="', '"', ">", f"</{mark}parameter>"),
            "json_attribute": 'string="false"',
        },
    )


_LFM = _call(literal("<|tool_call_start|>"), literal("<|tool_call_end|>"), "python-calls", transform=_EACH)
HERMES = ToolFormat(
    "hermes",
    ("<tool_call>",),
    _call(literal("<tool_call>"), literal("</tool_call>"), transform=_CALL),
    json_syntax=("<tool_call>\n", "\n</tool_call>", "name", "arguments"),
)
# The first format whose markers all occur wins, so formats with more markers precede those with a subset.
TOOL_FORMATS = (
    ToolFormat(
        "seed",
        ("<seed:tool_call>", "<function="),
        _call(pattern(rf"<function={_NAME}>", "<function="), literal("</function>"), "xml-inline", _PARAMETERS),
        ignored=("<seed:tool_call>", "</seed:tool_call>"),
        sections=("<seed:tool_call>",),
    ),
    ToolFormat(
        "qwen-xml",
        ("<function=", "<parameter="),
        (
            *_call(
                pattern(rf"<tool_call>\s*<function={_NAME}>", "<tool_call>"),
                # Without the mark of the function, the end of its last argument is required.
                pattern(
                    r"</function>\s*</tool_call>|(?:(?<=</parameter>)|(?<=</parameter>\n))</tool_call>",
                    *("</function>", "</tool_call>"),
                ),
                "xml-inline",
                _PARAMETERS,
            ),
            # Qwen3-Coder often leaves out the first mark; vLLM and SGLang read such calls as well.
            *_call(pattern(rf"<function={_NAME}>", "<function="), literal("</function>"), "xml-inline", _PARAMETERS),
        ),
        ignored=("</tool_call>",),
    ),
    # Templates write the marks of DeepSeek V3.2, V4 and V4.1 with variables.
    ToolFormat(
        "deepseek-v3.2",
        ("DSML", "invoke name=", 'string="true|false"'),
        (*_invoke("｜DSML｜"), *_invoke("｜DSML｜ ")),  # V4.1 writes a space
        ignored=tuple(f"<{slash}｜DSML｜{name}>" for name in _DSML_SECTIONS for slash in ("", "/")),
        sections=tuple(f"<｜DSML｜{name}>" for name in _DSML_SECTIONS),
    ),
    ToolFormat(
        "gigachat-3.5",
        ('<｜GCML｜invoke name="', "<｜GCML｜tool_calls>"),
        _invoke("｜GCML｜"),
        ignored=("<｜GCML｜tool_calls>", "</｜GCML｜tool_calls>"),
        sections=("<｜GCML｜tool_calls>",),
    ),
    ToolFormat(
        "minicpm-5",
        ('<function name="', '<param name="'),
        _call(
            pattern(rf'<function name="{_NAME}">', "<function name="),
            literal("</function>"),
            "xml-inline",
            {"tag": Tag('<param name="', '">', "", "</param>"), "cdata": True},
        ),
    ),
    ToolFormat(
        "hunyuan-3",
        ("<tool_call{}>", "<tool_sep{}>"),  # the template adds a suffix to every mark
        tuple(
            region
            for suffix in ("", ":opensource")
            for region in _call(
                pattern(rf"<tool_call{suffix}>\s*{_NAME}<tool_sep{suffix}>", f"<tool_call{suffix}>"),
                literal(f"</tool_call{suffix}>"),
                "xml-inline",
                {
                    "tag": Tag(
                        f"<arg_key{suffix}>", f"</arg_key{suffix}>", f"<arg_value{suffix}>", f"</arg_value{suffix}>"
                    )
                },
            )
        ),
        ignored=("<tool_calls>", "</tool_calls>", "<tool_calls:opensource>", "</tool_calls:opensource>"),
    ),
    ToolFormat(
        "minimax",
        ("<minimax:tool_call>", "<invoke name="),
        _call(
            pattern(rf'<invoke name="?{_NAME}"?>', "<invoke name="),
            literal("</invoke>"),
            "xml-inline",
            {"tag": Tag('<parameter name="', '">', "", "</parameter>")},
        ),
        ignored=("<minimax:tool_call>", "</minimax:tool_call>"),
        sections=("<minimax:tool_call>",),
    ),
    ToolFormat(
        "glm",
        ("<arg_key>", "<arg_value>"),
        _call(
            pattern(rf"<tool_call>\s*{_NAME}\s*(?=<)", "<tool_call>"),
            literal("</tool_call>"),
            "xml-inline",
            {"tag": Tag("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")},
        ),
    ),
    ToolFormat(
        "mistral-named",
        ("[TOOL_CALLS]", "[ARGS]"),
        # Mistral Small 3.2 writes an id between the two.
        _call(pattern(rf"\[TOOL_CALLS\]\s*{_NAME}\s*(?:\[CALL_ID\]\s*\w*\s*)?\[ARGS\]", "[TOOL_CALLS]")),
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
        sections=("<｜tool▁calls▁begin｜>",),
    ),
    ToolFormat(
        "deepseek-v3.1",
        ("<｜tool▁call▁begin｜>", "<｜tool▁sep｜>"),
        _call(
            pattern(rf"<｜tool▁call▁begin｜>{_NAME}<｜tool▁sep｜>", "<｜tool▁call▁begin｜>"),
            literal("<｜tool▁call▁end｜>"),
        ),
        ignored=("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
        sections=("<｜tool▁calls▁begin｜>",),
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
    ToolFormat(
        "gemma-4",
        ("<|tool_call>call:",),
        _call(
            pattern(rf"<\|tool_call>call:{_NAME}(?=\{{)", "<|tool_call>"),
            literal("<tool_call|>"),
            arguments={"string_delims": [['<|"|>', '<|"|>']], "unquoted_keys": True, "python_none": True},
        ),
    ),
    ToolFormat(
        "kimi-k2",
        ("<|tool_call_begin|>", "<|tool_call_argument_begin|>"),
        _call(
            pattern(
                r"<\|tool_call_begin\|>\s*(?:functions\.)?(?P<name>[\w./-]+)(?::\d+)?\s*<\|tool_call_argument_begin\|>",
                "<|tool_call_begin|>",
            ),
            literal("<|tool_call_end|>"),
        ),
        ignored=("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
        sections=("<|tool_calls_section_begin|>",),
    ),
    ToolFormat(
        "harmony",
        ("<|channel|>commentary", "functions."),
        (
            *_call(
                pattern(
                    rf"<\|channel\|>(?:commentary|analysis) to=(?:functions\.)?{_NAME}{_HARMONY_TYPE}",
                    "<|channel|>",
                ),
                literal("<|call|>"),
            ),
            *_call(
                pattern(
                    rf" to=functions\.{_NAME}<\|channel\|>(?:commentary|analysis){_HARMONY_TYPE}",
                    " to=functions.",
                ),
                literal("<|call|>"),
            ),
        ),
    ),
    ToolFormat(
        "solar-open",
        ("<|tool_call:begin|>", "<|tool_call:args|>"),
        _call(
            pattern(
                rf"<\|tool_call:begin\|>[^<]*<\|tool_call:name\|>{_NAME}<\|tool_call:args\|>", "<|tool_call:begin|>"
            ),
            literal("<|tool_call:end|>"),
        ),
        ignored=("<|tool_calls|>",),
    ),
    ToolFormat(
        "cohere",
        ("<|START_ACTION|>", '"tool_name":'),
        _call(literal("<|START_ACTION|>"), literal("<|END_ACTION|>"), transform=_COHERE),
    ),
    ToolFormat("nemotron", ("<TOOLCALL>",), _call(literal("<TOOLCALL>"), literal("</TOOLCALL>"), transform=_EACH)),
    ToolFormat(
        "apertus",
        ("<|tools_prefix|>",),
        _call(literal("<|tools_prefix|>"), literal("<|tools_suffix|>"), "json-by-name", transform=_EACH),
    ),
    # Neither template writes the calls of a message; `with_calls` does.
    ToolFormat("lfm2", ("<|tool_list_start|>",), _LFM),
    ToolFormat("lfm2.5", ("List of tools: [",), _LFM),
    ToolFormat(
        "olmo-3",
        ("<function_calls>",),
        _call(literal("<function_calls>"), literal("</function_calls>"), "python-calls", transform=_EACH),
    ),
    ToolFormat(
        "gigachat",
        ("<|role_sep|>", "function call"),
        _call(literal("function call<|role_sep|>\n", "<|function_call|>"), literal("<|message_sep|>"), transform=_CALL),
        ignored=("<|message_sep|>\n\n",),
    ),
    ToolFormat(
        "list",
        ("<tool_calls>[",),
        _call(literal("<tool_calls>"), literal("</tool_calls>"), transform=_EACH),
    ),
    # Functionary 3.1, and Llama 3.1 where a prompt describes the tools this way.
    ToolFormat(
        "functionary",
        ("<function=", "</function>", "end_tag"),
        _call(pattern(rf"<function={_NAME}>", "<function="), literal("</function>")),
    ),
    ToolFormat(
        "functionary-3.2",
        (">>>${recipient}",),
        _call(pattern(rf">>>(?!{EVERYONE}){_NAME}\n(?=\{{)", ">>>")),
        ignored=(f">>>{EVERYONE}",),
        recipient=">>>",
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
    if not takes_tools(template):
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
