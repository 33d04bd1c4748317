"""A machine without a C compiler or the headers of Python is told which package to install."""

import shutil
import sysconfig
from pathlib import Path

import pytest

from mycli.cli.reasons import reason
from mycli.runtime.kernels.triton.toolchain import launch_failure


def test_a_failed_launch_names_what_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    error = RuntimeError("Failed to find C compiler\nmore")
    (tmp_path / "Python.h").touch()
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"include": str(tmp_path)})
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert "install gcc" in reason(launch_failure(error, "kernel-raises"))
    monkeypatch.setattr(shutil, "which", lambda name: f"/usr/bin/{name}")
    other = launch_failure(error, "kernel-raises")
    assert other.code == "kernel-raises" and other.data["error"] == "RuntimeError: Failed to find C compiler"
    (tmp_path / "Python.h").unlink()
    message = reason(launch_failure(error, "kernels-failed"))
    assert "install python3-dev" in message and str(tmp_path) in message
