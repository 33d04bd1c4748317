"""Test that an interrupt while a model loads does not wait for the blocks that are being read from a slow disk."""

import json
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError
from pathlib import Path

import pytest

from mycli.runtime.checkpoint.model_folder import ModelFolder
from mycli.runtime.checkpoint.open_folder import open_model_folder
from mycli.runtime.engine.loading.loader import load_model
from tests.runtime.checkpoint.test_mlx_weights import CPU, LATENT, convert
from tests.support.adapters import DOWN, QUERIES, tensors_for, write_adapter
from tests.support.gguf_files import byte_tokenizer, write_model
from tests.support.paths import PICO


def _gguf(folder: Path) -> ModelFolder:
    config = json.loads((PICO / "config.json").read_text())
    write_model(PICO, folder / "m.gguf", "llama", "Q8_0", config, byte_tokenizer(config["vocab_size"]))
    return open_model_folder(folder / "m.gguf")


def _adapter(folder: Path) -> ModelFolder:
    adapter = write_adapter(folder / "adapter", tensors_for(PICO, QUERIES, DOWN))
    return open_model_folder(PICO).with_adapter("a", adapter)


def _restored(folder: Path) -> ModelFolder:
    convert(folder, LATENT)
    return open_model_folder(folder)


FOLDERS: dict[str, Callable[[Path], ModelFolder]] = {
    "safetensors": lambda folder: open_model_folder(PICO),
    "adapter": _adapter,
    "gguf": _gguf,
    "restored": _restored,
}


@pytest.mark.parametrize("kind", ("safetensors", "adapter", "gguf"))
def test_an_interrupt_while_layers_are_read_ends_their_reads(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, main, real = FOLDERS[kind](tmp_path), threading.main_thread(), os.preadv
    interrupted, later, threads = threading.Event(), list[int](), threading.enumerate()

    def interrupt(number: int, frame: object) -> None:
        if not interrupted.is_set():
            interrupted.set()
            raise KeyboardInterrupt

    def slow(descriptor: int, views: Sequence[memoryview], offset: int) -> int:
        if threading.current_thread() is main:
            return real(descriptor, views, offset)
        if interrupted.is_set():
            later.append(offset)
        else:  # again at each read: one that comes just before the main thread waits does not end its wait
            assert main.ident is not None
            signal.pthread_kill(main.ident, signal.SIGINT)
        time.sleep(0.01)
        return real(descriptor, [views[0][: 1 << 12]], offset)

    monkeypatch.setattr(os, "preadv", slow)
    handler = signal.signal(signal.SIGINT, interrupt)
    try:
        with pytest.raises(KeyboardInterrupt):
            load_model(folder, CPU)
    finally:
        signal.signal(signal.SIGINT, handler)
    for thread in set(threading.enumerate()).difference(threads):
        thread.join()
    assert interrupted.is_set() and len(later) < 20, "reads go on after the interrupt"


@pytest.mark.parametrize("kind", FOLDERS)
def test_no_tensor_is_read_once_cancelled(kind: str, tmp_path: Path) -> None:
    folder = FOLDERS[kind](tmp_path)
    checkpoint = folder.checkpoint()
    checkpoint.cancel()
    for name in folder.manifest.tensors:
        with pytest.raises(CancelledError):
            checkpoint.read(name)
