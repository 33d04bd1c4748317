"""Test downloads from a server on loopback: what is cached, and what is refused beforehand."""

import errno
import hashlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mycli.runtime.checkpoint.safetensors_header import INDEX
from mycli.runtime.errors import ExitCode, GateError, ModelError, NotFoundError, ResourceError, UsageError, UserError
from mycli.runtime.hub import download
from mycli.runtime.hub.client import Hub
from mycli.runtime.hub.download import fetch_files, plan_download, read_small_file
from mycli.runtime.hub.integrity import files_to_verify, verify_files
from mycli.runtime.hub.resolve import Source, resolve
from mycli.runtime.hub.store import HubFile, repo_folder
from tests.support.hub_server import HubServer, safetensors
from tests.support.pulling import FILES, QUICK, REPO, WANTED, WEIGHTS, Notes, contents, failing, fetch, leftovers

pytestmark = pytest.mark.usefixtures("folders")


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


def test_a_file_system_without_symlinks(server: HubServer, folders: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "symlink", refuse)
    server.add(REPO, FILES)
    source = fetch(server)
    assert contents(source.folder) == {name: FILES[name] for name in WANTED}
    assert not any(path.is_symlink() for path in source.folder.iterdir()) and not leftovers(folders)
    assert fetch(server) == source == resolve(REPO) and len(server.requests("storage:")) == 1, "nothing comes again"
    checked = verify_files(source, files_to_verify(source), lambda count: None)
    assert {file.state for file in checked} == {"ok"}
    (source.folder / "config.json").unlink()
    monkeypatch.undo()
    monkeypatch.setenv("HF_HUB_CACHE", str(folders))
    assert fetch(server) == source, "also after the cache was copied to a file system with symlinks"
    assert contents(source.folder) == {name: FILES[name] for name in WANTED}


def test_modules_of_an_embedding_model_are_fetched(server: HubServer) -> None:
    modules = {"modules.json": b"[]", "1_Pooling/config.json": b"{}", "2_Dense/model.safetensors": WEIGHTS}
    server.add(REPO, FILES | modules | {"2_Dense/pytorch_model.bin": b"x"})
    folder = fetch(server).folder
    assert {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()} == WANTED | set(modules)
    (folder / "1_Pooling" / "config.json").unlink()
    with pytest.raises(NotFoundError, match="missing 1_Pooling/config.json"):
        resolve(REPO)


def test_named_chat_templates_are_fetched(server: HubServer) -> None:
    named = {"additional_chat_templates/tool_use.jinja": b"{{ tools }}"}
    server.add(REPO, FILES | named | {"additional_chat_templates/notes.txt": b"x", "other/tool_use.jinja": b"x"})
    folder = fetch(server).folder
    assert {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()} == WANTED | set(named)


