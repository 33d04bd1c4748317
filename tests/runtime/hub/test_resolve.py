"""Test how names resolve to folders: each spelling, refused ones, and unfinished or foreign caches."""

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from mycli.cli.remedies import remedy
from mycli.runtime.checkpoint.safetensors_header import INDEX
from mycli.runtime.errors import ExitCode, ModelError, NotFoundError, UsageError, UserError
from mycli.runtime.hub import store
from mycli.runtime.hub.resolve import Source, custom_code_warning, resolve
from mycli.runtime.hub.store import HubFile, missing_files, read_shards
from mycli.runtime.utils.json_fields import read_object
from tests.support.paths import PICO, ROOT

COMMIT, OTHER = "a" * 40, "b" * 40


@pytest.fixture(autouse=True)
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.setenv("MYCLI_HOME", str(tmp_path / "home"))
    work = tmp_path / "work"
    work.mkdir()
    monkeypatch.chdir(work)
    return tmp_path


def model(folder: Path) -> Path:
    folder.mkdir(parents=True)
    for name in ("config.json", "model.safetensors"):
        (folder / name).write_text("{}")
    return folder


def cached(repo: str = "org/tiny", commit: str = COMMIT, ref: str | None = "main") -> Path:
    folder = store.repo_folder(repo)
    if ref:
        (folder / "refs" / ref).parent.mkdir(parents=True, exist_ok=True)
        (folder / "refs" / ref).write_text(commit)
    return model(folder / "snapshots" / commit)


def tree(repo: str, commit: str, *names: str) -> None:
    path = store.repo_folder(repo) / "trees" / f"{commit}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    files = {name: {"size": 2, "blob_id": "c" * 40} for name in names}
    path.write_text(json.dumps({"format_version": 1, "files": files}))


def failure(name: str, offline: bool = False) -> UserError:
    with pytest.raises(UserError) as caught:
        resolve(name, offline=offline)
    return caught.value


def test_built_in_models() -> None:
    for name in ("pico", "pico-draft"):
        assert (resolve(name).folder / "model.safetensors").stat().st_size > 1000
        assert resolve(name).repo is None


def test_a_folder_by_every_spelling(folders: Path) -> None:
    folder = model(folders / "work" / "sub" / "deep")
    for spelling in ("sub/deep", "./sub/deep", str(folder), "sub/deep/"):
        assert resolve(spelling).folder.resolve() == folder
    os.chdir(folder)
    assert resolve(".").folder.resolve() == folder


def test_home_is_expanded(folders: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(folders))
    folder = model(folders / "m")
    assert resolve("~/m").folder == folder


def test_a_quantized_name(folders: Path) -> None:
    folder = model(folders / "home" / "models" / "tiny-rtn-int4-g128")
    assert resolve("tiny-rtn-int4-g128").folder == folder
    assert "tiny-rtn-int4-g128" in store.local_model_names()


def test_a_cached_repository_at_its_commit() -> None:
    first, second = cached(), cached(commit=OTHER, ref="v2/beta")
    assert resolve("org/tiny") == Source("org/tiny", first, "org/tiny", COMMIT)
    assert resolve("org/tiny@v2/beta").folder == second
    assert resolve(f"org/tiny@{OTHER}").revision == OTHER
    assert store.local_model_names() == ["pico", "pico-draft", "org/tiny"]


def test_a_branch_never_pulled_is_not_another_one() -> None:
    cached(ref="v1")
    error = failure("org/tiny")
    assert error.message == "org/tiny is not on this machine; here is org/tiny@v1"
    assert remedy(error) == "mycli pull org/tiny" and error.exit_code == ExitCode.NOT_FOUND
    cached("org/loose", ref=None)
    assert f"org/loose@{COMMIT}" in failure("org/loose").message


@pytest.mark.parametrize(
    ("name", "suggestion"),
    [
        ("org/tyni", "org/tiny"),
        ("ORG/TINY", "org/tiny"),
        ("tiny", "org/tiny"),
        ("pcio", "pico"),
        ("Pico", "pico"),
        ("pico:latest", "pico"),
        ("tiny:8b", "org/tiny"),
    ],
)
def test_a_misspelt_name_gets_the_closest(name: str, suggestion: str) -> None:
    cached()
    error = failure(name)
    assert isinstance(error, NotFoundError) and f"did you mean {suggestion}" in error.message


