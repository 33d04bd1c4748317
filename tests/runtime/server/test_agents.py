"""Test requests as coding agents send them: other tool kinds, items of earlier turns, formats next to tools."""

import dataclasses
import json
from typing import Any

import anthropic
import pytest

from mycli.runtime.checkpoint.open_folder import open_model_folder
from mycli.runtime.engine.loading.loader import LoadedModel
from mycli.runtime.server.http.settings import ServerLimits, ServerSettings
from mycli.runtime.server.requests.item_store import ItemStore
from mycli.runtime.tokenizer.chat_template import ChatTemplate
from tests.runtime.server.conftest import Scripted
from tests.support.paths import PICO
from tests.support.served import GrammarEngine, Served, joined, serving

PATH = {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]}
READ = {"type": "function", "name": "read", "description": "Reads.", "parameters": PATH, "strict": False}
PATCH = {
    "type": "custom",
    "name": "apply_patch",
    "description": "Edits.",
    "format": {"type": "grammar", "syntax": "lark", "definition": 'start: "x"'},
}
SPACED = {"type": "namespace", "name": "files", "description": "Files.", "tools": [READ]}
CODEX_TOOLS = [READ, SPACED, PATCH, {"type": "web_search", "external_web_access": False}, {"type": "local_shell"}]
CALL = '<tool_call>\n{"name": "files.read", "arguments": {"path": "a\\nb"}}\n</tool_call>'


def ask(served: Served, **fields: Any) -> Any:
    return served.ask("POST", "/v1/responses", {"model": "pico", "input": "Go", **fields})


def test_tools_that_cannot_be_called_are_left_out_and_named(scripted: Scripted, reasoning: LoadedModel) -> None:
    with scripted("fine", model=reasoning) as served:
        answer = ask(served, tools=CODEX_TOOLS, tool_choice="auto")
        assert answer.status == 200
        omitted = "tool web_search, tool local_shell, grammar of tool apply_patch"
        assert answer.headers["x-mycli-omitted"] == omitted
        assert served.logged(1) and [line for line in served.log if omitted in line]
        prompt = served.service.loaded.tokenizer.spelled(served.service.worker.engine.prompts[-1])
        for name in ("read", "files.read", "apply_patch"):
            assert f'"name": "{name}"' in prompt
        assert "web_search" not in prompt and 'start: \\"x\\"' in prompt
        none = ask(served, tools=[{"type": "web_search"}], tool_choice="none")
        assert none.status == 200


@pytest.mark.parametrize(
    "choice",
    [
        {"type": "web_search"},
        "required",
        {"type": "mcp", "server_label": "x"},
        {"type": "custom", "name": "apply_patch"},
    ],
    ids=["web-search", "required", "mcp", "grammar"],
)
def test_a_tool_that_cannot_be_called_is_refused_where_it_is_forced(scripted: Scripted, choice: Any) -> None:
    tools = [PATCH] if isinstance(choice, dict) and choice["type"] == "custom" else [{"type": "web_search"}]
    with scripted("x") as served:
        answer = ask(served, tools=tools, tool_choice=choice)
        assert answer.status == 400 and answer.error["param"] == "tool_choice", answer.body


