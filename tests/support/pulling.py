"""A small model, and pulling it from a server on loopback as `mycli pull` does."""

from pathlib import Path

import pytest

from mycli.cli.remedies import remedy
from mycli.runtime.errors import UserError
from mycli.runtime.hub.client import Hub, RetryPolicy
from mycli.runtime.hub.download import fetch_files, plan_download
from mycli.runtime.hub.resolve import Source
from tests.support.hub_server import HubServer, safetensors

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
QUICK = RetryPolicy(attempts=4, request_attempts=3, base_delay=0.01, timeout=5.0)


class Notes(list[str]):
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
