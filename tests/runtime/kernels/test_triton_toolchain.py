"""Test that the error on a machine without a C compiler or Python headers names the package to install."""

import shutil
import sysconfig
from pathlib import Path

import pytest

from mycli.cli.reasons import reason
from mycli.runtime.kernels.triton.toolchain import missing_tool


def test_a_machine_is_told_what_it_lacks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "Python.h").touch()
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"include": str(tmp_path)})
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "new" / "cache"))
    monkeypatch.setattr(shutil, "which", lambda name: None)
    missing = missing_tool()
    assert missing is not None and "install gcc" in reason(missing)
    monkeypatch.setattr(shutil, "which", lambda name: f"/usr/bin/{name}")
    assert missing_tool() is None
    (tmp_path / "Python.h").unlink()
    missing = missing_tool()
    assert missing is not None and "install python3-dev" in reason(missing) and str(tmp_path) in reason(missing)


def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check a folder that cannot be made, as in a container whose user has no home; root may write to all others."""
    (tmp_path / "Python.h").touch()
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"include": str(tmp_path)})
    monkeypatch.setattr(shutil, "which", lambda name: f"/usr/bin/{name}")
    monkeypatch.delenv("TRITON_CACHE_DIR", raising=False)
    for home in (tmp_path, tmp_path / "Python.h"):
        monkeypatch.setenv("TRITON_HOME", str(home))
        missing = missing_tool()
        assert (missing is None) == (home == tmp_path)
    assert missing is not None and "Python.h/.triton/cache: set TRITON_CACHE_DIR" in reason(missing)
