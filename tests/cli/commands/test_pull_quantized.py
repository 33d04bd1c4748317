"""Test `mycli pull MODEL --bits 4`: the same bytes as pull and quantize, little disk space, resumable after a kill."""

import contextlib
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.support.command_line import run_here
from tests.support.forked import ForkedProcess
from tests.support.hub_server import Fault, HubServer, hub_server
from tests.support.models import random_model
from tests.support.paths import PICO, ROOT

REPO = "org/pico"
OPTIONS = ["--bits", "4", "--report", "none"]
GPTQ = [*OPTIONS, "--samples", "4", "--seq", "64"]
RTN = [*OPTIONS, "--method", "rtn", "--group", "64"]
METHODS = {"gptq": GPTQ, "rtn": RTN}
Expected = Callable[[str], dict[str, bytes]]
Moment = Callable[["subprocess.Popen[bytes]"], None]  # returns when the run is to be killed


@pytest.fixture(scope="module")
def server() -> Iterator[HubServer]:
    with hub_server() as running:
        running.add(REPO, {path.name: path.read_bytes() for path in PICO.iterdir() if path.is_file()})
        yield running


def environment_of(server: HubServer, home: Path) -> dict[str, str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    environment |= {"HF_ENDPOINT": server.address(), "HF_HUB_CACHE": str(home / "hub"), "MYCLI_HOME": str(home)}
    return environment | {"PYTHONPATH": str(ROOT / ".links"), "OMP_NUM_THREADS": "1"}


def start(server: HubServer, home: Path, *words: str) -> "subprocess.Popen[bytes]":
    command = [sys.executable, "-m", "mycli.cli", *words]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return ForkedProcess(command, env=environment_of(server, home), **pipes)


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def occupied(folder: Path) -> int:
    """Return the bytes allocated on disk, without holes."""
    total = 0
    for parent, _, names in os.walk(folder):  # unlike rglob, it passes over folders that vanish meanwhile
        for name in names:
            with contextlib.suppress(OSError):
                total += 512 * os.lstat(os.path.join(parent, name)).st_blocks
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
    home = tmp_path_factory.mktemp("whole")
    environment = environment_of(server, home)
    assert run_here(("pull", REPO), environment).returncode == 0

    @cache
    def copy(method: str) -> dict[str, bytes]:
        done = run_here(("quantize", REPO, *METHODS[method], "-o", str(home / method)), environment)
        assert done.returncode == 0, done.stderr
        return files(home / method)

    return copy


def killed(server: HubServer, home: Path, options: list[str], moments: Iterable[Moment]) -> Path:
    target = home / "copy"
    for moment in moments:
        process = start(server, home, "pull", REPO, *options, "-o", str(target))
        moment(process)
        process.send_signal(signal.SIGKILL)
        process.communicate()
        if target.exists():
            shutil.rmtree(target)
    process = start(server, home, "pull", REPO, *options, "-o", str(target))
    _, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors.decode()
    return target


def once(reached: Callable[[], bool]) -> Moment:
    def wait(process: "subprocess.Popen[bytes]") -> None:
        while process.poll() is None and not reached():
            time.sleep(0.005)

    return wait


def after(seconds: float) -> Moment:
    def wait(process: "subprocess.Popen[bytes]") -> None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.communicate(timeout=seconds)

    return wait


@pytest.mark.parametrize("method", ["rtn", pytest.param("gptq", marks=pytest.mark.slow)])
def test_the_same_bytes_little_disk_after_kills(
    method: str, server: HubServer, expected: Expected, tmp_path: Path
) -> None:
    work = tmp_path / ".copy.work"
    moments = once((work / "source").exists), once((work / "finished.jsonl").exists)
    with peak_of(tmp_path) as peak:
        target = killed(server, tmp_path, METHODS[method], moments)
    assert files(target) == expected(method)
    assert peak[0] <= 1.2 * occupied(target)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["copy"]


def test_without_a_folder_the_copy_has_the_name_of_the_model(server: HubServer, tmp_path: Path) -> None:
    done = run_here(("pull", f"{REPO}@main", *RTN), environment_of(server, tmp_path))
    assert done.returncode == 0, done.stderr
    assert [path.name for path in (tmp_path / "models").iterdir()] == [f"{REPO.rpartition('/')[2]}-rtn-int4-g64"]


def test_no_head_is_chosen_that_would_need_the_disk_of_two_results(server: HubServer, tmp_path: Path) -> None:
    """It is that of `--head keep`, whatever the choice of `quantize` would be."""
    source = random_model(tmp_path / "source")
    server.add("org/untied", files(source))
    environment, options = environment_of(server, tmp_path), ("--bits", "4", "--method", "rtn", "--group", "32")
    pulled, kept = tmp_path / "pulled", tmp_path / "kept"
    done = run_here(("pull", "org/untied", *options, "-o", str(pulled)), environment)
    assert done.returncode == 0 and "the output head stays unquantized" in done.stderr, done.stderr
    done = run_here(("quantize", str(source), *options, "--head", "keep", "-o", str(kept)), environment)
    assert done.returncode == 0, done.stderr
    for name in ("model.safetensors", "config.json"):
        assert (pulled / name).read_bytes() == (kept / name).read_bytes()


def weight_bytes(server: HubServer, start: int = 0) -> int:
    """Return the bytes of weights that were asked for since the request `start`."""
    asked = (request.headers.get("Range") for request in server.log[start:] if request.host == "storage")
    ranges = [words.removeprefix("bytes=").split("-") for words in asked if words]
    return sum(int(last) + 1 - int(first) for first, last in ranges)


@pytest.mark.slow
def test_30_kills(server: HubServer, expected: Expected, tmp_path: Path) -> None:
    model = (PICO / "model.safetensors").stat().st_size
    for seed in range(6):
        chance = random.Random(seed)
        home = tmp_path / str(seed)
        home.mkdir()
        method = "rtn" if seed % 2 else "gptq"
        for moments in ((), [after(chance.uniform(0.3, 8.0)) for _ in range(5)]):
            asked = len(server.log)
            with peak_of(home) as peak:
                target = killed(server, home, METHODS[method], moments)
            assert files(target) == expected(method)
            share = peak[0] / occupied(target)
            fetched = weight_bytes(server, asked) / model
            print(f"{method}, {len(moments)} kills: peak {share:.2f} of the result, read {fetched:.2f} of the model")
            assert share <= 1.2 and (moments or fetched < 2.5)  # layers of pico exceed .15 of the result: twice
            shutil.rmtree(target)


@pytest.mark.parametrize(
    ("options", "cause"),
    [
        (("--tune",), "read the whole model several times"),
        (("--target-bpw", "4.5"), "read the whole model several times"),
        (("--hessian", "model"), "read the whole model several times"),
        (("--dry-run",), "quantizing while downloading excludes"),
        (("--force",), "quantizing while downloading excludes"),
        (("--offline",), "quantizing while downloading excludes"),
    ],
    ids=["tune", "target-bpw", "hessian", "dry-run", "force", "offline"],
)
def test_options_that_a_download_cannot_have_are_refused_before_it(
    options: tuple[str, ...], cause: str, server: HubServer, tmp_path: Path
) -> None:
    asked = len(server.log)
    bits = () if options[0] == "--target-bpw" else OPTIONS
    done = run_here(("pull", "org/absent", *bits, *options), environment_of(server, tmp_path))
    assert done.returncode == 2 and cause in done.stderr, done.stderr
    assert len(server.log) == asked and not list(tmp_path.iterdir())


def test_a_server_without_ranges_is_refused(server: HubServer, tmp_path: Path) -> None:
    server.fail("storage:", Fault(ignore_range=True), times=50)
    process = start(server, tmp_path, "pull", REPO, *RTN)
    _, errors = process.communicate(timeout=300)
    server.forgive()
    assert process.returncode == 3 and b"does not send parts of model.safetensors" in errors
    assert b"mycli pull" in errors
