"""Test calls in a syntax that a model declares in its folder, as transformers reads them; hostile ones are refused."""

import json
from typing import Any

import pytest
from transformers.utils.chat_parsing import parse_response

from mycli.runtime.errors import ModelError
from mycli.runtime.tokenizer.parsing.response_template import read_response_template
from mycli.runtime.tokenizer.parsing.tool_formats import (
    ToolFormat,
    declared_tool_format,
    find_tool_format,
    model_tool_format,
)
from mycli.runtime.tokenizer.parsing.tool_parser import ToolCall, ToolParser
from mycli.runtime.utils.json_fields import Fields
from tests.runtime.tokenizer.parsing.test_tool_parser import TOOLS, parse

DECLARED: dict[str, Any] = {
    "defaults": {"role": "assistant"},
    "start_anchor": "<|im_start|>assistant\n",
    "fields": {
        "content": {},
        "tool_calls": {
            "open_pattern": r"<call name=(?P<name>\w+)>",
            "close": "</call>",
            "content": "json",
            "content_args": {"unquoted_keys": True, "string_delims": [["<s>", "</s>"]]},
            "repeats": True,
            "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}},
        },
    },
}
TEXTS = [
    "Hi <call name=f>{a:1,b:<s>x:y,z</s>}</call>",
    '<call name=f>{"a": 1,b:<s>x</s>}</call>',
    '<call name=f>{"a": 1}</call><call name=g>{}</call>',
    "no call",
]


@pytest.mark.parametrize("text", TEXTS)
def test_a_declared_template_is_read_as_transformers_reads_it(text: str) -> None:
    form = declared_tool_format(read_response_template(Fields(DECLARED, "t")))
    assert form is not None
    theirs = parse_response(text, DECLARED, prefix="", tools=TOOLS)
    calls = [(item["function"]["name"], item["function"]["arguments"]) for item in theirs.get("tool_calls", [])]
    for step in (1, 4, 1000):
        items = parse(form, text, step)
        assert [item for item in items if isinstance(item, tuple)] == calls
        assert "".join(item for item in items if isinstance(item, str)) == theirs.get("content", "")


@pytest.mark.parametrize(
    ("content", "arguments", "body"),
    [
        (
            "xml-inline",
            {"tag_pattern": r"<arg=(?P<key>\w+)>(?P<value>.*?)</arg>"},
            "<arg=a>1</arg> <arg=b>x</arg>",
        ),
        ("kv-lines", {}, "a: 1\nno pair\n b : x:y \n"),
        ("kv-lines", {"kv_sep": "=", "line_sep": ";", "value_parser": {"name": "json"}}, 'a = 1;b=[2];c="=";'),
        (
            "kv-lines",
            {"value_parser": {"name": "kv-lines", "args": {"kv_sep": "=", "line_sep": ","}}},
            "a: b=1,c=2\nd: e=3",
        ),
    ],
)
def test_declared_elements_are_read_as_transformers_reads_them(
    content: str, arguments: dict[str, Any], body: str
) -> None:
    field = {**DECLARED["fields"]["tool_calls"], "content": content, "content_args": arguments}
    spec = {**DECLARED, "fields": {"content": {}, "tool_calls": field}}
    text = f"<call name=f>{body}</call>"
    theirs = parse_response(text, spec, prefix="", tools=TOOLS)
    form = declared_tool_format(read_response_template(Fields(spec, "t")))
    assert form is not None
    assert parse(form, text, 3) == [("f", theirs["tool_calls"][0]["function"]["arguments"])]


def test_a_template_without_calls_leaves_them_to_the_chat_template() -> None:
    chat, calls = "<tool_call> {{ tools }}", Fields(DECLARED, "t")
    reasoning = Fields({"fields": {"content": {}, "thinking": {"open": "<think>", "close": "</think>"}}}, "t")
    by_markers = find_tool_format(chat)
    assert by_markers is not None
    assert model_tool_format(calls, chat) == declared_tool_format(read_response_template(calls)) != by_markers
    for template in (reasoning, Fields({"fields": 3}, "t")):
        assert model_tool_format(template, chat) == by_markers