@pytest.mark.parametrize("route", ["chat/completions", "responses", "messages"])
def test_hundreds_of_tools_are_read(scripted: Scripted, reasoning: LoadedModel, route: str) -> None:
    """Agents with several MCP servers send more than OpenAI's 128."""
    turns = [{"role": "user", "content": "Go"}]
    functions = [{"name": f"tool_{number}", "parameters": {"type": "object"}} for number in range(300)]
    forms: dict[str, Any] = {
        "chat/completions": {
            "messages": turns,
            "tools": [{"type": "function", "function": function} for function in functions],
        },
        "responses": {"input": turns, "tools": [{"type": "function", **function} for function in functions]},
        "messages": {
            "messages": turns,
            "max_tokens": 4,
            "tools": [{"name": function["name"], "input_schema": {"type": "object"}} for function in functions],
        },
    }
    with scripted("Hi", model=reasoning, context=1 << 15) as served:
        answer = served.ask("POST", f"/v1/{route}", forms[route])
        assert answer.status == 200, answer.body
        assert '"tool_299"' in served.service.loaded.tokenizer.spelled(served.service.worker.engine.prompts[-1])


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_calls_have_the_names_of_the_client(scripted: Scripted, reasoning: LoadedModel, stream: bool) -> None:
    patch = '<tool_call>\n{"name": "apply_patch", "arguments": {"input": "*** é\\n\\"q\\""}}\n</tool_call>'
    with scripted(f"{CALL}\n{patch}", model=reasoning) as served:
        answer = ask(served, tools=CODEX_TOOLS, stream=stream)
        output = (answer.events[-1]["response"] if stream else answer.json)["output"]
        assert [(item["type"], item["name"], item.get("namespace")) for item in output] == [
            ("function_call", "read", "files"),
            ("custom_tool_call", "apply_patch", None),
        ]
        assert json.loads(output[0]["arguments"]) == {"path": "a\nb"} and output[1]["input"] == '*** é\n"q"'
        if stream:
            kinds = {"response.function_call_arguments.delta": "", "response.custom_tool_call_input.delta": ""}
            for event in answer.events:
                if event["type"] in kinds:
                    kinds[event["type"]] += event["delta"]
            assert list(kinds.values()) == [output[0]["arguments"], output[1]["input"]]


def test_items_of_earlier_turns_are_read(scripted: Scripted, reasoning: LoadedModel) -> None:
    items: list[dict[str, Any]] = [
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Go"}]},
        {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "gAAA", "content": None},
        {"type": "function_call", "call_id": "c1", "name": "read", "namespace": "files", "arguments": '{"path": "a"}'},
        {"type": "function_call_output", "call_id": "c1", "output": [{"type": "input_text", "text": "one"}]},
        {"type": "custom_tool_call", "call_id": "c2", "name": "apply_patch", "input": "***"},
        {"type": "custom_tool_call_output", "call_id": "c2", "output": "two"},
        {
            "type": "local_shell_call",
            "call_id": "c3",
            "action": {"type": "exec", "command": ["ls"]},
            "status": "completed",
        },
        {"type": "local_shell_call_output", "call_id": "c3", "output": "three"},
        {"type": "web_search_call", "id": "ws_1", "status": "completed", "action": {"type": "search", "query": "q"}},
        {"type": "compaction", "id": "cmp_1", "encrypted_content": "gAAA"},
        {"type": "tool_search_call", "call_id": "c4", "execution": "client", "arguments": {"query": "q"}},
        {"type": "message", "role": "assistant", "content": [{"type": "refusal", "refusal": "I will not."}]},
    ]
    with scripted("fine", model=reasoning) as served:
        answer = ask(served, input=items, tools=CODEX_TOOLS)
        assert answer.status == 200, answer.body
        assert "item web_search_call, item compaction, item tool_search_call" in answer.headers["x-mycli-omitted"]
        prompt = served.service.loaded.tokenizer.spelled(served.service.worker.engine.prompts[-1])
        for part in ('files.read:{"path": "a"}', "one", 'apply_patch:{"input": "***"}', "two", '"ls"', "three", "not."):
            assert part in prompt
        unknown = ask(served, input=[{"type": "telepathy", "call_id": "c"}])
        assert unknown.status == 400 and unknown.error["param"] == "input.0.type"


def test_an_item_may_be_named_instead_of_sent(scripted: Scripted, reasoning: LoadedModel) -> None:
    with scripted("Tokyo it is.", model=reasoning) as served:
        (item,) = ask(served).json["output"]
        talk = [{"role": "user", "content": "Go"}, {"type": "item_reference", "id": item["id"]}]
        assert ask(served, input=[*talk, {"role": "user", "content": "Sure?"}]).status == 200
        assert "Tokyo it is." in served.service.loaded.tokenizer.spelled(served.service.worker.engine.prompts[-1])
        (private,) = ask(served, store=False).json["output"]
        for name in (private["id"], "msg_0"):
            answer = ask(served, input=[{"type": "item_reference", "id": name}])
            assert answer.status == 404 and answer.error["param"] == "input.0"


