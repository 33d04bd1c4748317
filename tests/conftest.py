"""What several test files need: an environment of its own, and mycli called in it, here or as a process."""

import os
import signal
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from tests.support.command_line import INSTALLED, Completed, Mycli, run_here, run_process
from tests.support.paths import ROOT

# Small models gain nothing from a second thread, and threads that wait for each other stall on a busy machine.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# What was started in the background of a shell ignores Ctrl-C, and all that it starts: a reply could not be stopped.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

with suppress(ImportError):  # a machine with a GPU may not have it
    from hypothesis import settings

    settings.register_profile("untimed", deadline=None)  # a busy machine is no failure
    settings.load_profile("untimed")

SHORT_TEXT = 50_000  # characters


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """Folders of its own for every test, no terminal habits, no network."""
    others = ("MYCLI_", "HF_", "XDG_", "PYTHONPATH")
    kept = {key: value for key, value in os.environ.items() if not key.startswith(others)}
    return {
        **kept,
        **({} if INSTALLED else {"PYTHONPATH": str(ROOT / ".links")}),
        "HOME": str(tmp_path),
        "XDG_CONFIG_HOME": str(tmp_path / "config"),
        "XDG_STATE_HOME": str(tmp_path / "state"),
        "XDG_DATA_HOME": str(tmp_path / "data"),
        "HF_HOME": str(tmp_path / "hf"),
        "HF_HUB_OFFLINE": "1",
        # The compiled kernel is the same for all: building it again for every test would take most of the time.
        "XDG_CACHE_HOME": os.environ.get("XDG_CACHE_HOME", str(Path.home() / ".cache")),
        "COLUMNS": "80",
    }


def _bound(run: Callable[..., Completed], environment: dict[str, str]) -> Mycli:
    def call(*arguments: str, input: str | bytes | None = None, env: dict[str, str] | None = None) -> Completed:
        return run(arguments, {**environment, **(env or {})}, input)

    return call


@pytest.fixture
def mycli(environment: dict[str, str]) -> Mycli:
    """Run the command line inside this process: mycli("run", "pico", "Hi", input=..., env=...)."""
    return _bound(run_here, environment)


@pytest.fixture
def mycli_process(environment: dict[str, str]) -> Mycli:
    """`mycli` as a process of its own, for what only a process shows. It takes two seconds with torch."""
    return _bound(run_process, environment)


@pytest.fixture
def short_calibration_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calibration sees the beginning of its texts: to encode them whole takes longer than to solve a small model."""
    from mycli.quant.calibration import sampler

    whole = sampler._bundled
    monkeypatch.setattr(sampler, "_bundled", lambda name: whole(name)[:SHORT_TEXT].rpartition("\n")[0])
