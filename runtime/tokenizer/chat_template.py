"""Chat templates: finds a model's template and renders conversations with it in a bounded worker process.

The Jinja sandbox stops escapes, not work, so rendering has limits on time, memory and output.
"""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from mycli.runtime.errors import ModelError, UsageError
from mycli.runtime.utils.json_fields import Fields, read_object
from mycli.runtime.utils.sandbox import WorkerError, WorkerProcess

Role = Literal["system", "developer", "user", "assistant", "tool"]
Tool = Mapping[str, Any]
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]  # of reasoning, as clients send it

RENDER_SECONDS = 2.0
RENDER_MEMORY = 512 << 20
MAX_TEMPLATE_BYTES = 1 << 20
TEMPLATE_FILE = re.compile(r"additional_chat_templates/([\w-]+)\.jinja", re.ASCII)  # in a model's folder
# Template arguments that a request may set with any template, in addition to those that its template reads; never the
# template itself or its internal names.
ALLOWED_ARGUMENTS = frozenset(
    (
        *("enable_thinking", "thinking", "reasoning_effort", "documents", "date_string", "builtin_tools"),
        # Whether the reasoning of earlier turns is kept: Qwen 3.6, Hy 3, GLM 4.7 and 5, LFM2, Nemotron 3.
        *(
            "preserve_thinking",
            "preserved_thinking",
            "clear_thinking",
            "keep_past_thinking",
            "truncate_history_thinking",
        ),
        *("low_effort", "thinking_budget"),  # of Nemotron 3 and Seed-OSS
    )
)
# Variables of a template that hold special tokens.
TOKEN_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
# Fields of a message in which templates look for its reasoning: most, gpt-oss and LFM2.5, Solar Open.
REASONING_NAMES = ("reasoning_content", "thinking", "reasoning")
# A template that may read the parts of a content, and the text with which that is tried.
_PARTS = re.compile(r"""\btype\b.{0,40}(?:text|image)""", re.DOTALL)
_PROBE = "Where are the herons?"
# Templates of Granite 3 and LFM2 leave out the calls of earlier messages, so that a result follows an empty message.
# For each: the text before and after the place of calls, and a macro that writes calls as the model does.
_UNWRITTEN_CALLS = (
    (
        "message['content'] + ",
        "'<|end_of_text|>",
        "{%- macro written_calls(calls) -%}{{ '<|tool_call|>' + calls | map(attribute='function') | list | tojson }}"
        "{%- endmacro -%}",
    ),
    (
        "{{- content + ",
        '"<|im_end|>',
        "{%- macro written_calls(calls) -%}<|tool_call_start|>[{%- for call in calls -%}{{ call.function.name }}("
        "{%- for name, value in call.function.arguments.items() -%}{{ name }}={{ value | tojson }}"
        "{{ ', ' if not loop.last }}{%- endfor -%}){{ ', ' if not loop.last }}{%- endfor -%}]<|tool_call_end|>"
        "{%- endmacro -%}",
    ),
)
_RESERVED = frozenset(
    (
        *("messages", "tools", "add_generation_prompt", *TOKEN_NAMES),
        *("self", "allow_special", "chat_template", "tokenize"),  # of the functions that render, here and elsewhere
    )
)


@dataclass(frozen=True)
class Message:
    """One message of a conversation; tool_calls: objects with type and function (name, arguments as an object)."""

    role: Role
    content: str
    tool_calls: tuple[Mapping[str, Any], ...] = ()
    reasoning: str = ""
    name: str = ""
    tool_call_id: str = ""

    def __post_init__(self) -> None:
        # A role becomes markup, so only known ones pass.
        if self.role not in get_args(Role):
            raise UsageError(f"message role {self.role!r:.40} is unknown", f"one of: {', '.join(get_args(Role))}")

    def fields(self) -> dict[str, Any]:
        """Return the template's fields of the message except the role; empty ones are left out, except content."""
        optional = {
            "tool_calls": [dict(call) for call in self.tool_calls],
            **dict.fromkeys(REASONING_NAMES, self.reasoning),
            "name": self.name,
            "tool_call_id": self.tool_call_id,
        }
        return {"content": self.content, **{key: value for key, value in optional.items() if value}}


