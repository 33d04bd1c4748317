"""The documentation against the files: what contributing.md shows is there, and what architecture.md names exists."""

import re
import subprocess
import sys
from pathlib import Path

from tests.support.family_tables import with_tables
from tests.support.paths import ROOT
from tests.support.sources import name, sources

DOCS = ROOT / "docs"


def test_the_examples_of_contributing_are_in_the_files() -> None:
    """Every run of added lines stands in its file as it is shown."""
    text = (DOCS / "contributing.md").read_text()
    shown = [part for block in re.findall(r"```diff\n(.*?)```", text, re.S) for part in block.split("+++ b/")[1:]]
    assert len(shown) >= 7
    for part in shown:
        path, _, added = part.partition("\n")
        lines = [line.removeprefix("+") for line in added.splitlines()]
        assert "\n".join(lines) in (ROOT / path).read_text(), path


def test_the_files_that_architecture_names_exist() -> None:
    text = (DOCS / "architecture.md").read_text()
    files = [f"/{name(path)}" for path in sources()]
    named = re.findall(r"`([\w/]+\.py)`", text)
    assert len(named) >= 30
    assert not [one for one in named if not any(path.endswith(f"/{one}") for path in files)]


def test_every_fault_of_the_server_is_told_with_a_test_that_exists() -> None:
    table = re.findall(r"^\| G(\d+) \|.*$", text := (DOCS / "results" / "server.md").read_text(), re.M)
    assert sorted({int(number) for number in table}) == list(range(1, 44))
    tests = re.findall(r"`([\w/]+\.py)::(test_\w+)`", text)
    assert len(tests) >= 43
    assert not [one for one in tests if f"def {one[1]}(" not in (ROOT / "tests" / one[0]).read_text()]


def test_the_tables_of_families_are_up_to_date() -> None:
    """`make docs` writes them."""
    text = (ROOT / "docs" / "families.md").read_text()
    assert with_tables(text) == text


def test_the_program_of_python_md_prints_what_its_comments_say(environment: dict[str, str], tmp_path: Path) -> None:
    blocks = re.findall(r"```python\n(.*?)```", (DOCS / "python.md").read_text(), re.S)
    expected = re.findall(r"^ *print\(.*\)  # (.+)$", "".join(blocks), re.M)
    assert len(blocks) >= 7 and len(expected) >= 7
    done = subprocess.run(
        [sys.executable, "-c", "".join(blocks)],
        cwd=tmp_path,
        env=environment | {"PYTHONPATH": str(ROOT / ".links")},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (done.returncode, done.stderr) == (0, "") and done.stdout.splitlines() == expected
