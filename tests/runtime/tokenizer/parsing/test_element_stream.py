"""Test that streamed arguments written as elements, joined, equal those of the whole call."""

import json
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from mycli.runtime.tokenizer.parsing.element_stream import has_element_stream
from mycli.runtime.tokenizer.parsing.tool_formats import TOOL_FORMATS
from mycli.runtime.tokenizer.parsing.tool_parser import ToolCall, ToolParser, join_calls

PROPERTIES = {"path": {"type": "string"}, "n": {"type": "integer"}, "any": {}, "list": {"type": "array"}}
TOOLS = [{"type": "function", "function": {"name": "write", "parameters": {"properties": PROPERTIES}}}]
FORMATS = {form.name: form for form in TOOL_FORMATS if any(map(has_element_stream, form.regions))}
OPENINGS = {  # of a call, and its end
    "seed": ("<function=write>\n", "</function>"),
    "qwen-xml": ("<tool_call>\n<function=write>\n", "</function>\n</tool_call>"),
    "deepseek-v3.2": ('<｜DSML｜invoke name="write">\n', "</｜DSML｜invoke>"),
    "gigachat-3.5": ('<｜GCML｜invoke name="write">\n', "</｜GCML｜invoke>"),
    "hunyuan-3": ("<tool_call>write<tool_sep>\n", "</tool_call>"),
    "minimax": ('<invoke name="write">\n', "</invoke>"),
    "glm": ("<tool_call>write\n", "</tool_call>"),
}
ELEMENTS = {
    "seed": ("<parameter={key}>", "</parameter>\n"),
    "qwen-xml": ("<parameter={key}>\n", "\n</parameter>\n"),
    "deepseek-v3.2": ('<｜DSML｜parameter name="{key}" string="true">', "</｜DSML｜parameter>\n"),
    "gigachat-3.5": ('<｜GCML｜parameter name="{key}" string="true">', "</｜GCML｜parameter>\n"),
    "hunyuan-3": ("<arg_key>{key}</arg_key>\n<arg_value>", "</arg_value>\n"),
    "minimax": ('<parameter name="{key}">', "</parameter>\n"),
    "glm": ("<arg_key>{key}</arg_key>\n<arg_value>", "</arg_value>\n"),
}
LOOSE = ("seed", "qwen-xml")


def fed(name: str, text: str, step: int) -> list[Any]:
    parser = ToolParser(FORMATS[name], TOOLS)
    items = [item for at in range(0, len(text), step) for item in parser.feed(text[at : at + step])]
    return items + parser.flush()


def calls(items: list[Any]) -> list[tuple[str, str]]:
    return [(call.name, call.arguments) for call in join_calls(item for item in items if isinstance(item, ToolCall))]


def whole(name: str, body: str) -> list[tuple[str, str]] | None:
    """Return the call of a text that is parsed in one piece, with the types of the schema."""
    parser = ToolParser(FORMATS[name], TOOLS)
    try:
        value = FORMATS[name].regions[0].parse(body, {"name": "write"})[0]
        call = parser._call(value)
    except ValueError:
        return None
    return [(call.name, call.arguments)]


def test_every_format_is_written_here() -> None:
    assert OPENINGS.keys() == ELEMENTS.keys() == FORMATS.keys()


def pieces(name: str) -> st.SearchStrategy[str]:
    before, after = ELEMENTS[name]
    marks = [before.format(key="any"), before[:5], after.strip(), after.strip()[:4], OPENINGS[name][1]]
    plain = st.sampled_from(["\n", "\n\n", '"', "\\", "é", "<", "</", "x", " ", "12", "[1, 'a']", "\x01", *marks])
    return st.lists(plain, max_size=6).map("".join)


