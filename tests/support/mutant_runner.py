"""Runs pytest in forks of one process that has imported it, torch and transformers: that takes longer than most tests.

Reads a line of JSON for each run, {"arguments": [...], "seconds": ...}, and answers with the first test that failed.
"""

import json
import os
import resource
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import suppress

import pytest
import torch  # noqa: F401  so that the forks have it
import transformers.modeling_utils  # noqa: F401

SETTINGS = ("-q", "-x", "--no-header", "--tb=no", "-p", "no:cacheprovider")
WALL = 10  # times the limit on processor time


class _FirstFailure:
    def __init__(self) -> None:
        self.test = ""

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.test = self.test or report.nodeid

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.test = self.test or report.nodeid


def _child(arguments: Sequence[str], seconds: int, answer: int) -> None:
    os.setsid()
    # Processor time, since a wall clock would count other work of the machine.
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
    nothing = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(nothing, stream)
    failure = _FirstFailure()
    code = pytest.main([*SETTINGS, *arguments], plugins=[failure])
    # 5: no test was selected
    os.write(answer, (failure.test or ("" if code in (0, 5) else f"pytest ended with {int(code)}")).encode())
    os._exit(0)


def _first_failure(arguments: Sequence[str], seconds: int) -> str:
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        try:
            _child(arguments, seconds, writer)
        finally:
            os._exit(1)
    os.close(writer)
    end, status = time.monotonic() + WALL * seconds, None
    while status is None and time.monotonic() < end:
        time.sleep(0.05)
        done, code = os.waitpid(child, os.WNOHANG)
        status = code if done else None
    with suppress(ProcessLookupError):  # and what the tests started
        os.killpg(child, signal.SIGKILL)
    if status is None:
        os.waitpid(child, 0)
    with os.fdopen(reader, "rb", closefd=True) as answer:
        os.set_blocking(reader, False)
        text = (answer.read() or b"").decode()
    return text if status == 0 else f"no end within {seconds} s"


def main() -> None:
    for line in sys.stdin:
        request = json.loads(line)
        print(json.dumps(_first_failure(request["arguments"], request["seconds"])), flush=True)


if __name__ == "__main__":
    main()