def test_a_response_may_be_continued_by_its_id(scripted: Scripted, reasoning: LoadedModel) -> None:
    with scripted("Tokyo it is.", model=reasoning) as served:

        def prompt() -> str:
            return served.service.loaded.tokenizer.spelled(served.service.worker.engine.prompts[-1])

        first = ask(served, input="Where?", instructions="Be brief.").json
        assert first["store"] and first["previous_response_id"] is None
        call = {"type": "function_call_output", "call_id": "c", "output": "sunny"}
        second = ask(served, input=[{"role": "user", "content": "Sure?"}, call], previous_response_id=first["id"]).json
        assert second["previous_response_id"] == first["id"]
        last = {"model": "pico", "input": "Why?", "previous_response_id": second["id"]}
        assert served.ask("POST", "/v1/responses", {**last, "stream": True}).status == 200
        text = prompt()
        places = [text.index(part) for part in ("Where?", "Tokyo", "Sure?", "sunny", "Why?")]
        assert places == sorted(places) and text.count("Tokyo it is.") == 2 and "Be brief." not in text
        counted = served.ask("POST", "/v1/responses/input_tokens", last).json
        assert counted["input_tokens"] == len(served.service.worker.engine.prompts[-1])
        # Both branches of a conversation stay.
        assert ask(served, input="Else?", previous_response_id=first["id"]).status == 200
        assert "Sure?" not in prompt() and "Tokyo it is." in prompt()


def test_only_a_stored_response_may_be_continued(scripted: Scripted) -> None:
    with scripted("Tokyo it is.") as served:
        private = ask(served, input="Where?", store=False).json
        (item,) = ask(served, input="Where?").json["output"]
        for name in (private["id"], item["id"], "resp_0"):
            answer = ask(served, input="Sure?", previous_response_id=name)
            assert answer.status == 400 and answer.error["code"] == "previous_response_not_found"
            assert answer.error["param"] == "previous_response_id"
        assert private["store"] is False
        assert ask(served, input=[{"type": "item_reference", "id": ask(served).json["id"]}]).status == 404
        served.service.conversations = ItemStore(100)
        first = ask(served, input="Where?" * 50).json["id"]
        assert ask(served, previous_response_id=first).status == 400, "larger than the store"


def test_tools_may_be_restricted_to_some(scripted: Scripted, served: Served) -> None:
    allowed = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "two"}]}
    nothing = {"type": "object", "properties": {}, "additionalProperties": False}
    tools = [{"type": "function", "name": name, "parameters": nothing} for name in ("one", "two")]
    output = ask(served, tools=tools, tool_choice=allowed, temperature=0, parallel_tool_calls=False).json["output"]
    assert [item["name"] for item in output] == ["two"]
    chat_tools = [{"type": "function", "function": {"name": tool["name"], "parameters": nothing}} for tool in tools]
    choice = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [chat_tools[1]]}}
    answer = served.chat(tools=chat_tools, tool_choice=choice, parallel_tool_calls=False, max_tokens=60)
    assert [name for name, _ in joined(answer)[2]] == ["two"]
    missing = {**allowed, "tools": [{"type": "function", "name": "three"}]}
    assert ask(served, tools=tools, tool_choice=missing).status == 400


ANSWER = {
    "type": "object",
    "properties": {"city": {"enum": ["Tokyo"]}},
    "required": ["city"],
    "additionalProperties": False,
}


@pytest.mark.parametrize(
    "text, content, called",
    [
        ('{"city": "Tokyo"}', '{"city": "Tokyo"}', []),
        ('<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>', "", [("f", '{"a": 1}')]),
        ("Tokyo", "", []),
        ('{"city": "Oslo"}', '{"city": "', []),
    ],
    ids=["the-format", "a-call", "neither", "another-value"],
)
def test_a_format_beside_tools_allows_either(
    reasoning: LoadedModel,
    text: str,
    content: str,
    called: list[tuple[str, str]],
) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {"properties": {"a": {"type": "integer"}}}}}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": ANSWER}}
    for thought in ("", "<think>\nhm\n</think>\n\n"):
        ids = reasoning.tokenizer.encode(thought + text, add_special=False, allow_special=True)
        with serving(reasoning, GrammarEngine(lambda request, ids=ids: ids)) as served:
            answer = served.chat("Go", tools=[tool], response_format=form)
            assert answer.status == 200
            found, _, calls, _ = joined(answer)
            assert (found, calls) == (content, called) or text.startswith('{"city": "O')


