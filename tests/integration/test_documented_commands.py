"""The commands in README and docs are ones: those that need no network run, all others at least parse.

What stands in a command's help too is run by `test_examples`.
"""

import os
import re
import shlex
import subprocess
from importlib import import_module
from pathlib import Path

import pytest

from mycli.cli.main import COMMANDS, find_command, program
from tests.support.command_line import COMMAND
from tests.support.paths import ROOT

PAGES = (
    "README.md",
    *sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md") if path.name != "commands.md"),
)
PLACEHOLDER = re.compile(
    r"\b(?:MODEL|FOLDER|OURS|PEER|PATH|DATASET|NAME|OUT|FILE|TEXT|TARGET|DRAFT|SOURCE)\b|\.\.\.|\["
)
OFFLINE = re.compile(r"\bmycli (?:chat|run|estimate|bench|show) pico(?:-draft)?(?![\w-])")
SLOW = ("--draft", "--verify", "-r 5")


def commands(page: str) -> list[str]:
    """The lines of a page's blocks of commands that call `mycli`, whole pipelines."""
    text = (ROOT / page).read_text(encoding="utf-8")
    fenced = [
        line for block in re.findall(r"```(?:sh|bash|console)?\n(.*?)```", text, re.S) for line in block.splitlines()
    ]
    lines = [line.removeprefix("$ ") for line in fenced if line.startswith("$ mycli")]
    lines += [line.strip() for line in re.findall(r"^    (?=\S)(.*)$", text, re.M) if re.search(r"\bmycli [a-z]", line)]
    return [line for line in lines if "/mycli" not in line and "pip install" not in line]


EXAMPLES = {line for module, _ in COMMANDS.values() for line in import_module(f"mycli.cli.commands.{module}").EXAMPLES}
ALL = sorted({(page, line) for page in PAGES for line in commands(page)})
RUN = [
    (page, line)
    for page, line in ALL
    if OFFLINE.search(line) and line not in EXAMPLES and not any(word in line for word in SLOW)
]


def test_there_are_commands() -> None:
    assert len(ALL) > 12 and len(RUN) >= 4


@pytest.mark.parametrize(("page", "line"), ALL, ids=[f"{page}: {line}"[:80] for page, line in ALL])
def test_a_documented_command_parses(page: str, line: str) -> None:
    if PLACEHOLDER.search(line):
        line = PLACEHOLDER.sub("x", line)
    for part in re.split(r"\s(?:\||&&)\s", line.partition("  #")[0]):
        words = shlex.split(part)
        if words[0] != "mycli":
            continue
        name = next(found for count in (2, 1) if (found := " ".join(words[1 : 1 + count])) in COMMANDS)
        parser = find_command(program(frozenset({name})), name)
        parser.make_context(name, words[1 + len(name.split()) :])


@pytest.mark.parametrize(("page", "line"), RUN, ids=[f"{page}: {line}"[:80] for page, line in RUN])
def test_a_documented_command_runs(page: str, line: str, environment: dict[str, str], tmp_path: Path) -> None:
    """As a person types it: in a shell, in another folder, with the command on the path."""
    bin_folder = tmp_path / "bin"
    bin_folder.mkdir()
    program_file = bin_folder / "mycli"
    program_file.write_text(f'#!/bin/sh\nexec {shlex.join(COMMAND)} "$@"\n')
    program_file.chmod(0o755)
    (tmp_path / "empty").mkdir()
    environment |= {"PATH": f"{bin_folder}{os.pathsep}{environment.get('PATH', '')}", "MYCLI_DEVICE": "cpu"}
    done = subprocess.run(
        ["sh", "-c", line.replace("git diff --staged", "echo changed")],
        cwd=tmp_path / "empty",
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, f"{page}: {line}\n{done.stderr}"
