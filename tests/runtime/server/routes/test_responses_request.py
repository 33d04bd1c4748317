"""Test what a request in the form of OpenAI's responses asks the engine for."""

from typing import Any

import pytest
from pydantic import ValidationError

from mycli.runtime.server.http.api_error import ApiError
from mycli.runtime.server.requests.item_store import ItemStore
from mycli.runtime.server.routes.chat_spec import ChatSpec
from mycli.runtime.server.routes.response_input import input_messages
from mycli.runtime.server.routes.responses_request import (
    LOGPROBS,
    ResponsesRequest,
    ToolIdentity,
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


def spec(*stored: dict[str, Any], **fields: Any) -> ChatSpec:
    body, store = ResponsesRequest.model_validate({"input": "Hi", **fields}), ItemStore()
    store.keep(stored)
    messages, omitted = input_messages(body, store)
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


def test_tools_are_described_to_the_model() -> None:
    parameters, grammar = {"type": "object", "properties": {"at": {"type": "string"}}}, {"type": "grammar"}
    tools = [
        {"type": "function", "name": "look", "description": "Looks.", "parameters": parameters},
        {"type": "function", "name": "wait"},
        {"type": "custom", "name": "write", "description": "Writes.", "format": grammar},
    ]
    found = callable_tools(ResponsesRequest.model_validate({"input": "Hi", "tools": tools}))
    text = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}
    assert [tool["function"] for tool in found.tools] == [
        {"name": "look", "description": "Looks.", "parameters": parameters},
        {"name": "wait"},
        {"name": "write", "description": "Writes.", "parameters": {**text, "additionalProperties": False}},
    ]
    assert not found.omitted and found.identities["look"] == ToolIdentity("look") != ToolIdentity("look", custom=True)
    none = callable_tools(
        ResponsesRequest.model_validate({"input": "Hi", "tools": [{"type": "namespace", "name": "a"}]})
    )
    assert not none.tools and not none.omitted_types
    assert not ToolIdentity("look").custom


@pytest.mark.parametrize(
    ("fields", "words"),
    [({"tools": [{"type": kind}]}, "name is required") for kind in ("function", "custom", "namespace")]
    + [({"tool_choice": {"type": kind}}, "name is required") for kind in ("function", "custom")]
    + [
        ({"tool_choice": {"type": "allowed_tools", **fields}}, "mode and tools are required")
        for fields in ({}, {"mode": "auto"}, {"mode": "auto", "tools": []}, {"tools": [TOOLS[0]]})
    ]
    + [({"input": [{"type": "function_call_output", "output": [{"text": "a"}]}]}, "type is required")],
    ids=str,
)
def test_what_is_incomplete_is_refused(fields: Any, words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        spec(**fields)


def test_reasoning_is_shown_unless_a_request_refuses_it() -> None:
    shows = [
        ResponsesRequest.model_validate({"input": "Hi", "include_reasoning": shown}).shows_reasoning
        for shown in (None, True, False)
    ]
    assert shows == [True, True, False]


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
        (
            {"type": "allowed_tools", "mode": "auto", "tools": [{**TOOLS[0], "namespace": "a"}]},
            "auto",
            None,
            ["a.look"],
        ),
        ("none", "none", None, None),
        ({"type": "custom", "name": "other"}, "required", "other", None),
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
    arguments = spec(reasoning={"effort": "low"}, chat_template_kwargs={"a": 1}).arguments
    assert arguments == {"reasoning_effort": "low", "a": 1}
    assert spec(reasoning={"effort": "none"}).arguments == {"reasoning_effort": "none", "enable_thinking": False}


def test_the_format_of_the_text() -> None:
    assert spec(text={"format": {"type": "text"}}).format is None
    schema = {"type": "json_schema", "name": "n", "schema": {"type": "integer"}}
    found = spec(text={"format": schema}).format
    assert found is not None and (found.type, found.place) == ("json_schema", "text.format")
    for fields, kind in (
        ({"text": {"format": {"type": "json_object"}}}, "json_object"),
        ({"text": {"format": {"type": "text"}}, "regex": "a"}, "regex"),
        ({"text": {"verbosity": "medium"}, "regex": "a"}, "regex"),
    ):
        other = spec(**fields).format
        assert other is not None and other.type == kind
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
    calls = [(part["id"], *part["function"].values()) for part in called.tool_calls]
    assert calls == [("a", "look", {"at": 1}), ("b", "shell", {"command": "ls"})], "parallel calls are one message"
    assert (result.name, result.tool_call_id, result.content) == ("look", "a", "A dog.")
    assert list(asked.omitted) == ["item web_search_call"]
    for wrong, words in (({"type": "odd"}, "'odd' is not supported"), ({"type": "message"}, "role: is required")):
        with pytest.raises(ApiError, match=words):
            spec(input=[wrong])


def test_reasoning_belongs_to_what_the_assistant_says_next() -> None:
    thought = {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "Near."}]}
    said = {"role": "assistant", "content": "It is a dog."}
    for items, reasoning in (
        ([thought, said], ["Near."]),
        ([thought, {"role": "user", "content": "And?"}, said], ["", "Near."]),
        ([thought, thought, said, said], ["Near.Near.", ""]),
        ([said, thought, {"type": "function_call", "name": "look"}], ["Near."]),
        ([{"role": "user", "content": "And?"}, thought, {"type": "function_call", "name": "look"}], ["", "Near."]),
    ):
        assert [message.reasoning for message in spec(input=items).messages] == reasoning


