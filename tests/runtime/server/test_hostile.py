"""Test requests that are cheap to send and expensive to answer, and failing worker threads."""

import json
import re
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from pydantic import ValidationError

from mycli.runtime.sampling.grammars.probe import GrammarProbe
from mycli.runtime.server.requests.schemas import Strict
from mycli.runtime.server.routes.chat_completions import ChatRequest
from mycli.runtime.server.routes.completions import CompletionRequest
from mycli.runtime.server.routes.messages_request import CountRequest, MessagesRequest
from mycli.runtime.server.routes.responses_request import ResponsesRequest
from mycli.runtime.server.routes.tokenization import DetokenizeRequest, TokenizeRequest
from mycli.runtime.server.service import Service
from tests.runtime.server.conftest import Scripted
from tests.support.bombs import BOMBS
from tests.support.served import Served

KINDS: tuple[type[Strict], ...] = (ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest)
KINDS += (ResponsesRequest, CountRequest, MessagesRequest)
MANY = 20_000
WRONG: dict[str, tuple[type[Strict], dict[str, Any]]] = {
    "prompt of ids": (CompletionRequest, {"prompt": [-1] * MANY}),
    "prompt of lists": (CompletionRequest, {"prompt": [[-1]] * MANY}),
    "prompt of a list": (CompletionRequest, {"prompt": [[-1] * MANY]}),
    "prompt of nothing": (CompletionRequest, {"prompt": [None] * MANY}),
    "stop": (ChatRequest, {"messages": [{"role": "user", "content": ""}], "stop": [1] * MANY}),
    "content": (ChatRequest, {"messages": [{"role": "user", "content": [0] * MANY}]}),
    "parts": (ChatRequest, {"messages": [{"role": "user", "content": [{"type": 0}] * 4000}]}),
    "messages": (ChatRequest, {"messages": [1] * MANY}),
    "tools": (ChatRequest, {"messages": [{"role": "user", "content": ""}], "tools": [1] * MANY}),
    "logit_bias": (ChatRequest, {"messages": [{"role": "user"}], "logit_bias": {f"x{i}": "" for i in range(MANY)}}),
    "input": (ResponsesRequest, {"input": [0] * MANY}),
    "metadata": (ResponsesRequest, {"input": "", "metadata": {str(i): 1 for i in range(MANY)}}),
    "system": (MessagesRequest, {"max_tokens": 1, "messages": [], "system": [0] * MANY}),
    "blocks": (MessagesRequest, {"max_tokens": 1, "messages": [{"role": "user", "content": [0] * MANY}]}),
    "tokens": (DetokenizeRequest, {"tokens": [-1] * MANY}),
    "tokenize": (TokenizeRequest, {"messages": [0] * MANY}),
}


@pytest.mark.parametrize("name", WRONG)
def test_s2_the_first_wrong_item_of_a_list_ends_the_check(name: str) -> None:
    kind, body = WRONG[name]
    with pytest.raises(ValidationError) as caught:
        kind.model_validate(body)
    assert caught.value.error_count() <= 16


def lists(schema: Any) -> Iterator[dict[str, Any]]:
    """Yield the lists and objects of a core schema, except objects with arbitrary JSON."""
    if isinstance(schema, dict):
        any_json = schema.get("type") == "dict" and schema.get("values_schema", {}).get("type") == "any"
        if schema.get("type") in ("list", "dict") and not any_json:
            yield schema
        fields = not isinstance(schema.get("type"), str)
        for key, part in schema.items():
            if fields or key not in ("metadata", "default"):
                yield from lists(part)
    elif isinstance(schema, list | tuple):
        for part in schema:
            yield from lists(part)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_s2_every_list_has_a_limit(kind: type[Strict]) -> None:
    found = list(lists(kind.__pydantic_core_schema__))
    assert found
    for schema in found:
        assert schema.get("max_length") is not None and schema.get("fail_fast"), schema


