"""Test that a forced call has an object of arguments, whatever the tool's schema admits."""

from typing import Any

import pytest

from tests.support.served import Served, joined

NOTHING = {"properties": {}, "additionalProperties": False}
SCHEMAS: dict[str, Any] = {
    "string": {"type": "string", **NOTHING},
    "object-or-null": {"type": ["null", "object"], **NOTHING},
    "nullable": {"type": "object", "nullable": True, "maxProperties": 0},
    "no-type": NOTHING,
}


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "f"}}], ids=["any", "named"])
@pytest.mark.parametrize("parameters", SCHEMAS.values(), ids=SCHEMAS)
def test_arguments_are_an_object(served: Served, parameters: object, choice: object) -> None:
    """A schema that admits null or a string let the model write that, and the reply had no call."""
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    answer = served.chat("Go", tools=[tool], tool_choice=choice, parallel_tool_calls=False, temperature=0)
    assert answer.status == 200, answer.body
    assert joined(answer)[2] == [("f", "{}")]


@pytest.mark.parametrize("parameters", [True, {}, None])
def test_a_tool_may_say_nothing_of_its_arguments(served: Served, parameters: object) -> None:
    fields: dict[str, Any] = {"temperature": 0, "tool_choice": "required"}
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    ((name, arguments),) = joined(served.chat("Go", tools=[tool], max_tokens=40, **fields))[2]
    assert name == "f" and arguments.startswith("{")
    fields |= {"input": "Go", "tools": [{"type": "function", "name": "f", "parameters": parameters}]}
    (item,) = served.ask("POST", "/v1/responses", {**fields, "max_output_tokens": 40}).json["output"]
    assert item["type"] == "function_call" and item["arguments"].startswith("{")


def test_a_tool_of_anthropic_may_take_any_arguments(served: Served) -> None:
    body = {"messages": [{"role": "user", "content": "Go"}], "tool_choice": {"type": "any"}, "max_tokens": 40}
    answer = served.ask("POST", "/v1/messages", {**body, "tools": [{"name": "f", "input_schema": True}]})
    assert answer.status == 200 and answer.json["content"][0]["type"] == "tool_use"
