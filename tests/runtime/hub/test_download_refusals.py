"""Test refused downloads, invalid server answers, and which hosts receive the token."""

import json
from pathlib import Path
from typing import Any

import pytest

from mycli.cli.remedies import remedy
from mycli.runtime.errors import ExitCode, ModelError, NotFoundError, UsageError, UserError
from mycli.runtime.hub.client import Hub, RetryPolicy
from tests.support.hub_server import Fault, HubServer
from tests.support.pulling import FILES, REPO, WANTED, Notes, contents, failing, fetch

pytestmark = pytest.mark.usefixtures("folders")


def refused(server: HubServer, fault: Fault, token: str | None = None, where: str = "/revision/") -> UserError:
    server.add(REPO, FILES)
    server.fail(where, fault, times=9)
    error = failing(server, token=token)
    server.forgive()
    assert error.exit_code == ExitCode.NOT_FOUND and remedy(error)
    return error


def coded(status: int, code: str = "", message: str = "") -> Fault:
    return Fault(status=status, headers={"X-Error-Code": code, "X-Error-Message": message})


def test_d11_each_refusal_has_its_own_words(server: HubServer) -> None:
    page = f"{server.address()}/{REPO}"
    gated = refused(server, coded(401, "GatedRepo"))
    assert "gated" in gated.message and page in remedy(gated) and "HF_TOKEN" in remedy(gated)
    waiting = refused(server, coded(403, "GatedRepo"), token="hf_secret", where="/resolve/")
    assert "no access" in waiting.message and page in waiting.hint
    assert "does not accept the token" in refused(server, coded(401, "", "Invalid credentials"), "hf_secret").message
    assert "forbids access: not for you" in refused(server, coded(403, "", "not for you")).message
    assert "answers 451" in refused(server, coded(451)).message


def test_d11_what_does_not_exist(server: HubServer) -> None:
    server.add(REPO, FILES)
    assert f"org/tyni: no such model on {server.address()}" in failing(server, "org/tyni").message
    assert "private" in remedy(failing(server, "org/tyni"))
    assert "may not see it" in failing(server, "org/tyni", token="hf_secret").hint
    unknown = failing(server, f"{REPO}@v9")
    assert "org/tiny has no revision v9" in unknown.message and unknown.hint.startswith("its branches and tags: http")
    assert "has no revision" in failing(server, f"{REPO}@{'0' * 40}").message


@pytest.mark.parametrize("status", [401, 404])
def test_a_hub_without_error_codes_has_no_such_model(status: int, server: HubServer) -> None:
    """Mirrors answer without codes."""
    error = refused(server, Fault(status=status))
    assert f"{REPO}: no such model on {server.address()}" in error.message and error.code == "private-model"


@pytest.mark.parametrize(
    "body",
    [b"<html>log in</html>", b"", b'{"sha": "../../x"}', b'{"sha": 3}', b"{}", b"[" * 100000],
    ids=["captive-portal", "empty", "path", "number", "no-sha", "deep"],
)
def test_an_answer_that_is_none(body: bytes, server: HubServer, folders: Path) -> None:
    server.add(REPO, FILES)
    server.fail("/revision/", Fault(status=200, body=body))
    error = failing(server)
    assert error.exit_code in (ExitCode.NOT_FOUND, ExitCode.MODEL) and error.message.startswith("127.0.0.1")
    assert not folders.exists()


@pytest.mark.parametrize(
    "entry",
    [
        {"type": "file", "path": "w", "size": -1, "oid": "a" * 40},
        {"type": "file", "path": "w", "size": 1, "oid": "../../../etc/passwd"},
        {"type": "file", "path": "w", "size": 1, "oid": "a" * 40, "lfs": {"oid": "../x", "size": 3}},
        {"type": "file", "size": 1, "oid": "a" * 40},
        {"type": "file", "path": "w", "size": True, "oid": "a" * 40},
        3,
    ],
)
def test_a_hostile_listing(entry: Any, server: HubServer, folders: Path) -> None:
    server.add(REPO, FILES)
    server.fail("/tree/", Fault(status=200, body=json.dumps([entry]).encode()))
    assert isinstance(failing(server), ModelError)
    assert not folders.exists()


def test_file_names_that_are_paths_are_never_written(server: HubServer, folders: Path) -> None:
    hostile = {"../../evil.json": b"1", "/evil.json": b"2", "a\\..\\evil.json": b"3", "e\nvil.json": b"4", "..": b"5"}
    server.add(REPO, {**FILES, **hostile})
    assert contents(fetch(server).folder).keys() == WANTED
    assert not [path for path in folders.parent.rglob("*evil*")]


def test_d11_the_token_goes_to_the_hub_and_nowhere_else(server: HubServer) -> None:
    server.add(REPO, FILES)
    notes = Notes()
    server.fail("storage:", Fault(drop_after=100))
    fetch(server, token="hf_secret", notes=notes)
    assert {r.headers.get("Authorization") for r in server.requests("hub:")} == {"Bearer hf_secret"}
    assert server.requests("storage:") and not [r for r in server.requests("storage:") if "Authorization" in r.headers]
    assert "secret" not in "".join(notes)