def test_s3_prompts_are_counted_before_they_are_tokenized(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Service, "text_prompt", lambda *_, **options: pytest.fail("tokenized"))
    for prompts in (["a"] * 65, ["a"] * 100_000, [[5]] * 1000):
        answer = served.ask("POST", "/v1/completions", {"prompt": prompts, "max_tokens": 1})
        assert answer.status == 400 and "at most" in answer.error["message"]


def test_as_many_prompts_as_a_request_may_have(served: Served) -> None:
    answer = served.ask("POST", "/v1/completions", {"prompt": ["a"] * 64, "max_tokens": 1})
    assert answer.status == 200 and len(answer.json["choices"]) == 64


def formatted(schema: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"schema": schema, **fields}}}


@pytest.mark.parametrize("name", BOMBS)
def test_s1_a_schema_bomb_is_refused_with_its_path(served: Served, name: str) -> None:
    answer = served.chat(**formatted(BOMBS[name]()))
    assert answer.status == 400 and answer.error["param"] == "response_format"
    assert re.search(r"#.*: more than \d+|198900 characters", answer.error["message"])


def test_s1_compiling_ends_when_the_client_leaves(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    started, interrupted = threading.Event(), threading.Event()

    def check(*_: object) -> None:
        started.set()
        interrupted.wait(20)

    monkeypatch.setattr(GrammarProbe, "check", check)
    monkeypatch.setattr(GrammarProbe, "interrupt", lambda probe: interrupted.set())
    body = {"model": "pico", "messages": [{"role": "user", "content": ""}], "response_format": {"type": "regex"}}
    body["response_format"]["regex"] = "a+"  # type: ignore[index]  # a dict
    data = json.dumps(body).encode()
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    with socket.create_connection(("127.0.0.1", served.port), timeout=20) as link:
        link.sendall(head + b"Content-Length: %d\r\n\r\n" % len(data) + data)
        assert started.wait(20)
    assert interrupted.wait(20)
    served.idle()
    assert served.chat(max_tokens=1).status == 200


def test_f9_the_response_says_what_was_left_out_of_a_schema(served: Served) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "object", "propertyNames": {"pattern": "^x"}}}}
    answer = served.chat(max_tokens=2, **formatted(schema))
    assert answer.status == 200 and answer.headers["x-mycli-loosened"] == "#/properties/a/propertyNames"
    assert any("left out of the schema: #/properties/a/propertyNames" in line for line in served.log)
    answer = served.chat(max_tokens=2, stream=True, **formatted(schema))
    assert answer.status == 200 and "x-mycli-loosened" in answer.headers
    refused = served.chat(**formatted(schema, strict=True))
    assert refused.status == 400
    assert "#/properties/a/propertyNames: this keyword is not supported" in refused.error["message"]


class Panic(BaseException):
    """Simulates a panic of a Rust library in Python."""


