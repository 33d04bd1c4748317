"""Provide the fixtures of the download tests: a hub on loopback and an empty cache."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.hub_server import HubServer, hub_server


@pytest.fixture
def server() -> Iterator[HubServer]:
    with hub_server() as running:
        yield running


@pytest.fixture
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in list(os.environ):
        if name.startswith("HF_") or name.lower().endswith("_proxy"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("MYCLI_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    return tmp_path / "hub"
