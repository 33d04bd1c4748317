"""Test that calls written as Python are read as Python reads them, and that nothing else is."""

import ast
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mycli.runtime.tokenizer.parsing.python_calls import parse_python, parse_python_calls

TEXT = st.text(st.characters(exclude_categories=["Cs"]))
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=8,
)


@given(VALUES)
def test_literals_are_those_of_python(value: Any) -> None:
    assert parse_python(repr(value)) == ast.literal_eval(repr(value)) == value


@pytest.mark.parametrize(
    "text, expected",
    [
        ("[]", []),
        ("f()", [("f", {})]),
        ("[a.b(from=1, x=(1, 2,), y={'k': -.5},)]", [("a.b", {"from": 1, "x": [1, 2], "y": {"k": -0.5}})]),
        ("f(a=1)\n\ng(b=null)\n", [("f", {"a": 1}), ("g", {"b": None})]),
        ("f(a=1), g()", [("f", {"a": 1}), ("g", {})]),
        (r"f(a='\U0001f642')", [("f", {"a": "\U0001f642"})]),
        ("f(a='''1\n'2'!''', b='\\x41\\u00e4\\'\\q')", [("f", {"a": "1\n'2'!", "b": "A\u00e4'\\q"})]),
    ],
)
def test_calls(text: str, expected: list[Any]) -> None:
    assert [(call["name"], call["arguments"]) for call in parse_python_calls(text)] == expected


@pytest.mark.parametrize(
    "text",
    [
        "f(a=b)",
        "f(1)",
        "f(a=1",
        "[f(a=1]",
        "[f()] x",
        "f(a='x)",
        "f(a=1 b=2)",
        "f(a=(1])",
        "f())",
        "1 + 1",
        "[" * 100_000,
        "\\",
        "{'a'}",
    ],
    ids=lambda text: text[:12],
)
def test_other_texts_are_refused(text: str) -> None:
    with pytest.raises(ValueError):
        parse_python_calls(text)
