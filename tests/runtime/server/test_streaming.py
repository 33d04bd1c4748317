"""Test how the pieces of replies become a response: joined, timed and kept alive, in virtual time."""

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from threading import Event, current_thread
from types import SimpleNamespace
from typing import Any, cast

import pytest
from starlette.requests import Request as HttpRequest

from mycli.runtime.engine.loading.loader import LoadedModel
from mycli.runtime.engine.replies.reader import Piece
from mycli.runtime.engine.sequence import Request
from mycli.runtime.server import streaming
from mycli.runtime.server.delivery import Delivery
from mycli.runtime.server.http.api_error import ApiError
from mycli.runtime.server.http.settings import ServerLimits, ServerSettings
from mycli.runtime.server.service import Prepared
from mycli.runtime.server.streaming import answer, merged, off_loop, running
from mycli.runtime.server.worker import Ticket
from tests.support.served import unserved
from tests.support.virtual_time import run_in_virtual_time

LIMITS = ServerLimits(ping_seconds=10, queue_seconds=30)
# Seconds from the start -> what the engine delivers then.
Schedule = Mapping[float, Sequence[Piece]]


class Worker:
    """Delivers pieces at set times; `times` are those of its tickets: submitted, first, last, tokens."""

    def __init__(self, schedule: Schedule, times: Sequence[tuple[float, float | None, float | None, int]]) -> None:
        self._schedule, self._times = schedule, times
        self.metrics = SimpleNamespace(used=lambda key, figures: None)
        self.cancelled: Sequence[Ticket] = ()

    def submit(self, requests: Any, delivery: Delivery, records: object) -> list[Ticket]:
        for seconds, pieces in self._schedule.items():
            asyncio.get_running_loop().call_later(seconds, delivery.put, pieces)
        return [
            Ticket(requests[0][0], cast(Any, None), delivery, submitted, first, last, tokens=tokens)
            for submitted, first, last, tokens in self._times
        ]

    def cancel(self, tickets: Sequence[Ticket]) -> None:
        self.cancelled = tickets


def a_service(
    schedule: Schedule, times: Sequence[tuple[float, float | None, float | None, int]] = ((0.0, None, None, 0),)
) -> Any:
    settings = ServerSettings(("pico",), limits=LIMITS)
    return SimpleNamespace(settings=settings, worker=Worker(schedule, times), recorded={})


def prepared_for(replies: int = 1) -> Prepared:
    readers = [SimpleNamespace(index=index) for index in range(replies)]
    return Prepared([(Request((1,)), cast(Any, readers))], [(1,)])


def a_request() -> HttpRequest:
    async def receive() -> Any:
        await asyncio.Event().wait()  # the client stays

    return HttpRequest({"type": "http", "headers": [], "state": {}}, receive)


def test_pieces_of_a_reply_are_joined_in_the_order_of_replies() -> None:
    first = Piece(1, ("a",), "x", (5,), cached_tokens=4, reasoning_tokens=1, prompt_tokens=2)
    other = Piece(0, ("z",), tokens=(9,), end="stop")
    second = Piece(1, ("b",), "y", (6, 7), reasoning_tokens=2, prompt_tokens=8)
    last = Piece(1, ("c",), tokens=(8,), end="length", prompt_tokens=3)
    joined = Piece(1, ("abc",), "xy", (5, 6, 7, 8), cached_tokens=4, end="length", reasoning_tokens=3, prompt_tokens=8)
    assert merged([first, other, second, last]) == [other, joined]
    assert merged([first, last])[0].content == "ac" and merged([]) == []


@pytest.mark.parametrize(("size", "pool"), [(0, "text"), (262_144, "text"), (262_145, "large")])
def test_large_bodies_have_a_pool_for_themselves(loaded: LoadedModel, size: int, pool: str) -> None:
    service = unserved(loaded)
    name = asyncio.run(off_loop(service, lambda: current_thread().name, size))
    service.close()
    assert name.startswith(pool)


def test_large_bodies_are_read_in_turn(loaded: LoadedModel) -> None:
    service, waiting = unserved(loaded), Event()

    def read() -> str:
        waiting.wait(20)
        return current_thread().name

    async def names() -> list[str]:
        bodies = [asyncio.create_task(off_loop(service, read, 1 << 20)) for _ in range(4)]
        await asyncio.sleep(0)  # all are in the queue now
        waiting.set()
        return await asyncio.gather(*bodies)

    assert len(set(asyncio.run(names()))) == 1
    service.close()


END = (Piece(tokens=(5,), end="stop"),)


