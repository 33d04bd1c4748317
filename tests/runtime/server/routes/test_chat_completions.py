"""Test what a request of chat completions asks for, before it is answered."""

from typing import Any

import pytest

from mycli.runtime.server.routes.chat_completions import ChatRequest, completion_spec

FUNCTION = {"name": "look"}
TOOL = {"type": "function", "function": FUNCTION}


@pytest.mark.parametrize(
    ("fields", "choice", "named"),
    [
        ({"tools": [TOOL]}, "auto", None),
        ({"tools": [TOOL], "tool_choice": "none"}, "none", None),
        ({"tools": [TOOL], "tool_choice": "any"}, "required", None),
        ({"tools": [TOOL], "tool_choice": TOOL}, "required", "look"),
        ({"functions": [FUNCTION]}, "auto", None),
        ({"functions": [FUNCTION], "function_call": "auto"}, "auto", None),
        ({"functions": [FUNCTION], "function_call": "none"}, "none", None),
        ({"functions": [FUNCTION], "function_call": FUNCTION}, "required", "look"),
        ({"functions": [FUNCTION], "function_call": FUNCTION, "tool_choice": "none"}, "none", None),
    ],
)
def test_tools_and_functions_are_chosen_in_the_same_way(fields: Any, choice: str, named: str | None) -> None:
    messages = [{"role": "user", "content": "Hi"}]
    spec = completion_spec(ChatRequest.model_validate({"messages": messages, **fields}))
    assert [tool["function"]["name"] for tool in spec.tools] == ["look"]
    assert (spec.choice, spec.named) == (choice, named)
