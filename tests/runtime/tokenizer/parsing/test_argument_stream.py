"""Test that streamed tool call arguments, joined, equal those of the whole call."""

import json
import math
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from mycli.runtime.tokenizer.parsing.tool_formats import HERMES, TOOL_FORMATS
from mycli.runtime.tokenizer.parsing.tool_parser import ToolCall, ToolParser, join_calls

PROPERTIES = {"path": {"type": "string"}, "n": {"type": "integer"}, "any": {}, "list": {"type": "array"}}
TOOLS = [{"type": "function", "function": {"name": "write", "parameters": {"properties": PROPERTIES}}}]
LLAMA = next(form for form in TOOL_FORMATS if form.name == "llama")
DEEPSEEK = next(form for form in TOOL_FORMATS if form.name == "deepseek-v3.1")


def parts(form: Any, text: str, step: int) -> list[Any]:
    parser = ToolParser(form, TOOLS)
    found = [item for at in range(0, len(text), step) for item in parser.feed(text[at : at + step])]
    return found + parser.flush()


def calls(items: list[Any]) -> list[tuple[str, str]]:
    return [(call.name, call.arguments) for call in join_calls(item for item in items if isinstance(item, ToolCall))]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=150)
@example({"any": [{"a": "]}\\", "b": ['"', {}]}, 1], '\\"q': 'x\n"é🙂', "n": "5"}, 1, True, 2, "hermes")
@example({"any": {"a": [[], {"b": '\\"['}]}, '"\\': "\\", "n": "\\5"}, 2, False, None, "llama")
@given(
    st.dictionaries(st.sampled_from(list(PROPERTIES)) | st.text(max_size=5), JSON, max_size=4),
    st.integers(1, 12),
    st.booleans(),
    st.sampled_from([None, 2]),
    st.sampled_from(["hermes", "llama", "deepseek"]),
)
def test_any_arguments_in_any_cut_are_those_of_the_whole_call(
    arguments: dict[str, Any], step: int, ascii_only: bool, indent: int | None, form: str
) -> None:
    written = json.dumps(arguments, ensure_ascii=ascii_only, indent=indent)
    texts = {
        "hermes": (HERMES, f'<tool_call>\n{{"name": "write", "arguments": {written}}}\n</tool_call>'),
        "llama": (LLAMA, f'{{"name": "write", "parameters": {written}}}'),
        "deepseek": (DEEPSEEK, f"<｜tool▁call▁begin｜>write<｜tool▁sep｜>{written}<｜tool▁call▁end｜>"),
    }
    items = parts(*texts[form], step)
    assert not [item for item in items if isinstance(item, str)]
    typed = {
        key: _integer(value) if key == "n" and isinstance(value, str) else value for key, value in arguments.items()
    }
    assert calls(items) == [("write", json.dumps(typed, ensure_ascii=False))]


def _integer(text: str) -> Any:
    try:
        value = json.loads(text)
    except ValueError:
        return text
    if isinstance(value, float) and not math.isfinite(value):
        return text
    return (
        int(value) if isinstance(value, int | float) and not isinstance(value, bool) and value == int(value) else text
    )


def test_a_long_text_is_passed_on_as_it_comes() -> None:
    parser = ToolParser(HERMES, TOOLS)
    head = parser.feed('Now.\n<tool_call>\n{"name": "write", "arguments": {"path": "')
    assert head[:2] == ["Now.", ToolCall("write", "")]
    assert calls(head) == [("write", '{"path": "')]
    assert parser.feed("a line\\n") == [ToolCall("", "a line\\n")]
    assert parser.feed("\\u00") == [] and parser.feed('e9"') == [ToolCall("", 'é"')]


def test_a_string_begins_as_soon_as_its_quote_arrives() -> None:
    parser = ToolParser(HERMES, TOOLS)
    head = parser.feed('<tool_call>{"name": "write", "arguments": {"path":"')
    assert calls(head) == [("write", '{"path": "')]


def test_a_closing_mark_inside_a_string_does_not_end_the_call() -> None:
    text = '<tool_call>{"name": "write", "arguments": {"path": "</tool_call>"}}</tool_call> done'
    items = parts(HERMES, text, 3)
    assert calls(items) == [("write", '{"path": "</tool_call>"}')]
    assert "".join(item for item in items if isinstance(item, str)) == "done"


@pytest.mark.parametrize("step", [1, 4, 1000])
@pytest.mark.parametrize(
    "written, expected",
    [
        ('{"path": "a\nb"}}\n</tool_call>!', '{"path": "a\nb"}}\n'),
        ('{"path": "a", oops}}\n</tool_call>!', '{"path": "a", oops}}\n'),
        ('{"path": "a", }}\n</tool_call>!', '{"path": "a", }}\n'),
        ('{"path": "a", "n": 12', '{"path": "a", "n": 12'),
        ('{"path": "a\\ud800"}}</tool_call>!', '{"path": "a\\ud800"}}'),
    ],
    ids=["control-character", "no-key", "comma", "cut", "half-a-pair"],
)
def test_arguments_that_turn_out_not_to_be_json_stay_as_they_are(written: str, expected: str, step: int) -> None:
    parser, text = ToolParser(HERMES, TOOLS), f'<tool_call>{{"name": "write", "arguments": {written}'
    items = [item for at in range(0, len(text), step) for item in parser.feed(text[at : at + step])] + parser.flush()
    assert calls(items) == [("write", expected)] and parser.incomplete
    assert [item for item in items if isinstance(item, str)] == (["!"] if written.endswith("!") else [])


def test_only_a_tool_of_the_request_is_passed_on_early() -> None:
    parser = ToolParser(HERMES, TOOLS)
    assert parser.feed('<tool_call>{"name": "other", "arguments": {"path": "abc') == []
    assert calls(parser.feed('"}}</tool_call>')) == [("other", '{"path": "abc"}')]


@pytest.mark.parametrize(
    ("text", "typed"), [("3.0", 3), ("3.5", "3.5"), ("true", "true"), ("[1]", "[1]"), ("1e999", "1e999")]
)
def test_a_text_that_is_no_integer_stays_a_text(text: str, typed: object) -> None:
    items = parts(HERMES, f'<tool_call>{{"name": "write", "arguments": {{"n": "{text}"}}}}</tool_call>', 1000)
    assert calls(items) == [("write", json.dumps({"n": typed}))]


def test_blanks_before_the_first_text_stay() -> None:
    assert "".join(parts(HERMES, " \n Hi", 1)) == " \n Hi"