def test_references_in_a_tool_s_schema_are_relative_to_it(reasoning: LoadedModel) -> None:
    """Regression: zod refers to an earlier property; only `$defs` were found, so forced calls were refused."""
    place = {"type": "object", "properties": {"x": {"$ref": "#/$defs/n"}}, "required": ["x"]}
    parameters = {
        "$id": "https://example.com/move",
        "properties": {
            "from": place,
            "to": {"$ref": "#/properties/from"},
            "next": {"$ref": "#"},
            "$ref": {"type": "string"},
        },
        "required": ["from", "to"],
        "$defs": {"n": {"type": "integer", "default": {"$ref": "#/x"}}},
    }
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    begin = '{"from": {"x": 1}, "to": {"x": 2}, '
    arguments = begin + '"next": ' + begin + '"$ref": "#/a"}, "$ref": "#"}'
    text = f'<tool_call>\n{{"name": "f", "arguments": {arguments}}}\n</tool_call>'
    ids = reasoning.tokenizer.encode(text, add_special=False, allow_special=True)
    with serving(reasoning, GrammarEngine(lambda request: ids)) as served:
        answer = served.chat("Go", tools=[tool], tool_choice="required")
        assert answer.status == 200, answer.body
        assert joined(answer)[2] == [("f", arguments)]


def test_a_forced_tool_may_have_a_schema_with_null_keywords(reasoning: LoadedModel) -> None:
    """Servers of tools in Go write null for an empty map: refused, although the tool takes no arguments."""
    parameters = {"type": None, "properties": None, "required": None, "additionalProperties": False}
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    text = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
    ids = reasoning.tokenizer.encode(text, add_special=False, allow_special=True)
    with serving(reasoning, GrammarEngine(lambda request: ids)) as served:
        answer = served.chat("Go", tools=[tool], tool_choice="required")
        assert answer.status == 200, answer.body
        assert joined(answer)[2] == [("f", "{}")]


def test_anthropic_structured_outputs_are_kept(served: Served) -> None:
    form = {"type": "json_schema", "schema": ANSWER}
    with anthropic.Anthropic(base_url=served.url, api_key="any", max_retries=0) as client:
        for extra in ({"output_config": {"format": form}}, {"output_format": form}):
            message = client.messages.create(
                model="pico",
                max_tokens=60,
                messages=[{"role": "user", "content": "Where?"}],
                extra_body={"temperature": 0, **extra},
            )
            assert message.content[0].type == "text" and json.loads(message.content[0].text) == {"city": "Tokyo"}
    body = {"model": "pico", "max_tokens": 5, "messages": [{"role": "user", "content": "Where?"}]}
    both = {**body, "output_format": form, "output_config": {"format": form}}
    assert served.ask("POST", "/v1/messages", both).error["param"] == "output_format"
    mcp = {**body, "mcp_servers": [{"type": "url", "url": "http://127.0.0.1:1", "name": "x"}]}
    assert served.ask("POST", "/v1/messages", mcp).error["param"] == "mcp_servers"


