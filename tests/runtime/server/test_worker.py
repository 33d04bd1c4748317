"""Test the threads between requests and engine: when a step starts, and what it does not wait for."""

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, cast

import pytest

from mycli.runtime.engine.replies.reader import Piece, ReplyReader
from mycli.runtime.engine.sequence import Request, SequenceOutput
from mycli.runtime.server import worker
from mycli.runtime.server.delivery import Delivery
from mycli.runtime.server.http.api_error import ApiError
from mycli.runtime.server.worker import EngineWorker
from tests.support.served import ScriptedEngine


class Held:
    """Simulates a delivery whose event loop is busy until it is released."""

    def __init__(self) -> None:
        self.pieces: list[Any] = []
        self.waiting: list[Callable[[], None]] = []
        self.put_once = threading.Semaphore(0)

    def put(self, pieces: Sequence[Any]) -> None:
        self.pieces += pieces

    def afterwards(self, work: Callable[[], None]) -> None:
        self.waiting.append(work)
        self.put_once.release()


class Reader:
    index = 0

    def feed(self, output: Any) -> Piece:
        return Piece(0, tokens=output.tokens, end="length" if output.finish_reason else None)


@pytest.mark.parametrize("shares", [pytest.param(True, id="cpu"), pytest.param(False, id="gpu")])
def test_a_step_on_the_cores_of_others_waits_until_the_one_before_is_told(
    shares: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker, "DELIVERY_SECONDS", 30.0)
    engine, held = ScriptedEngine(lambda request: [5] * 4), Held()
    engine.shares_cores = shares
    threads = EngineWorker(engine, 8, lambda text: None)
    threads.start()
    try:
        threads.submit([(Request((1,), limit=4), [cast(ReplyReader, Reader())])], cast(Delivery, held))
        for told in range(1, 5):
            assert held.put_once.acquire(timeout=20)
            if shares:
                time.sleep(0.02)  # otherwise another step would have run
                assert len(held.pieces) == told
                held.waiting[-1]()
        assert [len(piece.tokens) for piece in held.pieces] == [1, 1, 1, 1]
    finally:
        for work in held.waiting:
            work()
        threads.stop()


def test_a_loop_that_is_busy_does_not_stop_the_engine() -> None:
    """The loop need not confirm a delivery."""
    engine, held = ScriptedEngine(lambda request: [5] * 4), Held()
    threads = EngineWorker(engine, 8, lambda text: None)
    threads.start()
    try:
        threads.submit([(Request((1,), limit=4), [cast(ReplyReader, Reader())])], cast(Delivery, held))
        for _ in range(4):
            assert held.put_once.acquire(timeout=20)
        assert len(held.pieces) == 4
    finally:
        threads.stop()


def test_free_memory_is_released_after_a_number_of_replies(monkeypatch: pytest.MonkeyPatch) -> None:
    released = threading.Semaphore(0)
    monkeypatch.setattr(worker, "RELEASE_REPLIES", 3)
    monkeypatch.setattr(worker, "release_free_memory", released.release)
    threads, held = EngineWorker(ScriptedEngine(lambda request: [5]), 8, lambda text: None), Held()
    threads.start()
    try:
        for _ in range(8):
            threads.submit([(Request((1,), limit=1), [cast(ReplyReader, Reader())])], cast(Delivery, held))
            assert held.put_once.acquire(timeout=20)
        assert released.acquire(timeout=20) and released.acquire(timeout=20)
    finally:
        threads.stop()
    assert not released.acquire(blocking=False)


class Reading(ScriptedEngine):
    """Computes the prompt of its first request in a step without tokens."""

    steps = 0

    def step(self) -> Sequence[SequenceOutput]:
        self.steps += 1
        return [SequenceOutput(1, prompt_tokens=1)] if self.steps == 1 else super().step()


