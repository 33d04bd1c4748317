"""Test that a call of more than a million characters is text, so that no mark holds a reply back for ever."""

import itertools
import json

import pytest

from mycli.runtime.tokenizer.parsing.tool_formats import HERMES, TOOL_FORMATS
from mycli.runtime.tokenizer.parsing.tool_parser import ToolCall, ToolParser

LONGEST = 1 << 20  # characters between the marks
GLM = next(form for form in TOOL_FORMATS if form.name == "glm")
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"properties": {"list": {"type": "array"}}}}}]


def other_call(length: int) -> str:
    """Return a call of a tool that is not in the request, which is read in one piece."""
    empty = len(json.dumps({"name": "g", "arguments": {"a": ""}}))
    return json.dumps({"name": "g", "arguments": {"a": "x" * (length - empty)}})


@pytest.mark.parametrize("whole", [True, False])
def test_a_call_that_is_too_long_is_text(whole: bool) -> None:
    for length in (LONGEST, LONGEST + 1):
        parser, body = ToolParser(HERMES, TOOLS), other_call(length)
        texts = [f"<tool_call>{body}</tool_call>"] if whole else [f"<tool_call>{body}", "</tool_call>"]
        first, *others = [parser.feed(text) for text in texts]
        items = [*first, *itertools.chain(*others), *parser.flush()]
        if length > LONGEST:
            assert "".join(map(str, items)) == "".join(texts) and first, "not held back"
        else:
            assert [type(item) for item in items] == [ToolCall]


def test_elements_are_held_back_up_to_the_longest_call() -> None:
    parser, opening = ToolParser(GLM, TOOLS), "<tool_call>f"
    argument = "<arg_key>list</arg_key><arg_value>[".ljust(LONGEST, "1")
    assert parser.feed(opening + argument) == []
    assert parser.feed("1") == [opening + argument + "1"]
