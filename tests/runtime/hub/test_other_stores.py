"""Test that models of Ollama and LM Studio are found by name and used where they lie."""

import json
from pathlib import Path

import numpy as np
import pytest

from mycli.cli.main import main
from mycli.runtime.checkpoint.open_folder import open_model_folder
from mycli.runtime.errors import ExitCode, ModelError, NotFoundError
from mycli.runtime.hub import other_stores
from mycli.runtime.hub.integrity import has_record
from mycli.runtime.hub.local import local_models
from mycli.runtime.hub.other_stores import find_stored, stored_models
from mycli.runtime.hub.resolve import resolve, resolve_adapter
from mycli.runtime.open import OpenReport, add_adapter
from tests.attacks.gguf_model_attacks import model
from tests.support.adapters import write_gguf_adapter
from tests.support.other_stores import lm_studio, ollama
from tests.support.stored_models import checked

DATA = model({}, {})
DOWN = "model.layers.0.mlp.down_proj"


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("OLLAMA_MODELS", raising=False)
    return tmp_path


@pytest.mark.parametrize(
    ("place", "names"),
    [
        (
            ("registry.ollama.ai", "library", "tiny", "1b"),
            ["tiny:1b", "ollama.com/library/tiny:1b", "ollama run tiny:1b"],
        ),
        (
            ("registry.ollama.ai", "library", "tiny", "latest"),
            ["tiny", "tiny:latest", "https://ollama.com/library/tiny"],
        ),
        (("registry.ollama.ai", "someone", "tiny", "q4"), ["someone/tiny:q4"]),
        (("hf.co", "org", "tiny-GGUF", "Q4_K_M"), ["org/tiny-GGUF:Q4_K_M"]),
        (("models.example.com", "org", "tiny", "1b"), ["models.example.com/org/tiny:1b"]),
    ],
)
def test_ollamas_names(home: Path, place: tuple[str, ...], names: list[str]) -> None:
    ollama(home, DATA, *place)
    for name in names:
        source = resolve(name)
        assert source.folder.read_bytes() == DATA and source.folder.parent == home / ".ollama/models/blobs"
        assert open_model_folder(source.folder).config.layers > 0
        assert not source.label.startswith("sha256") and not has_record(source)
    (home / "mine").mkdir()
    (home / "mine/tiny.gguf").write_bytes(DATA)
    assert resolve(str(home / "mine/tiny.gguf")).label == "tiny", "as a folder"


