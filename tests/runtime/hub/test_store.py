"""Test where models are stored, and which files of a store belong to a model."""

from pathlib import Path

import pytest

from mycli.runtime.errors import ModelError
from mycli.runtime.hub.store import HubFile, data_dir, hub_cache, missing_files, model_folders, parse_tree
from mycli.runtime.utils.json_fields import Fields


@pytest.mark.parametrize(
    ("variables", "folder"),
    [
        ({}, "~/.cache/huggingface/hub"),
        ({"XDG_CACHE_HOME": "/c"}, "/c/huggingface/hub"),
        ({"XDG_CACHE_HOME": "/c", "HF_HOME": "/h"}, "/h/hub"),
        ({"HF_HOME": "/h", "HUGGINGFACE_HUB_CACHE": "/old"}, "/old"),
        ({"HF_HUB_CACHE": "$HOME/new", "HUGGINGFACE_HUB_CACHE": "/old"}, "~/new"),
    ],
)
def test_the_cache_is_where_huggingface_hub_has_it(
    variables: dict[str, str], folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert hub_cache() == Path(folder.replace("~", str(tmp_path)))


def test_folders_of_models_are_what_is_neither_hidden_nor_a_file(folders: Path) -> None:
    root = data_dir() / "models"
    for name in ("damaged", ".tiny.work"):
        (root / name).mkdir(parents=True)
    (root / "notes.txt").touch()
    (root / "moved").symlink_to(folders / "gone")
    assert model_folders() == ["damaged", "moved"]


def test_an_adapter_lacks_the_weights_that_its_commit_lists(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    names = ("adapter_config.json", "adapters.safetensors")
    assert missing_files(tmp_path, [HubFile(name, 1, "0" * 40) for name in names]) == ["adapters.safetensors"]
    assert missing_files(tmp_path, None) == ["adapter_model.safetensors"]


@pytest.mark.parametrize("field", ["size", "lfs_size"])
def test_a_size_beyond_an_exbibyte_is_no_size(field: str) -> None:
    entry = {"size": 1, "blob_id": "c" * 40, field: 1 << 60}
    (file,) = parse_tree(Fields({"w": entry}, "tree"))
    assert file.size == 1 << 60
    with pytest.raises(ModelError, match=field):
        parse_tree(Fields({"w": {**entry, field: (1 << 60) + 1}}, "tree"))