@pytest.mark.parametrize("arguments", [{}, {"strip": False}])
def test_a_text_is_stripped_as_transformers_strips_it(arguments: dict[str, Any]) -> None:
    transform = {"type": "function", "function": {"name": "{name}", "arguments": {"code": "{content}"}}}
    field = {**DECLARED["fields"]["tool_calls"], "content": "text", "content_args": arguments, "transform": transform}
    spec = {**DECLARED, "fields": {"content": {}, "tool_calls": field}}
    text = "<call name=f> a\n b\n</call>"
    theirs = parse_response(text, spec, prefix="", tools=TOOLS)
    form = declared_tool_format(read_response_template(Fields(spec, "t")))
    assert form is not None
    assert parse(form, text, 3) == [("f", theirs["tool_calls"][0]["function"]["arguments"])]


@pytest.mark.parametrize(
    ("body", "calls"),
    [
        ('[{"name": "f", "arguments": {}}, {"name": "g", "arguments": {"a": 1}}]', [("f", {}), ("g", {"a": 1})]),
        ("[]", []),
        ('[{"name": "f", "arguments": {}}, 3]', None),
        ('{"name": "f", "arguments": {}}', None),
    ],
    ids=["two", "none", "not-an-object", "not-a-list"],
)
def test_a_list_of_calls_is_one_of_objects(body: str, calls: list[Any] | None) -> None:
    transform = {"type": "function", "function": {"name": "{name}", "arguments": "{arguments}"}}
    field = {"open": "<calls>", "close": "</calls>", "content": "json", "transform": transform, "transform_each": True}
    form = declared_tool_format(read_response_template(Fields({"fields": {"tool_calls": field}}, "t")))
    assert form is not None
    text = f"<calls>{body}</calls>"
    assert parse(form, text, 1000) == ([text] if calls is None else calls)


@pytest.mark.parametrize(
    "field",
    [
        {"open_pattern": "(a+)+b"},
        {"open_pattern": "x(?:a|a)*"},
        {"open_pattern": ".*"},
        {"open_pattern": r"x\w+\w+\w+\w+y"},
        {"open_pattern": "x" * 257},
        {"open_pattern": r"x(?=y)"},
        {"open_pattern": "x["},
        {"open": ""},
        {"open": "x" * 257},
        {"open": 3},
        {"open": []},
        {"open": ["x", ""]},
        {"open": "x", "content": "python"},
        {"open": "x", "content": "xml-inline", "content_args": {"tag_pattern": "(a|b)+"}},
        {"open": "x", "content": "xml-inline"},
        *(
            {"open": "x", "content": "xml-inline", "content_args": {"tag_pattern": tag}}
            for tag in (
                r"(?P<key>\w+)=(?P<value>.*?);",
                r"<(?P<key>\w+)(?P<value>.*?)>",
                r"<(?P<key>\w+)=(?P<value>.*?)",
                r"<\d(?P<key>\w+)=(?P<value>.*?)>",
            )
        ),
        *(
            {"open": "x", "content": "kv-lines", "content_args": arguments}
            for arguments in (
                {"kv_sep": 3},
                {"kv_sep": ""},
                {"line_sep": ["\n"]},
                {"string_delims": "<>"},
                {"string_delims": [["<", ">", "|"]]},
                {"string_delims": ["<>"]},
                {"string_delims": [["<", 1]]},
                {"value_parser": "json"},
                {"value_parser": {"name": "xml-inline"}},
                {"value_parser": {"name": ["json"]}},
                {"value_parser": {"args": [1]}},
                {"value_parser": {"args": {"value_parser": {"name": "kv-lines", "args": {"line_sep": 1}}}}},
            )
        ),
    ],
    ids=lambda field: json.dumps(field)[:90],
)
def test_a_hostile_template_is_refused(field: dict[str, Any]) -> None:
    """Check that an untrusted pattern never runs where it could take long."""
    with pytest.raises(ModelError):
        read_response_template(Fields({"fields": {"tool_calls": field}}, "t"))


def test_a_template_without_fields_is_refused() -> None:
    for spec in ({}, {"fields": {}}, {"fields": {"content": {}}}, {"version": 2, "fields": {}}, {"fields": 3}):
        with pytest.raises(ModelError):
            read_response_template(Fields(spec, "t"))


@pytest.mark.parametrize(
    "field",
    [{"open_pattern": "x" * 256}, {"open_pattern": r"x\w+\w+\w+y"}, {"open": "x" * 256}, {"open": "x"}],
    ids=str,
)
def test_marks_of_1_to_256_characters_and_3_repeats_are_read(field: dict[str, Any]) -> None:
    (region,) = read_response_template(Fields({"fields": {"tool_calls": field}}, "t"))
    assert region.open.pattern.match("x" * 256 + "y")


