"""Test that responses reach clients that still send, or have ended their side, and that others are not kept."""

import asyncio
import socket
import time
from typing import cast

import h11
import pytest

from mycli.runtime.server.http import lingering
from mycli.runtime.server.http.settings import ServerLimits, ServerSettings
from tests.runtime.server.conftest import Scripted
from tests.support.served import Served
from tests.support.virtual_time import run_in_virtual_time

KEY = "s3cret-key"
BODY = b'{"prompt":"Hi","max_tokens":40%b}'
HEALTH = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"


def post(body: bytes, *headers: str, kind: str = "application/json", version: str = "1.1") -> bytes:
    lines = [
        f"POST /v1/completions HTTP/{version}", "Host: localhost", f"Content-Type: {kind}", *headers,
        *([] if any("ncoding" in line for line in headers) else [f"Content-Length: {len(body)}"]),
    ]  # fmt: skip
    return "\r\n".join([*lines, "", ""]).encode() + body


def stream(fields: bytes = b',"stream":true') -> bytes:
    return post(BODY % fields)


def read_all(link: socket.socket) -> bytes:
    parts = []
    while part := link.recv(65536):
        parts.append(part)
    return b"".join(parts)


def read_reply(link: socket.socket) -> bytes:
    parts = b""
    while not parts.endswith(b"}"):
        parts += link.recv(65536)
    return parts


def connected(served: Served) -> socket.socket:
    return socket.create_connection(("127.0.0.1", served.port), timeout=30)


@pytest.mark.parametrize("fields", [b"", b',"stream":true'], ids=["whole", "stream"])
@pytest.mark.parametrize("requests", [1, 2], ids=["one", "pipelined"])
def test_a_client_that_ends_its_side_gets_its_response(scripted: Scripted, fields: bytes, requests: int) -> None:
    with scripted("a b c d e f", pause=0.03) as served:
        answer = served.raw(stream(fields) * requests + HEALTH)
        assert answer.count(b"HTTP/1.1 200") == requests + 1 and answer.endswith(b"}")
        assert answer.count(b"[DONE]") == (requests if fields else 0)
        served.idle()


