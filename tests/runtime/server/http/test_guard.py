"""Test access control: hosts, origins, keys and request shapes; and what is logged."""

import json
from typing import Any

import pytest

from mycli.runtime.server.application import ROUTES
from mycli.runtime.server.http.guard import OPEN_PATHS, host_of
from mycli.runtime.server.http.settings import ServerLimits, ServerSettings
from tests.runtime.server.conftest import Scripted
from tests.support.served import JSON, Served

CHAT = "/v1/chat/completions"
KEY = "s3cret-key"


@pytest.mark.parametrize(
    "host, allowed",
    [
        ("localhost", True),
        ("127.0.0.1:8080", True),
        ("[::1]:80", True),
        ("192.168.1.7", True),
        ("page.localhost:1", True),
        ("evil.example", False),
        ("localhost.evil.example", False),
        ("127.0.0.1.evil.example:8080", False),
        ("user@127.0.0.1", False),
        ("127.0.0.1:8080, evil.example", False),
        ("", False),
        ("a" * 5000, False),
    ],
    ids=lambda value: str(value)[:30],
)
def test_g2_a_foreign_host_is_refused(served: Served, host: str, allowed: bool) -> None:
    answer = served.ask("GET", "/v1/models", headers={"Host": host})
    assert answer.status == (200 if allowed else 403)
    if not allowed:
        assert answer.error["code"] == "host_not_allowed" and "the server was started with" in answer.error["message"]


def test_g2_http_1_0_needs_no_host(served: Served) -> None:
    assert served.raw(b"GET /health HTTP/1.0\r\n\r\n").split()[1] == b"200"
    assert served.raw(b"GET /health HTTP/1.0\r\nHost: evil.example\r\n\r\n").split()[1] == b"403"
    assert served.raw(b"GET /health HTTP/1.1\r\nConnection: close\r\n\r\n").split()[1] == b"400"


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("//v1/models", 200),  # of base URLs with a slash at the end
        ("/v1//models", 200),
        ("/v1/v1/models", 200),  # of base URLs that end in /v1, in clients that add it
        ("/v1/v1/models/pico", 200),
        ("//models", 200),
        ("//api/version", 200),
        ("/v1/models//models/pico", 404),  # the name of a model may begin with a slash
        ("/v1/v1", 404),
        ("/v1/api/version", 404),
    ],
)
def test_a_prefix_that_a_client_repeats(served: Served, path: str, status: int) -> None:
    answer = served.ask("GET", path)
    assert answer.status == status
    if path == "/v1/models//models/pico":
        assert "/models/pico" in answer.error["message"]


def test_a_repeated_prefix_needs_the_key_as_well(scripted: Scripted) -> None:
    with scripted("hi", settings=ServerSettings(("pico",), key=KEY.encode())) as served:
        assert [served.ask("GET", path).status for path in ("//v1/models", "/v1/v1/models", "//health")] == [
            401,
            401,
            200,
        ]


@pytest.mark.parametrize(
    "target, host, status",
    [
        ("http://localhost:1/v1/models", "localhost", b"200"),
        ("HTTP://127.0.0.1/v1/models?limit=1", "evil.example", b"200"),
        ("http://localhost", "localhost", b"200"),
        ("http://evil.example/v1/models", "localhost", b"403"),
        ("http://evil.example@localhost/v1/models", "localhost", b"403"),
        ("http:///v1/models", "localhost", b"403"),
        ("http%3A//localhost/v1/models", "localhost", b"404"),
        ("/http://localhost/v1/models", "localhost", b"404"),
    ],
)
def test_g2_the_host_of_an_absolute_target_is_checked(served: Served, target: str, host: str, status: bytes) -> None:
    """RFC 9112, section 3.2.2: it takes the place of the header."""
    data = f"GET {target} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n".encode()
    assert served.raw(data).split()[1] == status


def test_an_absolute_target_needs_a_key_as_well(scripted: Scripted) -> None:
    data = b"GET http://localhost/v1/models HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
    with scripted(settings=ServerSettings(("pico",), key=KEY.encode())) as served:
        assert served.raw(data + b"\r\n").split()[1] == b"401"
        assert served.raw(data + f"Authorization: Bearer {KEY}\r\n\r\n".encode()).split()[1] == b"200"