def test_repeats_of_a_pattern_end_so_that_a_search_does_however_long_the_reply_is() -> None:
    source = r"<c\*>\s*(?P<name>[^*+]+)\d?</c>"
    fields = {"fields": {"tool_calls": {"open_pattern": source}}}
    (region,) = read_response_template(Fields(fields, "t"))
    assert region.open.pattern.pattern == r"<c\*>\s{0,512}(?P<name>[^*+]{1,512})\d?</c>"


def test_a_mark_that_does_not_end_is_held_back_for_512_characters() -> None:
    form = declared_tool_format(read_response_template(Fields(DECLARED, "t")))
    assert form is not None
    parser, text = ToolParser(form, TOOLS), "<call name=".ljust(512, "f")
    assert parser.feed("Hi " + text) == ["Hi"]
    assert parser.feed("f") == [f" {text}f"]
    assert parser.feed(" <call name=f>{}</call>") == [ToolCall("f", "{}")]


@pytest.mark.parametrize("body", ["{a:<s>\x01</s>}", "{a:<s>\x02</s>}", "{a:\x010\x02,b:<s>x</s>}"], ids=ascii)
def test_characters_that_stand_for_strings_make_no_call(body: str) -> None:
    form = declared_tool_format(read_response_template(Fields(DECLARED, "t")))
    text = f"<call name=f>{body}</call>"
    assert parse(form, text, 1000) == [text]


def declared(**changes: Any) -> ToolFormat:
    field = {**DECLARED["fields"]["tool_calls"], **changes}
    form = declared_tool_format(read_response_template(Fields({"fields": {"tool_calls": field}}, "t")))
    assert form is not None
    return form


def test_a_call_comes_with_the_last_character_of_its_closing_mark() -> None:
    parser, text = ToolParser(declared(), TOOLS), "<call name=g>{}</call>"
    assert parser.feed(text[:-1]) == []
    assert parser.feed(text[-1]) == [ToolCall("g", "{}")]


@pytest.mark.parametrize("mark", ["<call>", "[f]", "[[f"])
def test_any_of_several_marks_is_held_back(mark: str) -> None:
    form = declared(open=["<call>", "[f]", "[[f"], transform={"name": "f", "arguments": "{content}"})
    assert parse(form, f"Hi <ca {mark}{{}}</call>", 1) == ["Hi <ca", ("f", {})]


@pytest.mark.parametrize("step", [1, 4, 1000])
def test_a_mark_that_may_be_longer_is_not_decided(step: int) -> None:
    form = declared(open_pattern=r"<call=(?P<name>\w+)", content_args={})
    assert parse(form, 'Hi <call=name {"a": 1}</call>', step) == ["Hi", ("name", {"a": 1})]


@pytest.mark.parametrize(
    ("transform", "body"),
    [
        (None, '{"name": "f", "arguments": {"a": 1}}'),
        ({"name": "{name}", "arguments": "{content.arguments}"}, '{"arguments": {"a": 1}}'),
        ({"name": "{content.name}", "arguments": "{content}"}, '{"name": "f", "a": 1}'),
    ],
    ids=["none", "captured-name", "whole-content"],
)
def test_a_call_may_have_its_name_inside_or_outside_of_its_arguments(transform: Any, body: str) -> None:
    form = declared(transform=transform, content_args={})
    ((name, arguments),) = parse(form, f"<call name=f>{body}</call>", 1000)
    assert name == "f" and arguments["a"] == 1


@pytest.mark.parametrize("body", ["3", "null", '"name"', '["name"]', "{}", '{"name": "f"}', '{"name": {"name": "f"}}'])
def test_an_entry_that_a_transform_needs_but_a_reply_lacks_makes_no_call(body: str) -> None:
    form = declared(transform={"name": "{content.name}", "arguments": "{content.arguments.a}"}, content_args={})
    whole = '<call name=f>{"name": "f", "arguments": {"a": {"b": 1}}}</call>'
    assert parse(form, whole, 1000) == [("f", {"b": 1})]
    text = f"<call name=f>{body}</call>"
    assert parse(form, text, 1000) == [text]
