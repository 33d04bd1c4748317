"""Test LoRA adapters of a hub: downloaded like models, listed as adapters, and never loaded as a model."""

import json
from pathlib import Path

import numpy as np
import pytest

from mycli.cli.remedies import remedy
from mycli.runtime.errors import ModelError, NotFoundError
from mycli.runtime.hub.client import Hub
from mycli.runtime.hub.download import plan_download
from mycli.runtime.hub.integrity import files_to_verify, find_local, verify_files
from mycli.runtime.hub.local import local_models, plan_removal, remove
from mycli.runtime.hub.model_info import check_supported
from mycli.runtime.hub.resolve import resolve, resolve_adapter
from mycli.runtime.hub.store import repo_folder
from tests.support.adapters import LORA, low_rank, write_adapter, write_gguf_adapter
from tests.support.hub_server import HubServer
from tests.support.pulling import QUICK, REPO, contents, fetch

pytestmark = pytest.mark.usefixtures("folders")
NAMES = ("adapter_config.json", "adapter_model.safetensors")


@pytest.fixture
def files(tmp_path: Path) -> dict[str, bytes]:
    folder = write_adapter(tmp_path / "adapter", low_rank("model.layers.0.mlp.down_proj", (8, 16)))
    extra = {
        "README.md": b"# tuned",
        "tokenizer.json": b"{}",
        "training_args.bin": b"pickle",
        "optimizer.pt": b"pickle",
    }
    return {**contents(folder), **extra}


def test_its_two_files_are_fetched_listed_verified_and_removed(server: HubServer, files: dict[str, bytes]) -> None:
    server.add(REPO, files)
    source = fetch(server)
    assert contents(source.folder) == {name: files[name] for name in NAMES}
    assert resolve_adapter(REPO) == source and source.label == REPO
    (adapter,) = [model for model in local_models() if model.kind != "built-in"]
    assert (adapter.name, adapter.kind, adapter.problem) == (REPO, "adapter", "")
    assert adapter.nbytes == sum(len(files[name]) for name in NAMES)
    checked = verify_files(find_local(REPO), files_to_verify(find_local(REPO)), lambda count: None)
    assert [(file.name, file.state) for file in checked] == [(name, "ok") for name in NAMES]
    remove(plan_removal(REPO), print)
    with pytest.raises(NotFoundError, match="not on this machine"):
        resolve_adapter(REPO)


def test_an_adapter_is_known_by_its_files_and_by_the_listing_of_its_commit(
    server: HubServer, files: dict[str, bytes]
) -> None:
    """Other programs store no listing; with one, an adapter without its config is an adapter nevertheless."""

    def listed() -> list[tuple[str, str]]:
        return [(model.kind, model.problem) for model in local_models() if model.name == REPO]

    server.add(REPO, files)
    source = fetch(server)
    (listing,) = (repo_folder(REPO) / "trees").glob("*.json")
    data = listing.read_bytes()
    listing.unlink()
    assert listed() == [("adapter", "")]
    listing.write_bytes(data)
    (source.folder / "adapter_config.json").unlink()
    assert listed() == [("adapter", "incomplete: adapter_config.json missing")]


def test_an_adapter_of_mlx_is_pulled_whole(server: HubServer, files: dict[str, bytes]) -> None:
    config = json.dumps({"model": "org/base", "lora_parameters": {"rank": 4, "scale": 20.0}}).encode()
    weights = files["adapter_model.safetensors"]
    server.add(REPO, {"adapter_config.json": config, "adapters.safetensors": weights, "README.md": b"x"})
    fetch(server)
    (adapter,) = [model for model in local_models() if model.kind == "adapter"]
    assert adapter.problem == ""
    assert (resolve_adapter(REPO).folder / "adapters.safetensors").read_bytes() == weights


def test_it_is_no_model_and_the_hint_says_which_it_needs(server: HubServer, files: dict[str, bytes]) -> None:
    server.add(REPO, files)
    fetch(server)
    with pytest.raises(ModelError, match="a LoRA adapter, which needs its model") as caught:
        resolve(REPO)
    assert remedy(caught.value) == f"mycli run org/base --adapter {REPO}"


def test_an_adapter_in_gguf_is_pulled_and_listed(server: HubServer, tmp_path: Path) -> None:
    halves = {f"blk.0.ffn_down.weight.lora_{half}": np.ones((4, 4), np.float32) for half in "ab"}
    data = write_gguf_adapter(tmp_path / "tuned.gguf", halves).read_bytes()
    server.add(REPO, {"tuned.gguf": data, "README.md": b"x"})
    model = f"{REPO}:tuned.gguf"
    with Hub(server.address(), None, print, QUICK) as hub:
        check_supported(hub, plan_download(hub, model))
    fetch(server, model)
    (adapter,) = [model for model in local_models() if model.kind != "built-in"]
    assert (adapter.name, adapter.kind, adapter.problem) == (model, "adapter", "")
    assert resolve_adapter(model).folder.read_bytes() == data


def test_what_cannot_be_merged_is_refused_before_it_is_fetched(server: HubServer, files: dict[str, bytes]) -> None:
    files["adapter_config.json"] = json.dumps({**LORA, "use_qalora": True}).encode()
    server.add(REPO, files)
    refused = pytest.raises(ModelError, match="cannot be used here: .*use_qalora")
    with Hub(server.address(), None, print, QUICK) as hub, refused:
        check_supported(hub, plan_download(hub, REPO))
    assert not server.requests("adapter_model.safetensors")


def test_one_that_is_cut_off_says_what_it_lacks(server: HubServer, files: dict[str, bytes]) -> None:
    server.add(REPO, files)
    (fetch(server).folder / "adapter_model.safetensors").unlink()
    (adapter,) = [model for model in local_models() if model.kind == "adapter"]
    assert adapter.problem == "incomplete: adapter_model.safetensors missing"
    with pytest.raises(NotFoundError, match="only partly downloaded: missing adapter_model.safetensors"):
        resolve_adapter(REPO)


def test_the_config_of_the_model_may_lie_in_the_folder(server: HubServer, files: dict[str, bytes]) -> None:
    """Training programs write it there; huggingface_hub downloads it."""
    server.add(REPO, files)
    folder = fetch(server).folder
    (folder / "config.json").write_text('{"model_type": "llama"}')
    assert resolve_adapter(REPO).folder == folder == resolve_adapter(str(folder)).folder
    assert [(model.kind, model.problem) for model in local_models() if model.name == REPO] == [("adapter", "")]
    with pytest.raises(ModelError, match="a LoRA adapter, which needs its model"):
        resolve(str(folder))
    (folder / "model.safetensors").touch()
    assert resolve(str(folder)).folder == folder, "a whole model, whatever lies next to it"


def test_a_model_is_no_adapter(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="pico: not a LoRA adapter"):
        resolve_adapter("pico")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ModelError, match="empty: not a LoRA adapter") as caught:
        resolve_adapter(str(tmp_path / "empty"))
    assert "adapter_config.json" in str(caught.value.hint)
    file = write_adapter(tmp_path / "a", {}) / "adapter_model.safetensors"
    with pytest.raises(ModelError, match="a file, but an adapter is a folder") as caught:
        resolve_adapter(str(file))
    assert caught.value.hint == f"give its folder: {file.parent}"
    with pytest.raises(NotFoundError, match="no such folder"):
        resolve_adapter(str(tmp_path / "nowhere"))
