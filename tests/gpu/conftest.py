"""Set fresh random numbers for every test on a GPU, and NaN in uninitialized memory; tell failures as they happen."""

import os
from collections.abc import Iterator

import pytest
import torch

LEFT = "an earlier test left an error on the device"


class Failures:
    """The pytest plugin of the controlling process that prints why a test failed at once: a run may be cut short."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        terminal = self._config.pluginmanager.get_plugin("terminalreporter")
        if not report.failed or terminal is None:
            return
        lines = [line for line in report.longreprtext.splitlines() if line.startswith("E ")]
        lines = lines or report.longreprtext.splitlines()[-3:]
        terminal.ensure_newline()
        for line in (f"{report.when} of {report.nodeid} failed:", *lines[:8]):
            terminal.write_line(line[:300])
        terminal.flush()


def pytest_configure(config: pytest.Config) -> None:
    if "PYTEST_XDIST_WORKER" not in os.environ:
        config.pluginmanager.register(Failures(config))


@pytest.fixture(autouse=True)
def device_without_errors() -> Iterator[None]:
    """Skip a test whose process has an error of the device from before; fail one that leaves such an error."""
    if not torch.cuda.is_available():
        yield
        return
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        pytest.skip(LEFT)
    yield
    torch.cuda.synchronize()


@pytest.fixture(autouse=True)
def fresh_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Set a random seed; a failing test prints it, and MYCLI_TEST_SEED repeats its numbers."""
    seed = os.environ.get("MYCLI_TEST_SEED") or str(int.from_bytes(os.urandom(6)))
    print(f"MYCLI_TEST_SEED={seed}")
    monkeypatch.setenv("MYCLI_TEST_SEED", seed)


@pytest.fixture(autouse=True)
def poison(device_without_errors: None) -> Iterator[None]:
    """Fill uninitialized memory with NaN by deterministic torch; the fills separate launches, so that none overlap.

    MYCLI_TEST_POISON=0 leaves memory uninitialized.
    """
    torch.use_deterministic_algorithms(os.environ.get("MYCLI_TEST_POISON") != "0", warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)
