"""Check that docs/commands.md and the man page match the generated text."""

import shutil
import subprocess

import pytest

from mycli.cli.main import COMMANDS
from mycli.runtime.errors import ExitCode
from tests.support import man_page
from tests.support.command_reference import page
from tests.support.paths import ROOT


def test_the_page_is_fresh() -> None:
    assert (ROOT / "docs" / "commands.md").read_text() == page(), "run: make docs"


def test_the_page_is_complete() -> None:
    text = page()
    assert all(f"## mycli {name}" in text for name in COMMANDS)
    assert all(f"| {int(code)} |" in text for code in ExitCode)


def test_the_man_page_is_fresh() -> None:
    assert (ROOT / "docs" / "mycli.1").read_text() == man_page.page(), "run: make docs"


@pytest.mark.skipif(shutil.which("groff") is None, reason="needs groff")
def test_the_man_page_is_readable_by_man() -> None:
    groff = ["groff", "-man", "-Tutf8", "-ww", "-P-cbou", str(ROOT / "docs" / "mycli.1")]
    done = subprocess.run(groff, capture_output=True, text=True, check=True)
    assert done.stderr == ""
    assert all(f"mycli {name}" in done.stdout for name in COMMANDS)
    assert "--target-bpw X" in done.stdout and "130" in done.stdout
