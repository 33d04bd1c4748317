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
SLOW = ("--draft", "--verify", "-r 5", "--kv-sweep")
# What stands for something else in a command, and what stands for it where the command is run.
STAND_INS = {
    r"\[:[^]]*\]": "",
    r"gptq\|awq\|mlx\|safetensors": "safetensors",
    r"--bits B\b": "--bits 4",
    r" \.\.\.$": "",
    r"(?<=mycli )(\w+) (?:MODEL|FOLDER)\b": r"\1 pico",
    r"\bFOLDER\b": "made",
    r"\bDRAFT\b": "pico-draft",
}
# Why a command is not run: it asks a network or another program's server, is a form of names, or takes minutes.
NOT_RUN = re.compile(
    r"\w/\w+.*[Qq]wen|Qwen|org|http://|--engine|--adapter|NAME|mtp|--rate|-00001-|search|pirate|--samples 64"
)
SERVED = re.compile(r"^mycli serve ")


def commands(page: str) -> list[str]:
    """The lines of a page's blocks of commands that call `mycli`, whole pipelines."""
    text = (ROOT / page).read_text(encoding="utf-8")
    fenced = [
        line for block in re.findall(r"```(?:sh|bash|console)?\n(.*?)```", text, re.S) for line in block.splitlines()
    ]
    lines = [line.removeprefix("$ ") for line in fenced if line.startswith("$ mycli")]
    lines += [line.strip() for line in re.findall(r"^    (?=\S)(.*)$", text, re.M) if re.search(r"\bmycli [a-z]", line)]
    return [line for line in lines if "/mycli" not in line and "pip install" not in line]


def spans(page: str) -> list[str]:
    """The commands with arguments in the sentences of a page."""
    found = re.findall(r"`(mycli [a-z]+ [^`]+)`", (ROOT / page).read_text(encoding="utf-8"))
    return [line for line in (" ".join(line.split()) for line in found) if line.removeprefix("mycli ") not in COMMANDS]


EXAMPLES = {line for module, _ in COMMANDS.values() for line in import_module(f"mycli.cli.commands.{module}").EXAMPLES}
ALL = sorted({(page, line) for page in PAGES for line in (*commands(page), *spans(page))})
RUN = [
    (page, line)
    for page, line in ALL
    if OFFLINE.search(line) and line not in EXAMPLES and not any(word in line for word in SLOW)
]


def test_there_are_commands() -> None:
    assert len(ALL) > 12 and len(RUN) >= 4


@pytest.mark.parametrize(("page", "line"), ALL, ids=[f"{page}: {line}"[:80] for page, line in ALL])
def test_a_documented_command_parses(page: str, line: str) -> None:
    for form, filled in STAND_INS.items():
        line = re.sub(form, filled, line)
    if PLACEHOLDER.search(line):
        line = PLACEHOLDER.sub("x", line)
    for part in re.split(r"\s(?:\||&&)\s", line.partition("  #")[0]):
        words = shlex.split(part)
        if words[0] != "mycli":
            continue
        name = next(found for count in (2, 1) if (found := " ".join(words[1 : 1 + count])) in COMMANDS)
        parser = find_command(program(frozenset({name})), name)
        parser.make_context(name, words[1 + len(name.split()) :])


def in_a_shell(folder: Path, environment: dict[str, str]) -> dict[str, str]:
    """The environment of a person's shell: the command on the path, and an empty folder to stand in."""
    bin_folder = folder / "bin"
    bin_folder.mkdir()
    program_file = bin_folder / "mycli"
    program_file.write_text(f'#!/bin/sh\nexec {shlex.join(COMMAND)} "$@"\n')
    program_file.chmod(0o755)
    (folder / "empty").mkdir()
    return environment | {"PATH": f"{bin_folder}{os.pathsep}{environment.get('PATH', '')}", "MYCLI_DEVICE": "cpu"}


def typed(line: str, folder: Path, environment: dict[str, str]) -> "subprocess.CompletedProcess[str]":
    """What a line does in a shell."""
    return subprocess.run(
        ["sh", "-c", line],
        cwd=folder / "empty",
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=300,
    )


@pytest.mark.parametrize(("page", "line"), RUN, ids=[f"{page}: {line}"[:80] for page, line in RUN])
def test_a_documented_command_runs(page: str, line: str, environment: dict[str, str], tmp_path: Path) -> None:
    """As a person types it: in a shell, in another folder, with the command on the path."""
    environment = in_a_shell(tmp_path, environment)
    done = typed(line.replace("git diff --staged", "echo changed"), tmp_path, environment)
    assert done.returncode == 0, f"{page}: {line}\n{done.stderr}"


@pytest.mark.slow
def test_every_documented_command_runs(environment: dict[str, str], tmp_path: Path) -> None:
    """Those that need no network, with names filled in, after what they need; servers for twenty seconds."""
    environment = in_a_shell(tmp_path, environment)
    for line in (
        "mycli quantize pico --bits 4 -q",
        "mycli export pico --to gguf -o model-Q4_K_M.gguf -q && cp model-Q4_K_M.gguf file.gguf",
    ):
        assert typed(line, tmp_path, environment).returncode == 0
    ran = []
    for page, shown in ALL:
        line = shown.partition("  #")[0].strip()
        for form, filled in STAND_INS.items():
            line = re.sub(form, filled, line)
        if NOT_RUN.search(line) or shown in EXAMPLES or (page, shown) in RUN:
            continue
        if SERVED.search(line):
            line = f"{line} --port 0 & sleep 20; kill $!; wait $!"
            (tmp_path / "empty" / "key.txt").write_text("0" * 32)
            (tmp_path / "empty" / "key.txt").chmod(0o600)
        done = typed(
            line.replace("quantize pico --bits 4", "quantize pico --bits 4 --overwrite"), tmp_path, environment
        )
        assert done.returncode in ((0, 143) if SERVED.search(line) else (0,)), f"{page}: {line}\n{done.stderr}"
        if SERVED.search(line):
            assert "http" in done.stdout + done.stderr, f"{page}: {line}\n{done.stderr}"
        ran.append(line)
    assert len(ran) >= 15


@pytest.mark.parametrize("page", PAGES)
def test_the_modules_and_targets_that_a_page_names_exist(page: str) -> None:
    """Of `python -m tests...` and `make ...`."""
    text = (ROOT / page).read_text(encoding="utf-8")
    for module in set(re.findall(r"python -m (tests(?:\.\w+)+)", text)):
        assert (ROOT / f"{module.replace('.', '/')}.py").is_file(), module
    makefile = (ROOT / "Makefile").read_text()
    for target in set(re.findall(r"`make ([a-z-]+)`|^    make ([a-z-]+)$", text, re.M)):
        assert re.search(rf"^{target[0] or target[1]}:", makefile, re.M), target