def test_an_item_is_read_by_its_id() -> None:
    stored = {"id": "m", "type": "message", "role": "assistant", "content": "Well,"}
    for reference in ({"type": "item_reference", "id": "m"}, {"id": "m"}):
        assert [message.content for message in spec(stored, input=[reference]).messages] == ["Well,"]
    for reference in ({"type": "item_reference", "id": "x"}, {"type": "item_reference"}, {}):
        with pytest.raises(ApiError, match="input.0: no item") as error:
            spec(stored, input=[reference])
        assert (error.value.status, error.value.param) == (404, "input.0")
    with pytest.raises(ApiError, match="the item cannot be used"):
        spec({"id": "m", "type": "message", "role": "unknown"}, input=[{"id": "m"}])


def test_an_image_in_a_result_is_left_out_and_named() -> None:
    image = {"type": "input_image", "image_url": "data:image/png;base64,AA"}
    text = {"type": "input_text", "text": "A dog."}
    asked = spec(input=[{"type": "function_call_output", "call_id": "a", "output": [text, image]}])
    assert [message.content for message in asked.messages] == [
        "A dog.\n[input_image: left out, this model reads text only]"
    ]
    assert list(asked.omitted) == ["part input_image"]


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
    assert called.tool_calls[0]["function"]["arguments"] == (
        operation if name == "apply_patch" else {"commands": ["ls"]}
    )
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


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"output": "A dog."}, "A dog."),
        ({"error": "no file"}, "error: no file"),
        ({"status": "failed"}, "failed"),
        ({}, ""),
        ({"output": [{"stdout": "a", "outcome": {"type": "exit", "exit_code": 0}}]}, "a\nexit code: 0"),
        ({"output": [{"stderr": "b", "outcome": {"type": "timeout"}}]}, "b\ntimed out"),
    ],
)
def test_a_result_is_the_output_the_error_or_the_status(fields: Any, text: str) -> None:
    (message,) = spec(input=[{"type": "function_call_output", "id": "a", **fields}]).messages
    assert (message.content, message.tool_call_id, message.name) == (text, "a", "")


def test_calls_of_tools_that_others_run_are_calls_and_results() -> None:
    custom = {"type": "custom_tool_call", "call_id": "c", "name": "write", "namespace": "files", "input": "x"}
    remote = {"type": "mcp_call", "id": "m", "name": "f", "arguments": '{"at": 1}', "output": "A dog."}
    said = {"role": "assistant", "content": "I look."}
    first, called, result = (
        spec(input=[custom, {"role": "user", "content": "Hi"}, said, remote]).messages[:1]
        + spec(input=[said, remote]).messages
    )
    assert first.tool_calls[0]["function"] == {"name": "files.write", "arguments": {"input": "x"}}
    assert (called.content, called.tool_calls[0]["function"]) == ("I look.", {"name": "f", "arguments": {"at": 1}})
    assert (result.content, result.name, result.tool_call_id) == ("A dog.", "f", "m")


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
