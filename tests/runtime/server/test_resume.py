"""Test POST /v1/replies/{id}/resume: an interrupted reply is sent again and continued, on every interface."""

import json
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest

from mycli.runtime.engine.engine import Engine
from mycli.runtime.engine.loading.loader import LoadedModel
from mycli.runtime.memory.cache_shape import CacheShape
from mycli.runtime.server.http.settings import ServerSettings
from tests.runtime.server.conftest import Scripted
from tests.support.served import Served, serving

MESSAGES = [{"role": "user", "content": "Tell me about Leo and his dog."}]
SCHEMA = {"type": "object", "properties": {"name": {"type": "string", "maxLength": 9}}, "required": ["name"]}
TOOL = {"name": "look_up", "parameters": {"type": "object", "properties": {"word": {"type": "string", "maxLength": 9}}}}
SAMPLED = {"temperature": 0.9, "seed": 3}
BODIES: dict[str, tuple[str, dict[str, Any]]] = {
    "greedy": ("/v1/chat/completions", {"messages": MESSAGES, "temperature": 0, "max_tokens": 24}),
    "sampled": ("/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 24, **SAMPLED, "stop": ["zebra"]}),
    "unseeded": ("/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 24, "temperature": 1}),
    "several": ("/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 12, **SAMPLED, "n": 3}),
    "logprobs": (
        "/v1/chat/completions",
        {"messages": MESSAGES, "max_tokens": 9, **SAMPLED, "logprobs": True, "top_logprobs": 2},
    ),
    "schema": (
        "/v1/chat/completions",
        {
            "messages": MESSAGES,
            "max_tokens": 40,
            **SAMPLED,
            "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}},
        },
    ),
    "tools": (
        "/v1/chat/completions",
        {
            "messages": MESSAGES,
            "max_tokens": 60,
            **SAMPLED,
            "tools": [{"type": "function", "function": TOOL}],
            "tool_choice": "required",
        },
    ),
    "completions": ("/v1/completions", {"prompt": ["Leo", "Mia"], "max_tokens": 12, **SAMPLED, "n": 2}),
    "messages": ("/v1/messages", {"messages": MESSAGES, "max_tokens": 24, "temperature": 0.9}),
    "responses": ("/v1/responses", {"input": "Tell me about Leo.", "max_output_tokens": 24, "temperature": 0.9}),
}
# Times and counts of cached tokens may differ.
VOLATILE = (
    "completed_at",
    "timings",
    "prompt_tokens_details",
    "input_tokens_details",
    "cache_read_input_tokens",
    "input_tokens",
)


@pytest.fixture(scope="module")
def recording(loaded: LoadedModel, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    engine = Engine(loaded.runner, CacheShape.paged(512, 2048, 16), loaded.vocabulary_size, running=8)
    folder = tmp_path_factory.mktemp("state") / "replies"
    with serving(loaded, engine, ServerSettings(("pico",), replies=folder)) as served:
        yield served


def record_of(served: Served, name: str) -> Path:
    assert served.service.journal is not None
    return served.service.journal.folder / f"{name}.jsonl"


def stable(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: stable(entry) for key, entry in value.items() if key not in VOLATILE}
    return [stable(entry) for entry in value] if isinstance(value, list) else value


def kill(served: Served, name: str, data: bytes, random: Random) -> None:
    """Create the files that a server killed at a random time leaves."""
    head = data.index(b"\n") + 1
    record_of(served, name).write_bytes(data[: random.randint(head, len(data))])


@pytest.mark.parametrize("kind", BODIES)
def test_a_resumed_reply_is_the_whole_reply(kind: str, recording: Served) -> None:
    path, body = BODIES[kind]
    whole = recording.ask("POST", path, body)
    assert whole.status == 200, whole.body
    name = whole.json["id"]
    data = record_of(recording, name).read_bytes()
    random = Random(kind)
    for _ in range(3):
        recording.idle()
        kill(recording, name, data, random)
        again = recording.ask("POST", f"/v1/replies/{name}/resume", {})
        assert again.status == 200 and stable(again.json) == stable(whole.json)
        assert record_of(recording, name).read_bytes().count(b"\n") > 1


def text(events: list[Any]) -> str:
    return "".join(event["choices"][0]["delta"].get("content") or "" for event in events if event["choices"])


def test_a_stream_that_was_cut_continues_after_what_the_client_has(recording: Served) -> None:
    body = {**BODIES["sampled"][1], "stream": True}
    events = recording.ask("POST", "/v1/chat/completions", body).events
    name, whole = events[0]["id"], text(events)
    data = record_of(recording, name).read_bytes()
    for received in (0, 1, len(whole) // 2, len(whole)):
        recording.idle()
        kill(recording, name, data, Random(received))
        rest = recording.ask("POST", f"/v1/replies/{name}/resume", {"after": received}).events
        assert whole[:received] + text(rest) == whole and rest[0]["id"] == name


def test_reasoning_that_is_not_shown_is_not_counted(scripted: Scripted, reasoning: LoadedModel, tmp_path: Path) -> None:
    settings = ServerSettings(("pico",), replies=tmp_path / "replies")
    bodies: dict[str, dict[str, Any]] = {
        "chat/completions": {"include_reasoning": False},
        "messages": {"max_tokens": 99, "thinking": {"type": "adaptive", "display": "omitted"}},
    }
    with scripted("<think>\nLong enough.\n</think>\n\nOf course.", model=reasoning, settings=settings) as served:
        for route, body in bodies.items():
            name = served.ask("POST", f"/v1/{route}", {"messages": MESSAGES, **body}).json["id"]
            served.idle()
            rest = served.ask("POST", f"/v1/replies/{name}/resume", {"after": 3}).json
            content = rest["choices"][0]["message"]["content"] if "choices" in rest else rest["content"][-1]["text"]
            assert content == "course."


def test_a_client_that_comes_back_takes_a_running_reply_over(recording: Served) -> None:
    import http.client

    body = {**BODIES["greedy"][1], "max_tokens": 200, "ignore_eos": True, "stream": True}
    expected = text(recording.ask("POST", "/v1/chat/completions", body).events)
    connection = http.client.HTTPConnection("127.0.0.1", recording.port, timeout=60)
    connection.request("POST", "/v1/chat/completions", json.dumps(body), {"content-type": "application/json"})
    response = connection.getresponse()
    name = json.loads(response.readline().decode().removeprefix("data: "))["id"]
    again = recording.ask("POST", f"/v1/replies/{name}/resume", {"stream": True})
    connection.close()
    assert text(again.events) == expected


@pytest.mark.parametrize(
    ("change", "status", "code"),
    [
        pytest.param({"fingerprint": "other"}, 409, "reply_differs", id="another-model"),
        pytest.param({"prompts": "other"}, 409, "reply_differs", id="another-prompt"),
        pytest.param({"kind": "run"}, 404, "reply_not_found", id="of-a-command"),
        pytest.param({"version": 1}, 404, "reply_not_found", id="another-version"),
    ],
)
def test_a_record_that_does_not_fit_is_refused(
    change: dict[str, Any], status: int, code: str, recording: Served
) -> None:
    path, body = BODIES["greedy"]
    name = recording.ask("POST", path, body).json["id"]
    recording.idle()
    head, rest = record_of(recording, name).read_bytes().split(b"\n", 1)
    record_of(recording, name).write_bytes(json.dumps({**json.loads(head), **change}).encode() + b"\n" + rest)
    answer = recording.ask("POST", f"/v1/replies/{name}/resume", {})
    assert (answer.status, answer.error["code"]) == (status, code)


@pytest.mark.parametrize("name", ["chatcmpl-0", "..%2fkey", "%00", "a" * 300])
def test_an_unknown_reply_is_not_found(name: str, recording: Served) -> None:
    answer = recording.ask("POST", f"/v1/replies/{name}/resume", {})
    assert answer.status == 404 and "reply" in answer.error["message"] or answer.error["code"] == "not_found"


def test_a_server_without_records_says_so(served: Served) -> None:
    name = served.chat(max_tokens=4).json["id"]
    assert served.ask("POST", f"/v1/replies/{name}/resume", {}).error["code"] == "reply_not_found"


@pytest.mark.parametrize("replies", [2, 3])
def test_after_needs_a_single_reply(replies: int, recording: Served) -> None:
    path, body = BODIES["several"]
    name = recording.ask("POST", path, {**body, "n": replies}).json["id"]
    recording.idle()
    assert recording.ask("POST", f"/v1/replies/{name}/resume", {"after": 3}).error["param"] == "after"


def test_a_refused_request_leaves_no_record(recording: Served) -> None:
    assert recording.service.journal is not None
    before = recording.service.journal.names()
    assert recording.chat(max_tokens=100_000).status == 400
    assert sorted(recording.service.journal.names()) == sorted(before)