@pytest.mark.parametrize(
    ("schedule", "pauses", "failed"),
    [
        pytest.param({}, [2], True, id="no-token"),
        pytest.param({29.0: END}, [2, 0], False, id="just-in-time"),
        pytest.param({25.0: [Piece(tokens=(5,))], 124.0: END}, [2, 9, 0], False, id="silent-after-the-first"),
        pytest.param({1.0: [Piece(tokens=(5,))], 2.0: END}, [0, 0, 0], False, id="at-once"),
    ],
)
def test_a_reply_waits_for_its_first_token_only_as_long_as_the_limit(
    schedule: Schedule, pauses: list[int], failed: bool
) -> None:
    """The pauses before each piece are counted by the empty lists, which come every `ping_seconds`."""
    counted = [0]

    async def read() -> None:
        async with running(a_service(schedule), a_request(), prepared_for()) as pieces:
            async for batch in pieces:
                if batch:
                    counted.append(0)
                else:
                    counted[-1] += 1

    if failed:
        with pytest.raises(ApiError, match="no token within 30 s") as error:
            run_in_virtual_time(read, 1000)
        assert (error.value.status, error.value.code) == (504, "queue_timeout")
    else:
        run_in_virtual_time(read, 1000)
    assert counted == pauses


@pytest.mark.parametrize(
    ("end", "status", "code"),
    [
        pytest.param(Piece(end="deadline"), 504, "timeout", id="too-slow"),
        pytest.param(Piece(end="error", problem="a bug"), 500, "generation_failed", id="bug"),
        pytest.param(Piece(end="error", problem="too long", refused=True), 400, "generation_failed", id="refused"),
    ],
)
def test_a_reply_that_fails_is_an_error_of_the_server_or_of_the_request(end: Piece, status: int, code: str) -> None:
    async def read() -> None:
        async with running(a_service({1.0: [end]}), a_request(), prepared_for()) as pieces:
            async for _ in pieces:
                pass

    with pytest.raises(ApiError) as error:
        run_in_virtual_time(read, 100)
    assert (error.value.status, error.value.code) == (status, code) and end.problem in error.value.message


@pytest.mark.parametrize(
    ("times", "ttft", "tpot"),
    [
        pytest.param([(10, None, None, 0)], None, None, id="no-token"),
        pytest.param([(10, 12, 12, 1)], 2, None, id="single-token"),
        pytest.param([(10, 12, 15, 2)], 2, 3, id="two-tokens"),
        pytest.param([(10, 12, 20, 5), (10, 11, 17, 3), (10, 14, 18, 2), (10, 13, 13, 1)], 1, 3, id="mean-of-replies"),
    ],
)
def test_a_request_has_the_time_of_its_first_token_and_the_mean_of_the_others(
    times: list[tuple[float, float | None, float | None, int]], ttft: float | None, tpot: float | None
) -> None:
    prepared, service = prepared_for(), a_service({1.0: END}, times)

    async def read() -> None:
        async with running(service, a_request(), prepared) as pieces:
            assert [batch async for batch in pieces]

    run_in_virtual_time(read, 100)
    assert (prepared.figures.ttft, prepared.figures.tpot) == (ttft, tpot)
    assert (prepared.figures.prompt, prepared.figures.completion) == (1, 1)
    assert len(service.worker.cancelled) == len(times)


class Words:
    """Writes an event for every piece with text, and names the other events."""

    def begin(self) -> Iterable[bytes]:
        return [b"begin"]

    def add(self, piece: Piece) -> Iterable[bytes]:
        return [piece.content.encode()] if piece.content else []

    def keep_alive(self) -> Iterable[bytes]:
        return [b"ping"]

    def finish(self) -> Iterable[bytes]:
        return [b"end"]

    def failed(self, error: ApiError) -> Iterable[bytes]:
        return [b"failed"]

    def whole(self, replies: Sequence[Piece]) -> dict[str, Any]:
        return {"replies": len(replies)}


def test_a_stream_without_events_is_kept_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pieces without events, such as parts of a call that is sent when it is complete, count as silence."""
    text, silent = Piece(parts=("text",), tokens=(5,)), Piece(tokens=(6,))
    schedule: dict[float, list[Piece]] = {4: [text], 8: [silent], 12: [silent], 14: [silent], 16: [silent], 20: [text]}
    schedule |= {45: [Piece(parts=("last",), end="stop")]}
    sent: list[tuple[float, bytes, bool]] = []

    async def stream() -> None:
        now: Callable[[], float] = asyncio.get_running_loop().time
        monkeypatch.setattr(streaming, "time", SimpleNamespace(monotonic=now))
        request = a_request()

        async def send(message: Any) -> None:
            if message["type"] == "http.response.start":
                assert message["status"] == 200 and not sent
            else:
                sent.append((now(), message["body"], message["more_body"]))

        response = await answer(a_service(schedule), request, prepared_for(), Words(), True)
        await response(request.scope, request.receive, send)

    run_in_virtual_time(stream, 100)
    assert [body for _, body, _ in sent] == [
        *(b"begin", b"text", b"", b"", b"ping", b"", b"text", b"ping", b"ping", b"last", b"end"),
    ]
    assert [round(seconds) for seconds, _, _ in sent] == [0, 4, 8, 12, 14, 16, 20, 30, 40, 45, 45]
    assert [more for _, _, more in sent] == [True] * 10 + [False]