@dataclass(frozen=True)
class TemplateOptions:
    """A template to use instead of the model's own, and arguments of every rendering.

    source: Jinja; name: of one of the model's templates; arguments: those of a request have precedence.
    """

    source: str | None = None
    name: str | None = None
    arguments: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in self.arguments:
            if not name.isidentifier() or name.startswith("_") or name in _RESERVED:
                raise UsageError(
                    f"template argument {name!r:.60} is not possible", "use a name that the template reads"
                )


def takes_tools(template: str) -> bool:
    """Return whether a template reads the variable `tools`; Phi-4-mini's reads a field of that name of a message."""
    return re.search(r"""(?<![\w'".])tools\b(?!['"])""", template) is not None


def with_calls(template: str) -> str:
    """Return a template of a known model that leaves out calls with the calls, any other one as it is."""
    if "tool_calls" in template or not takes_tools(template):
        return template
    for before, after, macro in _UNWRITTEN_CALLS:
        if before + after in template:
            calls = "(written_calls(message['tool_calls']) if message['tool_calls'] else '') + "
            return macro + template.replace(before + after, before + calls + after)
    return template


def special_tokens_map(settings: Fields, names: Sequence[str] = TOKEN_NAMES) -> dict[str, str]:
    """Return the special tokens of tokenizer_config.json (`settings`) by name; each is a string or {"content": ...}."""
    texts = {}
    for name in names:
        value = settings.values.get(name)
        if isinstance(value, dict):
            value = value.get("content")
        if isinstance(value, str):
            texts[name] = value
        elif value is not None:
            raise settings.fail(name, f"must be a string, not {value!r:.40}")
    return texts


def _find_sources(folder: Path, settings: Fields) -> dict[str, str]:
    # Files have precedence over tokenizer_config.json, as on the hub.
    paths = {"default": path} if (path := folder / "chat_template.jinja").exists() else {}
    for path in template_files(folder):
        paths[path.stem] = path
    if paths:
        return {name: _read_source(path) for name, path in paths.items()}
    legacy = folder / "chat_template.json"  # of older multimodal models, whose tokenizer may have none
    return _named_sources(settings) or (
        _named_sources(read_object(legacy, MAX_TEMPLATE_BYTES)) if legacy.exists() else {}
    )


def template_files(folder: Path) -> list[Path]:
    """Return the files of a model's named chat templates, as Command A has them."""
    return [
        path
        for path in sorted(folder.glob("additional_chat_templates/*"))
        if TEMPLATE_FILE.fullmatch(path.relative_to(folder).as_posix()) and path.is_file()
    ]


def _read_source(path: Path) -> str:
    if not path.is_file() or path.stat().st_size > MAX_TEMPLATE_BYTES:
        raise ModelError(f"{path.name}: not a file of at most {MAX_TEMPLATE_BYTES} bytes", code="verify-files")
    try:
        return path.read_text("utf-8")
    except ValueError:
        raise ModelError(f"{path.name}: not UTF-8 text", code="verify-files") from None


def _named_sources(settings: Fields) -> dict[str, str]:
    value = settings.values.get("chat_template")
    if value is None:
        return {}
    if isinstance(value, str):
        return {"default": value}
    if isinstance(value, list):
        value = {item.get("name"): item.get("template") for item in value if isinstance(item, dict)}
    if not isinstance(value, dict) or not all(isinstance(x, str) for pair in value.items() for x in pair):
        raise settings.fail("chat_template", "must be a string, or a list of objects with name and template")
    return dict(value)


