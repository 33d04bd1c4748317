"""Test the reasoning budget on every route: a model that never closes its reasoning still answers."""

import dataclasses
import itertools
import json
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from mycli.runtime.checkpoint.open_folder import open_model_folder
from mycli.runtime.engine.config import EngineConfig
from mycli.runtime.engine.engine import Engine
from mycli.runtime.engine.loading.loader import LoadedModel
from mycli.runtime.memory.cache_shape import CacheShape
from mycli.runtime.server.http.settings import ServerSettings
from mycli.runtime.utils.dtypes import FLOATS
from tests.runtime.server.conftest import TEMPLATE, Scripted
from tests.support.agent_model import agent_model
from tests.support.served import GrammarEngine, Served, joined, serving

CITY = {
    "type": "object",
    "properties": {"city": {"enum": ["Oslo"]}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOL = {"name": "f", "parameters": {"type": "object", "properties": {"a": {"enum": [1]}}, "required": ["a"]}}
THINKS = TEMPLATE.replace("assistant\n{% if enable", "assistant\n<think>\n{% if enable")  # the prompt opens the tag


def looping_model(folder: Path, template: str) -> LoadedModel:
    """Write a model that begins with <think> after a line break, then repeats one word without closing."""
    agent_model(folder, end=0.0)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**settings, "chat_template": template}))
    opened = open_model_folder(folder)
    tokenizer = opened.tokenizer()
    tensors = load_file(folder / "model.safetensors")
    embedding, head = tensors["model.embed_tokens.weight"], tensors["lm_head.weight"]
    (word,) = tokenizer.encode(" on", add_special=False)
    head[word, 0] = 2.0
    chain = tokenizer.encode("\n<think>", add_special=False)
    for number, (before, after) in enumerate(pairwise(chain), start=2):
        embedding[before, number] = 40.0
        head[after, number] = 4.0
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return LoadedModel.load(opened, EngineConfig(device="cpu", dtype=FLOATS["fp32"]).place(opened.config))


@pytest.fixture(scope="module", params=[TEMPLATE, THINKS], ids=["opened-by-the-model", "opened-by-the-prompt"])
def looping(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    loaded = looping_model(tmp_path_factory.mktemp("looping") / "model", request.param)
    engine = Engine(loaded.runner, CacheShape.paged(2048, 8192, 16), loaded.vocabulary_size, running=8)
    with serving(loaded, engine, ServerSettings(("pico",))) as served:
        yield served


def test_without_a_budget_it_never_answers(looping: Served) -> None:
    content, thought, _, end = joined(looping.chat("Go", max_tokens=100))
    assert content == "" and thought.count(" on") > 60 and end == "length"


@pytest.mark.parametrize("budget, stream", [(0, False), (20, True), (10_000, False)])
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"regex": "Oslo[.]"},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": CITY}}},
        {"tools": [{"type": "function", "function": TOOL}], "tool_choice": "required", "parallel_tool_calls": False},
        {"tools": [{"type": "function", "function": TOOL}]},
        {"temperature": 1.0, "seed": 3},
    ],
    ids=["text", "expression", "schema", "call", "tools", "sampled"],
)
def test_a_budget_leaves_an_answer(looping: Served, fields: dict[str, Any], budget: int, stream: bool) -> None:
    limit = 120
    answer = looping.chat("Go", max_tokens=limit, thinking_token_budget=budget, stream=stream, **fields)
    assert answer.status == 200, answer.body
    content, thought, calls, _ = joined(answer)
    assert content.strip() or calls
    assert len(looping.service.text_prompt(thought, add_special=False)) <= min(budget, limit - limit // 4) + 1
    if "regex" in fields:
        assert content == "Oslo."
    if fields.get("tool_choice"):
        assert calls == [("f", '{"a": 1}')]


ROUTES: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", {"reasoning": {"max_tokens": 20}}),
    ("/v1/chat/completions", {"reasoning_budget_tokens": 20}),
    ("/v1/messages", {"thinking": {"type": "enabled", "budget_tokens": 20}}),
    ("/v1/responses", {"reasoning": {"max_tokens": 20}}),
]


@pytest.mark.parametrize("route, fields", ROUTES, ids=["chat", "chat-llama.cpp", "messages", "responses"])
def test_every_interface_has_a_budget(looping: Served, route: str, fields: dict[str, Any]) -> None:
    talk: dict[str, Any] = {"messages": [{"role": "user", "content": "Go"}], "max_tokens": 80}
    if route == "/v1/responses":
        talk = {"input": "Go", "max_output_tokens": 80}
    answer = looping.ask("POST", route, {"model": "pico", "temperature": 0, **talk, **fields}).json
    if route == "/v1/messages":
        thinking, text = answer["content"]
        assert thinking["type"] == "thinking" and text["text"].strip()
    elif route == "/v1/responses":
        reasoning, message = answer["output"]
        assert reasoning["type"] == "reasoning" and message["content"][0]["text"].strip()
    else:
        assert answer["choices"][0]["message"]["content"].strip()


