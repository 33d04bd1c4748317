"""Test the threads between requests and engine: when a step starts, and what it does not wait for."""

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, cast

import pytest

from mycli.runtime.engine.replies.reader import Piece, ReplyReader
from mycli.runtime.engine.sequence import Request
from mycli.runtime.server import worker
from mycli.runtime.server.delivery import Delivery
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
        for _ in range(7):
            threads.submit([(Request((1,), limit=1), [cast(ReplyReader, Reader())])], cast(Delivery, held))
            assert held.put_once.acquire(timeout=20)
        assert released.acquire(timeout=20) and released.acquire(timeout=20)
    finally:
        threads.stop()
    assert not released.acquire(blocking=False)