@pytest.mark.parametrize(
    ("name", "suggestion"),
    [
        ("model.ggu", "model.gguf"),
        ("./model.ggu", "./model.gguf"),
        ("Modell.gguf", "model.gguf"),
        ("folder/my-modle", "folder/my-model"),
        ("./folder/my-modle/", "./folder/my-model"),
        ("./folder/models/model.ggu", None),
        ("model.txt", None),
        ("./notes", None),
    ],
)
def test_a_misspelt_path_gets_the_closest(folders: Path, name: str, suggestion: str | None) -> None:
    (folders / "work" / "model.gguf").touch()
    (folders / "work" / "notes.md").touch()
    model(folders / "work" / "folder" / "my-model")
    message = failure(name).message
    assert message.endswith(f"; did you mean {suggestion}?") if suggestion else "did you mean" not in message


def test_an_ambiguous_name_says_how_to_write_each(folders: Path) -> None:
    model(folders / "work" / "pico")
    error = failure("pico")
    assert error.message == "pico means 2 models" and "./pico or /" in error.hint
    assert resolve("./pico").folder.resolve() == folders / "work" / "pico"
    cached()
    model(folders / "work" / "org" / "tiny")
    assert failure("org/tiny").hint == "write ./org/tiny or org/tiny@main"
    assert resolve("org/tiny@main").repo == "org/tiny"


def test_a_folder_that_is_no_model_hides_nothing(folders: Path) -> None:
    (folders / "work" / "pico").mkdir()
    assert resolve("pico").folder.samefile(PICO)
    assert "no config.json" in failure("./pico").message
    (folders / "work" / "pico" / "params.json").write_text("{}")
    assert "use a version of the model with config.json" in failure("./pico").hint


@pytest.mark.parametrize(
    "name",
    [
        "",
        "a\0b",
        "x" * 5000,
        "org/../etc",
        "org/na--me",
        "org/tiny@../../x",
        "org/tiny@",
        "org/tiny@/x",
        "a/b@c\nd",
        "-/x",
    ],
)
def test_hostile_names_are_refused_before_they_are_paths(name: str) -> None:
    assert failure(name).exit_code in (ExitCode.USAGE, ExitCode.NOT_FOUND)


@pytest.mark.parametrize(
    ("name", "kind", "words"),
    [
        ("./none", NotFoundError, "no such folder"),
        ("/dev/zero", ModelError, "neither a folder nor a regular file"),
        ("some/folder/deep", NotFoundError, "no such folder"),
        ("./file.bin", ModelError, "or a folder with config.json"),
        ("x" * 300, NotFoundError, "no model of that name here"),
        ("~nobody-of-that-name/x", NotFoundError, "no such folder"),
        ("./a\x00b", UsageError, "empty or not a name"),
    ],
)
def test_paths_that_do_not_work(name: str, kind: type[UserError], words: str) -> None:
    Path("file.bin").write_bytes(b"GGUF")
    error = failure(name)
    assert isinstance(error, kind) and (words in error.message or "too long" in error.message)


def test_a_quantized_model_without_its_config_is_damaged() -> None:
    folder = store.data_dir() / "models" / "tiny-int4"
    folder.mkdir(parents=True)
    error = failure("tiny-int4")
    assert error.message == f"tiny-int4 is damaged: {folder} has no config.json" and error.code == "remove-model"


def test_a_model_whose_quantization_was_interrupted_is_named_as_that() -> None:
    (store.data_dir() / "models" / ".tiny-gptq-int4-g128.work").mkdir(parents=True)
    error = failure("tiny-gptq-int4-g128")
    assert error.message == "tiny-gptq-int4-g128: its quantization is not finished"
    assert error.exit_code == ExitCode.NOT_FOUND and error.code == "finish-quantizing"


@pytest.mark.parametrize("name", ["my copy", "./my copy", "deep/er/copy.gguf"])
def test_a_folder_or_file_whose_quantization_was_interrupted_is_named_as_that(name: str) -> None:
    work = Path(name).with_name(f".{Path(name).name}.work")
    work.mkdir(parents=True)
    error = failure(name)
    assert error.message == f"{name}: its quantization is not finished"
    assert (error.code, error.data) == ("finish-quantizing-folder", {"folder": shlex.quote(str(work))})