class ChatTemplate:
    """The chat templates of one model, by name ("default", "tool_use"), and the worker that renders them."""

    def __init__(
        self, sources: Mapping[str, str], tokens: Mapping[str, str], arguments: Mapping[str, Any] | None = None
    ) -> None:
        """sources: by name; tokens: special tokens by variable; arguments: of every rendering."""
        self._sources = dict(sources)
        self._tokens = dict(tokens)
        self._arguments = dict(arguments or {})
        self._parts = dict[str, bool]()  # by source: whether it reads contents as lists of parts only
        self._own_arguments: frozenset[str] | None = None
        self._worker = WorkerProcess(
            "mycli.runtime.tokenizer.chat_template_worker", None, RENDER_MEMORY, reply_bytes=1 << 27
        )

    @classmethod
    def load(cls, folder: Path, settings: Fields) -> "ChatTemplate | None":
        """Return the templates of a model's folder; None without any."""
        sources = _find_sources(folder, settings)
        return cls(sources, special_tokens_map(settings)) if sources else None

    @classmethod
    def from_settings(cls, settings: Fields) -> "ChatTemplate | None":
        sources = _named_sources(settings)
        return cls(sources, special_tokens_map(settings)) if sources else None

    def contains(self, text: str) -> bool:
        """Return whether the source of a template contains `text`."""
        return any(text in source for source in self._sources.values())

    def with_options(self, options: TemplateOptions) -> "ChatTemplate":
        """Return the templates that `options` selects. Raises UsageError for an unknown name."""
        sources = self._sources
        if options.source is not None:
            sources = {"default": options.source}
        elif options.name is not None:
            if options.name not in sources:
                known = ", ".join(sorted(sources)) or "none"
                problem = f"the model has no chat template {options.name!r:.60}"
                raise UsageError(problem, f"it has: {known}; or name a file")
            sources = {"default": sources[options.name]}
        return ChatTemplate(sources, self._tokens, {**self._arguments, **options.arguments})

    def start(self) -> None:
        """Start the worker without waiting: its start takes as long as a short reply."""
        self._worker.start()

    def source(self, tools: bool = False) -> str:
        """Return the template for requests with or without tools."""
        if tools and "tool_use" in self._sources:
            return self._sources["tool_use"]
        if "default" not in self._sources:
            raise ModelError(
                f"tokenizer_config.json: chat_template has {', '.join(sorted(self._sources))} but no default",
                "copy the template to use into chat_template.jinja",
            )
        return self._sources["default"]

    def check_arguments(self, names: Iterable[str]) -> None:
        """Raise UsageError for a name that is neither in `ALLOWED_ARGUMENTS` nor read by the model's templates."""
        for name in names:
            if name not in ALLOWED_ARGUMENTS and name not in (variables := self._find_own_arguments()):
                allowed = ", ".join(sorted(ALLOWED_ARGUMENTS | variables))
                raise UsageError(f"{name[:60]!r} is not a template argument", f"allowed: {allowed}")

    def _find_own_arguments(self) -> frozenset[str]:
        if self._own_arguments is None:
            names = set[str]()
            for source in self._sources.values():
                with suppress(WorkerError):  # rendering with this template fails, with its cause
                    names |= set(self._worker.call({"template": source}, RENDER_SECONDS))
            self._own_arguments = frozenset(name for name in names - _RESERVED if not name.startswith("_"))
        return self._own_arguments

    def render(
        self,
        conversations: Sequence[Sequence[Mapping[str, Any]]],
        tools: Sequence[Sequence[Tool]] | None,
        arguments: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool,
    ) -> list[str]:
        """Return the rendered text of each conversation with its tools and arguments.

        Raises UsageError if the template refuses the conversation, ModelError if it fails or exceeds a limit.
        """
        source = self.source(bool(tools))
        called = any(message.get("tool_calls") for messages in conversations for message in messages)
        if called:
            source = with_calls(source)
        typed = self._takes_parts(source)
        variables = [
            {
                **self._tokens,
                "documents": None,
                **_known_effort(source, {**self._arguments, **_both_switches(arguments[index])}),
                "messages": [_in_parts(message) for message in messages] if typed else messages,
                "tools": tools[index] if tools else None,
                "add_generation_prompt": add_generation_prompt,
            }
            for index, messages in enumerate(conversations)
        ]
        try:
            try:
                return self._texts(source, variables)
            except WorkerError as error:
                if error.kind != "TypeError" or not called:
                    raise
                # Functionary's template joins arguments with text, so they must be text, as in OpenAI's interface.
                return self._texts(source, [_with_written_arguments(values) for values in variables])
        except WorkerError as error:
            if error.kind == "Refusal":
                raise UsageError(
                    f"the model's chat template refuses: {error.message:.300}", "change the messages"
                ) from None
            raise ModelError(f"chat template: {error.kind}: {error.message:.300}", code="show-template") from None

    def _texts(self, source: str, variables: Sequence[Mapping[str, Any]]) -> list[str]:
        texts: list[str] = self._worker.call({"template": source, "variables": variables}, RENDER_SECONDS)
        return texts

    def _takes_parts(self, source: str) -> bool:
        # Templates of multimodal models such as LLaVA and SmolVLM read a list of parts only, and lose a text.
        if not _PARTS.search(source):
            return False
        if source not in self._parts:
            message = {"role": "user", "content": _PROBE}
            base = {**self._tokens, "documents": None, "tools": None, "add_generation_prompt": False}
            rendered = []
            for variant in (message, _in_parts(message)):
                request = {"template": source, "variables": [{**base, **self._arguments, "messages": [variant]}]}
                try:
                    rendered.append(_PROBE in self._worker.call(request, RENDER_SECONDS)[0])
                except WorkerError:
                    rendered.append(False)
            self._parts[source] = rendered == [False, True]
        return self._parts[source]