def test_a_folder_of_ollamas_by_its_variable(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The store may be a link to another disk."""
    ollama(home, DATA)
    (home / "disk").symlink_to(home / ".ollama/models")
    monkeypatch.setenv("OLLAMA_MODELS", str(home / "disk"))
    assert resolve("tiny:1b").folder.parent == home / "disk/blobs"
    monkeypatch.setenv("OLLAMA_MODELS", str(home / "nothing"))
    with pytest.raises(NotFoundError):
        resolve("tiny:1b")


def test_lm_studios_names(home: Path) -> None:
    small, large = (lm_studio(home, DATA, f"org/tiny-GGUF/tiny-{kind}.gguf") for kind in ("Q4_K_M", "Q8_0"))
    lm_studio(home, DATA, "org/tiny-GGUF/mmproj-F16.gguf")
    assert resolve("org/tiny-GGUF:Q4_K_M").folder == small
    assert resolve("org/tiny-GGUF:tiny-Q8_0.gguf").folder == large
    with pytest.raises(ModelError, match="2 files") as caught:
        resolve("org/tiny-GGUF")
    assert "org/tiny-GGUF:tiny-Q4_K_M.gguf" in (caught.value.hint or "")
    large.unlink()
    assert resolve("org/tiny-GGUF").folder == small
    for number in range(4):
        lm_studio(home, DATA, f"org/tiny-GGUF/tiny-{number}.gguf")
    with pytest.raises(ModelError, match="5 files") as caught:
        resolve("org/tiny-GGUF")
    assert (caught.value.hint or "").count(" or ") == 3, "not all of a long list"
    assert find_stored("org/tiny-GGUF:Q2_K") is None


def test_a_store_is_listed_up_to_a_bound(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(3):
        ollama(home, DATA, "registry.ollama.ai", "library", "tiny", f"{number}b")
        lm_studio(home, DATA, f"org/tiny-{number}-GGUF/tiny.gguf")
    assert len([*stored_models()]) == 6
    monkeypatch.setattr(other_stores, "_MAX_MODELS", 2)
    names = [model.name for model in stored_models()]
    assert len(names) == 4 and not any("2b" in name or "tiny-2" in name for name in names)


def test_names_that_no_program_gives_are_not_listed_or_found(home: Path) -> None:
    for parts in ((".tiny", "1b"), ("tiny", ".1b")):
        ollama(home, DATA, "registry.ollama.ai", "library", *parts)
        assert find_stored(":".join(parts)) is None
    for place in (".org/tiny/tiny.gguf", "org/.tiny/tiny.gguf", "org/tiny.gguf"):
        lm_studio(home, DATA, place)
    assert not [*stored_models()]


@pytest.mark.parametrize("size", [1, -1, None, float(len(DATA)), str(len(DATA))])
def test_a_file_that_has_not_its_recorded_size_is_refused(home: Path, size: object) -> None:
    path = ollama(home, DATA)
    manifest = json.loads(path.read_text())
    manifest["layers"][0]["size"] = len(DATA) + size if isinstance(size, int) else size
    path.write_text(json.dumps(manifest))
    with pytest.raises(ModelError, match=f"has {len(DATA)} bytes, expected"):
        find_stored("tiny:1b")


def test_a_second_adapter_is_refused(home: Path) -> None:
    path = ollama(home, DATA, adapter=b"GGUF adapter")
    manifest = json.loads(path.read_text())
    manifest["layers"].append(manifest["layers"][1])
    path.write_text(json.dumps(manifest))
    with pytest.raises(ModelError, match="2 adapters, of which Ollama applies one"):
        find_stored("tiny:1b")


def test_a_folder_of_a_store_that_leads_out_of_it_is_not_followed(home: Path) -> None:
    folder = ollama(home, DATA).parent
    folder.rename(home / "elsewhere")
    folder.symlink_to(home / "elsewhere")
    with pytest.raises(ModelError, match="a link, which is not followed"):
        find_stored("tiny:1b")


def test_list_says_where_a_file_lies(home: Path) -> None:
    ollama(home, DATA)
    ollama(home, DATA + b"\0", "registry.ollama.ai", "library", "bad", "1b", layers=[])
    file = lm_studio(home, DATA, "org/tiny-GGUF/tiny-Q8_0.gguf")
    found = {known.name: known for known in local_models()}
    assert (found["tiny:1b"].kind, found["tiny:1b"].nbytes, found["tiny:1b"].problem) == ("ollama", len(DATA), "")
    assert found["tiny:1b"].folder.read_bytes() == DATA
    assert found["org/tiny-GGUF:tiny-Q8_0.gguf"].folder == file and not found["org/tiny-GGUF:tiny-Q8_0.gguf"].problem
    assert "0 layers are models" in found["bad:1b"].problem


def test_ones_own_models_count_first(home: Path) -> None:
    ollama(home, DATA, "registry.ollama.ai", "library", "pico", "latest")
    assert resolve("pico").folder.is_dir()


def test_an_adapter_of_ollamas_is_applied(home: Path, tmp_path: Path) -> None:
    """A Modelfile with ADAPTER makes a manifest with two files; the name of the model means both."""
    ollama(home, DATA)
    plain = resolve("tiny:1b").open()
    rows, columns = dict(plain.config.tensors())[f"{DOWN}.weight"]
    halves = {"lora_a": np.ones((2, columns), np.float32), "lora_b": np.ones((rows, 2), np.float32)}
    tensors = {f"blk.0.ffn_down.weight.{half}": values for half, values in halves.items()}
    adapter = write_gguf_adapter(tmp_path / "a.gguf", tensors, alpha=4.0).read_bytes()
    ollama(home, DATA, "registry.ollama.ai", "library", "tuned", "latest", adapter=adapter)
    source, name = resolve("tuned"), f"{DOWN}.weight"
    before, after = (opened.checkpoint().read(name) for opened in (resolve("tiny:1b").open(), source.open()))
    assert (after.float() - before.float() - 4).abs().max() < 0.05
    assert resolve("tiny:1b").adapter is None
    (listed,) = (known for known in local_models() if known.name == "tuned:latest")
    assert (listed.nbytes, listed.problem) == (len(DATA) + len(adapter), "")
    assert resolve_adapter("tuned").folder == source.adapter
    with pytest.raises(ModelError, match="contains an adapter, and only one"):
        add_adapter(source.open(), "tuned", "tuned", report=OpenReport())


def test_an_adapter_of_another_model_is_listed_with_the_reason(home: Path, tmp_path: Path) -> None:
    tensors = {f"blk.0.ffn_down.weight.lora_{half}": np.ones((3, 2), np.float32) for half in "ab"}
    adapter = write_gguf_adapter(tmp_path / "a.gguf", tensors).read_bytes()
    ollama(home, DATA, adapter=adapter)
    (listed,) = (known for known in local_models() if known.kind == "ollama")
    assert "do not fit the weight" in listed.problem
    with pytest.raises(ModelError, match="do not fit the weight"):
        resolve("tiny:1b").open()


def test_files_of_ollamas_store_are_verified_by_their_names(home: Path) -> None:
    """The model and its adapter; the store has no other record of them."""
    ollama(home, DATA, adapter=b"GGUF adapter")
    names = [path.name for path in (home / ".ollama/models/blobs").iterdir()]
    assert len(names) == 2 and checked("tiny:1b") == dict.fromkeys(names, "ok")
    adapter = resolve("tiny:1b").adapter
    assert adapter is not None
    adapter.write_bytes(b"GGUF adaptor")
    assert checked("tiny:1b") == {name: "damaged" if name == adapter.name else "ok" for name in names}


@pytest.mark.parametrize(("options", "code"), [((), ExitCode.GATE), (("--drop",), ExitCode.USAGE)])
def test_a_damaged_file_of_ollamas_is_pulled_again_by_ollama(
    options: tuple[str, ...], code: ExitCode, home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ollama(home, DATA)
    blob = resolve("tiny:1b").folder
    blob.write_bytes(DATA[:-1] + b"?")
    with pytest.raises(SystemExit) as ended:
        main(["verify", "tiny:1b", *options])
    assert ended.value.code == code and "ollama pull" in capsys.readouterr().err and blob.exists()


@pytest.mark.parametrize("name", ["../elsewhere", "org/tiny/deeper", "org", "org/"])
def test_a_name_of_lm_studio_is_a_publisher_and_a_repository(home: Path, name: str) -> None:
    """Nothing outside of its folder is opened."""
    for place in ("../elsewhere/tiny.gguf", "org/tiny/deeper/tiny.gguf", "org/tiny/tiny.gguf"):
        lm_studio(home, DATA, place)
    assert find_stored(name) is None and find_stored("org/tiny") is not None
