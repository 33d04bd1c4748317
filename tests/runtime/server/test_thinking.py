"""A budget of reasoning on every route: a model that never closes its reasoning still answers."""

import dataclasses
import json
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from mycli.runtime.checkpoint.open_folder import open_model_folder
from mycli.runtime.engine.config import EngineConfig
from mycli.runtime.engine.engine import Engine
from mycli.runtime.engine.loader import LoadedModel
from mycli.runtime.engine.model_runner import CacheShape
from mycli.runtime.server.settings import ServerSettings
from mycli.runtime.utils.dtypes import FLOATS
from tests.runtime.server.conftest import TEMPLATE
from tests.support.agent_model import agent_model
from tests.support.served import Served, joined, serving

CITY = {
    "type": "object",
    "properties": {"city": {"enum": ["Oslo"]}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOL = {"name": "f", "parameters": {"type": "object", "properties": {"a": {"enum": [1]}}, "required": ["a"]}}
THINKS = TEMPLATE.replace("assistant\n{% if enable", "assistant\n<think>\n{% if enable")  # the prompt opens the tag


def looping_model(folder: Path, template: str) -> LoadedModel:
    """A model that begins with <think> after a line break and then repeats one word: it never closes anything."""
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
    limit = 240
    answer = looping.chat("Go", max_tokens=limit, thinking_token_budget=budget, stream=stream, **fields)
    assert answer.status == 200, answer.body
    content, thought, calls, _ = joined(answer)
    assert content.strip() or calls
    assert len(looping.service.text_prompt(thought, False)) <= min(budget, limit - limit // 4) + 1
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