def test_a_listing_with_a_digest_that_is_none_is_refused(
    server: HubServer, folders: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The digest would become a path in the cache."""
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
    (record,) = folders.glob("*/trees/*.json")
    theirs = json.loads(record.read_text())
    shutil.rmtree(folders)
    fetch(server)
    assert json.loads(record.read_text()) == theirs


def test_sharded_models_fetch_the_shards_of_the_index(server: HubServer) -> None:
    shards = {f"model-{i}-of-2.safetensors": safetensors({f"w{i}": ("F32", [512], bytes([i]) * 2048)}) for i in (1, 2)}
    index = {"metadata": {}, "weight_map": {"w1": "model-1-of-2.safetensors", "w2": "model-2-of-2.safetensors"}}
    extra = {"consolidated.safetensors": WEIGHTS, "config.json": b"{}", INDEX: json.dumps(index).encode()}
    server.add(REPO, {**shards, **extra})
    source = fetch(server)
    assert contents(source.folder).keys() == {*shards, "config.json", INDEX}
    assert resolve(REPO) == source
    server.add(REPO, {**extra, "model-1-of-2.safetensors": b"x"})
    assert "model-2-of-2.safetensors, which org/tiny does not hold" in failing(server).message
    server.add(REPO, {**extra, "model.safetensors": WEIGHTS})
    source = fetch(server)
    assert contents(source.folder).keys() == {"model.safetensors", "config.json"}, "the index is of earlier shards"
    assert resolve(REPO) == source


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
    before = len(server.requests("/revision/"))
    assert fetch(server, f"{REPO}@{commit}").revision == commit
    assert resolve(f"{REPO}@{commit}").folder == resolve(f"{REPO}@v1/rc").folder
    assert [path.name for path in (repo_folder(REPO) / "refs").rglob("*")] == ["v1", "rc"], "a commit is no branch"
    assert len(server.requests("/revision/")) == before
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


def test_a_read_only_cache_that_holds_everything_is_enough(server: HubServer, folders: Path) -> None:
    server.add(REPO, FILES)
    fetch(server)

    def no_write(*_: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(download, "write_atomic", no_write)
        server.refs[REPO]["same"] = server.refs[REPO]["main"]
        assert fetch(server, f"{REPO}@same").folder.is_dir()


def test_a_cache_that_cannot_be_written_is_named(server: HubServer, folders: Path) -> None:
    server.add(REPO, FILES)
    folders.write_bytes(b"a file")
    error = failing(server)
    assert isinstance(error, UsageError) and error.message.startswith(f"cannot write {folders}/models--org--tiny: ")


@pytest.mark.parametrize(("umask", "mode"), [(0o027, 0o640), (0o022, 0o644), (0o002, 0o664)])
def test_modes_follow_the_umask(umask: int, mode: int, server: HubServer) -> None:
    server.add(REPO, FILES)
    old = os.umask(umask)
    try:
        source = fetch(server)
    finally:
        os.umask(old)
    assert (source.folder / "model.safetensors").stat().st_mode & 0o777 == mode


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({"pytorch_model.bin": b"x"}, "only pytorch_model.bin, whose format can run code"),
        ({"pytorch_model.bin": b"x", "other.safetensors": b"x"}, "only pytorch_model.bin, whose format can run code"),
        ({"other.safetensors": b"x"}, "only other.safetensors"),
        ({"model.Q4.gguf": b"GGUF"}, "no safetensors but GGUF files"),
        ({"README.md": b"x"}, "no weights in model.safetensors or model.safetensors.index.json, nor in a GGUF file"),
    ],
    ids=["A19-bin", "A19-among-others", "another-name", "gguf", "nothing"],
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
        server.add(REPO, {"model.safetensors": WEIGHTS, "config.json": b"{}", "tekken.json": b"{}"})
        plan = plan_download(connection, REPO)
    assert not plan.warnings and "tekken.json" in {file.name for file in plan.files}


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


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EFBIG], ids=["disk", "file"])
def test_d2_a_disk_that_fills_up_leaves_something_to_go_on_with(
    server: HubServer, folders: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    server.add(REPO, FILES)
    real = os.pwrite

    def full(descriptor: int, data: bytes, at: int) -> int:
        if len(data) > 10000:
            raise OSError(code, os.strerror(code))
        return real(descriptor, data, at)

    monkeypatch.setattr(os, "pwrite", full)
    error = failing(server)
    assert isinstance(error, ResourceError) and ("the disk is full" in error.message) == (code == errno.ENOSPC)
    monkeypatch.undo()
    monkeypatch.setenv("HF_HUB_CACHE", str(folders))
    assert contents(fetch(server).folder)["model.safetensors"] == WEIGHTS


def test_a_link_to_other_contents_is_replaced_and_a_right_one_stays(server: HubServer, folders: Path) -> None:
    commit = server.add(REPO, FILES)
    snapshot = folders / "models--org--tiny" / "snapshots" / commit
    snapshot.mkdir(parents=True)
    (snapshot / "model.safetensors").symlink_to("../../blobs/other")
    fetch(server)
    link = snapshot / "config.json"
    assert (snapshot / "model.safetensors").read_bytes() == WEIGHTS and link.is_symlink()
    before = link.lstat().st_ino
    (folders / "models--org--tiny" / "blobs" / hashlib.sha256(WEIGHTS).hexdigest()).unlink()
    fetch(server)
    assert link.lstat().st_ino == before and (snapshot / "model.safetensors").read_bytes() == WEIGHTS


def test_contents_of_another_size_are_fetched_again(server: HubServer) -> None:
    server.add(REPO, FILES)
    blob = (fetch(server).folder / "model.safetensors").resolve()
    blob.write_bytes(WEIGHTS[:-1])
    assert contents(fetch(server).folder)["model.safetensors"] == WEIGHTS


@pytest.mark.parametrize(("size", "kind"), [(32 << 20, GateError), ((32 << 20) + 1, ModelError)])
def test_a_small_file_has_at_most_32_mib(size: int, kind: type[UserError]) -> None:
    """The hub here answers with nothing, which does not have the hash."""
    hub: Any = SimpleNamespace(read=lambda *_: b"")
    with pytest.raises(kind):
        read_small_file(hub, REPO, "a" * 40, HubFile("config.json", size, "0" * 64))


@pytest.mark.parametrize(("count", "more"), [(6, ""), (7, " and 1 more")])
def test_six_gguf_files_are_named(count: int, more: str, server: HubServer) -> None:
    names = [f"m-{number}.gguf" for number in range(count)]
    server.add(REPO, {name: b"GGUF" for name in names})
    assert failing(server).hint == "give one: " + ", ".join(f"{REPO}:{name}" for name in names[:6]) + more


def test_a_link_that_is_missing_is_made_from_contents_at_hand(server: HubServer) -> None:
    server.add(REPO, FILES)
    link = fetch(server).folder / "config.json"
    link.unlink()
    fetch(server)
    assert link.read_bytes() == FILES["config.json"]


def test_what_another_process_fetched_since_the_plan_counts_as_arrived(server: HubServer) -> None:
    server.add(REPO, FILES)
    fetch(server)
    server.add(REPO, {**FILES, "config.json": b"{}"})
    notes = Notes()
    with Hub(server.address(), None, print, QUICK) as connection:
        job = plan_download(connection, REPO)
        fetch(server)
        fetch_files(connection, job, force=False, advance=notes.advance)
    assert notes.arrived == job.new_bytes == 2


@pytest.mark.parametrize("named", [True, False])
def test_without_working_locks_another_process_may_have_named_the_file(
    named: bool, server: HubServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    replace = os.replace

    def overtaken(source: Path, target: Path) -> None:
        if target.parent.name != "blobs":
            return replace(source, target)
        if named:
            replace(source, target)
        raise FileNotFoundError(errno.ENOENT, "No such file or directory")

    monkeypatch.setattr(os, "replace", overtaken)
    server.add(REPO, FILES)
    if named:
        assert contents(fetch(server).folder) == {name: FILES[name] for name in WANTED}
    else:
        with pytest.raises(FileNotFoundError):
            fetch(server)
