"""Test the load generator against servers with known replies and delays."""

import itertools
import socket
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from mycli.runtime.diagnostics import completion_client
from mycli.runtime.diagnostics.completion_client import CompletionServer, Reply
from mycli.runtime.diagnostics.serving_load import Load, Texts, run_load, tokens_per_word
from mycli.runtime.errors import ModelError, NotFoundError, UsageError
from tests.support.completion_server import Stream, event, scripted, talkative


def test_a_reply_is_timed_and_counted_as_its_client_sees_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock counts how often it is read: when the request is sent, and once for each event."""
    monkeypatch.setattr(completion_client, "time", SimpleNamespace(monotonic=itertools.count(10.0).__next__))
    with scripted() as server:
        reply = CompletionServer(server.url + "/v1", "secret").reply("one two", 3)
        assert server.keys == ["Bearer secret"]
        (asked,) = server.asked
    assert (reply.prompt, reply.cached, reply.tokens, reply.problem) == (6, 2, 3, "")
    assert (reply.sent, reply.first, reply.last) == (10, 11, 13), "the end is no token"
    assert reply.first_token_seconds == reply.token_seconds == 1
    assert asked["model"] == "it" and asked["ignore_eos"] and asked["max_tokens"] == 3 and asked["temperature"] == 0


def test_words_are_measured_without_what_the_server_adds() -> None:
    with scripted() as server:
        target = CompletionServer(server.url)
        assert tokens_per_word(target) == 1.5
        texts = Texts(Load(30, 3, 1, shared=15, clients=1), 1.5, seed=3)
        first, second = texts.next().split(), texts.next().split()
    assert len(first) == len(second) == 20 and first[:10] == second[:10] and first != second


def together(requests: int) -> Stream:
    """Return a stream that begins when `requests` of them have arrived, and breaks off if fewer do."""
    arrived = threading.Barrier(requests, timeout=60)

    def stream(asked: Any, say: Callable[[str], None]) -> None:
        arrived.wait()
        talkative(asked, say)

    return stream


@pytest.mark.parametrize("clients", [1, 3, 9])
def test_closed_load_keeps_so_many_busy(clients: int) -> None:
    with scripted(together(clients)) as server:
        done: list[int] = []
        result = run_load(CompletionServer(server.url), Load(8, 3, 9, clients=clients), 1.0, 0, lambda: done.append(1))
        assert server.most == clients and len({one["prompt"] for one in server.asked}) == 9
    assert len(done) == len(result.answered) == 9
    assert result.rate == pytest.approx(27 / result.seconds)
    assert result.counted["num_preemptions"] == 9 and result.counted["prefix_cache_hits"] == 0
    assert result.queue_seconds == pytest.approx(0.25)


def test_open_load_does_not_wait_for_replies() -> None:
    with scripted(together(12)) as server:
        result = run_load(CompletionServer(server.url), Load(8, 3, 12, rate=200.0), 1.0, 0)
        assert server.most == 12
    assert len(result.answered) == 12 and result.load.name == "r200 p8 n3"


@pytest.mark.parametrize("load", [Load(8, 3, 4, clients=2), Load(8, 3, 4, rate=0.001)], ids=["closed", "open"])
def test_a_run_ends_by_its_check_while_replies_and_arrivals_are_due(load: Load) -> None:
    class Gone(Exception): ...

    def check() -> None:
        raise Gone

    release = threading.Event()

    def stream(asked: Any, say: Callable[[str], None]) -> None:
        release.wait(60)
        talkative(asked, say)

    with scripted(stream) as server:
        with pytest.raises(Gone):
            run_load(CompletionServer(server.url), load, 1.0, 0, check=check)
        release.set()


def broken(asked: Any, say: Callable[[str], None]) -> None:
    say("data: {nothing")


def failing(asked: Any, say: Callable[[str], None]) -> None:
    say(event(choices=[{"text": "a"}]))
    say(event(error={"message": "lost"}))


def silent(asked: Any, say: Callable[[str], None]) -> None:
    say("data: [DONE]")


@pytest.mark.parametrize(
    ("stream", "status", "problem"),
    [(broken, 200, "JSONDecodeError"), (failing, 200, "lost"), (silent, 200, "empty"), (silent, 400, "400: too long")],
    ids=["no-json", "error-in-stream", "empty", "refused"],
)
def test_what_is_no_reply_is_a_problem_and_ends_nothing(stream: Stream, status: int, problem: str) -> None:
    with scripted(stream, status=status) as server:
        result = run_load(CompletionServer(server.url), Load(8, 3, 3, clients=2), 1.0, 0)
        assert not result.answered and all(problem in one.problem for one in result.replies)
        with pytest.raises(ModelError, match="http"):
            tokens_per_word(CompletionServer(server.url))


@pytest.mark.parametrize("models", [b"{}", b'{"data": []}', b"[1]", b"x", b'{"data": [{"id": 3'])
def test_a_server_of_something_else_is_refused(models: bytes) -> None:
    with scripted(models=models) as server, pytest.raises(ModelError, match="lists no model"):
        CompletionServer(server.url)


@pytest.mark.parametrize("url", ["127.0.0.1:80", "http://", "ftp://a", "http://a:x", "http://u@a", "http://a/?q=1"])
def test_what_is_no_address_is_refused(url: str) -> None:
    with pytest.raises(UsageError, match="not the address"):
        CompletionServer(url)


def test_nobody_there() -> None:
    with socket.create_server(("127.0.0.1", 0)) as held:
        port = held.getsockname()[1]
    with pytest.raises(NotFoundError, match="refused"):
        CompletionServer(f"http://127.0.0.1:{port}")


COUNTS = {"prompt_tokens": 9, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 4}}


@pytest.mark.parametrize(
    ("usage", "counts"),
    [
        (COUNTS, (9, 4, 3)),
        ({**COUNTS, "prompt_tokens": 0, "prompt_tokens_details": {"cached_tokens": 0}}, (0, 0, 3)),
        ({**COUNTS, "prompt_tokens": -1, "prompt_tokens_details": {"cached_tokens": "4"}}, (0, 0, 3)),
        ({"prompt_tokens": 9, "prompt_tokens_details": None}, (9, 0, 2)),
        ({}, (0, 0, 2)),
    ],
    ids=["all", "zeros", "impossible", "fewer", "none"],
)
def test_counts_of_a_server_are_not_trusted(usage: dict[str, Any], counts: tuple[int, int, int]) -> None:
    """The reply has three events: one with text, one with empty text, and the end."""

    def stream(asked: Any, say: Callable[[str], None]) -> None:
        for choice in ({"text": "a"}, {"text": ""}, {"text": "", "finish_reason": "stop"}):
            say(event(choices=[choice]))
        say(event(choices=[], usage=usage))
        say("data: [DONE]")

    with scripted(stream) as server:
        reply = CompletionServer(server.url).reply("one two", 3)
    assert (reply.prompt, reply.cached, reply.tokens, reply.problem) == (*counts, "")


def test_one_token_has_no_time_after_it() -> None:
    assert Reply(1.0, 2.0, 2.0, tokens=1).token_seconds is None
    assert Reply(1.0, 2.0, 5.0, tokens=2).token_seconds == 3.0
