"""Test slow, idle and too many sockets."""

import grp
import http.client
import json
import os
import socket
import stat
import time
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path

import pytest

from mycli.runtime.errors import ResourceError, UsageError
from mycli.runtime.server.http.body import MAX_BODY_VALUES
from mycli.runtime.server.http.connection import listen, listen_unix
from mycli.runtime.server.http.settings import ServerLimits, ServerSettings
from tests.runtime.server.conftest import Scripted
from tests.support.paths import ROOT
from tests.support.served import Served

# Rows of the table in docs/server.md, with the names of the limits in place of the numbers.
DOCUMENTED = (
    "request body | {body_bytes} MiB, {values:,} values, {body_seconds:.0f} s to arrive |",
    "request head | {header_bytes} KiB, {headers} headers, {header_seconds:.0f} s to arrive |",
    "connections | {connections:,};",
    "waiting replies | {waiting} (`--max-waiting`); further ones get 429, and 504 after {queue_seconds:.0f} s",
    "client that does not read | disconnected after {stall_seconds:.0f} s;",
    "idle stream | an empty event every {ping_seconds:.0f} s |",
    "replies per request | {choices} |",
)
HEAD = b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 1000\r\n\r\n"


def dribble(served: Served, begin: bytes, drop: bytes, seconds: float) -> bytes:
    """Send `begin`, then a byte now and then; return what the server sends before it closes."""
    with socket.create_connection(("127.0.0.1", served.port), timeout=seconds) as link:
        link.sendall(begin)
        end = time.monotonic() + seconds
        link.settimeout(0.05)
        while time.monotonic() < end:
            try:
                if part := link.recv(4096):
                    return part
                return b"closed"
            except TimeoutError:
                pass
            except ConnectionError:
                return b"closed"
            try:
                link.sendall(drop)
            except ConnectionError:
                return b"closed"
    return b""


@pytest.mark.parametrize("row", DOCUMENTED, ids=lambda row: row.partition(" |")[0])
def test_the_limits_are_the_documented_ones(row: str) -> None:
    limits = asdict(ServerLimits())
    limits |= {"values": MAX_BODY_VALUES, "body_bytes": limits["body_bytes"] >> 20}
    limits["header_bytes"] >>= 10
    assert f"\n| {row.format_map(limits)}" in (ROOT / "docs" / "server.md").read_text()


@pytest.mark.parametrize(
    "begin, drop", [(b"", b"G"), (b"GET / HTTP/1.1\r\n", b"x"), (HEAD, b" ")], ids=["line", "head", "body"]
)
def test_g8_a_slow_request_is_given_up(scripted: Scripted, begin: bytes, drop: bytes) -> None:
    """Check that single bytes do not extend the deadline."""
    limits = ServerLimits(header_seconds=0.4, body_seconds=0.4)
    with scripted("Hi", settings=ServerSettings(("pico",), limits=limits)) as served:
        answer = dribble(served, begin, drop, 15)
        assert answer.startswith(b"HTTP/1.1 408") or answer == b"closed"
        assert served.ask("GET", "/health").status == 200


def test_g8_a_second_slow_request_on_a_connection_is_given_up_too(scripted: Scripted) -> None:
    limits = ServerLimits(header_seconds=0.4)
    with scripted("Hi", settings=ServerSettings(("pico",), limits=limits)) as served:
        request = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
        with socket.create_connection(("127.0.0.1", served.port), timeout=15) as link:
            for _ in range(3):  # it may idle between requests for longer than the header timeout
                link.sendall(request)
                answer = b""
                while not answer.endswith(b"}"):
                    answer += link.recv(65536)
                assert answer.startswith(b"HTTP/1.1 200")
                time.sleep(0.5)
            link.sendall(b"GET /he")
            parts = b""
            while part := link.recv(4096):
                parts += part
            assert parts == b"" or parts.startswith(b"HTTP/1.1 408")


