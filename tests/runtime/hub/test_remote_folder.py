"""Test a model that is read on the hub: its files are recorded as if they had been downloaded."""

import hashlib
from pathlib import Path

import pytest

from mycli.runtime.errors import ModelError
from mycli.runtime.hub.client import Hub
from mycli.runtime.hub.download import plan_download
from mycli.runtime.hub.remote_folder import RemoteModel
from tests.support.hub_server import LARGE, HubServer, safetensors
from tests.support.paths import PICO
from tests.support.pulling import QUICK, REPO


@pytest.mark.parametrize("count", [100, 1000], ids=["git", "lfs"])
def test_every_file_is_recorded_with_its_sha256(count: int, server: HubServer, tmp_path: Path) -> None:
    """The hub has only a SHA-1 for files outside LFS."""
    weights = safetensors({"model.norm.weight": ("F32", [count], bytes(range(4)) * count)})
    assert (len(weights) > LARGE) == (count == 1000)
    files = {"config.json": (PICO / "config.json").read_bytes(), "model.safetensors": weights}
    server.add(REPO, files)
    with (
        Hub(server.address(), None, print, QUICK) as hub,
        RemoteModel.open(hub, plan_download(hub, REPO), tmp_path / "source") as remote,
    ):
        assert remote.digests() == {
            name: {"sha256": hashlib.sha256(data).hexdigest(), "bytes": len(data)} for name, data in files.items()
        }
        assert not (tmp_path / "source" / "model.safetensors").exists()
    whole = [
        request for request in server.requests("") if request.headers.get("Range") == f"bytes=0-{len(weights) - 1}"
    ]
    assert bool(whole) == (count == 100), "a file whose sha256 the hub records is not read for it"


@pytest.mark.parametrize(
    ("model", "files"),
    [
        (f"{REPO}:m.gguf", {"m.gguf": b"GGUF", "config.json": b"{}"}),
        (REPO, {"adapter_config.json": b"{}", "adapter_model.safetensors": b"x"}),
        (REPO, {"model.safetensors": b"x", "modules.json": b"[]", "1_Pooling/config.json": b"{}"}),
    ],
    ids=["gguf", "adapter", "no-config"],
)
def test_only_a_whole_model_in_safetensors_is_opened(
    model: str, files: dict[str, bytes], server: HubServer, tmp_path: Path
) -> None:
    server.add(REPO, files)
    with Hub(server.address(), None, print, QUICK) as hub, pytest.raises(ModelError, match="only a whole model"):
        RemoteModel.open(hub, plan_download(hub, model), tmp_path / "source")
    assert not (tmp_path / "source").exists()
