"""Test what a request in the form of OpenAI's responses asks the engine for."""

from typing import Any

import pytest

from mycli.runtime.server.http.api_error import ApiError
from mycli.runtime.server.requests.item_store import ItemStore
from mycli.runtime.server.routes.chat_spec import ChatSpec
from mycli.runtime.server.routes.response_input import input_messages
from mycli.runtime.server.routes.responses_request import (
    LOGPROBS,
    ResponsesRequest,
    callable_tools,
    flat_name,
    response_spec,
)

GRAMMAR = {"type": "grammar", "syntax": "lark", "definition": "start: A"}
TOOLS = [
    {"type": "function", "name": "look", "strict": True},
    {"type": "custom", "name": "write"},
    {"type": "custom", "name": "exact", "format": GRAMMAR},
    {"type": "namespace", "name": "files", "tools": [{"type": "function", "name": "look"}, {"type": "web_search"}]},
    {"type": "web_search"},
]


def spec(**fields: Any) -> ChatSpec:
    body = ResponsesRequest.model_validate({"input": "Hi", **fields})
    messages, omitted = input_messages(body, ItemStore())
    return response_spec(body, messages, omitted, callable_tools(body))


def test_tools_are_named_with_their_namespace() -> None:
    assert [flat_name("a", space) for space in (None, "", "b", "b.", "b_")] == ["a", "a", "b.a", "b.a", "b_a"]
    found = callable_tools(ResponsesRequest.model_validate({"input": "Hi", "tools": TOOLS}))
    assert list(found.identities) == ["look", "write", "exact", "files.look"] and list(found.strict) == ["look"]
    assert [identity.custom for identity in found.identities.values()] == [False, True, True, False]
    assert [identity.namespace for identity in found.identities.values()] == [None, None, None, "files"]
    assert list(found.omitted_types) == ["web_search"] * 2 and list(found.omitted) == ["grammar of tool exact"]
    plain, exact = (found.tools[index]["function"]["parameters"]["properties"]["input"] for index in (1, 2))
    assert plain == {"type": "string"} and exact["description"] == "matches this lark grammar:\nstart: A"


@pytest.mark.parametrize(
    ("choice", "kind", "named", "allowed"),
    [
        (None, "auto", None, None),
        ("required", "required", None, None),
        ({"type": "function", "name": "look"}, "required", "look", None),
        ({"type": "function", "name": "look", "namespace": "files"}, "required", "files.look", None),
        (
            {"type": "allowed_tools", "mode": "required", "tools": [TOOLS[1], {"type": "web_search"}]},
            "required",
            None,
            ["write"],
        ),
    ],
)
def test_the_choice_of_a_tool(choice: Any, kind: str, named: str | None, allowed: list[str] | None) -> None:
    asked = spec(tools=TOOLS, tool_choice=choice)
    assert (asked.choice, asked.named, asked.allowed, asked.parallel) == (kind, named, allowed, True)


@pytest.mark.parametrize(
    ("choice", "words"),
    [
        ({"type": "web_search"}, "tools of type web_search cannot be called here"),
        ({"type": "custom", "name": "exact"}, "the grammar of 'exact' cannot be enforced"),
    ],
)
def test_a_tool_that_cannot_be_called_as_asked_is_refused(choice: Any, words: str) -> None:
    with pytest.raises(ApiError, match=words):
        spec(tools=TOOLS, tool_choice=choice)


def test_options_of_the_reply() -> None:
    assert (spec().limit, spec().top, spec().format, spec().arguments) == (None, None, None, {})
    assert [spec(max_output_tokens=limit).limit for limit in (-1, 5)] == [None, 5]
    assert [spec(top_logprobs=top).top for top in (0, 3)] == [None, 3]
    assert spec(include=[LOGPROBS]).top == 0 and spec(include=[LOGPROBS], top_logprobs=2).top == 2
    assert [spec(parallel_tool_calls=parallel).parallel for parallel in (None, True, False)] == [True, True, False]
    assert [list(spec(text={"verbosity": word}).omitted) for word in ("low", "medium")] == [
        ["field text.verbosity"],
        [],
    ]
    assert spec(reasoning={"effort": "none"}).arguments == {"reasoning_effort": "none", "enable_thinking": False}