def _together(served: Served, count: int) -> list[int]:
    statuses: list[int] = []
    threads = [threading.Thread(target=lambda: statuses.append(served.chat().status)) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return statuses


def test_s4_a_panic_on_the_engine_thread_fails_every_request_and_ends_the_server(
    scripted: Scripted, monkeypatch: pytest.MonkeyPatch
) -> None:
    with scripted("a b c d", pause=0.05) as served:
        monkeypatch.setattr(served.server, "end", lambda: None)  # it is checked before it ends
        worker, ended = served.service.worker, threading.Event()
        worker._on_death = ended.set  # type: ignore[method-assign]  # replaces the server's
        worker.engine.error = Panic("index out of bounds")  # type: ignore[attr-defined]  # of the scripted engine
        assert _together(served, 4).count(500) >= 1
        assert served.ask("GET", "/health").status == 503
        assert "engine thread ended: Panic: index out of bounds" in served.ask("GET", "/health").body.decode() or (
            worker.failed == "the engine thread ended: Panic: index out of bounds"
        )
        refused = served.chat()
        assert refused.status == 503 and refused.error["code"] == "engine_failed"
        assert ended.wait(20) and worker.dead and worker.underway == 0
    with scripted("a b c d") as served:
        served.service.worker.engine.error = Panic("x")  # type: ignore[attr-defined]  # of the scripted engine
        assert served.chat().status == 500
        end = time.monotonic() + 20
        while not served.server.should_exit:
            assert time.monotonic() < end, "the server goes on without an engine"
            time.sleep(0.05)


def test_s4_a_panic_in_a_pool_or_on_the_text_thread_fails_one_request(
    scripted: Scripted, monkeypatch: pytest.MonkeyPatch
) -> None:
    with scripted("a b c d") as served:
        with monkeypatch.context() as patch:
            patch.setattr(Service, "text_prompt", _panics)
            answer = served.ask("POST", "/v1/completions", {"prompt": "a"})
            assert answer.status == 500 and answer.error["type"] == "api_error"
        with monkeypatch.context() as patch:
            patch.setattr("mycli.runtime.engine.replies.reader.ReplyReader.feed", _panics)
            assert served.chat().status == 500
        assert served.chat().status == 200 and served.ask("GET", "/health").status == 200


def _panics(*_: object, **__: object) -> Any:
    raise Panic("slice index")


def test_s6_a_request_that_is_prepared_counts_as_under_way(scripted: Scripted, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that it gets the grace period after a signal."""
    at_work, go_on = threading.Event(), threading.Event()

    def slow(*_: object, **options: object) -> list[int]:
        at_work.set()
        go_on.wait(20)
        return [5]

    with scripted("a b c d") as served:
        monkeypatch.setattr(Service, "text_prompt", slow)
        answers: list[Any] = []
        asking = threading.Thread(
            target=lambda: answers.append(served.ask("POST", "/v1/completions", {"prompt": "a", "max_tokens": 2}))
        )
        asking.start()
        assert at_work.wait(20) and served.service.busy
        served.server.handle_exit(15, None)
        time.sleep(0.3)
        assert not served.server.should_exit
        go_on.set()
        asking.join(20)
        assert answers[0].status == 200
        end = time.monotonic() + 10
        while not served.server.should_exit:
            assert time.monotonic() < end
            time.sleep(0.05)


def test_s6_after_the_grace_period_the_answer_is_still_json(
    scripted: Scripted, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on = threading.Event()
    monkeypatch.setattr(Service, "text_prompt", lambda *_, **options: go_on.wait(20) and [5])
    with scripted("a b c d") as served:
        answers: list[Any] = []
        asking = threading.Thread(
            target=lambda: answers.append(served.ask("POST", "/v1/completions", {"prompt": "a", "max_tokens": 2}))
        )
        asking.start()
        while not served.service.busy:
            time.sleep(0.01)
        served.server.should_exit = True
        asking.join(20)
        go_on.set()
        assert answers[0].status == 503 and answers[0].error["code"] == "shutting_down"
        assert not [line for line in served.log if "Traceback" in line]


HEADS = {
    "length and encoding": b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    b"Content-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\nGET /health HTTP/1.1\r\nHost: x\r\n\r\n",
    "bare line feeds": b"GET /health HTTP/1.1\nHost: localhost\n\n",
    "one bare line feed": b"GET /health HTTP/1.1\r\nHost: localhost\nX: y\r\n\r\n",
}


@pytest.mark.parametrize("name", HEADS)
def test_s11_what_a_proxy_may_read_differently_is_refused(served: Served, name: str) -> None:
    answer = served.raw(HEADS[name])
    assert answer.startswith(b"HTTP/1.1 400") and answer.count(b"HTTP/1.1") == 1


@pytest.mark.parametrize("host", ["evil.example://localhost", "http://localhost", "://127.0.0.1"])
def test_s11_a_host_with_a_scheme_is_refused(served: Served, host: str) -> None:
    assert served.ask("GET", "/v1/models", headers={"Host": host}).status == 403