@pytest.mark.parametrize("fields", [b"", b',"stream":true'], ids=["whole", "stream"])
@pytest.mark.parametrize("half", [False, True], ids=["closed", "half-closed before"])
def test_the_reply_of_a_client_that_has_gone_is_cancelled(
    scripted: Scripted, fields: bytes, half: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No token is generated meanwhile: only a probe can tell, or the events that keep a stream alive."""
    monkeypatch.setattr(lingering, "_PROBE_CHECKS", 3)
    limits = ServerLimits(ping_seconds=0.5 if half else 60.0)
    with scripted("a b c d", settings=ServerSettings(("pico",), limits=limits)) as served:
        engine = served.service.worker.engine
        engine.held.clear()
        link = connected(served)
        link.sendall(stream(fields))
        while not served.service.worker.underway:
            time.sleep(0.005)
        if fields:  # closing with unread bytes resets the connection anyway
            assert link.recv(65536).startswith(b"HTTP/1.1 200")
        if half:
            link.shutdown(socket.SHUT_WR)
            time.sleep(0.3)
        link.close()
        served.log_line("POST")  # written at the end of a request
        engine.held.set()
        served.idle()
        assert engine.cancelled


def test_a_client_of_http_1_0_that_ends_its_side_counts_as_gone(scripted: Scripted) -> None:
    with scripted("a b c d") as served:
        served.service.worker.engine.held.clear()
        assert served.raw(post(BODY % b"", version="1.0")) == b""
        served.service.worker.engine.held.set()


SIZE = 3 << 20
CHUNKED = "Transfer-Encoding: chunked"
REFUSED = {
    "type": (post(b"x" * SIZE, "Connection: close", f"Authorization: Bearer {KEY}", kind="text/plain"), b"415"),
    "key": (post(b"x" * SIZE, "Connection: close"), b"401"),
    "http 1.0": (post(b"x" * SIZE, version="1.0"), b"401"),
    "chunks": (post(b"zz\r\n" * SIZE, CHUNKED), b"400"),
    "small chunks": (post(b"1\r\nx\r\n" * SIZE, CHUNKED, f"Authorization: Bearer {KEY}"), b"400"),
}


@pytest.mark.parametrize(("request_", "status"), REFUSED.values(), ids=REFUSED)
def test_a_response_reaches_a_client_that_sends_on(
    scripted: Scripted, request_: bytes, status: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    """It sends everything before it reads; a connection closed before that is reset, and the response lost."""
    with scripted("Hi", settings=ServerSettings(("pico",), key=KEY.encode())) as served, connected(served) as link:
        link.sendall(request_[:1000])
        time.sleep(0.1)
        for start in range(1000, len(request_), 1 << 18):
            link.sendall(request_[start : start + (1 << 18)])
        assert read_all(link).split()[1] == status
        served.log_line("POST")
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


@pytest.mark.parametrize("headers", [(), ("Connection: close",)], ids=["keep-alive", "close"])
def test_a_refused_body_without_end_is_cut(scripted: Scripted, headers: tuple[str, ...]) -> None:
    limits = ServerLimits(body_bytes=10_000)
    head = post(b"", *headers, kind="text/plain").replace(b"Length: 0", b"Length: 9999999999")
    with scripted("Hi", settings=ServerSettings(("pico",), limits=limits)) as served, connected(served) as link:
        link.sendall(head)
        with pytest.raises(ConnectionError):
            for _ in range(1000):
                link.sendall(b"x" * 65536)


def test_the_limit_of_refused_bodies_is_for_each_request(scripted: Scripted) -> None:
    limits = ServerLimits(body_bytes=10_000)
    with scripted("Hi", settings=ServerSettings(("pico",), limits=limits)) as served, connected(served) as link:
        for _ in range(4):
            link.sendall(post(b"x" * 100_000, kind="text/plain"))
            assert read_reply(link).split()[1] == b"415"


def test_a_refused_body_that_stalls_is_cut(scripted: Scripted) -> None:
    limits = ServerLimits(body_seconds=0.3)
    head = post(b"", "Connection: close", kind="text/plain").replace(b"Length: 0", b"Length: 9999")
    with scripted("Hi", settings=ServerSettings(("pico",), limits=limits)) as served, connected(served) as link:
        link.sendall(head)
        assert read_all(link).split()[1] == b"415"
        while served.server.server_state.connections:
            time.sleep(0.01)


@pytest.mark.parametrize("bad", [b"zz\r\n", b"zz\r\n" * 10_000])
def test_an_invalid_rest_of_a_refused_body_is_no_fault(
    scripted: Scripted, bad: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    with scripted("Hi") as served, connected(served) as link:
        link.sendall(post(b"", CHUNKED, kind="text/plain"))
        answer = read_reply(link)
        assert answer.split()[1] == b"415"
        link.sendall(bad)
        assert read_all(link) == b""
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


def test_after_a_refusal_instead_of_100_continue_no_body_is_expected(scripted: Scripted) -> None:
    """The client sends none, and the next request must not be read as the body."""
    head = post(b"", "Expect: 100-continue", kind="text/plain").replace(b"Length: 0", b"Length: 99")
    with scripted("Hi") as served:
        with connected(served) as link:
            link.sendall(head)
            answer = read_reply(link)
            assert answer.split()[1] == b"415" and b"connection: close" in answer
            link.sendall(HEALTH)
            assert read_all(link) == b""
        accepted = post(b'{"prompt":"Hi"}', "Expect: 100-continue")
        with connected(served) as link:
            link.sendall(accepted[:-5])
            assert link.recv(65536).startswith(b"HTTP/1.1 100 ")
            link.sendall(accepted[-5:])
            answer = read_reply(link)
            assert answer.split()[1] == b"200" and b"connection: close" not in answer


class Line:
    """Notes what is written to a client that has ended its side, with the time."""

    def __init__(self) -> None:
        self.written: list[tuple[int, bytes]] = []
        self._sockets = socket.socketpair()

    def __enter__(self) -> "Line":
        return self

    def __exit__(self, *_: object) -> None:
        for end in self._sockets:
            end.close()

    def get_extra_info(self, name: str) -> socket.socket:
        return self._sockets[0]

    def is_closing(self) -> bool:
        return False

    def write(self, data: bytes) -> None:
        self.written.append((round(asyncio.get_running_loop().time()), data))


@pytest.mark.parametrize(
    ("begun", "probes"),
    [
        pytest.param(False, [(seconds, b"HTTP/1.1 100 Continue\r\n\r\n") for seconds in (0, 5, 10)], id="no-response"),
        pytest.param(True, [(0, b"0")], id="within-a-chunked-body"),  # parsers limit the digits of a size
    ],
)
def test_a_client_that_has_ended_its_side_is_probed_every_five_seconds(
    begun: bool, probes: list[tuple[int, bytes]]
) -> None:
    connection = h11.Connection(h11.SERVER)
    connection.receive_data(HEALTH)
    connection.next_event()
    if begun:
        connection.send(h11.Response(status_code=200, headers=[("transfer-encoding", "chunked")]))

    async def probe() -> None:
        lingering.ClientProbe(cast(asyncio.Transport, line), connection)
        await asyncio.sleep(12)

    with Line() as line:
        run_in_virtual_time(probe, 20)
        assert line.written == probes
