"""Test the address, keys and names of a server: unsafe and invalid ones are refused before a model is loaded."""

import io
from pathlib import Path
from typing import Any

import pytest

from mycli.cli.command import Call
from mycli.cli.flags.address import AddressFlags
from mycli.cli.output import Output
from mycli.runtime.errors import UsageError
from mycli.runtime.server.http.settings import ServerSettings

KEY = "0123456789abcdef"


@pytest.fixture(autouse=True)
def no_key(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("MYCLI_API_KEY", raising=False)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


def resolved(**flags: Any) -> tuple[ServerSettings, str]:
    stderr = io.StringIO()
    settings = AddressFlags(**flags).resolve(Call(Output(stdout=io.StringIO(), stderr=stderr), offline=True))
    return settings, stderr.getvalue()


def written(path: Path, text: str, mode: int = 0o600) -> Path:
    path.write_bytes(text.encode())
    path.chmod(mode)
    return path


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.9.1", "::1", "localhost", "LOCALHOST"])
def test_this_machine_needs_no_key(host: str) -> None:
    settings, said = resolved(host=host)
    assert settings.key is None and settings.hosts == (host.lower(),) and said == ""


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1", "localhost.example.org"])
def test_other_machines_need_one_unless_all_are_allowed(
    host: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UsageError, match=f"--host {host} allows other machines"):
        resolved(host=host)
    key, keys = written(tmp_path / "key", f"{KEY}\n"), written(tmp_path / "keys", f"anna {KEY}\n")
    assert resolved(host=host, key_file=key)[0].key == KEY.encode()
    assert [entry.share.name for entry in resolved(host=host, keys_file=keys)[0].keys] == ["anna"]
    assert resolved(host=host, open_to_all=True)[0].key is None
    assert resolved(host=host, unix_socket=tmp_path / "socket")[0].key is None
    monkeypatch.setenv("MYCLI_API_KEY", f" {KEY} ")
    assert resolved(host=host)[0].key == KEY.encode()
    supervised = resolved(supervised=True, keys_file=keys)[0]
    assert (supervised.key, supervised.keys) == (None, ()), "the server for several models has checked them"


@pytest.mark.parametrize(
    "host", ["127.0.0.1:8080", "localhost:8080", "http://127.0.0.1", "[::1]", "/run/mycli.sock", "mycli.sock", "*", ""]
)
def test_what_is_no_address_is_refused_before_a_key_is_missing(host: str) -> None:
    with pytest.raises(UsageError) as refused:
        resolved(host=host)
    assert refused.value.message == f"--host {host}: not an address"
    assert "--host 127.0.0.1 --port 8080" in refused.value.hint and "--unix-socket" in refused.value.hint


def test_an_address_may_have_a_scope_and_a_name_any_letters() -> None:
    assert resolved(host="fe80::1%eth0", open_to_all=True)[0].hosts == ("fe80::1%eth0",)
    assert resolved(host="rechner-1.büro_2", open_to_all=True)[0].hosts == ("rechner-1.büro_2",)


@pytest.mark.parametrize("text", ["one two", "one\ntwo", "grüß", "", " \n"])
def test_a_key_that_is_none_is_refused(text: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="one line of ASCII|is empty"):
        resolved(key_file=written(tmp_path / "key", text))


@pytest.mark.parametrize(("mode", "warned"), [(0o600, False), (0o400, False), (0o640, True), (0o604, True)])
def test_a_key_that_others_can_read_is_warned_about(mode: int, warned: bool, tmp_path: Path) -> None:
    for name, text in (("key_file", KEY), ("keys_file", f"anna {KEY}")):
        _, said = resolved(**{name: written(tmp_path / f"{name}{mode}", text, mode)})
        assert ("readable by other users" in said) is warned


@pytest.mark.parametrize("name", ["a", "x" * 256, "名前"])
def test_names_for_clients(name: str) -> None:
    assert resolved(aliases=[name])[0].names == (name,)


def test_names_with_commas_are_several() -> None:
    assert resolved(aliases=["gpt-4o, coder", "local"])[0].names == ("gpt-4o", "coder", "local")
    assert resolved(aliases=["a,b"], supervised=True)[0].names == ("a,b",), "the name of a model, from its own server"


@pytest.mark.parametrize("name", ["", "x" * 257, "a\nb", "a,,b", "a,"])
def test_names_that_are_none(name: str) -> None:
    with pytest.raises(UsageError, match="not a valid name"):
        resolved(aliases=["first", name])


@pytest.mark.parametrize("origin", ["*", "https://example.org/", "example.org", "https://a.org,https://b.org"])
def test_origins_that_are_none(origin: str) -> None:
    assert resolved(origins=["https://example.org:8443"])[0].origins == ("https://example.org:8443",)
    with pytest.raises(UsageError, match="not an origin"):
        resolved(origins=["https://example.org", origin])


def test_what_is_left_out_has_the_usual_values(tmp_path: Path) -> None:
    settings, _ = resolved()
    assert (settings.names, settings.origins, settings.log_format) == ((), (), "text")
    assert settings.replies == tmp_path / "state" / "mycli" / "replies" and resolved(no_record=True)[0].replies is None
    assert resolved(hosts=["Example.ORG"])[0].hosts == ("example.org", "127.0.0.1")
    with pytest.raises(UsageError, match="--socket-group needs --unix-socket"):
        resolved(socket_group="www")
    assert resolved(socket_group="www", unix_socket=tmp_path / "socket")[0].key is None