def test_a_reply_waits_until_its_first_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "DELIVERY_SECONDS", 30.0)
    threads, held = EngineWorker(Reading(lambda request: [5] * 3), 8, print), Held()
    threads.start()
    seen = []
    try:
        threads.submit([(Request((1,), limit=3), [cast(ReplyReader, Reader())])], cast(Delivery, held))
        for _ in range(4):
            assert held.put_once.acquire(timeout=20)
            seen.append((threads.waiting, threads.underway))
            held.waiting[-1]()
    finally:
        threads.stop()
    assert seen == [(1, 1), (0, 1), (0, 1), (0, 0)]
    metrics = threads.metrics.text().decode()
    assert "time_to_first_token_seconds_count 1.0" in metrics and "inter_token_latency_seconds_count 2.0" in metrics
    assert "request_generation_tokens_sum 3.0" in metrics


@pytest.mark.parametrize(("stops", "reason", "cancelled"), [(True, "stop", [1]), (False, "length", [])])
def test_a_stop_string_ends_the_sequence_in_the_engine(
    stops: bool, reason: str, cancelled: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Stopping(Reader):
        def feed(self, output: Any) -> Piece:
            return Piece(0, tokens=output.tokens, end="stop_string") if stops else super().feed(output)

    monkeypatch.setattr(worker, "DELIVERY_SECONDS", 30.0)
    engine, held = ScriptedEngine(lambda request: [5] * 9), Held()
    threads = EngineWorker(engine, 8, print)
    threads.start()
    try:
        threads.submit(
            [(Request((1,), limit=9 if stops else 1), [cast(ReplyReader, Stopping())])], cast(Delivery, held)
        )
        assert held.put_once.acquire(timeout=20)
        held.waiting[-1]()
    finally:
        threads.stop()
    assert engine.cancelled == cancelled and held.pieces[0].end == ("stop_string" if stops else "length")
    assert f'request_success_total{{finished_reason="{reason}"}} 1.0' in threads.metrics.text().decode()


def test_a_request_for_one_reply_waits_among_requests_and_others_among_replies() -> None:
    threads = EngineWorker(ScriptedEngine(lambda request: [5]), 4, print)  # not started: everything waits

    def submit(replies: int) -> None:
        readers = [cast(ReplyReader, Reader())] * replies
        threads.submit([(Request((1,), limit=1), readers)], cast(Delivery, Held()))

    submit(9)  # more than the limit, but nothing else is waiting
    for _ in range(3):
        submit(1)
    with pytest.raises(ApiError, match="queue full: 4 requests are waiting, at most 4 may"):
        submit(1)
    with pytest.raises(ApiError, match="queue full: 12 replies are waiting, at most 4 may"):
        submit(2)
    assert threads.underway == threads.waiting == 12


@pytest.mark.parametrize("lost", [True, False])
def test_an_engine_that_lost_its_accelerator_takes_no_more_requests(lost: bool) -> None:
    """The replies of a step alone fail by any other error."""
    kind = type("AcceleratorError" if lost else "OtherError", (RuntimeError,), {})
    engine, held, lines = ScriptedEngine(lambda request: [5]), Held(), list[str]()
    threads = EngineWorker(engine, 8, lines.append)
    threads.start()

    def submit() -> None:
        engine.error = kind("CUDA error: " + "x" * 300 + "\nCompile with more checks")
        threads.submit([(Request((1,), limit=1), [cast(ReplyReader, Reader())])], cast(Delivery, held))
        assert held.put_once.acquire(timeout=20)

    try:
        submit()
        if lost:
            with pytest.raises(ApiError) as error:
                submit()
            assert error.value.status == 503
            assert error.value.message == "the engine has failed: CUDA error: " + "x" * 188
        else:
            submit()
    finally:
        threads.stop()
    assert [piece.code for piece in held.pieces] == ["internal_error"] * (1 if lost else 2)
    assert engine.cancelled == ([1] if lost else [1, 2]) and f"engine step failed: {kind.__name__}" in lines[0]