def test_the_server_may_set_a_budget(looping: Served) -> None:
    service = looping.service
    before, service.settings = service.settings, dataclasses.replace(service.settings, reasoning_budget=10)
    try:
        content, thought, _, _ = joined(looping.chat("Go", max_tokens=60))
        assert content.strip() and thought.count(" on") <= 10
        own = joined(looping.chat("Go", max_tokens=60, thinking_token_budget=-1))
        assert own[0].strip()  # -1 leaves it to the server
    finally:
        service.settings = before


@pytest.mark.parametrize("limit", [32, 100])
def test_a_schema_with_texts_leaves_an_answer_too(looping: Served, limit: int) -> None:
    """As langchain-ollama sends one, with a limit that the reasoning would use up."""
    texts = {"name": {"type": "string"}, "size": {"type": "integer"}}
    schema = {"type": "object", "properties": texts, "required": ["name", "size"]}
    options = {"num_predict": limit, "temperature": 0}
    body = {"model": "pico", "messages": [{"role": "user", "content": "Go"}], "format": schema, "options": options}
    message = looping.ask("POST", "/api/chat", {**body, "stream": False}).json["message"]
    assert json.loads(message["content"]).keys() == {"name", "size"} and "on" in message["thinking"]


FORMS: dict[str, dict[str, Any]] = {
    "text": {},
    "schema": {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": CITY}}},
    "call": {"tools": [{"type": "function", "function": TOOL}], "tool_choice": "required"},
    "tools": {"tools": [{"type": "function", "function": TOOL}]},
}
MESSAGES_FORMS: dict[str, dict[str, Any]] = {
    "text": {},
    "schema": {"output_config": {"format": {"type": "json_schema", "schema": CITY}}},
    "call": {"tools": [{"name": "f", "input_schema": TOOL["parameters"]}], "tool_choice": {"type": "any"}},
    "tools": {"tools": [{"name": "f", "input_schema": TOOL["parameters"]}]},
}
RESPONSES_FORMS: dict[str, dict[str, Any]] = {
    "text": {},
    "schema": {"text": {"format": {"type": "json_schema", "name": "x", "schema": CITY}}},
    "call": {"tools": [{"type": "function", **TOOL}], "tool_choice": "required"},
    "tools": {"tools": [{"type": "function", **TOOL}]},
}


def answered(looping: Served, route: str, fields: dict[str, Any], stream: bool) -> str:
    talk: dict[str, Any] = {"messages": [{"role": "user", "content": "Go"}], "max_tokens": 110}
    if route == "/v1/responses":
        talk = {"input": "Go", "max_output_tokens": 110}
    answer = looping.ask("POST", route, {"model": "pico", **talk, **fields, "stream": stream})
    assert answer.status == 200, answer.body
    if route == "/v1/chat/completions":
        content, _, calls, _ = joined(answer)
        return content + "".join(arguments for _, arguments in calls)
    if stream and route == "/v1/messages":
        deltas = [event["delta"] for event in answer.events if event["type"] == "content_block_delta"]
        return "".join(delta.get("text", "") + delta.get("partial_json", "") for delta in deltas)
    if stream:
        (last,) = [event["response"] for event in answer.events if event["type"] == "response.completed"] or [
            event["response"] for event in answer.events if event["type"] == "response.incomplete"
        ]
    else:
        last = answer.json
    if route == "/v1/messages":
        return "".join(
            block.get("text", "") + (json.dumps(block["input"]) if "input" in block else "")
            for block in last["content"]
            if block["type"] != "thinking"
        )
    return "".join(
        item.get("arguments", "") + "".join(part["text"] for part in item.get("content", ()))
        for item in last["output"]
        if item["type"] != "reasoning"
    )


ALL_FORMS = {
    "/v1/chat/completions": FORMS,
    "/v1/messages": MESSAGES_FORMS,
    "/v1/responses": RESPONSES_FORMS,
}
LIMITS: dict[str, dict[str, Any]] = {
    "budget": {"reasoning_budget_tokens": 30, "temperature": 1.5},
    "deadline": {"deadline": 0.15, "temperature": 1.5},
    "loop": {"deadline": 600, "temperature": 0},
}


def limited(looping: Served, route: str, limit: str, form: str, stream: bool, seed: int = 0) -> None:
    fields = LIMITS[limit]
    if route == "/v1/messages" and limit == "budget":
        fields = {"thinking": {"type": "enabled", "budget_tokens": 30}, "temperature": 1}
    seed_field = {} if route == "/v1/messages" else {"seed": seed}
    text = answered(looping, route, {**fields, **ALL_FORMS[route][form], **seed_field}, stream)
    assert text.strip(), (route, limit, form, stream, seed)
    if form == "schema":
        assert json.loads(text) == {"city": "Oslo"}


@pytest.mark.parametrize("limit", LIMITS)
@pytest.mark.parametrize("route", ALL_FORMS)
def test_every_limit_leaves_an_answer(looping: Served, route: str, limit: str, request: pytest.FixtureRequest) -> None:
    """Each template has half of the formats of a route and a limit, and the other template has the other half."""
    half = (
        list(ALL_FORMS).index(route) + list(LIMITS).index(limit) + (request.node.callspec.params["looping"] == THINKS)
    )
    for stream, form in ((False, "text"), (True, "schema"), (True, "call"), (False, "tools"))[half % 2 :: 2]:
        limited(looping, route, limit, form, stream)


@pytest.mark.slow
def test_a_hundred_replies_of_a_looping_model_have_an_answer(looping: Served) -> None:
    """Prints the number of replies with an answer, and the longest reply of each limit in seconds."""
    cases = list(itertools.product(ALL_FORMS, LIMITS, FORMS, (True, False)))
    longest = dict.fromkeys(LIMITS, 0.0)
    for number in range(100):
        route, limit, form, stream = cases[number * 37 % len(cases)]
        began = time.perf_counter()
        limited(looping, route, limit, form, stream, number)
        longest[limit] = max(longest[limit], time.perf_counter() - began)
    print("100 of 100 answered;", ", ".join(f"{name} {seconds:.2f} s" for name, seconds in longest.items()))


def test_a_loop_is_cut_long_before_the_budget(looping: Served) -> None:
    content, thought, _, _ = joined(looping.chat("Go", max_tokens=300, thinking_token_budget=1000, temperature=0))
    assert content.strip() and 60 <= thought.count(" on") <= 90


def test_a_deadline_ends_a_reply_without_reasoning(served: Served) -> None:
    fields = {"deadline": 0.1, "ignore_eos": True, "max_tokens": 450, "temperature": 1.0}
    answer = served.chat("Tell me a story.", **fields)
    content, _, _, end = joined(answer)
    assert content.strip() and end == "length" and answer.json["usage"]["completion_tokens"] < 450


STRICT = {**TOOL, "strict": True}


def test_strict_calls_match_their_schema_also_where_the_model_may_write_text(
    scripted: Scripted, reasoning: LoadedModel
) -> None:
    """The grammar allows free text, and calls only as their schema allows."""
    tools = [{"type": "function", "function": STRICT}]
    good = 'Hi <tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
    bad = 'Hi <tool_call>\n{"name": "f", "arguments": {"a": 2}}\n</tool_call>'
    for text, accepted in ((good, True), (bad, False), ("Only text.", True)):
        ids = reasoning.tokenizer.encode(text, add_special=False, allow_special=True)
        with serving(reasoning, GrammarEngine(lambda request, ids=ids: ids)) as served:  # type: ignore[misc]  # bound now
            answer = served.chat("Go", tools=tools, max_tokens=100)
            content, _, calls, _ = joined(answer)
            assert "x-mycli-omitted" not in answer.headers
            assert (calls == [("f", '{"a": 1}')]) == (text == good)
            assert (text == "Only text.") == (content == text)
            assert accepted or calls != [("f", '{"a": 2}')]


def test_a_strict_tool_with_a_keyword_that_is_not_supported_is_refused(
    scripted: Scripted, reasoning: LoadedModel
) -> None:
    keyed = {"type": "object", "properties": {"m": {"type": "object", "propertyNames": {"pattern": "^a"}}}}
    for strict in (True, False):
        tool = {"type": "function", "function": {"name": "f", "parameters": keyed, "strict": strict}}
        with scripted("x", model=reasoning) as served:
            answer = served.chat("Go", tools=[tool], tool_choice="required", max_tokens=100)
            if strict:
                assert answer.status == 400 and "propertyNames" in answer.error["message"]
            else:
                assert answer.status == 200 and "propertyNames" in answer.headers["x-mycli-loosened"]


def test_a_fault_of_a_format_next_to_tools_names_the_format(served: Served) -> None:
    tools = [{"type": "function", "function": TOOL}]
    answer = served.chat("Go", tools=tools, regex="a[b", max_tokens=40)
    assert answer.status == 400 and answer.error["param"] == "regex"


def test_verbosity_is_left_out_and_named(served: Served) -> None:
    answer = served.ask("POST", "/v1/responses", {"input": "Hi", "max_output_tokens": 2, "text": {"verbosity": "low"}})
    assert answer.status == 200 and answer.headers["x-mycli-omitted"] == "field text.verbosity"
