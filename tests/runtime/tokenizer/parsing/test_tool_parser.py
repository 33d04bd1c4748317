"""Test tool call parsing for any chunking of the text; everything else remains text."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mycli.runtime.tokenizer.parsing.tool_formats import (
    HERMES,
    TOOL_FORMATS,
    ToolFormat,
    find_tool_format,
)
from mycli.runtime.tokenizer.parsing.tool_parser import ToolCall, ToolParser, join_calls
from tests.support.paths import ROOT

TEMPLATES = ROOT.parent / "shared" / "data" / "chat_templates"
BY_NAME = {form.name: form for form in TOOL_FORMATS}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "f",
            "parameters": {
                "properties": {
                    "a": {"type": "integer"},
                    "b": {"type": "string"},
                    "c": {"anyOf": [{"type": "boolean"}, {"type": "null"}]},
                    "d": {"type": ["array", "string"]},
                }
            },
        },
    }
]
# format -> (text, parsed contents)
WRITTEN: dict[str, tuple[str, list[Any]]] = {
    "hermes": (
        'Sure.\n<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>\n'
        '<tool_call>{"name": "f", "arguments": {"b": "</tool>"}}</tool_call>\n',
        ["Sure.", ("f", {"a": 1}), ("f", {"b": "</tool>"})],
    ),
    "qwen-xml": (
        "Hi <tool_call>\n<function=f>\n<parameter=a>\n1\n</parameter>\n<parameter=b>\n1\nx <y>\n</parameter>\n"
        "<parameter=c>\nTrue\n</parameter>\n<parameter=d>\n[1, 2]\n</parameter>\n</function>\n</tool_call>",
        ["Hi", ("f", {"a": 1, "b": "1\nx <y>", "c": True, "d": [1, 2]})],
    ),
    "glm": (
        "<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n<arg_key>c</arg_key>\n<arg_value>none</arg_value>\n"
        "</tool_call>",
        [("f", {"a": 1, "c": None})],
    ),
    "mistral": (
        '[TOOL_CALLS][{"name": "f", "arguments": {"a": 1}}, {"name": "f", "arguments": {"a": 2}}]',
        [("f", {"a": 1}), ("f", {"a": 2})],
    ),
    "mistral-named": (
        'x[TOOL_CALLS]f[ARGS]{"a": 1}[TOOL_CALLS]f[ARGS]{"a": 2}',
        ["x", ("f", {"a": 1}), ("f", {"a": 2})],
    ),
    "granite": ('<|tool_call|>[{"name": "f", "arguments": {"a": 1}}]', [("f", {"a": 1})]),
    "deepseek": (
        'ok<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n{"a": 1}\n```'
        "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        ["ok", ("f", {"a": 1})],
    ),
    "deepseek-v3.1": (
        '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{"a": 1}<｜tool▁call▁end｜>'
        '<｜tool▁call▁begin｜>f<｜tool▁sep｜>{"a": 2}<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
        [("f", {"a": 1}), ("f", {"a": 2})],
    ),
    "function-gemma": (
        '<start_function_call>call:f{a:1,b:<escape>x "q", {y:1}<escape>}<end_function_call>',
        [("f", {"a": 1, "b": 'x "q", {y:1}'})],
    ),
    "seed": (
        "Hi\n<seed:tool_call>\n<function=f>\n<parameter=a>1</parameter>\n<parameter=b>007</parameter>\n"
        "<parameter=d>['x', None]</parameter>\n</function>\n</seed:tool_call>\n"
        "<seed:tool_call>\n<function=f>\n</function>\n</seed:tool_call>",
        ["Hi", ("f", {"a": 1, "b": "007", "d": ["x", None]}), ("f", {})],
    ),
    "hunyuan-3": (
        "<tool_calls:opensource>\n<tool_call:opensource>f<tool_sep:opensource>\n<arg_key:opensource>b"
        "</arg_key:opensource>\n<arg_value:opensource>007</arg_value:opensource>\n</tool_call:opensource>\n"
        "<tool_call:opensource>f<tool_sep:opensource>\n</tool_call:opensource>\n</tool_calls:opensource>",
        [("f", {"b": "007"}), ("f", {})],
    ),
    "minimax": (
        '\n<minimax:tool_call>\n<invoke name="f">\n<parameter name="a">1</parameter>\n<parameter name="b">x <y>'
        '</parameter>\n</invoke>\n<invoke name="f">\n</invoke>\n</minimax:tool_call>',
        [("f", {"a": 1, "b": "x <y>"}), ("f", {})],
    ),
    "deepseek-v3.2": (
        'Hi\n\n<｜DSML｜function_calls>\n<｜DSML｜invoke name="f">\n'
        '<｜DSML｜parameter name="a" string="false">1</｜DSML｜parameter>\n'
        '<｜DSML｜parameter name="b" string="true">x > "y"</｜DSML｜parameter>\n'
        '<｜DSML｜parameter name="e" string="false">{"k": [null]}</｜DSML｜parameter>\n</｜DSML｜invoke>\n'
        '<｜DSML｜invoke name="f">\n</｜DSML｜invoke>\n</｜DSML｜function_calls>',
        ["Hi", ("f", {"a": 1, "b": 'x > "y"', "e": {"k": [None]}}), ("f", {})],
    ),
    "gigachat-3.5": (
        'Hi\n\n<｜GCML｜tool_calls>\n<｜GCML｜invoke name="f">\n'
        '<｜GCML｜parameter name="a" string="false">1</｜GCML｜parameter>\n'
        '<｜GCML｜parameter name="b" string="true">x > "y"</｜GCML｜parameter>\n</｜GCML｜invoke>\n'
        '<｜GCML｜invoke name="f">\n</｜GCML｜invoke>\n</｜GCML｜tool_calls>',
        ["Hi", ("f", {"a": 1, "b": 'x > "y"'}), ("f", {})],
    ),
    "minicpm-5": (
        'Hi\n<function name="f"><param name="a">1</param><param name="b"><![CDATA[x </param>\n <y>]]></param>'
        "<param name=\"d\">['p', 'q']</param></function>\n<function name=\"f\"></function>",
        ["Hi", ("f", {"a": 1, "b": "x </param>\n <y>", "d": ["p", "q"]}), ("f", {})],
    ),
    "functionary": (
        '<function=f>{"a": 1, "b": "<x>"}</function><function=f>{}</function>',
        [("f", {"a": 1, "b": "<x>"}), ("f", {})],
    ),
    "functionary-3.2": (
        '>>>all\nHi >>> x\n>>>f\n{}>>>f\n{"a": 1, "b": ">>>f"}',
        ["Hi >>> x", ("f", {}), ("f", {"a": 1, "b": ">>>f"})],
    ),
    "gemma-4": (
        '<|tool_call>call:f{a:1,b:<|"|>x "q", {y:1}<|"|>,c:None,user-id:{k:[true,None]}}<tool_call|>'
        "<|tool_call>call:f{}<tool_call|>",
        [("f", {"a": 1, "b": 'x "q", {y:1}', "c": None, "user-id": {"k": [True, None]}}), ("f", {})],
    ),
    "kimi-k2": (
        "ok<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>"
        '{"a": 1}<|tool_call_end|><|tool_call_begin|>functions.f:1<|tool_call_argument_begin|>{}<|tool_call_end|>'
        "<|tool_calls_section_end|>",
        ["ok", ("f", {"a": 1}), ("f", {})],
    ),
    "harmony": (
        '<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a": 1}<|call|>'
        ' to=functions.f<|channel|>commentary json<|message|>{"a": 2}<|call|>',
        [("f", {"a": 1}), ("f", {"a": 2})],
    ),
    "solar-open": (
        '<|tool_calls|><|tool_call:begin|>x1<|tool_call:name|>f<|tool_call:args|>{"a": 1}<|tool_call:end|>'
        "<|tool_call:begin|>x2<|tool_call:name|>f<|tool_call:args|>{}<|tool_call:end|>",
        [("f", {"a": 1}), ("f", {})],
    ),
    "cohere": (
        '<|START_ACTION|>[\n    {"tool_call_id": "0", "tool_name": "f", "parameters": {"a": 1}},\n'
        '    {"tool_call_id": "1", "tool_name": "f", "parameters": {}}\n]<|END_ACTION|>',
        [("f", {"a": 1}), ("f", {})],
    ),
    "nemotron": (
        'Hi<TOOLCALL>[{"name": "f", "arguments": {"a": 1}}, {"name": "f", "arguments": {}}]</TOOLCALL>',
        ["Hi", ("f", {"a": 1}), ("f", {})],
    ),
    "apertus": (
        '<|tools_prefix|>[{"f": {"a": 1}}, {"f": {}}]<|tools_suffix|>',
        [("f", {"a": 1}), ("f", {})],
    ),
    "lfm2": (
        '<|tool_call_start|>[f(a=1, b=\'x "y"\', d=[\'p\', {"k": null}]), f(c=True, b="")]<|tool_call_end|>Done.',
        [("f", {"a": 1, "b": 'x "y"', "d": ["p", {"k": None}]}), ("f", {"c": True, "b": ""}), "Done."],
    ),
    "lfm2.5": (
        '<|tool_call_start|>[{"name": "f", "arguments": {"a": 1}}]<|tool_call_end|>',
        [("f", {"a": 1})],
    ),
    "olmo-3": (
        'Hi <function_calls>\nf(a=1, b="it\'s (x)")\nf()\n</function_calls>',
        ["Hi", ("f", {"a": 1, "b": "it's (x)"}), ("f", {})],
    ),
    "gigachat": (
        '<|message_sep|>\n\nfunction call<|role_sep|>\n{"name": "f", "arguments": {"a": 1}}<|message_sep|>',
        [("f", {"a": 1})],
    ),
    "list": (
        '\n<tool_calls>[{"name": "f", "arguments": {"a": 1}}, {"name": "f", "arguments": {}}]</tool_calls>',
        [("f", {"a": 1}), ("f", {})],
    ),
    "llama": ('{"name": "f", "parameters": {"a": "1"}}', [("f", {"a": 1})]),
}


def parse(form: Any, text: str, step: int, tools: Any = TOOLS) -> list[Any]:
    parser, items = ToolParser(form, tools), list[Any]()
    pieces = [text[at : at + step] for at in range(0, len(text), step)]
    found = [item for piece in pieces for item in parser.feed(piece)] + parser.flush()
    calls = join_calls(item for item in found if isinstance(item, ToolCall))
    for item in found:
        if isinstance(item, ToolCall):
            if item.name:
                items.append((item.name, json.loads(calls[item.index].arguments)))
        elif items and isinstance(items[-1], str):
            items[-1] += item
        else:
            items.append(item)
    return items


@pytest.mark.parametrize("step", [1, 2, 7, 10_000])
@pytest.mark.parametrize("name", WRITTEN)
def test_calls_are_read_however_they_are_cut(name: str, step: int) -> None:
    text, expected = WRITTEN[name]
    assert parse(BY_NAME[name], text, step) == expected


# To the end of a reply these formats have a list of calls.
@pytest.mark.parametrize("step", [1, 10_000])
@pytest.mark.parametrize("name", sorted(WRITTEN.keys() - {"mistral", "granite", "lfm2"}))
def test_blanks_around_text_after_a_call_are_dropped(name: str, step: int) -> None:
    text, expected = WRITTEN[name]
    assert parse(BY_NAME[name], text + "\n\n after it\n", step) == [*expected, "after it"]


def test_every_format_is_written_here() -> None:
    assert set(WRITTEN) == set(BY_NAME)


@pytest.mark.parametrize("form", TOOL_FORMATS, ids=lambda form: form.name)
def test_no_format_hides_another(form: ToolFormat) -> None:
    assert find_tool_format("tools " + " ".join(form.template_markers)) is form


@pytest.mark.parametrize("step", [1, 3, 10_000])
@pytest.mark.parametrize(
    "name, text, expected",
    [
        ("mistral-named", '[TOOL_CALLS]f[CALL_ID]abcdefgh0[ARGS]{"a": 1}', [("f", {"a": 1})]),  # Small 3.2
        (  # Qwen3-Coder leaves out the first mark
            "qwen-xml",
            "Hi\n<function=f>\n<parameter=b>\nx </tool_call> y\n</parameter>\n</function>\n</tool_call>",
            ["Hi", ("f", {"b": "x </tool_call> y"})],
        ),
        (  # an argument is not closed before the next, and not at the end of the call
            "qwen-xml",
            "<tool_call>\n<function=f>\n<parameter=a>\n1\n<parameter=b>\nx\n</function>\n</tool_call>\n"
            "<tool_call>\n<function=f>\n<parameter=a>\n2\n</parameter>\n</function>\n</tool_call>",
            [("f", {"a": 1, "b": "x"}), ("f", {"a": 2})],
        ),
        (  # the function is not closed
            "qwen-xml",
            "<tool_call>\n<function=f>\n<parameter=a>\n1\n</parameter>\n</tool_call>\n"
            "<tool_call>\n<function=f>\n<parameter=b>\nx\n</parameter>\n</function>\n</tool_call>",
            [("f", {"a": 1}), ("f", {"b": "x"})],
        ),
        (  # an argument names its closing mark, and one has two
            "qwen-xml",
            "<tool_call>\n<function=f>\n<parameter=b>\nx </parameter> y\n</parameter>\n</parameter>\n<parameter=a>\n1\n"
            "</parameter>\n</function>\n</tool_call>",
            [("f", {"b": "x </parameter> y", "a": 1})],
        ),
        (  # cut: the argument may go on
            "qwen-xml",
            "<tool_call>\n<function=f>\n<parameter=a>\n1",
            ["<tool_call>\n<function=f>\n<parameter=a>\n1"],
        ),
        (  # V4
            "deepseek-v3.2",
            '<｜DSML｜tool_calls>\n<｜DSML｜invoke name="f">\n</｜DSML｜invoke>\n</｜DSML｜tool_calls>',
            [("f", {})],
        ),
        (  # V4.1
            "deepseek-v3.2",
            '<｜DSML｜ calls>\n<｜DSML｜ invoke name="f">\n'
            '<｜DSML｜ parameter name="a" string="false">1</｜DSML｜ parameter>\n</｜DSML｜ invoke>\n</｜DSML｜ calls>',
            [("f", {"a": 1})],
        ),
        (  # marks without a meaning stay where they are part of an argument
            "minimax",
            '<invoke name="f"><parameter name="b"></minimax:tool_call></parameter></invoke></minimax:tool_call>',
            [("f", {"b": "</minimax:tool_call>"})],
        ),
        ("hunyuan-3", "<tool_calls><tool_call>f<tool_sep></tool_call></tool_calls>", [("f", {})]),  # the preview
        ("gigachat", '<|function_call|>{"name": "f", "arguments": {"a": 1}}', [("f", {"a": 1})]),  # 3.1
        (
            "harmony",
            "<|channel|>analysis to=functions.f code<|message|>{}<|call|>",
            [("f", {})],
        ),
        (
            "gemma-4",
            '<|tool_call>call:f{b:<|"|>\x010\x02<|"|>}<tool_call|>',
            ['<|tool_call>call:f{b:<|"|>\x010\x02<|"|>}<tool_call|>'],
        ),
        (
            "llama",
            '{"name": "f", "parameters": {"a": 1}}; {"name": "f", "parameters": {"b": "}; {"}}\n'
            '{"name": "f", "parameters": {}}',
            [("f", {"a": 1}), ("f", {"b": "}; {"}), ("f", {})],
        ),
        (
            "llama",
            '{"type": "function", "name": "f", "parameters": {"a": 1}}; {"name": "f", "parameters": {"a": 2}} Done.',
            ['{"type": "function", "name": "f", "parameters": {"a": 1}}; {"name": "f", "parameters": {"a": 2}} Done.'],
        ),
        (
            "llama",
            '{"type": "function", "name": "f", "parameters": {"a": 1}}; {"name": "f", "parameters": {"a": 2}}',
            [("f", {"a": 1}), ("f", {"a": 2})],
        ),
        ("llama", '{"name": "f", "parameters": {"a": 1}}; and {more}', [("f", {"a": 1}), "; and {more}"]),
        (
            "llama",
            '{"name": "f", "parameters": {}}; {"name": "unknown", "parameters": {}}',
            ['{"name": "f", "parameters": {}}; {"name": "unknown", "parameters": {}}'],
        ),
        (  # the brace is not of the call
            "mistral-named",
            '[TOOL_CALLS]f[ARGS]{"a": 1}} x',
            [("f", {"a": 1}), "} x"],
        ),
        (  # cut: the number may go on
            "glm",
            "<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>1",
            ["<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>1"],
        ),
        ("lfm2", "<|tool_call_start|>[f(a=b)]<|tool_call_end|>", ["<|tool_call_start|>[f(a=b)]<|tool_call_end|>"]),
    ],
)
def test_variants_that_models_write(name: str, text: str, expected: list[Any], step: int) -> None:
    assert parse(BY_NAME[name], text, step) == expected


MALFORMED = {
    "not-json": "<tool_call>\n{oops\n</tool_call> after",
    "no-name": '<tool_call>{"arguments": {}}</tool_call>',
    "empty-name": '<tool_call>{"name": "", "arguments": {}}</tool_call>',
    "name-no-text": '<tool_call>{"name": 3, "arguments": {}}</tool_call>',
    "arguments-list": '<tool_call>{"name": "f", "arguments": [1]}</tool_call>',
    "never-closed": '<tool_call>{"name": "f", "argu',
    "deep": "<tool_call>" + "[" * 5000 + "</tool_call>",
    "list": "<tool_call>[1]</tool_call>",
    "only-open": "text <tool_call>",
    "half-open": "text <tool_c",
}


@pytest.mark.parametrize("name", MALFORMED)
def test_what_is_no_call_stays_text(name: str) -> None:
    for step in (1, 5, 10_000):
        assert "".join(parse(HERMES, MALFORMED[name], step)) == MALFORMED[name]


@pytest.mark.parametrize(
    "text",
    [
        '{"name": "unknown", "parameters": {}}',
        '{"a": 1}',
        "{ not json",
        "[1, 2]",
        'Look: {"name": "f", "parameters": {}}',
    ],
)
def test_a_bare_object_is_a_call_only_of_a_tool(text: str) -> None:
    assert parse(BY_NAME["llama"], text, 3) == [text]


@pytest.mark.parametrize("form", [form for form in TOOL_FORMATS if not form.bare_json], ids=lambda form: form.name)
def test_a_bare_object_is_text_where_calls_have_marks(form: ToolFormat) -> None:
    text = '{"name": "f", "arguments": {"a": 1}}'
    assert parse(form, text, 3) == [text]


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_plain_text_comes_through_whole(data: st.DataObject) -> None:
    form = data.draw(st.sampled_from(TOOL_FORMATS))
    parts = ["<", "tool", "_call", " ", "\n", "x", "{", "}", '"', "[TOOL", "|>", "<|", "</", "=", "é", "<tool_cal", "["]
    text = "x" + "".join(data.draw(st.lists(st.sampled_from(parts), max_size=30)))
    step = data.draw(st.integers(1, 9))
    if not any(region.open.pattern.search(text) for region in form.regions):
        for item in form.ignored:
            text = text.replace(item, "")
        assert "".join(parse(form, text, step)) == text


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_cuts_do_not_matter(data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(sorted(WRITTEN)))
    noise = data.draw(st.sampled_from(["", "a ", "<tool_call>", "\n\n", "[TOOL_CALLS]", "{"]))
    text = noise + WRITTEN[name][0] + data.draw(st.sampled_from(["", " b", "<", "\n"]))
    step = data.draw(st.integers(1, 40))
    assert parse(BY_NAME[name], text, step) == parse(BY_NAME[name], text, 10_000)


@pytest.mark.parametrize(
    "name, expected",
    [
        ("Qwen-Qwen3-0.6B", "hermes"),
        ("NousResearch-Hermes-3-Llama-3.1-8B-tool_use", "hermes"),
        ("meta-llama-Llama-3.2-3B-Instruct", "llama"),
        ("mistralai-Mistral-Nemo-Instruct-2407", "mistral"),
        ("ibm-granite-granite-3.3-2B-Instruct", "granite"),
        ("google-gemma-2-2b-it", None),
    ],
)
def test_a_template_shows_the_way(name: str, expected: str | None) -> None:
    path = TEMPLATES / f"{name}.jinja"
    if not path.exists():
        pytest.skip("the templates are not next to this checkout")
    form = find_tool_format(Path(path).read_text("utf-8"))
    assert (form and form.name) == expected
