"""Test clients that disconnect, do not read, wait, or are too many: none affects the others."""

import asyncio
import dataclasses
import http.client
import json
import re
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import pytest

from mycli.runtime.engine.loading.loader import LoadedModel
from mycli.runtime.engine.replies.reader import Piece
from mycli.runtime.engine.sequence import SequenceOutput
from mycli.runtime.server.delivery import MAX_BEHIND, Delivery
from mycli.runtime.server.http.api_error import ApiError
from mycli.runtime.server.http.settings import ServerLimits, ServerSettings
from tests.runtime.server.conftest import Scripted
from tests.support.served import ScriptedEngine, Served, joined, serving


def leave(served: Served, stream: bool) -> None:
    body = {"model": "pico", "messages": [{"role": "user", "content": "Go"}], "stream": stream, "ignore_eos": True}
    connection = http.client.HTTPConnection("127.0.0.1", served.port, timeout=20)
    connection.request("POST", "/v1/chat/completions", json.dumps(body), {"content-type": "application/json"})
    if stream:
        connection.getresponse().read(10)
    served.busy()
    assert connection.sock is None or connection.sock.close() is None
    connection.close()


@pytest.mark.parametrize("stream", [False, True], ids=["g20-whole", "g19-streamed"])
def test_a_client_that_leaves_frees_its_sequence(loaded: LoadedModel, stream: bool) -> None:
    engine = ScriptedEngine(lambda request: [5] * 100_000, pause=0.002)
    with serving(loaded, engine) as served:
        leave(served, stream)
        served.idle()
        assert engine.cancelled == [1]
        assert 'request_success_total{finished_reason="cancelled"} 1.0' in served.ask("GET", "/metrics").body.decode()


@pytest.mark.parametrize("stream", [False, True], ids=["g20-whole", "g19-streamed"])
def test_a_client_that_leaves_gives_its_blocks_back(served: Served, stream: bool) -> None:
    def cancelled() -> int:
        found = re.findall(r'finished_reason="cancelled"} (\d+)', served.ask("GET", "/metrics").body.decode())
        return int(found[0]) if found else 0

    before = cancelled()
    leave(served, stream)
    served.idle()
    assert cancelled() == before + 1
    assert served.ask("GET", "/health").json == {"status": "ok", "running": 0, "waiting": 0, "cache": 0.0}


class Flood(ScriptedEngine):
    """Generates thousands of tokens per step for a long prompt, without end."""

    def step(self) -> list[SequenceOutput]:
        return [
            dataclasses.replace(one, tokens=(5,) * 5000) if one.finish_reason is None else one for one in super().step()
        ]


def test_g21_g42_a_reader_that_does_not_read_is_dropped(loaded: LoadedModel) -> None:
    """Check that other clients do not wait for it."""
    engine = Flood(lambda request: [5] * 20_000 if len(request.prompt) > 12 else [5])
    settings = ServerSettings(("pico",), limits=ServerLimits(stall_seconds=0.5))
    with serving(loaded, engine, settings) as served:
        body = {"model": "pico", "messages": [{"role": "user", "content": "a b c d e f g h"}], "stream": True}
        connection = http.client.HTTPConnection("127.0.0.1", served.port, timeout=60)
        connection.connect()
        connection.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.request("POST", "/v1/chat/completions", json.dumps(body), {"content-type": "application/json"})
        assert connection.getresponse().read(10)
        end = time.monotonic() + 60
        while not engine.cancelled:
            assert served.chat("Hi").status == 200 and time.monotonic() < end
        served.idle()
        connection.close()


