"""Test that stored models are listed with their problems, and removed without touching other files."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from mycli.runtime.checkpoint.safetensors_header import INDEX
from mycli.runtime.errors import ExitCode, NotFoundError, UsageError, UserError
from mycli.runtime.hub.download import lock_folder
from mycli.runtime.hub.local import local_models, plan_removal, remove
from mycli.runtime.hub.resolve import resolve
from mycli.runtime.hub.store import data_dir, repo_folder
from mycli.runtime.utils.files import try_lock
from tests.support.paths import PICO
from tests.support.stored_models import FILES, FIRST, SECOND, cached, checked, quantized

pytestmark = pytest.mark.usefixtures("folders")


def rows() -> dict[str, tuple[str, int, str]]:
    return {entry.name: (entry.kind, entry.nbytes, entry.problem) for entry in local_models()}


def test_all_kinds_are_listed() -> None:
    cached(FILES)
    folder = quantized()
    listed = rows()
    assert list(listed) == ["pico", "pico-draft", "tiny-int4", "org/tiny"]
    assert listed["org/tiny"][:2] == ("hub", 702)
    assert listed["tiny-int4"][:2] == ("quantized", sum(p.stat().st_size for p in folder.iterdir()))


def _cut(path: Path, share: float) -> None:
    path.write_bytes(path.read_bytes()[: int(path.stat().st_size * share)])


def _cut_tekken(folder: Path) -> None:
    (folder / "tokenizer.json").rename(folder / "tekken.json")
    _cut(folder / "tekken.json", 0.7)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda folder: None, ""),
        (lambda folder: (folder / "config.json").unlink(), "incomplete: config.json missing"),
        (
            lambda folder: (folder / "config.json").write_text('{"model_type": "gptj"}'),
            "unsupported: config.json: model",
        ),
        (lambda folder: _cut(folder / "config.json", 0.5), "damaged: config.json"),
        (lambda folder: _cut(folder / "model.safetensors", 0.9), "damaged: model.safetensors"),
        (lambda folder: _cut(folder / "model.safetensors", 0), "damaged: model.safetensors: empty file"),
        (lambda folder: (folder / "tokenizer.json").unlink(), "no tokenizer.json"),
        (lambda folder: _cut(folder / "tokenizer.json", 0.7), "damaged: tokenizer.json is cut off"),
        (lambda folder: (folder / "tokenizer.json").rename(folder / "tekken.json"), ""),
        (_cut_tekken, "damaged: tekken.json is cut off"),
        (lambda folder: (folder / "tokenizer.json").write_text("{}\n"), ""),
    ],
    ids=["whole", "no-config", "family", "half-a-config", "cut-weights", "empty-weights", "no-tokenizer", "half-of-it"]
    + ["tekken", "half-of-tekken", "small-tokenizer"],
)
def test_a_model_that_cannot_answer_is_not_called_ready(change: Callable[[Path], object], problem: str) -> None:
    folder = data_dir() / "models" / "copy"
    shutil.copytree(PICO, folder)
    change(folder)
    assert rows()["copy"][2].startswith(problem) and bool(rows()["copy"][2]) == bool(problem)
    assert removed("copy") > 0 and not folder.exists(), "what is damaged can be removed by name"


def test_each_commit_has_the_name_that_reaches_it() -> None:
    cached(FILES)
    cached(FILES | {"config.json": b'{"a": 1}'}, SECOND, ref="v2")
    assert {"org/tiny", "org/tiny@v2"} <= rows().keys()
    (repo_folder("org/tiny") / "refs" / "v2").unlink()
    assert f"org/tiny@{SECOND}" in rows()
    for name in rows():
        assert resolve(name).folder.is_dir()
    (repo_folder("org/tiny") / "refs" / "v3").write_text("c" * 40)
    with pytest.raises(NotFoundError, match="org/tiny@v3 is not on this machine; here is org/tiny@main"):
        resolve("org/tiny@v3")


def test_what_cannot_be_used_says_why() -> None:
    folder = cached(FILES)
    (folder / "model.safetensors").unlink()
    (repo_folder("org/tiny") / "blobs" / "x.mycli.incomplete").write_bytes(b"half")
    assert rows()["org/tiny"] == ("hub", 6, "incomplete: model.safetensors missing")
    cached({"config.json": b"{}", "pytorch_model.bin": b"x"}, SECOND, ref="old")
    assert rows()["org/tiny@old"][2] == "no safetensors"


def test_a_whole_model_has_the_size_of_its_files() -> None:
    files = {path.name: path.read_bytes() for path in PICO.iterdir()}
    cached(files)
    (repo_folder("org/tiny") / "blobs" / "x.mycli.incomplete").write_bytes(b"half")
    assert rows()["org/tiny"] == ("hub", sum(map(len, files.values())), "")


def test_the_first_of_several_missing_files_is_named_with_their_number() -> None:
    weights = {f"model-{number}.safetensors": FILES["model.safetensors"] for number in (1, 2, 3)}
    index = json.dumps({"weight_map": {f"w{number}": name for number, name in enumerate(weights)}}).encode()
    folder = cached({"config.json": FILES["config.json"], INDEX: index, **weights})
    for more, name in enumerate(weights):
        (folder / name).unlink()
        others = f" and {more} more" if more else ""
        assert rows()["org/tiny"][2] == f"incomplete: model-1.safetensors missing{others}"


def test_an_empty_machine() -> None:
    assert [entry.kind for entry in local_models()] == ["built-in", "built-in"]


# Removing


def removed(model: str) -> int:
    removal = plan_removal(model)
    remove(removal, lambda text: None)
    return removal.nbytes


def test_a_whole_repository_goes_and_nothing_else(tmp_path: Path) -> None:
    cached(FILES)
    (repo_folder("org/tiny") / "blobs" / "x.mycli.incomplete").write_bytes(b"half")
    other = repo_folder("org/other")
    other.mkdir()
    assert removed("org/tiny") >= 706
    assert not repo_folder("org/tiny").exists() and other.exists()
    assert not lock_folder(repo_folder("org/tiny")).exists()
    assert [path.name for path in (tmp_path / "hub").iterdir() if not path.name.startswith(".locks")] == [other.name]


def test_one_revision_leaves_what_another_uses() -> None:
    cached(FILES)
    other = cached(FILES | {"config.json": b'{"a": 1}'}, SECOND, ref="v2")
    assert removed("org/tiny@main") == 2
    assert set(checked("org/tiny@v2").values()) == {"ok"} and other.exists()
    folder = repo_folder("org/tiny")
    assert not (folder / "trees" / f"{FIRST}.json").exists()
    assert sorted(path.stat().st_size for path in (folder / "blobs").iterdir()) == [8, 700]
    with pytest.raises(NotFoundError):
        resolve("org/tiny")
    (folder / "refs" / "v3").write_text("c" * 40)
    with pytest.raises(NotFoundError, match="org/tiny@v3 is not on this machine"):
        removed("org/tiny@v3")


def test_the_only_revision_is_removed_without_what_belongs_to_none() -> None:
    cached(FILES)
    (repo_folder("org/tiny") / "blobs" / "x.mycli.incomplete").write_bytes(b"half")
    assert removed("org/tiny@main") == sum(map(len, FILES.values()))
    with pytest.raises(NotFoundError):
        resolve("org/tiny")


def test_one_gguf_file_of_a_repository_leaves_the_others(tmp_path: Path) -> None:
    large, same = b"G" * 50, b"S" * 20
    first = cached({"m-Q8_0.gguf": large, "m-Q4_0-00001-of-00002.gguf": b"1", "m-Q4_0-00002-of-00002.gguf": same})
    cached({"m-BF16.gguf": same}, SECOND, ref="v2")
    for absent in ("Q2_K", "m-Q2_K.gguf"):
        with pytest.raises(NotFoundError, match=f"org/tiny:{absent} is not on this machine"):
            removed(f"org/tiny:{absent}")
    assert removed("org/tiny:Q4_0") == 1, "the other part is a file of v2 too"
    assert [path.name for path in first.iterdir()] == ["m-Q8_0.gguf"]
    assert resolve("org/tiny@v2:m-BF16.gguf").folder.read_bytes() == same
    blobs = repo_folder("org/tiny") / "blobs"
    assert sorted(path.stat().st_size for path in blobs.iterdir()) == [20, 50]
    removed("org/tiny:m-Q8_0.gguf")
    assert not first.exists() and resolve("org/tiny@v2:BF16").folder.exists()
    removed("org/tiny@v2:BF16")
    assert rows().keys() == {"pico", "pico-draft"}


def test_a_gguf_file_takes_its_contents_along_in_a_cache_of_a_relative_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_CACHE", "hub")
    cached({"m-Q8_0.gguf": b"G" * 50, "m-Q4_0.gguf": b"S" * 20})
    assert removed("org/tiny:Q4_0") == 20
    assert [path.stat().st_size for path in (repo_folder("org/tiny") / "blobs").iterdir()] == [50]


def test_with_the_last_gguf_file_the_repository_goes() -> None:
    cached({"m-Q8_0.gguf": b"G" * 50})
    assert removed("org/tiny:Q8_0") > 50 and not repo_folder("org/tiny").exists()


def test_an_unfinished_download_can_be_removed() -> None:
    cached(FILES)
    shutil.rmtree(repo_folder("org/tiny") / "snapshots")
    shutil.rmtree(repo_folder("org/tiny") / "refs")
    removed("org/tiny")
    assert not repo_folder("org/tiny").exists()


@pytest.mark.parametrize(
    "left", ["tiny-int4.replaced-12-0123456789ab", "tiny-int4.widths.partial-12-0123456789ab", "removed-12-tiny-int4"]
)
def test_what_a_killed_command_leaves_is_listed_and_can_be_removed(left: str) -> None:
    """Killed while it deleted the folder that it had replaced or was to remove, or measured a copy."""
    folder = quantized()
    folder.rename(folder.with_name(f".{left}"))
    assert rows()[left][0] == "unfinished"
    removed(left)
    assert not list(folder.parent.iterdir())


def test_only_a_folder_is_unfinished_work() -> None:
    quantized().with_name(".tiny-int4.work").write_bytes(b"")
    assert rows().keys() == {"pico", "pico-draft", "tiny-int4"}


@pytest.mark.parametrize("lock", ["tiny-int4.work/lock", "tiny-int4.lock"], ids=["work", "target"])
def test_what_another_process_writes_is_not_removed(lock: str) -> None:
    work = data_dir() / "models" / ".tiny-int4.work"
    work.mkdir(parents=True)
    with (work.parent / f".{lock}").open("wb") as file:
        assert try_lock(file.fileno())
        with pytest.raises(UsageError, match="another process is using it"):
            plan_removal("tiny-int4.work")
    removed("tiny-int4.work")
    assert not work.exists()


def test_a_quantized_model_goes_by_its_name() -> None:
    folder = quantized()
    quantized("other")
    size = sum(path.stat().st_size for path in folder.iterdir())
    assert removed("tiny-int4") == size
    assert [path.name for path in folder.parent.iterdir()] == ["other"]


def test_a_link_is_removed_not_what_it_points_to(tmp_path: Path) -> None:
    shutil.copytree(PICO, tmp_path / "mine")
    link = data_dir() / "models" / "linked"
    link.parent.mkdir(parents=True)
    link.symlink_to(tmp_path / "mine")
    removed("linked")
    assert not link.is_symlink() and (tmp_path / "mine" / "config.json").exists()


@pytest.mark.parametrize(
    ("model", "code"),
    [
        ("pico", ExitCode.USAGE),
        ("./mine", ExitCode.USAGE),
        ("mine", ExitCode.USAGE),
        ("org/mine", ExitCode.USAGE),
        ("empty", ExitCode.USAGE),
        ("some/folder/deep", ExitCode.USAGE),
        ("~", ExitCode.USAGE),
        ("/", ExitCode.USAGE),
        ("..", ExitCode.USAGE),
        ("nothing", ExitCode.NOT_FOUND),
        ("org/nothing", ExitCode.NOT_FOUND),
        ("org/tiny@v9", ExitCode.NOT_FOUND),
        ("org/../..", ExitCode.USAGE),
    ],
)
def test_what_mycli_did_not_store_is_left_alone(model: str, code: ExitCode, tmp_path: Path) -> None:
    cached(FILES)
    (tmp_path / "empty").mkdir()
    for folder in (tmp_path / "mine", tmp_path / "org" / "mine"):
        shutil.copytree(PICO, folder)
    with pytest.raises(UserError) as caught:
        plan_removal(model)
    assert caught.value.exit_code == code
    assert isinstance(caught.value, UsageError | NotFoundError)


@pytest.mark.parametrize("model", ["nothing", "llama3", "org/nothing", "org/tiny@v9"])
def test_the_remedy_for_an_unknown_name_downloads_nothing(model: str) -> None:
    cached(FILES)
    with pytest.raises(NotFoundError) as caught:
        plan_removal(model)
    assert caught.value.code == "list-models"
