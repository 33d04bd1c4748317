"""Test `mycli pull MODEL --bits 4`: the same bytes as pull and quantize, little disk space, resumable after a kill."""

import contextlib
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.support.hub_server import Fault, HubServer, hub_server
from tests.support.paths import PICO, ROOT

REPO = "org/pico"
OPTIONS = ["--bits", "4", "--report", "none"]
GPTQ = [*OPTIONS, "--samples", "4", "--seq", "64"]
RTN = [*OPTIONS, "--method", "rtn", "--group", "64"]
METHODS = {"gptq": GPTQ, "rtn": RTN}
Expected = Callable[[str], dict[str, bytes]]


@pytest.fixture(scope="module")
def server() -> Iterator[HubServer]:
    with hub_server() as running:
        running.add(REPO, {path.name: path.read_bytes() for path in PICO.iterdir() if path.is_file()})
        yield running


def start(server: HubServer, home: Path, *words: str) -> "subprocess.Popen[bytes]":
    environment = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    environment |= {"HF_ENDPOINT": server.address(), "HF_HUB_CACHE": str(home / "hub"), "MYCLI_HOME": str(home)}
    environment |= {"PYTHONPATH": str(ROOT / ".links"), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "mycli.cli", *words]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def run(server: HubServer, home: Path, *words: str) -> None:
    process = start(server, home, *words)
    _, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors.decode()


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def occupied(folder: Path) -> int:
    """Return the bytes allocated on disk, without holes."""
    total = 0
    for path in folder.rglob("*"):
        with contextlib.suppress(OSError):
            total += 512 * path.lstat().st_blocks if path.is_file() else 0
    return total


@contextlib.contextmanager
def peak_of(folder: Path) -> Iterator[list[int]]:
    peak, stop = [0], threading.Event()

    def watch() -> None:
        while not stop.wait(0.005):
            peak[0] = max(peak[0], occupied(folder))

    thread = threading.Thread(target=watch)
    thread.start()
    yield peak
    stop.set()
    thread.join()


@pytest.fixture(scope="module")
def expected(server: HubServer, tmp_path_factory: pytest.TempPathFactory) -> Expected:
    """Return the files that pull and quantize produce, by method."""
    home = tmp_path_factory.mktemp("whole")
    run(server, home, "pull", REPO)

    @cache
    def copy(method: str) -> dict[str, bytes]:
        run(server, home, "quantize", REPO, *METHODS[method], "-o", str(home / method))
        return files(home / method)

    return copy


def killed(server: HubServer, home: Path, options: list[str], kills: int, seconds: float, seed: int) -> Path:
    """Kill runs after random times, then let one finish; return the folder of the result."""
    chance, target = random.Random(seed), home / "copy"
    for _ in range(kills):
        process = start(server, home, "pull", REPO, *options, "-o", str(target))
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.communicate(timeout=chance.uniform(0.3, seconds))
        process.send_signal(signal.SIGKILL)
        process.communicate()
        if target.exists():
            shutil.rmtree(target)
    run(server, home, "pull", REPO, *options, "-o", str(target))
    return target


@pytest.mark.parametrize("method", ["gptq", pytest.param("rtn", marks=pytest.mark.slow)])
def test_the_same_bytes_little_disk_after_kills(
    method: str, server: HubServer, expected: Expected, tmp_path: Path
) -> None:
    with peak_of(tmp_path) as peak:
        target = killed(server, tmp_path, METHODS[method], 2, 4.0, 1)
    assert files(target) == expected(method)
    assert peak[0] <= 1.2 * occupied(target)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["copy"]


@pytest.mark.slow
def test_30_kills(server: HubServer, expected: Expected, tmp_path: Path) -> None:
    for seed in range(6):
        home = tmp_path / str(seed)
        home.mkdir()
        method = "rtn" if seed % 2 else "gptq"
        assert files(killed(server, home, METHODS[method], 5, 8.0, seed)) == expected(method)


def test_a_server_without_ranges_is_refused(server: HubServer, tmp_path: Path) -> None:
    server.fail("storage:", Fault(ignore_range=True), times=50)
    process = start(server, tmp_path, "pull", REPO, *RTN)
    _, errors = process.communicate(timeout=300)
    server.forgive()
    assert process.returncode == 3 and b"does not send parts of model.safetensors" in errors
    assert b"mycli pull" in errors
