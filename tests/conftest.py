"""What several test files need: the shipped model, and mycli as a process of its own."""

import json
import os
import signal
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

import pytest

# Small models gain nothing from a second thread, and threads that wait for each other stall on a busy machine.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# What was started in the background of a shell ignores Ctrl-C, and all that it starts: a reply could not be stopped.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

ROOT = Path(__file__).parent.parent
PICO = ROOT / "runtime" / "pico" / "pico"

Mycli = Callable[..., "subprocess.CompletedProcess[str]"]


def _is_installed() -> bool:
    """Whether this interpreter has an editable install of this checkout, and not of another."""
    records = [one.read_text("direct_url.json") for one in metadata.distributions(name="mycli-llm")]
    return ROOT.as_uri() in [json.loads(record)["url"] for record in records if record]


# What a person types is what tests run: the installed command, without PYTHONPATH, outside of the checkout.
# A second worktree and a GPU machine have nothing installed; there the links show Python the same files.
INSTALLED = _is_installed()
COMMAND = [str(Path(sysconfig.get_path("scripts")) / "mycli")] if INSTALLED else [sys.executable, "-m", "mycli.cli"]


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


@pytest.fixture
def mycli(environment: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Mycli:
    """Run the command line: mycli("run", "pico", "Hi", input=..., env=...)."""
    elsewhere = tmp_path_factory.mktemp("elsewhere")

    def run(
        *arguments: str, input: str | None = None, env: dict[str, str] | None = None
    ) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(
            [*COMMAND, *arguments],
            cwd=elsewhere,
            input=input,
            stdin=subprocess.DEVNULL if input is None else None,
            env={**environment, **(env or {})},
            capture_output=True,
            text=True,
            timeout=120,
        )

    return run
