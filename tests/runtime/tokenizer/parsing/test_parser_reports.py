"""Test what a tool parser reports while a reply streams: texts at once, calls in order, and whether one is open."""

import json
from typing import Any

import pytest

from mycli.runtime.tokenizer.parsing.tool_formats import HERMES, TOOL_FORMATS, ToolFormat
from mycli.runtime.tokenizer.parsing.tool_parser import ToolCall, ToolParser, join_calls

BY_NAME = {form.name: form for form in TOOL_FORMATS}
PROPERTIES = {"a": {"type": "integer"}, "b": {"type": "string"}}
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"properties": PROPERTIES}}}]
LIST = '[{"name": "f", "arguments": {"a": 1}}, {"name": "f", "arguments": {"a": 2}}, {"name": "g", "arguments": {}}]'


def calls(items: list[Any]) -> list[tuple[int, str, str]]:
    joined = join_calls(item for item in items if isinstance(item, ToolCall))
    return [(call.index, call.name, call.arguments) for call in joined]


@pytest.mark.parametrize("form", TOOL_FORMATS, ids=lambda form: form.name)
def test_a_text_without_a_mark_is_passed_on_at_once(form: ToolFormat) -> None:
    parser = ToolParser(form, TOOLS)
    assert [parser.feed("Hi"), parser.feed(" you"), parser.flush()] == [["Hi"], [" you"], []]
    assert not parser.called and not parser.in_call and not parser.incomplete


def test_blanks_at_the_end_of_a_text_wait_for_a_call() -> None:
    parser = ToolParser(HERMES, TOOLS)
    assert [parser.feed("Hi \n"), parser.flush()] == [["Hi"], [" \n"]]


@pytest.mark.parametrize("step", [1, 10_000])
@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("mistral", f"[TOOL_CALLS]{LIST}"),
        ("nemotron", f"<TOOLCALL>{LIST}</TOOLCALL>"),
        ("hermes", "".join(f"<tool_call>{json.dumps(call)}</tool_call>" for call in json.loads(LIST))),
    ],
)
def test_calls_are_numbered_in_the_order_of_the_reply(name: str, text: str, step: int) -> None:
    expected = [(0, "f", '{"a": 1}'), (1, "f", '{"a": 2}'), (2, "g", "{}")]
    for single in (False, True):
        parser = ToolParser(BY_NAME[name], TOOLS, single=single)
        items = [item for at in range(0, len(text), step) for item in parser.feed(text[at : at + step])]
        assert calls(items + parser.flush()) == (expected[:1] if single else expected)
        assert parser.called and not parser.in_call and not parser.incomplete


@pytest.mark.parametrize(
    ("name", "head", "value", "end"),
    [
        ("hermes", '<tool_call>{"name": "f", "arguments": {"b": ', '"', '"}}</tool_call>'),
        ("seed", "<function=f>\n<parameter=b>", "x", "</parameter>\n</function>"),
    ],
)
def test_a_call_is_open_from_its_first_argument_to_its_closing_mark(name: str, head: str, value: str, end: str) -> None:
    parser, states = ToolParser(BY_NAME[name], TOOLS), []
    for text in ("Hi ", head[:-4], head[-4:] + value, end[:-1], end[-1]):
        parser.feed(text)
        states.append((parser.called, parser.in_call))
    assert states == [(False, False), (False, False), (True, True), (True, True), (True, False)]


@pytest.mark.parametrize("name", ["hermes", "llama"])
@pytest.mark.parametrize("step", [1, 10_000])
def test_a_forced_call_that_the_reply_ends_in_is_not_text(name: str, step: int) -> None:
    prefix, suffix, *_ = BY_NAME[name].json_syntax or ()
    whole = '{"name": "f", "parameters": {"a": 1}}' if name == "llama" else '{"name": "f", "arguments": {"a": 1}}'
    text = f"{prefix}{whole}{suffix}"
    for end in range(len(text)):
        parser = ToolParser(BY_NAME[name], TOOLS, forced=True)
        items = [item for at in range(0, end, step) for item in parser.feed(text[at : min(at + step, end)])]
        items += parser.flush()
        assert not [item for item in items if isinstance(item, str)], text[:end]


@pytest.mark.parametrize("name", ["mistral", "granite", "llama"])
def test_a_forced_call_that_ends_with_the_reply_is_a_call(name: str) -> None:
    parser = ToolParser(BY_NAME[name], TOOLS, forced=True)
    text = {
        "mistral": '[TOOL_CALLS][{"name": "f", "arguments": {}}]',
        "granite": '<|tool_call|>[{"name": "f", "arguments": {}}]',
        "llama": '{"name": "f", "parameters": {}}',
    }[name]
    assert parser.feed(text) + parser.flush() == [ToolCall("f", "{}")]


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("mistral-named", '[TOOL_CALLS]f[ARGS]{"b": "x"}'),
        ("llama", '{"name": "f", "parameters": {"b": "x"}}'),
    ],
)
def test_a_text_after_a_call_without_a_closing_mark_is_passed_on_at_once(name: str, call: str) -> None:
    parser = ToolParser(BY_NAME[name], TOOLS)
    *items, text = parser.feed(f"{call} Hi")
    assert calls(items) == [(0, "f", '{"b": "x"}')] and text == "Hi"


@pytest.mark.parametrize(
    ("name", "text"),
    [("glm", "<tool_call>f\n<arg_key>a</tool_call>"), ("seed", "<function=f>\n<parameter=a</function>")],
)
def test_elements_that_are_not_in_the_format_are_text_at_their_closing_mark(name: str, text: str) -> None:
    assert ToolParser(BY_NAME[name], TOOLS).feed(text) == [text]


@pytest.mark.parametrize("step", [1, 10_000])
def test_a_call_that_is_not_json_ends_where_the_next_one_begins(step: int) -> None:
    parser, text = (
        ToolParser(BY_NAME["mistral-named"], TOOLS),
        '[TOOL_CALLS]f[ARGS]{"b": "x", oops[TOOL_CALLS]f[ARGS]{}',
    )
    items = [item for at in range(0, len(text), step) for item in parser.feed(text[at : at + step])]
    assert calls(items + parser.flush()) == [(0, "f", '{"b": "x", oops'), (1, "f", "{}")]
    assert parser.incomplete
