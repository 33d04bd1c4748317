"""Test several processes that pull the same model, and one that is killed."""

import contextlib
import errno
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from tests.support.hub_server import Fault, HubServer
from tests.support.paths import ROOT
from tests.support.pulling import FILES, REPO, WEIGHTS, contents, fetch, leftovers

pytestmark = pytest.mark.usefixtures("folders")


def child(server: HubServer, folders: Path, code: str = "") -> "subprocess.Popen[str]":
    script = f"""
import sys
from mycli.runtime.hub.download import fetch_files, plan_download
from mycli.runtime.hub.client import Hub
say = lambda text: print(text, flush=True)
from mycli.runtime.hub.client import RetryPolicy
with Hub({server.address()!r}, None, say, RetryPolicy()) as connection:
    job = plan_download(connection, {REPO!r})
    say("planned")
    fetch_files(connection, job, force=False, advance=lambda amount: say(f"+{{amount:.0f}}"))
say("done")
"""
    env = {**os.environ, "PYTHONPATH": str(ROOT / ".links"), "HF_HUB_CACHE": str(folders)}
    return subprocess.Popen([sys.executable, "-c", script], env=env, stdout=subprocess.PIPE, text=True)


def await_partial(folders: Path, least: int) -> None:
    for _ in range(500):
        for path in folders.rglob("*.incomplete"):
            with contextlib.suppress(FileNotFoundError):  # complete by now, under its final name
                if path.stat().st_size >= least:
                    return
        time.sleep(0.02)
    raise AssertionError("nothing arrived")


def test_kill_9_and_resume(server: HubServer, folders: Path) -> None:
    server.add(REPO, FILES)
    server.fail("storage:", Fault(seconds_per_block=0.3))
    process = child(server, folders)
    await_partial(folders, 4096)
    process.kill()
    process.communicate()
    (partial,) = folders.rglob("*.incomplete")
    size = partial.stat().st_size
    assert 4096 <= size < len(WEIGHTS)
    assert contents(fetch(server).folder)["model.safetensors"] == WEIGHTS
    assert server.requests("storage:")[-1].headers["Range"] == f"bytes={size}-"


def test_d6_a_second_process_waits_and_uses_what_the_first_brought(server: HubServer, folders: Path) -> None:
    server.add(REPO, FILES)
    server.fail("storage:", Fault(seconds_per_block=0.8))
    first = child(server, folders)
    await_partial(folders, 4096)
    second = child(server, folders)
    first_output, second_output = first.communicate(timeout=240)[0], second.communicate(timeout=240)[0]
    assert first_output.endswith("done\n") and second_output.endswith("done\n")
    assert f"{REPO} is in use by process {first.pid}: waiting for it" in second_output
    assert len(server.requests("storage:")) == 1
    assert sum(int(line) for line in second_output.splitlines() if line.startswith("+")) <= sum(
        map(len, FILES.values())
    )


def test_d6_without_working_locks_both_still_end_right(
    server: HubServer, folders: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_locks(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("fcntl.flock", no_locks)
    server.add(REPO, FILES)
    server.fail("storage:", Fault(seconds_per_block=0.02), times=2)
    results: list[bytes] = []
    threads = [
        threading.Thread(target=lambda: results.append(contents(fetch(server).folder)["model.safetensors"]))
        for _ in range(2)
    ]
    for thread in threads:
        thread.start()
        time.sleep(0.05)
    for thread in threads:
        thread.join()
    assert results == [WEIGHTS, WEIGHTS] and not leftovers(folders)