def test_anthropic_server_tools_and_documents(scripted: Scripted, reasoning: LoadedModel) -> None:
    blocks = [
        {
            "type": "document",
            "title": "Notes",
            "source": {"type": "text", "media_type": "text/plain", "data": "Leo is 9."},
        },
        {
            "type": "search_result",
            "source": "x.org",
            "title": "Ages",
            "content": [{"type": "text", "text": "Ada is 7."}],
        },
        {"type": "server_tool_use", "id": "s1", "name": "web_search", "input": {}},
        {"type": "web_search_tool_result", "tool_use_id": "s1", "content": []},
        {"type": "text", "text": "How old?"},
    ]
    tools = [
        {"type": "web_search_20250305", "name": "web_search", "max_uses": 3},
        {"type": "bash_20250124", "name": "bash"},
        {"name": "f", "input_schema": PATH},
    ]
    body = {"model": "pico", "max_tokens": 9, "messages": [{"role": "user", "content": blocks}], "tools": tools}
    with scripted("Nine.", model=reasoning) as served:
        answer = served.ask("POST", "/v1/messages", body)
        assert answer.status == 200, answer.body
        assert answer.headers["x-mycli-omitted"].startswith("tool web_search_20250305, tool bash_20250124, block ")
        assert set(answer.json["content"][0]) == {"type", "text"}  # no citations: null
        prompt = served.service.loaded.tokenizer.spelled(served.service.worker.engine.prompts[-1])
        assert "Notes\nLeo is 9." in prompt and "Ages\nx.org\nAda is 7." in prompt and "bash" not in prompt
        forced = served.ask("POST", "/v1/messages", {**body, "tool_choice": {"type": "tool", "name": "bash"}})
        assert forced.status == 400 and forced.error["param"] == "tool_choice"
        pdf = {"type": "document", "source": {"type": "base64", "media_type": "application/pdf", "data": "JVBE"}}
        refused = served.ask("POST", "/v1/messages", {**body, "messages": [{"role": "user", "content": [pdf]}]})
        assert refused.status == 400 and refused.error["param"] == "messages.0.content.0.source.type"


def test_arguments_arrive_while_the_model_writes(scripted: Scripted, reasoning: LoadedModel) -> None:
    """Check that half of the arguments have arrived when half a call is generated, on every route."""
    written = f'<tool_call>\n{{"name": "read", "arguments": {{"path": "{"word " * 40}'
    chat_tool = {"type": "function", "function": {"name": "read", "parameters": PATH}}
    talk = {"model": "pico", "messages": [{"role": "user", "content": "Go"}], "max_tokens": 400, "stream": True}
    with scripted(written, model=reasoning) as served:
        chat = served.ask("POST", "/v1/chat/completions", {**talk, "tools": [chat_tool]})
        assert joined(chat)[2][0][1].startswith('{"path": "word word') and len(chat.events) > 30
        message = served.ask("POST", "/v1/messages", {**talk, "tools": [{"name": "read", "input_schema": PATH}]})
        deltas = [event["delta"] for event in message.events if event["type"] == "content_block_delta"]
        assert len(deltas) > 30 and {delta["type"] for delta in deltas} == {"input_json_delta"}
        whole = served.ask(
            "POST", "/v1/messages", {**talk, "stream": False, "tools": [{"name": "read", "input_schema": PATH}]}
        )
        assert whole.json["content"][0]["input"]["path"].startswith("word word")
        response = ask(served, tools=[READ], stream=True)
        kinds = [event["type"] for event in response.events]
        assert kinds.count("response.function_call_arguments.delta") > 30


def test_a_call_that_is_sent_at_its_end_does_not_leave_the_stream_silent(
    scripted: Scripted, loaded: LoadedModel
) -> None:
    """A file that an agent writes in Qwen's XML takes minutes, and clients give up without an event."""
    tokenizer = open_model_folder(PICO).tokenizer()
    xml = "{{ tools }}{# <function= <parameter= #}{% for m in messages %}{{ m.content }}{% endfor %}"
    tokenizer.template = ChatTemplate({"default": xml}, {})
    model = dataclasses.replace(loaded, tokenizer=tokenizer)
    settings = ServerSettings(("pico",), limits=ServerLimits(ping_seconds=0.05))
    call = f"<tool_call>\n<function=read>\n<parameter=path>\n{'word ' * 60}\n</parameter>\n</function>\n</tool_call>"
    body = {"model": "pico", "messages": [{"role": "user", "content": "Go"}], "stream": True, "max_tokens": 400}
    with scripted(call, model=model, settings=settings, pause=0.005) as served:
        chat = served.ask("POST", "/v1/chat/completions", {**body, "tools": [{"type": "function", "function": READ}]})
        assert [(name, json.loads(text)["path"]) for name, text in joined(chat)[2]] == [("read", "word " * 60)]
        assert [event["choices"][0]["delta"] for event in chat.events].count({}) >= 3
        message = served.ask("POST", "/v1/messages", {**body, "tools": [{"name": "read", "input_schema": PATH}]})
        assert [event["type"] for event in message.events].count("ping") >= 3
