"""Test that Python files of the folder in which mycli is started, such as a cloned repository, never run."""

import os
import subprocess
from pathlib import Path

import pytest

from mycli.cli.command import command_line
from tests.support.command_line import Mycli
from tests.support.paths import ROOT

SHADOWED = ("grp", "json", "torch", "typer")  # of the standard library and of what is installed


@pytest.fixture
def hostile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Change to a folder with modules that leave a file where they are imported; return that file."""
    folder = tmp_path / "cloned"
    folder.mkdir()
    for name in SHADOWED:
        (folder / f"{name}.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'a').write(__name__)\n")
    monkeypatch.chdir(folder)
    return tmp_path / "ran"


def test_a_process_that_runs_mycli_imports_nothing_of_it(hostile: Path, environment: dict[str, str]) -> None:
    done = subprocess.run(command_line("--version"), env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "") and done.stdout.startswith("mycli ")
    assert not hostile.exists()


def test_the_server_of_an_agent_imports_nothing_of_it(hostile: Path, mycli: Mycli, tmp_path: Path) -> None:
    programs = tmp_path / "bin"
    programs.mkdir()
    (programs / "aider").write_text("#!/bin/sh\nexit 7\n")
    (programs / "aider").chmod(0o755)
    path = {"PATH": f"{programs}:{os.environ['PATH']}"}
    done = mycli("launch", "aider", "--model", "pico", "--ctx", "256", env=path)
    assert done.returncode == 7, done.stderr
    assert not hostile.exists()


def test_no_other_process_is_started_with_this_python() -> None:
    """Readers of other formats and sandboxes are isolated (-I); `vllm` and `sglang` lie next to this Python."""
    users = {
        path.relative_to(ROOT).as_posix()
        for part in ("cli", "runtime", "quant")
        for path in (ROOT / part).rglob("*.py")
    }
    users = {name for name in users if "sys.executable" in (ROOT / name).read_text()}
    readers = {f"quant/readers/{name}.py" for name in ("gguf_py", "gptqmodel", "transformers", "vllm")}
    assert users == {"cli/command.py", "cli/serving/other_engines.py", "runtime/utils/sandbox.py", *readers}