# Chunks are counted while more are to come, in slices of up to 2,730 chunks of one byte.
@pytest.mark.parametrize(("size", "count", "refused"), [(1, 4000, False), (1, 7500, True), (64, 7500, False)])
def test_a_body_of_many_small_chunks_is_refused(scripted: Scripted, size: int, count: int, refused: bool) -> None:
    head = HEAD.replace(b"Content-Length: 1000", b"Transfer-Encoding: chunked\r\nConnection: close")
    body = (b"%x\r\n%b\r\n" % (size, b"x" * size)) * count + b"0\r\n\r\n"
    with scripted("Hi") as served, socket.create_connection(("127.0.0.1", served.port), timeout=15) as link:
        link.sendall(head + body)
        answer = b""
        while part := link.recv(4096):
            answer += part
        assert answer.startswith(b"HTTP/1.1 400") and (b"small_chunks" in answer) is refused


def test_a_long_reply_is_no_slow_request(scripted: Scripted) -> None:
    """The deadlines apply to what a client sends, not to its waiting."""
    limits = ServerLimits(header_seconds=0.2, body_seconds=0.2)
    with scripted("a b c d e f g h i j k l", settings=ServerSettings(("pico",), limits=limits), pause=0.05) as served:
        assert served.chat().status == 200 and served.chat(stream=True).body.endswith(b"[DONE]\n\n")


def test_who_reads_slowly_gets_the_whole_of_a_large_response(scripted: Scripted) -> None:
    """It takes several times `stall_seconds`."""
    body = json.dumps({"prompt": "漢字仮名" * 125_000}, ensure_ascii=False).encode()
    with scripted(settings=ServerSettings(("pico",), limits=ServerLimits(stall_seconds=0.4))) as served:
        connection = http.client.HTTPConnection("127.0.0.1", served.port, timeout=60)
        with socket.socket() as link:
            link.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
            link.connect(("127.0.0.1", served.port))
            connection.sock = link
            connection.request("POST", "/tokenize", body, {"content-type": "application/json"})
            response, size, begin = connection.getresponse(), 0, time.monotonic()
            while part := response.read(1 << 17):
                size += len(part)
                time.sleep(0.04)
        assert size == int(response.headers["content-length"]) > 5 << 20 and time.monotonic() - begin > 1.2


def test_g35_idle_sockets_make_room(scripted: Scripted) -> None:
    """Check that a socket beyond the limit closes the one that has been idle longest."""
    limits = ServerLimits(connections=20)
    with scripted("Hi", settings=ServerSettings(("pico",), limits=limits)) as served, ExitStack() as links:
        idle = [links.enter_context(socket.create_connection(("127.0.0.1", served.port))) for _ in range(30)]
        assert served.ask("GET", "/health").status == 200
        idle[0].settimeout(10)
        assert idle[0].recv(1) == b""
        idle[-1].sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        assert idle[-1].recv(4096).startswith(b"HTTP/1.1 200")


def test_g35_requests_under_way_are_not_closed_for_others(scripted: Scripted) -> None:
    limits = ServerLimits(connections=4)
    with scripted("Hi", settings=ServerSettings(("pico",), limits=limits)) as served, ExitStack() as links:
        for _ in range(4):
            link = links.enter_context(socket.create_connection(("127.0.0.1", served.port)))
            link.sendall(HEAD)
        time.sleep(0.2)
        with socket.create_connection(("127.0.0.1", served.port), timeout=10) as late:
            late.sendall(HEAD)
            assert late.recv(4096).startswith(b"HTTP/1.1 503")


def test_g29_a_place_that_cannot_be_listened_at() -> None:
    with listen("127.0.0.1", 0) as first, pytest.raises(ResourceError, match="is in use") as busy:
        listen("127.0.0.1", first.getsockname()[1])
    assert busy.value.code == "choose-port"
    with pytest.raises(UsageError, match="cannot resolve host"):
        listen("no such host", 0)
    with pytest.raises(ResourceError, match="not an address of this machine"):
        listen("192.0.2.1", 0)


def test_a_unix_socket_is_open_to_its_user_or_to_a_group(tmp_path: Path) -> None:
    path = tmp_path / "socket"
    with listen_unix(path):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        with pytest.raises(ResourceError, match="in use"):
            listen_unix(path)
    group = grp.getgrgid(os.getgroups()[-1] if os.getgroups() else os.getgid())
    with listen_unix(path, group.gr_name):  # what a dead server left is replaced
        assert stat.S_IMODE(path.stat().st_mode) == 0o660 and path.stat().st_gid == group.gr_gid
    path.unlink()
    with pytest.raises(UsageError, match="no such group"):
        listen_unix(path, "no-such-group")
    assert not path.exists()