def test_g2_two_hosts_are_none(served: Served) -> None:
    data = b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\nHost: evil.example\r\nConnection: close\r\n\r\n"
    assert served.raw(data).split()[1] in (b"400", b"403")


@pytest.mark.parametrize("origin", ["null", "http://evil.example", "http://localhost", "https://127.0.0.1"])
def test_g3_g37_a_foreign_page_may_not_ask_nor_read(served: Served, origin: str) -> None:
    for method, path in (("POST", CHAT), ("GET", "/v1/models"), ("OPTIONS", CHAT)):
        answer = served.ask(method, path, b"{}" if method == "POST" else None, {"Origin": origin})
        assert answer.status == 403 and answer.error["code"] == "origin_not_allowed"
        assert not [name for name in answer.headers if name.startswith("access-control")]


def test_g3_listed_pages_may_and_only_they(scripted: Scripted) -> None:
    with scripted("Hi", settings=ServerSettings(("pico",), origins=("https://a.example",))) as served:
        listed = {"Origin": "https://a.example"}
        # As openai's JavaScript client asks.
        names = "authorization, content-type, x-stainless-os"
        asking = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": names}
        asked = served.ask("OPTIONS", CHAT, None, {**listed, **asking})
        assert asked.status == 204 and asked.headers["access-control-allow-origin"] == "https://a.example"
        assert asked.headers["access-control-allow-headers"] == names
        assert "access-control-allow-private-network" not in asked.headers
        private = {**listed, **asking, "Access-Control-Request-Private-Network": "true"}
        asked = served.ask("OPTIONS", CHAT, None, private)
        assert asked.headers["access-control-allow-private-network"] == "true"
        answer = served.ask("GET", "/v1/models", None, listed)
        assert answer.status == 200 and answer.headers["access-control-allow-origin"] == "https://a.example"
        assert "access-control-allow-credentials" not in answer.headers
        assert served.ask("GET", "/v1/models", None, {"Origin": "https://b.example"}).status == 403
        for scheme in ("http", "https"):  # https: behind a reverse proxy that ends TLS
            own = {"Origin": f"{scheme}://127.0.0.1:{served.port}"}
            assert served.ask("GET", "/v1/models", None, own).status == 200


# Ollama's interface accepts one more type, see test_ollama.
@pytest.mark.parametrize("path", [p for method, p, _ in ROUTES if method == "POST" and not p.startswith("/api/")])
@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data", ""])
def test_g4_a_form_of_another_site_is_no_json(served: Served, path: str, kind: str) -> None:
    answer = served.ask("POST", path, b"{}", {"content-type": kind})
    assert answer.status == 415 and answer.error["code"] == "unsupported_media_type"
    assert (repr(kind) if kind else "no content-type") in answer.error["message"]


@pytest.fixture
def keyed(scripted: Scripted) -> Any:
    with scripted("Hi", settings=ServerSettings(("pico",), key=KEY.encode())) as found:
        yield found


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"authorization": "Bearer wrong"},
        {"authorization": "Bearer "},
        {"authorization": "Bearer"},
        {"authorization": f"Basic {KEY}"},
        {"x-api-key": ""},
        {"x-api-key": KEY + "x"},
        {"x-api-key": "clé".encode().decode("latin-1")},
        {"authorization": "Bearer " + "k" * 30_000},
    ],
    ids=lambda headers: json.dumps(headers)[:30],
)
def test_g5_without_the_key_nobody_comes_in(keyed: Served, headers: dict[str, str]) -> None:
    answer = keyed.ask("GET", "/v1/models", headers=headers)
    assert answer.status == 401 and answer.error["type"] == "authentication_error"
    assert answer.headers["www-authenticate"] == "Bearer" and KEY not in answer.body.decode()


def test_g5_the_key_is_taken_in_both_forms(keyed: Served) -> None:
    for headers in ({"authorization": f"Bearer {KEY}"}, {"Authorization": f"bearer {KEY}"}, {"x-api-key": KEY}):
        assert keyed.ask("GET", "/v1/models", headers=headers).status == 200
    assert KEY not in "\n".join(keyed.log)