def test_offline_partial_snapshot_lists_what_is_missing() -> None:
    """D12."""
    folder = cached()
    index = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    (folder / INDEX).write_text(json.dumps(index))
    (folder / "model-1.safetensors").write_text("x")
    tree("org/tiny", COMMIT, "config.json", INDEX, "tokenizer.json", "other.json")
    error = failure("org/tiny", offline=True)
    assert error.message == "org/tiny is only partly downloaded: missing model-2.safetensors, tokenizer.json"
    assert remedy(error) == "run it without --offline: mycli pull org/tiny"


def test_a_first_download_that_broke_off_is_known_without_a_branch() -> None:
    tree("org/tiny", COMMIT, "config.json", "model.safetensors")
    assert "missing config.json, model.safetensors" in failure("org/tiny").message


def test_a_cache_written_by_another_tool_has_no_record() -> None:
    folder = cached()
    assert resolve("org/tiny").folder == folder
    (folder / "model.safetensors").unlink()
    assert "missing model.safetensors" in failure("org/tiny").message


@pytest.mark.parametrize(("others", "missing"), [((), ["tekken.json"]), (("tokenizer.json",), [])])
def test_tekken_is_needed_where_it_is_the_only_tokenizer(others: tuple[str, ...], missing: list[str]) -> None:
    folder = cached()
    files = [HubFile(name, 1, "0" * 40) for name in ("config.json", "tekken.json", *others)]
    for name in others:
        (folder / name).write_text("{}")
    assert missing_files(folder, files) == missing


def test_dangling_link_is_missing(folders: Path) -> None:
    folder = cached()
    (folder / "config.json").unlink()
    (folder / "config.json").symlink_to("../../blobs/gone")
    assert missing_files(folder, None) == ["config.json"]


SHARDS = {
    "A20-parent": "../../etc/passwd",
    "A20-absolute": "/etc/passwd",
    "A20-drive": "C:\\x.safetensors",
    "A20-unc": "\\\\host\\x.safetensors",
    "A20-nul": "a\0.safetensors",
    "A20-folder": "a/b.safetensors",
    "A21-bin": "w.bin",
    "not-a-string": 3,
}


@pytest.mark.parametrize("shard", SHARDS.values(), ids=SHARDS.keys())
def test_an_index_names_only_safetensors_beside_it(shard: object) -> None:
    folder = cached()
    (folder / INDEX).write_text(json.dumps({"weight_map": {"a": shard}}))
    with pytest.raises(ModelError, match="weight_map"):
        read_shards(read_object(folder / INDEX))
    assert failure("org/tiny").exit_code == ExitCode.MODEL


@pytest.mark.parametrize("text", ["", "{", '{"files": 3}', '{"files": {"x": {"size": -1, "blob_id": "c"}}}', "[]"])
def test_a_damaged_record_counts_as_none(text: str) -> None:
    cached()
    tree("org/tiny", COMMIT)
    (store.repo_folder("org/tiny") / "trees" / f"{COMMIT}.json").write_text(text)
    assert store.read_tree(store.repo_folder("org/tiny"), COMMIT) is None
    assert resolve("org/tiny").repo == "org/tiny"


def test_an_entry_without_a_hash_is_left_out_of_a_record() -> None:
    tree("org/tiny", COMMIT)
    path = store.repo_folder("org/tiny") / "trees" / f"{COMMIT}.json"
    files = {"odd": {"size": 1, "blob_id": "../x"}, "w": {"size": 9, "blob_id": "d" * 40}}
    path.write_text(json.dumps({"format_version": 1, "files": files}))
    assert store.read_tree(path.parent.parent, COMMIT) == (HubFile("w", 9, "d" * 40),)


def test_folders_that_may_not_be_read_hold_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Path, pattern: str) -> list[Path]:
        raise PermissionError(13, "Permission denied", str(self))

    cached()
    assert "org/tiny" in store.local_model_names()
    monkeypatch.setattr(Path, "glob", refuse)
    assert store.local_model_names() == list(store.BUILT_IN)
    assert resolve("pico").folder == store.built_in_folder("pico")
    assert failure("nothing").exit_code == ExitCode.NOT_FOUND


