"""Pulling from a real server on loopback: what lands in the cache, and every way a network or a server can fail."""

import contextlib
import errno
import hashlib
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mycli.cli.remedies import remedy
from mycli.runtime.errors import ExitCode, GateError, ModelError, NotFoundError, ResourceError, UserError
from mycli.runtime.hub import download
from mycli.runtime.hub import resolve as hub
from mycli.runtime.hub.client import Hub
from mycli.runtime.hub.download import fetch_files, plan_download
from mycli.runtime.hub.resolve import Source, resolve
from mycli.runtime.hub.retry import RetryPolicy
from tests.support.hub_server import Fault, HubServer, hub_server, safetensors
from tests.support.paths import ROOT

REPO = "org/tiny"
WEIGHTS = safetensors({"w": ("F32", [4096], bytes(range(256)) * 64)})
FILES = {
    "config.json": b'{"model_type": "llama"}',
    "tokenizer.json": b"{}" * 400,
    "chat_template.jinja": b"{{ messages }}",
    "model.safetensors": WEIGHTS,
    "README.md": b"# hello",
    "pytorch_model.bin": b"\x80\x04pickle" * 200,
    "modeling_tiny.py": b"import os",
    "onnx/config.json": b"{}",
    "training.index.json": b"{}",
}
WANTED = {"config.json", "tokenizer.json", "chat_template.jinja", "model.safetensors"}
QUICK = RetryPolicy(attempts=4, questions=3, first_delay=0.01, timeout=5.0)


@pytest.fixture
def server() -> Iterator[HubServer]:
    with hub_server() as running:
        yield running