def test_a_listing_that_continues_elsewhere_gets_no_token(server: HubServer) -> None:
    server.add(REPO, FILES)
    link = {"Link": f'<{server.address("storage")}/api/next>; rel="next"'}
    server.fail("hub:/api/models/org/tiny/tree/", Fault(status=200, headers=link, body=b"[]"))
    server.fail("storage:/api/next", Fault(status=200, body=b"[]"))
    failing(server, token="hf_secret")
    assert [r.headers.get("Authorization") for r in server.requests("storage:")] == [None]


@pytest.mark.parametrize(
    ("address", "sent"),
    [
        ("http://hub.example.org", False),
        ("http://127.0.0.1.example.org", False),
        ("https://hub.example.org", True),
        ("http://127.0.0.1:9", True),
        ("http://[::1]:9", True),
        ("http://localhost:9", True),
    ],
)
def test_a_token_is_not_sent_unencrypted(address: str, sent: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", address)
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    notes: list[str] = []
    with Hub.connect(notes.append) as hub:
        assert hub._token == ("hf_secret" if sent else None)
    assert notes == ([] if sent else [f"{address} is not encrypted, so no token is sent to it"])


@pytest.mark.parametrize("spelled", ["{}", "HTTP://LocalHost:{}", " http://user:secret@localhost:{}/ "])
def test_the_address_is_any_spelling_of_a_url(spelled: str, server: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """A host in capitals is the hub, not a storage host whose refusals are tried again."""
    port = server.address().rpartition(":")[2]
    monkeypatch.setenv("HF_ENDPOINT", server.address() if spelled == "{}" else spelled.format(port))
    notes: list[str] = []
    with Hub.connect(notes.append) as hub, pytest.raises(NotFoundError, match="org/x: no such model on http") as error:
        hub.commit("org/x", None)
    assert notes == [] and "secret" not in str(error.value)


def test_a_hub_may_redirect_to_its_other_address(server: HubServer) -> None:
    """http to https, for example: the refusal there is final."""
    server.add(REPO, FILES)
    to = {"Location": f"{server.address('storage')}/moved"}
    server.fail("/revision/", Fault(status=301, headers=to), times=9)
    server.fail("/moved", coded(404, "RepoNotFound"), times=9)
    assert "no such model" in failing(server).message and len(server.requests("/moved")) == 1


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("HF_ENDPOINT", "http://[::1", "HF_ENDPOINT=http://[::1: not a URL"),
        ("HF_ENDPOINT", "hub.example.org", "HF_ENDPOINT=hub.example.org: not a URL"),
        ("HF_ENDPOINT", "ftp://hub.example.org", "HF_ENDPOINT=ftp://hub.example.org: not a URL"),
        ("HF_ENDPOINT", "https://:443", "HF_ENDPOINT=https://:443: not a URL"),
        ("HF_ENDPOINT", "http://127.0.0.1:65536", "HF_ENDPOINT=http://127.0.0.1:65536: not a URL"),
        ("HF_ENDPOINT", "https://ü..b", "HF_ENDPOINT=https://ü..b: not a URL"),
        ("HF_ENDPOINT", "https://a..b", "HF_ENDPOINT=https://a..b: not a URL"),
        ("ALL_PROXY", "socks5h://127.0.0.1:1080", "a SOCKS proxy .* needs the package socksio"),
        ("HTTPS_PROXY", "socks://127.0.0.1:1080", "HTTPS_PROXY or ALL_PROXY: Unknown scheme"),
        ("HTTPS_PROXY", "http://127.0.0.1:abc", "HTTPS_PROXY or ALL_PROXY: Invalid port"),
        ("SSL_CERT_FILE", "/none.pem", "SSL_CERT_FILE=/none.pem: No such file"),
        ("SSL_CERT_FILE", "/dev/null", "SSL_CERT_FILE=/dev/null: "),
    ],
)
def test_variables_of_the_network_are_named(
    name: str, value: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(UsageError, match=message.replace("[", r"\[")), Hub.connect(print):
        pass


def test_a_proxy_without_an_answer_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("https_proxy", "http://127.0.0.1:1")
    problem = pytest.raises(NotFoundError, match="no connection to hub.example.org through the proxy")
    with Hub("https://hub.example.org", None, print, RetryPolicy(request_attempts=1)) as hub, problem:
        hub.commit("org/x", None)


@pytest.mark.parametrize("proxy", ["", "http://127.0.0.1:2"], ids=["none", "bypassed"])
def test_a_proxy_that_is_not_used_is_not_named(proxy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "all_proxy"):
        monkeypatch.setenv(name, proxy)
    monkeypatch.setenv("no_proxy", "127.0.0.1" if proxy else "")
    problem = pytest.raises(NotFoundError, match="no connection to 127.0.0.1")
    with Hub("http://127.0.0.1:1", None, print, RetryPolicy(request_attempts=1)) as hub, problem as error:
        hub.commit("org/x", None)
    assert "proxy" not in error.value.message