def test_the_format_of_the_text() -> None:
    assert spec(text={"format": {"type": "text"}}).format is None
    schema = {"type": "json_schema", "name": "n", "schema": {"type": "integer"}}
    found = spec(text={"format": schema}).format
    assert found is not None and found.type == "json_schema"
    with pytest.raises(ApiError, match="text.format.schema is missing"):
        spec(text={"format": {"type": "json_schema", "name": "n"}})
    with pytest.raises(ApiError, match="cannot be combined with another format"):
        spec(text={"format": schema}, regex="a")


def test_items_become_messages() -> None:
    call = {"type": "function_call", "call_id": "a", "name": "look", "arguments": '{"at": 1}'}
    items = [
        {"role": "user", "content": "Hi"},
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "Near."}]},
        call,
        {"type": "shell_call", "call_id": "b", "action": {"command": "ls"}},
        {"type": "function_call_output", "call_id": "a", "output": "A dog."},
        {"type": "web_search_call"},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "It is a dog."}]},
    ]
    asked = spec(input=items, instructions="Be brief.")
    assert [message.role for message in asked.messages] == ["system", "user", "assistant", "tool", "assistant"]
    _, _, called, result, said = asked.messages
    assert called.reasoning == "Near." and said.reasoning == ""
    assert [part["function"]["name"] for part in called.tool_calls] == ["look", "shell"], (
        "parallel calls are one message"
    )
    assert (result.name, result.tool_call_id, result.content) == ("look", "a", "A dog.")
    assert list(asked.omitted) == ["item web_search_call"]
    for wrong, words in (({"type": "odd"}, "'odd' is not supported"), ({"type": "message"}, "role: is required")):
        with pytest.raises(ApiError, match=words):
            spec(input=[wrong])


@pytest.mark.parametrize(
    ("output", "text"),
    [
        ({"type": "apply_patch_call_output", "status": "completed", "output": "Done."}, "Done."),
        ({"type": "apply_patch_call_output", "status": "failed"}, "failed"),
        (
            {
                "type": "shell_call_output",
                "output": [
                    {"stdout": "a\n", "stderr": "b", "outcome": {"type": "exit", "exit_code": 1}},
                    {"stdout": "", "stderr": "", "outcome": {"type": "timeout"}},
                ],
            },
            "a\nb\nexit code: 1\ntimed out",
        ),
    ],
    ids=["patch", "failed", "shell"],
)
def test_outputs_of_the_tools_of_openai(output: Any, text: str) -> None:
    operation = {"type": "delete_file", "path": "a"}
    calls = {
        "apply_patch_call_output": {"type": "apply_patch_call", "operation": operation, "status": "completed"},
        "shell_call_output": {"type": "shell_call", "action": {"commands": ["ls"]}},
    }
    items = [{"call_id": "a", **calls[output["type"]]}, {"call_id": "a", **output}]
    called, result = spec(input=items).messages
    name = "shell" if output["type"].startswith("shell") else "apply_patch"
    assert called.tool_calls[0]["function"]["name"] == result.name == name and result.content == text


def test_items_of_tools_that_openai_runs_are_left_out() -> None:
    screenshot = {"type": "computer_screenshot", "image_url": "data:image/png;base64,AA"}
    items = [
        {"role": "user", "content": "Hi"},
        {"type": "computer_call", "call_id": "a", "actions": [{"type": "screenshot"}], "status": "completed"},
        {"type": "computer_call_output", "call_id": "a", "output": screenshot},
        {"type": "configuration_update", "reasoning": {"effort": "low"}},
        {"type": "mcp_call", "id": "m", "name": "f", "arguments": "{}", "error": {"type": "http_error", "code": 1}},
    ]
    asked = spec(input=items)
    assert list(asked.omitted) == [f"item {item['type']}" for item in items[1:4]]
    assert asked.messages[-1].content == 'error: {"type": "http_error", "code": 1}'


def test_items_of_a_resumed_reply_are_counted_once() -> None:
    item = {"id": "0", "text": "x" * 50}
    store = ItemStore(2 * len(str(item)))
    for _ in range(4):
        store.keep([item])
    assert store.find("0") == item


def test_the_oldest_items_are_forgotten_first() -> None:
    items = [{"id": str(number), "text": "x" * 50} for number in range(4)]
    size = len(str(items[0]))
    store = ItemStore(3 * size)
    store.keep(items[:3])
    assert all(store.find(str(number)) == items[number] for number in range(3))
    store.keep(items[3:])
    assert [store.find(str(number)) is None for number in range(4)] == [True, False, False, False]