@pytest.fixture(autouse=True)
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in list(os.environ):
        if name.startswith("HF_") or name.lower().endswith("_proxy"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("MYCLI_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    return tmp_path / "hub"


class Notes(list[str]):
    """What was said, and the bytes that were reported."""

    arrived = 0.0

    def advance(self, amount: float) -> None:
        self.arrived += amount


def fetch(
    server: HubServer, model: str = REPO, token: str | None = None, notes: Notes | None = None, force: bool = False
) -> Source:
    heard = Notes() if notes is None else notes
    with Hub(server.address(), token, heard.append, QUICK) as connection:
        return fetch_files(connection, plan_download(connection, model), force=force, advance=heard.advance)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def leftovers(cache: Path) -> list[str]:
    return [path.name for path in cache.rglob("*") if "incomplete" in path.name or ".tmp" in path.name]


def failing(server: HubServer, model: str = REPO, token: str | None = None, notes: Notes | None = None) -> UserError:
    with pytest.raises(UserError) as caught:
        fetch(server, model, token, notes)
    error = caught.value
    assert "hf_secret" not in error.message + remedy(error) + "".join(notes or [])
    return error


def blob(cache: Path, data: bytes) -> Path:
    return cache / "models--org--tiny" / "blobs" / hashlib.sha256(data).hexdigest()


# What lands where


def test_only_what_a_model_needs_is_fetched(server: HubServer, folders: Path) -> None:
    commit = server.add(REPO, FILES)
    notes = Notes()
    source = fetch(server, notes=notes)
    assert source == Source(REPO, folders / "models--org--tiny" / "snapshots" / commit, REPO, commit)
    assert contents(source.folder) == {name: FILES[name] for name in WANTED}
    assert notes.arrived == sum(len(FILES[name]) for name in WANTED)
    assert not leftovers(folders) and not notes
    assert resolve(REPO) == source
    assert not [r for r in server.log if "pickle" in r.path or ".bin" in r.path or ".py" in r.path]


def test_a_listing_with_a_digest_that_is_none_is_refused(
    server: HubServer, folders: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such a name would become a path of the cache."""
    server.add(REPO, FILES)
    monkeypatch.setattr("tests.support.hub_server.git_digest", lambda data: "../../x")
    error = failing(server)
    assert isinstance(error, ModelError) and "'../../x' is not a hash" in error.message
    assert not folders.exists()


def test_the_cache_is_one_that_huggingface_hub_reads(server: HubServer, folders: Path) -> None:
    server.add(REPO, FILES)
    source = fetch(server)
    code = f"""
import huggingface_hub as h
folder = h.snapshot_download({REPO!r}, local_files_only=True, allow_patterns={sorted(WANTED)!r})
assert folder == {str(source.folder)!r}, folder
assert h.try_to_load_from_cache({REPO!r}, "model.safetensors")
(repo,) = h.scan_cache_dir().repos
assert [sorted(r.refs) for r in repo.revisions] == [["main"]] and repo.nb_files == {len(WANTED)}, repo
assert not h.scan_cache_dir().warnings
"""
    subprocess.run([sys.executable, "-c", code], env={**os.environ, "HF_HUB_OFFLINE": "1"}, check=True, timeout=60)
    link = source.folder / "model.safetensors"
    assert link.readlink() == Path("../../blobs", hashlib.sha256(WEIGHTS).hexdigest())


def test_a_cache_that_huggingface_hub_wrote_needs_no_download(server: HubServer, folders: Path) -> None:
    server.add(REPO, FILES)
    code = f"import huggingface_hub as h; h.snapshot_download({REPO!r})"
    env = {
        **os.environ,
        "HF_ENDPOINT": server.address(),
        "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    }
    subprocess.run([sys.executable, "-c", code], env=env, check=True, timeout=60)
    assert resolve(REPO).folder.is_dir()
    before = len(server.requests("resolve"))
    with Hub(server.address(), None, print, QUICK) as connection:
        job = plan_download(connection, REPO)
        assert job.missing == () and job.new_bytes == 0
        fetch_files(connection, job, force=False, advance=lambda amount: None)
    assert len(server.requests("resolve")) == before


def test_sharded_models_fetch_the_shards_of_the_index(server: HubServer) -> None:
    shards = {f"model-{i}-of-2.safetensors": safetensors({f"w{i}": ("F32", [512], bytes([i]) * 2048)}) for i in (1, 2)}
    index = {"metadata": {}, "weight_map": {"w1": "model-1-of-2.safetensors", "w2": "model-2-of-2.safetensors"}}
    extra = {"consolidated.safetensors": WEIGHTS, "config.json": b"{}", hub.INDEX: json.dumps(index).encode()}
    server.add(REPO, {**shards, **extra})
    source = fetch(server)
    assert contents(source.folder).keys() == {*shards, "config.json", hub.INDEX}
    assert resolve(REPO) == source
    server.add(REPO, {**extra, "model-1-of-2.safetensors": b"x"})
    assert "model-2-of-2.safetensors, which org/tiny does not hold" in failing(server).message


def test_a_long_listing_comes_in_pages(server: HubServer) -> None:
    server.page = 3
    server.add(REPO, {**{f"part-{i}.json": b"{}" for i in range(10)}, **FILES})
    assert len(contents(fetch(server).folder)) == 10 + len(WANTED)
    assert len(server.requests("/tree/")) == 7


def test_unchanged_files_of_a_new_commit_are_not_fetched_again(server: HubServer, folders: Path) -> None:
    first = server.add(REPO, FILES)
    fetch(server)
    second = server.add(REPO, {**FILES, "config.json": b'{"model_type": "qwen2"}'})
    before = len(server.log)
    with Hub(server.address(), None, print, QUICK) as connection:
        job = plan_download(connection, REPO)
        assert [file.name for file in job.missing] == ["config.json"] and job.new_bytes == 23
        assert fetch_files(connection, job, force=False, advance=lambda amount: None).revision == second
    assert [r.path.rpartition("/")[2] for r in server.log[before:] if "resolve" in r.path] == ["config.json"]
    assert resolve(f"{REPO}@{first}").folder != resolve(REPO).folder


def test_d10_a_branch_that_moves_while_pulling_changes_nothing(server: HubServer) -> None:
    first = server.add(REPO, FILES)
    with Hub(server.address(), None, print, QUICK) as connection:
        job = plan_download(connection, REPO)
        server.add(REPO, {**FILES, "model.safetensors": WEIGHTS[::-1], "config.json": b"{}"})
        source = fetch_files(connection, job, force=False, advance=lambda amount: None)
    assert source.revision == first and contents(source.folder) == {name: FILES[name] for name in WANTED}
    assert {r.path.split("/")[4] for r in server.requests("/resolve/")} == {first}


def test_branch_tag_and_commit(server: HubServer) -> None:
    commit = server.add(REPO, FILES, branch="v1/rc")
    server.add(REPO, {**FILES, "config.json": b"{}"})
    assert fetch(server, f"{REPO}@v1/rc").revision == commit
    asked = len(server.requests("/revision/"))
    assert fetch(server, f"{REPO}@{commit}").revision == commit
    assert len(server.requests("/revision/")) == asked
    assert resolve(f"{REPO}@v1/rc").revision == commit
    with pytest.raises(NotFoundError):
        resolve(REPO)


def test_plan_writes_nothing(server: HubServer, folders: Path) -> None:
    server.add(REPO, FILES)
    with Hub(server.address(), None, print, QUICK) as connection:
        job = plan_download(connection, REPO)
    assert job.new_bytes == job.total_bytes == sum(len(FILES[name]) for name in WANTED)
    assert not folders.exists()


def test_an_empty_file_and_two_of_the_same_contents(server: HubServer) -> None:
    server.add(REPO, {**FILES, "a.json": b"", "b.json": b"{}", "c.json": b"{}"})
    held = contents(fetch(server).folder)
    assert held["a.json"] == b"" and held["b.json"] == held["c.json"] == b"{}"


# What is refused


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({"pytorch_model.bin": b"x"}, "only pytorch_model.bin, whose format can run code"),
        ({"model.Q4.gguf": b"GGUF"}, "no safetensors but GGUF files"),
        ({"README.md": b"x"}, "no weights in model.safetensors or model.safetensors.index.json, none"),
    ],
    ids=["A19-bin", "gguf", "nothing"],
)
def test_a_repository_without_safetensors(
    files: dict[str, bytes], words: str, server: HubServer, folders: Path
) -> None:
    server.add(REPO, {"config.json": b"{}", **files})
    error = failing(server)
    assert isinstance(error, ModelError) and words in error.message and error.hint
    assert not folders.exists()


def test_what_a_model_lacks_is_said(server: HubServer) -> None:
    server.add(REPO, {"model.safetensors": WEIGHTS})
    with Hub(server.address(), None, print, QUICK) as connection:
        assert [w.split(":")[0] for w in plan_download(connection, REPO).warnings] == [
            f"{REPO} has no config.json",
            f"{REPO} has no tokenizer.json",
        ]


def test_d1_too_little_space_is_known_before_the_start(
    server: HubServer, folders: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.add(REPO, FILES)
    needed = sum(len(FILES[name]) for name in WANTED)
    usage = shutil.disk_usage("/")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=needed - 1))
    error = failing(server)
    assert isinstance(error, ResourceError) and error.exit_code == ExitCode.RESOURCES
    assert f"{needed} bytes needed, {needed - 1} bytes free" in error.message
    assert not folders.exists()
    assert fetch(server, force=True).folder.is_dir()


def test_d2_a_disk_that_fills_up_leaves_something_to_go_on_with(
    server: HubServer, folders: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.add(REPO, FILES)
    real = os.pwrite

    def full(descriptor: int, data: bytes, at: int) -> int:
        if len(data) > 10000:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(descriptor, data, at)

    monkeypatch.setattr(os, "pwrite", full)
    assert isinstance(failing(server), ResourceError)
    monkeypatch.undo()
    monkeypatch.setenv("HF_HUB_CACHE", str(folders))
    assert contents(fetch(server).folder)["model.safetensors"] == WEIGHTS


# D9: what a network does


def test_d9_a_dropped_connection_goes_on_from_where_it_was(server: HubServer) -> None:
    server.add(REPO, FILES)
    server.fail("storage:", Fault(drop_after=5000))
    server.fail("storage:", Fault(drop_after=3000))
    notes = Notes()
    assert contents(fetch(server, notes=notes).folder) == {name: FILES[name] for name in WANTED}
    ranges = [r.headers.get("Range") for r in server.requests("storage:") if r.headers.get("Range")]
    assert ranges == ["bytes=5000-", "bytes=8000-"]
    assert notes.arrived == sum(len(FILES[name]) for name in WANTED)
    assert len(notes) == 2 and "trying again" in notes[0]


def test_d9_what_one_process_left_the_next_one_uses(server: HubServer, folders: Path) -> None:
    server.add(REPO, FILES)
    server.fail("storage:", Fault(drop_after=6000), times=1)
    server.fail("storage:", Fault(drop_after=0), times=3)
    error = failing(server)
    assert "(tried 4 times)" in error.message and error.exit_code == ExitCode.NOT_FOUND
    assert [path.stat().st_size for path in folders.rglob("*.incomplete")] == [6000]
    with Hub(server.address(), None, print, QUICK) as connection:
        job = plan_download(connection, REPO)
    assert job.new_bytes == sum(file.size for file in job.missing) - 6000
    fetch(server)
    assert "bytes=6000-" in [r.headers.get("Range") for r in server.requests("storage:")]
    assert not leftovers(folders)


@pytest.mark.parametrize(
    "fault",
    [
        Fault(ignore_range=True),
        Fault(status=416),
        Fault(shifted=100),
        Fault(status=503),
        Fault(announced=10, ignore_range=True),
        Fault(announced=10**6),
        Fault(announced=2**63),
        Fault(status=403, body=b"<Error>Request has expired</Error>"),
    ],
    ids=[
        "D9-range-ignored",
        "D9-416",
        "D9-another-range",
        "D9-5xx",
        "D9-length-too-short",
        "D9-length-too-long",
        "D9-length-absurd",
        "expired-link",
    ],
)
def test_d9_an_odd_answer_while_resuming(fault: Fault, server: HubServer) -> None:
    server.add(REPO, FILES)
    server.fail("storage:", Fault(drop_after=5000))
    server.fail("storage:", fault)
    assert contents(fetch(server).folder)["model.safetensors"] == WEIGHTS


@pytest.mark.parametrize("size", [0, 1, 4000, len(WEIGHTS), len(WEIGHTS) + 7])
def test_what_lies_there_already_may_be_anything(size: int, server: HubServer, folders: Path) -> None:
    """A partial file that another program, or a crash, left with wrong contents: thrown away when the hash says so."""
    server.add(REPO, FILES)
    partial = blob(folders, WEIGHTS).with_name(blob(folders, WEIGHTS).name + ".mycli.incomplete")
    partial.parent.mkdir(parents=True)
    partial.write_bytes(b"\xff" * size)
    assert contents(fetch(server).folder)["model.safetensors"] == WEIGHTS
    assert not leftovers(folders)


def test_d9_wrong_bytes_of_the_right_size_once_are_fetched_again(server: HubServer) -> None:
    server.add(REPO, FILES)
    server.fail("storage:", Fault(altered=True))
    notes = Notes()
    assert contents(fetch(server, notes=notes).folder)["model.safetensors"] == WEIGHTS
    assert "does not match its hash" in notes[0]
    assert notes.arrived == sum(len(FILES[name]) for name in WANTED)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"], ids=["git-sha1", "sha256"])
def test_d9_wrong_bytes_for_good_never_get_a_name(name: str, server: HubServer, folders: Path) -> None:
    server.add(REPO, FILES)
    where = "storage:" if name == "model.safetensors" else "config.json"
    server.fail(where, Fault(altered=True), times=4)
    error = failing(server)
    assert isinstance(error, GateError) and error.exit_code == ExitCode.GATE and name in error.message
    assert not list(folders.rglob(f"snapshots/*/{name}")) and not leftovers(folders)
    with pytest.raises(NotFoundError, match="partly downloaded"):
        resolve(REPO)


def test_an_altered_index_is_noticed_before_it_chooses_files(server: HubServer) -> None:
    index = json.dumps({"weight_map": {"w": "model-1.safetensors"}}).encode()
    server.add(REPO, {"config.json": b"{}", hub.INDEX: index, "model-1.safetensors": WEIGHTS})
    server.fail(hub.INDEX, Fault(altered=True))
    assert isinstance(failing(server), GateError)
    assert fetch(server).folder.is_dir()


@pytest.mark.parametrize("where", ["/revision/", "/tree/", "config.json", "storage:"])
def test_d9_busy_servers_are_waited_for(where: str, server: HubServer) -> None:
    server.add(REPO, FILES)
    server.fail(where, Fault(status=429, headers={"Retry-After": "0"}))
    server.fail(where, Fault(status=502))
    notes = Notes()
    assert fetch(server, notes=notes).folder.is_dir()
    assert "too many requests" in notes[0] and "502" in notes[1]


def test_d9_a_server_that_asks_for_an_hour_is_not_waited_for(server: HubServer) -> None:
    server.add(REPO, FILES)
    server.fail("/revision/", Fault(status=429, headers={"Retry-After": "3600"}))
    assert "asks to wait 3600 s" in failing(server).message
    server.fail("/revision/", Fault(status=429, headers={"RateLimit": '"api";r=0;t=900'}))
    assert "asks to wait 900 s" in failing(server).message


def test_d9_a_server_that_stays_down(server: HubServer) -> None:
    server.add(REPO, FILES)
    server.fail("/revision/", Fault(status=500), times=99)
    error = failing(server)
    assert "answers 500 (tried 3 times)" in error.message and error.exit_code == ExitCode.NOT_FOUND


def test_a_connection_that_drips_is_not_progress(server: HubServer) -> None:
    server.add(REPO, FILES)
    server.fail("storage:", Fault(drop_after=10), times=99)
    assert "tried 4 times" in failing(server).message


# D11: who may not


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
    assert "org/tiny has no revision v9" in failing(server, f"{REPO}@v9").message
    assert "has no revision" in failing(server, f"{REPO}@{'0' * 40}").message


def test_no_server_and_no_name(server: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    def attempt(address: str) -> str:
        with Hub(address, None, lambda text: None, QUICK) as connection, pytest.raises(NotFoundError) as caught:
            plan_download(connection, REPO)
        return caught.value.message

    address = server.address()
    server.close()
    assert "no connection to 127.0.0.1" in attempt(address)
    assert "cannot be found: no network, or no name service" in attempt("http://hub.invalid")


def test_a_server_that_says_nothing(server: HubServer) -> None:
    server.add(REPO, FILES)
    server.fail("/revision/", Fault(status=200, body=b"{}" * 5000, seconds_per_block=1.0), times=9)
    impatient = replace(QUICK, timeout=0.2)
    with (
        Hub(server.address(), None, lambda text: None, impatient) as connection,
        pytest.raises(NotFoundError) as caught,
    ):
        plan_download(connection, REPO)
    assert "does not answer" in caught.value.message


@pytest.mark.parametrize(
    "body",
    [b"<html>log in</html>", b"", b'{"sha": "../../x"}', b'{"sha": 3}', b"{}", b"[" * 100000],
    ids=["captive-portal", "empty", "path", "number", "no-sha", "deep"],
)
def test_an_answer_that_is_none(body: bytes, server: HubServer, folders: Path) -> None:
    server.add(REPO, FILES)
    server.fail("/revision/", Fault(status=200, body=body))
    assert failing(server).exit_code in (ExitCode.NOT_FOUND, ExitCode.MODEL)
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


# The token


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


# Two processes


def child(server: HubServer, folders: Path, code: str = "") -> "subprocess.Popen[str]":
    script = f"""
import sys
from mycli.runtime.hub.download import fetch_files, plan_download
from mycli.runtime.hub.client import Hub
say = lambda text: print(text, flush=True)
from mycli.runtime.utils.units import gib
from mycli.runtime.hub.retry import RetryPolicy
with Hub({server.address()!r}, None, say, RetryPolicy()) as connection:
    job = plan_download(connection, {REPO!r})
    say("planned")
    fetch_files(connection, job, force=False, advance=lambda amount: say(f"+{{amount:.0f}}"))
say("done")
"""
    env = {**os.environ, "PYTHONPATH": str(ROOT / ".links"), "HF_HUB_CACHE": str(folders)}
    return subprocess.Popen([sys.executable, "-c", script], env=env, stdout=subprocess.PIPE, text=True)


def await_partial(folders: Path, least: int) -> None:
    for _ in range(500):
        for path in folders.rglob("*.incomplete"):
            with contextlib.suppress(FileNotFoundError):  # complete by now, under its own name
                if path.stat().st_size >= least:
                    return
        time.sleep(0.02)
    raise AssertionError("nothing arrived")


def test_kill_9_and_resume(server: HubServer, folders: Path) -> None:
    server.add(REPO, FILES)
    server.fail("storage:", Fault(seconds_per_block=0.3))
    process = child(server, folders)
    await_partial(folders, 4096)
    process.kill()
    process.communicate()
    (partial,) = folders.rglob("*.incomplete")
    size = partial.stat().st_size
    assert 4096 <= size < len(WEIGHTS)
    assert contents(fetch(server).folder)["model.safetensors"] == WEIGHTS
    assert server.requests("storage:")[-1].headers["Range"] == f"bytes={size}-"


def test_d6_a_second_process_waits_and_uses_what_the_first_brought(server: HubServer, folders: Path) -> None:
    server.add(REPO, FILES)
    server.fail("storage:", Fault(seconds_per_block=0.8))
    first = child(server, folders)
    await_partial(folders, 4096)
    second = child(server, folders)
    said_first, said = first.communicate(timeout=60)[0], second.communicate(timeout=60)[0]
    assert said_first.endswith("done\n") and said.endswith("done\n")
    assert f"{REPO} is being fetched by process {first.pid}: waiting for it" in said
    assert len(server.requests("storage:")) == 1
    assert sum(int(line) for line in said.splitlines() if line.startswith("+")) <= sum(map(len, FILES.values()))


def test_d6_without_working_locks_both_still_end_right(
    server: HubServer, folders: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_locks(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("fcntl.flock", no_locks)
    server.add(REPO, FILES)
    server.fail("storage:", Fault(seconds_per_block=0.02), times=2)
    results: list[bytes] = []
    threads = [
        threading.Thread(target=lambda: results.append(contents(fetch(server).folder)["model.safetensors"]))
        for _ in range(2)
    ]
    for thread in threads:
        thread.start()
        time.sleep(0.05)
    for thread in threads:
        thread.join()
    assert results == [WEIGHTS, WEIGHTS] and not leftovers(folders)


def test_a_read_only_cache_that_holds_everything_is_enough(server: HubServer, folders: Path) -> None:
    server.add(REPO, FILES)
    fetch(server)

    def no_write(*_: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(download, "write_atomic", no_write)
        server.refs[REPO]["same"] = server.refs[REPO]["main"]
        assert fetch(server, f"{REPO}@same").folder.is_dir()


def test_modes_follow_the_umask(server: HubServer, folders: Path) -> None:
    server.add(REPO, FILES)
    old = os.umask(0o027)
    try:
        source = fetch(server)
    finally:
        os.umask(old)
    assert (source.folder / "model.safetensors").stat().st_mode & 0o777 == 0o640