@settings(max_examples=250, deadline=None)
@given(st.data())
def test_any_arguments_in_any_cut_are_those_of_the_whole_call(data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(sorted(FORMATS)))
    (opening, closing), (before, after) = OPENINGS[name], ELEMENTS[name]
    loose = name in LOOSE
    keys = data.draw(st.lists(st.sampled_from([*PROPERTIES, "other"]), max_size=4, unique=True))
    values = [data.draw(pieces(name)) for _ in keys]
    # A value ends at its first mark; where marks may be missing, the call ends at its own.
    assume(not any(("</function>" if loose else after.strip()) in value for value in values))
    ends = [data.draw(st.sampled_from([after, "\n"])) if loose else after for _ in keys]
    body = "".join(before.format(key=key) + value + end for key, value, end in zip(keys, values, ends, strict=True))
    expected = whole(name, body)
    assume(expected is not None)
    assert expected is not None
    items = fed(name, f"Now.\n{opening}{body}{closing} Done.", data.draw(st.integers(1, 12)))
    assert "".join(item for item in items if isinstance(item, str)) == "Now.Done."
    (tool, arguments), *others = calls(items)
    assert not others and tool == "write"
    pairs = json.loads(arguments, object_pairs_hook=list)
    if len({key for key, _ in pairs}) == len(pairs):
        assert arguments == expected[0][1]
    else:  # marks in a value can repeat a key: JSON's last value is the one
        assert json.loads(arguments) == json.loads(expected[0][1])


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_a_long_text_is_passed_on_as_it_comes(name: str) -> None:
    (opening, closing), (before, after) = OPENINGS[name], ELEMENTS[name]
    parser = ToolParser(FORMATS[name], TOOLS)
    head = parser.feed(opening + before.format(key="n") + "3" + after + before.format(key="path"))
    assert calls(head) == [("write", '{"n": 3, "path": "')]
    assert parser.feed('a "line"\n') == [ToolCall("", 'a \\"line\\"')]
    assert parser.feed("b\n</") == [ToolCall("", "\\nb")]
    assert parser.feed("p>") == [ToolCall("", "\\n</p>")]
    assert calls(parser.feed(after + closing) + parser.flush()) == [("", '"}')] and not parser.incomplete


@pytest.mark.parametrize("name", ["glm", "minimax", "deepseek-v3.2"])
@pytest.mark.parametrize("step", [1, 1000])
def test_a_closing_mark_inside_a_string_does_not_end_the_call(name: str, step: int) -> None:
    (opening, closing), (before, after) = OPENINGS[name], ELEMENTS[name]
    items = fed(name, f"{opening}{before.format(key='path')}a{closing}b{after}{closing}Done.", step)
    assert calls(items) == [("write", json.dumps({"path": f"a{closing}b"}, ensure_ascii=False))]
    assert "".join(item for item in items if isinstance(item, str)) == "Done."


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_a_string_that_the_reply_ends_in_is_incomplete(name: str) -> None:
    parser = ToolParser(FORMATS[name], TOOLS)
    text = OPENINGS[name][0] + ELEMENTS[name][0].format(key="path") + '"some"\n'
    assert calls(parser.feed(text) + parser.flush()) == [("write", '{"path": "\\"some\\"\\n')]
    assert parser.incomplete


@pytest.mark.parametrize("step", [1, 1000])
def test_an_argument_after_a_string_that_is_not_json_is_passed_on_as_it_is(step: int) -> None:
    (opening, closing), (before, after) = OPENINGS["deepseek-v3.2"], ELEMENTS["deepseek-v3.2"]
    number = '<｜DSML｜parameter name="n" string="false">3x' + after
    items = fed("deepseek-v3.2", f"{opening}{before.format(key='path')}a{after}{number}{closing}Done.", step)
    assert calls(items) == [("write", f'{{"path": "a", "n": 3x{after}')]
    assert "".join(item for item in items if isinstance(item, str)) == "Done."


def test_only_a_tool_of_the_request_is_passed_on_early() -> None:
    parser = ToolParser(FORMATS["glm"], TOOLS)
    assert parser.feed("<tool_call>other\n<arg_key>path</arg_key>\n<arg_value>a long text") == []


@pytest.mark.parametrize("step", [1, 1000])
@pytest.mark.parametrize("name", sorted(FORMATS))
def test_a_call_of_another_tool_is_read_in_one_piece(name: str, step: int) -> None:
    """Its arguments are texts, and what is not in the format is text."""
    (opening, closing), (before, after) = OPENINGS[name], ELEMENTS[name]
    opening, first = opening.replace("write", "other"), before.format(key="path")
    body = f"{first}a\nb{after}{before.format(key='n')}3{after}"
    assert calls(fed(name, f"{opening}{body}{closing}", step)) == [("other", '{"path": "a\\nb", "n": "3"}')]
    broken = f"{opening}{first.partition('path')[0]}{closing}"
    assert "".join(fed(name, broken, step)) == broken