def _both_switches(arguments: Mapping[str, Any]) -> Mapping[str, Any]:
    # DeepSeek V3.1, Kimi K2.5 and Granite 3 name the switch that requests set as enable_thinking otherwise.
    return {"thinking": arguments["enable_thinking"], **arguments} if "enable_thinking" in arguments else arguments


def _known_effort(source: str, arguments: Mapping[str, Any]) -> Mapping[str, Any]:
    # Hy 3 has three efforts, refuses the others, and has no other switch. SGLang maps the others in the same way.
    if "'no_think'" not in source or "reasoning_effort" not in source:
        return arguments
    effort, thinks = arguments.get("reasoning_effort"), arguments.get("enable_thinking")
    if thinks is False or effort in ("none", "minimal"):
        return {**arguments, "reasoning_effort": "no_think"}
    if effort in ("medium", "xhigh", "max") or (thinks and effort is None):
        return {**arguments, "reasoning_effort": "high"}
    return arguments


def _with_written_arguments(variables: Mapping[str, Any]) -> Mapping[str, Any]:
    def written(call: Mapping[str, Any]) -> Mapping[str, Any]:
        arguments = json.dumps(call["function"]["arguments"], ensure_ascii=False)
        return {**call, "function": {**call["function"], "arguments": arguments}}

    messages = [
        {**message, "tool_calls": [written(call) for call in message["tool_calls"]]}
        if "tool_calls" in message
        else message
        for message in variables["messages"]
    ]
    return {**variables, "messages": messages}


def _in_parts(message: Mapping[str, Any]) -> Mapping[str, Any]:
    content = message.get("content")
    return {**message, "content": [{"type": "text", "text": content}]} if isinstance(content, str) else message


def effort_arguments(effort: str | None) -> dict[str, Any]:
    """Return the template arguments for a reasoning effort."""
    if effort is None:
        return {}
    return {"reasoning_effort": effort, **({"enable_thinking": False} if effort in ("none", "minimal") else {})}
