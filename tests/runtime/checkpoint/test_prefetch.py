"""Test that weights are prefetched before torch is imported, and only if they fit into memory."""

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from mycli.runtime.checkpoint import stable_file
from mycli.runtime.checkpoint.open_folder import open_model_folder
from mycli.runtime.device.system import Memory
from tests.runtime.checkpoint.test_mlx_weights import LATENT, convert

PROBE = """
import sys
from mycli.cli.main import main
from mycli.runtime.checkpoint import stable_file
real = stable_file.prefetch_files
def spy(folder):
    print(folder.name, "torch" in sys.modules, file=sys.stderr)
    real(folder)
stable_file.prefetch_files = spy
main(["run", "pico", "Who are you?", "-n", "1", "--device", "cpu"])
"""

pytestmark = pytest.mark.skipif(not hasattr(os, "posix_fadvise"), reason="no posix_fadvise here")


def test_before_torch(environment: dict[str, str]) -> None:
    done = subprocess.run([sys.executable, "-c", PROBE], env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and "pico False" in done.stderr


@pytest.mark.parametrize("available, count", [(4000, 2), (3602, 2), (3600, 0), (100, 0)])
def test_every_file_where_they_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, available: int, count: int) -> None:
    for name in ("a.safetensors", "b.safetensors", "other.bin"):
        (tmp_path / name).write_bytes(bytes(900))
    advised: list[int] = []
    monkeypatch.setattr(os, "posix_fadvise", lambda descriptor, *_: advised.append(descriptor))
    monkeypatch.setattr(stable_file, "memory", lambda: Memory(available, available, "machine"))
    before = set(threading.enumerate())
    stable_file.prefetch_files(tmp_path)
    for thread in set(threading.enumerate()) - before:
        thread.join(10)
    assert len(advised) == count


@pytest.mark.parametrize("family", ["llama-biases", LATENT])
def test_all_bytes_of_the_tensors_are_prefetched(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Folders of mlx-lm have some tensors in two parts, and experts in stacks."""
    convert(tmp_path, family)
    folder, places = open_model_folder(tmp_path), list[tuple[int, int]]()
    checkpoint = folder.checkpoint()
    monkeypatch.setattr(os, "posix_fadvise", lambda _, offset, count, advice: places.append((offset, count)))
    for name, _ in folder.config.tensors():
        checkpoint.prefetch(name)
    end = tmp_path.joinpath("model.safetensors").stat().st_size
    for offset, count in sorted(places, reverse=True):
        assert offset + count == end
        end = offset
    with tmp_path.joinpath("model.safetensors").open("rb") as file:
        assert end == 8 + int.from_bytes(file.read(8), "little")
    checkpoint.prefetch("absent")
