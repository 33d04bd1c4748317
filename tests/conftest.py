"""Define shared fixtures: an isolated environment, and mycli called in it, in this process or as a child."""

import gc
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path

import pytest

from tests.support.command_line import INSTALLED, Completed, Mycli, run_here, run_process
from tests.support.paths import ROOT

# Small models gain nothing from a second thread, and threads that wait for each other stall on a busy machine.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Background jobs of a shell and their children ignore Ctrl-C: a reply could not be stopped.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

with suppress(ImportError):  # a machine with a GPU may not have it
    from hypothesis import settings

    settings.register_profile("untimed", deadline=None)  # a busy machine is no failure
    settings.load_profile("untimed")

SHORT_TEXT = 50_000  # characters

# Collecting the tests makes a million objects that live until the end. Searching them for garbage takes a second, which
# some tests would do ten times, so they are exempted.
gc.disable()


def pytest_collection_finish() -> None:
    gc.collect()
    gc.freeze()
    gc.enable()


@pytest.fixture(scope="module", autouse=True)
def _what_a_file_leaves() -> Iterator[None]:
    """Exempt what outlives a file, such as imported modules, from later searches for garbage."""
    yield
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def _state_of_the_tests(tmp_path_factory: pytest.TempPathFactory) -> None:
    # Loading a GGUF file records a measurement, which does not belong among the user's.
    os.environ["XDG_STATE_HOME"] = str(tmp_path_factory.mktemp("state"))


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """Set temporary folders for every test, no terminal settings, no network."""
    others = ("MYCLI_", "HF_", "XDG_", "OLLAMA_", "PYTHONPATH")
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
        # All tests share the compiled kernel: building it for every test would take most of the time.
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
    """Run `mycli` as a child process, for tests that need one: a fork that has torch."""
    return _bound(run_process, environment)


@pytest.fixture
def short_calibration_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorten the calibration texts: encoding all of them takes longer than solving a small model."""
    from mycli.quant.calibration import sampler

    whole = sampler._bundled
    monkeypatch.setattr(sampler, "_bundled", lambda name: whole(name)[:SHORT_TEXT].rpartition("\n")[0])


@pytest.fixture
def quick_configs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Read many configs in half of the time: transformers writes each out for its log, and we list our families.

    It also asks at every access to a field whether layers have their own value, and refuses what is ambiguous then.
    """
    from transformers import PreTrainedConfig

    from mycli.runtime.models import registry

    for guard in [kind for kind in PreTrainedConfig.__mro__[1:-1] if "__getattribute__" in vars(kind)]:
        monkeypatch.delattr(guard, "__getattribute__")
    monkeypatch.setattr(PreTrainedConfig, "__repr__", object.__repr__)
    monkeypatch.setattr(registry, "families", cache(registry.families))