def test_the_record_prefers_the_large_files_hash() -> None:
    tree("org/tiny", COMMIT)
    path = store.repo_folder("org/tiny") / "trees" / f"{COMMIT}.json"
    entry = {"size": 130, "blob_id": "c" * 40, "lfs_sha256": "d" * 64, "lfs_size": 9}
    path.write_text(json.dumps({"format_version": 1, "files": {"w": entry}}))
    assert store.read_tree(path.parent.parent, COMMIT) == (HubFile("w", 9, "d" * 64),)


@pytest.mark.parametrize("text", ["", "../../x", "A" * 40, "a" * 41, "\xff"])
def test_a_damaged_branch_points_nowhere(text: str) -> None:
    cached()
    (store.repo_folder("org/tiny") / "refs" / "main").write_bytes(text.encode("latin-1"))
    assert "is not on this machine" in failure("org/tiny").message


@pytest.mark.parametrize(
    "environment",
    [
        {},
        {"HF_HOME": "/x/hf"},
        {"HF_HUB_CACHE": "/x/cache", "HF_HOME": "/y"},
        {"HUGGINGFACE_HUB_CACHE": "/x/old"},
        {"XDG_CACHE_HOME": "/x/xdg"},
        {"HF_HUB_CACHE": "~/c"},
        {"HF_HUB_CACHE": "~no-such-user/c"},
        {"HF_HOME": "$HOME/h"},
    ],
)
def test_the_cache_is_where_huggingface_hub_has_it(environment: dict[str, str]) -> None:
    code = (
        "from mycli.runtime.hub.store import hub_cache; from huggingface_hub import constants; "
        "assert str(hub_cache()) == constants.HF_HUB_CACHE, (hub_cache(), constants.HF_HUB_CACHE)"
    )
    base = {"PATH": os.environ["PATH"], "HOME": "/home/someone", "PYTHONPATH": str(ROOT / ".links")}
    subprocess.run([sys.executable, "-c", code], env={**base, **environment}, check=True)


def test_our_own_folders_follow_xdg(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, folder in (("MYCLI_HOME", "/m"), ("XDG_DATA_HOME", "/d"), ("XDG_STATE_HOME", "/s")):
        monkeypatch.setenv(name, folder)
    assert store.data_dir() == Path("/m") and store.state_dir() == Path("/s/mycli")
    monkeypatch.delenv("MYCLI_HOME")
    assert store.data_dir() == Path("/d/mycli")
    monkeypatch.delenv("XDG_STATE_HOME")
    assert store.state_dir() == Path.home() / ".local/state/mycli"


def test_resolving_imports_nothing_slow() -> None:
    code = (
        "import sys; from mycli.runtime.hub.resolve import resolve; resolve('pico'); "
        "assert not {'torch', 'huggingface_hub', 'httpx2', 'httpx'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": str(ROOT / ".links")}, check=True)


def test_custom_code_is_warned_of(folders: Path) -> None:
    """B15."""
    folder = model(folders / "m")
    assert custom_code_warning(folder) == ""
    (folder / "config.json").write_text('{"auto_map": {"AutoModel": "modeling.X"}}')
    assert "auto_map" in custom_code_warning(folder)
    (folder / "config.json").write_text("[" * 10**5)
    assert custom_code_warning(folder) == ""


def test_a_file_in_a_folder_is_not_looked_for_on_the_hub(folders: Path) -> None:
    (folders / "work" / "sub").mkdir()
    (folders / "work" / "sub" / "model.safetensors").touch()
    error = failure("sub/model.safetensors")
    assert "a file, but a model is" in error.message and remedy(error) == "give its folder: sub"


def test_long_lists_are_cut(folders: Path) -> None:
    for number in range(6):
        (folders / "work" / "sub").mkdir(exist_ok=True)
        (folders / "work" / "sub" / f"m-Q{number}.gguf").write_bytes(b"GGUF")
    error = failure("./sub")
    listed = ", ".join(f"sub/m-Q{number}.gguf" for number in range(4))
    assert "GGUF files without config.json" in error.message and remedy(error) == f"give one: {listed} and 2 more"
    (folders / "work" / "sub" / "m-Q5.gguf").unlink()
    (folders / "work" / "sub" / "m-Q4.gguf").unlink()
    assert remedy(failure("./sub")) == f"give one: {listed}"
    for number in range(4):
        cached(commit=str(number) * 40, ref=f"v{number}")
    assert failure("org/tiny").message.count("org/tiny@v") == 3