@pytest.mark.parametrize("more", [0, 1])
def test_pieces_that_wait_for_a_slow_reader_have_a_limit(more: int) -> None:
    async def read() -> int:
        delivery = Delivery()
        for _ in range(2):
            delivery.put([Piece()] * (MAX_BEHIND // 2))
        delivery.put([Piece()] * more)
        await asyncio.sleep(0)
        return len(await delivery.next())

    if more:
        with pytest.raises(ApiError, match="reads the reply too slowly"):
            asyncio.run(read())
    else:
        assert asyncio.run(read()) == MAX_BEHIND


@pytest.mark.slow
def test_g42_who_reads_is_answered_to_the_end_while_255_others_do_not_read(loaded: LoadedModel) -> None:
    """The slow clients read a byte now and then of replies that have filled the socket buffer."""
    replies = {True: [5] * 300, False: [5] * 20_000}
    engine = ScriptedEngine(lambda request: replies[len(request.prompt) < 12], running=256, pause=0.01)
    limits = ServerLimits(waiting=1000, stall_seconds=3600)
    with serving(loaded, engine, ServerSettings(("pico",), limits=limits)) as served, ExitStack() as links:
        body = json.dumps({"messages": [{"role": "user", "content": "a b c d e f g h"}], "stream": True}).encode()
        head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(body)}\r\n"
        readers = []
        for _ in range(255):
            link = links.enter_context(socket.socket())
            link.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            link.connect(("127.0.0.1", served.port))
            link.sendall(f"{head}content-type: application/json\r\n\r\n".encode() + body)
            readers.append(link)
        end = time.monotonic() + 120
        while served.service.worker.stats.running < 255:
            assert time.monotonic() < end
            time.sleep(0.05)
        over = threading.Event()

        def sip() -> None:
            while not over.wait(0.2):
                assert all(link.recv(1) for link in readers)

        thread = threading.Thread(target=sip)
        thread.start()
        try:
            assert joined(served.chat("Hi"))[3] == "stop"
        finally:
            over.set()
            thread.join()
        assert served.service.worker.stats.running == 255


def test_g22_too_many_wait_and_one_is_told_so(loaded: LoadedModel) -> None:
    engine = ScriptedEngine(lambda request: [5, 6, 7], running=1)
    engine.held.clear()
    settings = ServerSettings(("pico",), limits=ServerLimits(waiting=3))
    with serving(loaded, engine, settings) as served, ThreadPoolExecutor(8) as pool:
        answers = [pool.submit(served.chat) for _ in range(3)]
        end = time.monotonic() + 60
        while served.service.worker.waiting < 3:
            assert time.monotonic() < end
            time.sleep(0.01)
        refused = served.chat()
        assert refused.status == 429 and refused.error["code"] == "queue_full" and refused.headers["retry-after"]
        assert served.chat(stream=True).status == 429
        engine.held.set()
        assert [one.result().status for one in answers] == [200, 200, 200]


def test_g24_g26_what_waits_is_pinged_and_at_last_told(loaded: LoadedModel) -> None:
    engine = ScriptedEngine(lambda request: [5, 6])
    engine.held.clear()
    limits = ServerLimits(ping_seconds=0.1, queue_seconds=0.5)
    with serving(loaded, engine, ServerSettings(("pico",), limits=limits)) as served:
        streamed = served.chat(stream=True)
        assert (
            streamed.body.count(b'"delta":{},"logprobs":null,"finish_reason":null') >= 3
            and streamed.events[-1]["error"]["code"] == "queue_timeout"
        )
        waited = served.ask("POST", "/completion", {"prompt": "a", "stream": True}).events
        assert len(waited) >= 4 and all(event["content"] == "" and not event["stop"] for event in waited[:3])
        assert served.chat().status == 504
        engine.held.set()
        served.idle()


def test_a_reply_whose_time_ends_before_it_begins_is_an_error(loaded: LoadedModel) -> None:
    class Late(ScriptedEngine):
        def step(self) -> list[SequenceOutput]:
            return [dataclasses.replace(output, finish_reason="deadline") for output in super().step()]

    with serving(loaded, Late(lambda request: [5])) as served:
        answer = served.chat()
        assert (answer.status, answer.error["code"]) == (504, "timeout")


def test_g27_while_it_drains_nothing_new_begins(scripted: Scripted) -> None:
    with scripted("a b c") as served:
        served.service.draining = True
        assert served.ask("GET", "/health").status == 503 and served.ask("GET", "/v1/models").status == 200
        answer = served.chat()
        assert answer.status == 503 and answer.error["code"] == "shutting_down" and answer.headers["retry-after"]
        assert answer.error["type"] == "overloaded_error"


def test_g33_no_reply_holds_what_another_was_asked(loaded: LoadedModel) -> None:
    """The server echoes 64 secrets concurrently: every client gets its own, whatever is batched."""
    engine = ScriptedEngine(lambda request: list(request.prompt), running=16)
    with serving(loaded, engine) as served, ThreadPoolExecutor(32) as pool:
        secrets = [f"secret {number * 7919:07d}." for number in range(64)]
        answers = list(pool.map(lambda one: served.chat(one, stream=one[-2] in "02468"), secrets))
        for secret, answer in zip(secrets, answers, strict=True):
            content = joined(answer)[0]
            assert secret in content and not [other for other in secrets if other != secret and other in content]
        served.idle()


def test_g36_the_loop_is_free_while_a_long_text_is_read(served: Served) -> None:
    """The megabyte is parsed, rendered and encoded in threads, so a probe in the meantime does not wait."""
    began, slow = threading.Event(), []

    def long() -> None:
        began.set()
        served.ask("POST", "/tokenize", {"prompt": "word " * 200_000})
        slow.append(True)

    thread = threading.Thread(target=long)
    thread.start()
    began.wait()
    probes = 0
    while not slow:
        assert served.ask("GET", "/health").status == 200
        probes += 1
    thread.join()
    assert probes >= 2  # if the event loop blocks, the first is answered last