def test_g6_the_key_covers_every_route(keyed: Served) -> None:
    """The exceptions are the health probe and the page, which holds no data and asks for the key."""
    bare = [(method, path.removeprefix("/v1"), None) for method, path, _ in ROUTES]
    for method, path, _ in (*ROUTES, *bare):
        file = path.replace("/web/{name:path}", "/web/page.js").replace("{name:path}", "pico")
        answer = keyed.ask(method, file, b"{}" if method == "POST" else None)
        assert answer.status == (200 if path in (*OPEN_PATHS, "/web/{name:path}") else 401), path
    assert keyed.ask("GET", "/nowhere").status == 401
    assert set(OPEN_PATHS) == {"/health", "/v1/health", "/"}
    assert keyed.ask("GET", "/v1/health").json == keyed.ask("GET", "/health").json


def test_g9_a_large_body_is_refused_before_it_is_read(scripted: Scripted) -> None:
    limits = ServerLimits(body_bytes=10_000)
    with scripted("Hi", settings=ServerSettings(("pico",), limits=limits)) as served:
        head = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        told = served.raw(f"{head}Content-Length: 99999999\r\n\r\n{{".encode())
        assert told.split()[1] == b"413"
        chunk = b"1000\r\n" + b" " * 4096 + b"\r\n"
        assert served.raw(f"{head}Transfer-Encoding: chunked\r\n\r\n".encode() + chunk * 5).split()[1] == b"413"
        assert served.chat(max_tokens=2).status == 200


@pytest.mark.parametrize(
    "data",
    [
        b"GET / HTTP/1.1\r\nHost: localhost\r\n" + b"a: b\r\n" * 200 + b"Connection: close\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: localhost\r\nx: " + b"a" * 70_000 + b"\r\n\r\n",
        b"POST / HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"POST /v1/models HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\nxx",
        b"POST /v1/models HTTP/1.1\r\nHost: localhost\r\nContent-Length: -1\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"GET / HTTP/9.9\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"GET / HTTP/1.1\nHost: localhost\n bad\r\n\r\n",
    ],
    ids=["many", "long", "chunk", "lengths", "negative", "tls", "version", "h2", "fold"],
)
def test_g10_what_is_no_request_is_refused(served: Served, data: bytes) -> None:
    answer = served.raw(data)
    assert answer.split()[1] in (b"400", b"403", b"404", b"413", b"415", b"431", b"405"), answer[:200]
    assert served.ask("GET", "/health").status == 200


def test_g10_a_second_request_is_not_smuggled(served: Served) -> None:
    """The server, given both lengths, refuses or reads one request and never sends two answers."""
    inner = b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n\r\n"
    data = (
        b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: "
        + str(5 + len(inner)).encode()
        + b"\r\nTransfer-Encoding: chunked\r\nConnection: close\r\n\r\n0\r\n\r\n"
        + inner
    )
    assert served.raw(data).count(b"HTTP/1.1 ") <= 1


def test_g31_a_request_id_is_kept_if_it_is_one(served: Served) -> None:
    assert served.ask("GET", "/health", headers={"x-request-id": "abc-1.2_3"}).headers["x-request-id"] == "abc-1.2_3"
    for bad in ("a" * 200, "a b", "é".encode().decode("latin-1"), "<script>"):
        given = served.ask("GET", "/health", headers={"x-request-id": bad}).headers["x-request-id"]
        assert given != bad and given.startswith("req_")


def test_the_host_of_a_header_is_read() -> None:
    assert [host_of(one) for one in ("A.b:1", "[::1]", "x.", "a/b", "http://c:80", "a:b", "[x]")] == [
        "a.b", "::1", "x", "", "c", "", "",
    ]  # fmt: skip


def test_answers_are_not_sniffed_nor_cached_by_others(served: Served) -> None:
    headers = served.ask("GET", "/v1/models").headers
    assert headers["x-content-type-options"] == "nosniff" and headers["content-type"] == JSON["content-type"]
