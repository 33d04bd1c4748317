"""docs/commands.md is what the code says."""

from mycli.cli.main import COMMANDS
from mycli.runtime.errors import ExitCode
from tests.support.command_reference import page
from tests.support.paths import ROOT


def test_the_page_is_fresh() -> None:
    assert (ROOT / "docs" / "commands.md").read_text() == page(), "run: make docs"


def test_the_page_is_complete() -> None:
    text = page()
    assert all(f"## mycli {name}" in text for name in COMMANDS)
    assert all(f"| {int(code)} |" in text for code in ExitCode)
