"""Check that commands and options in hints exist: in strings of `cli/` and in real errors."""

import ast
import json
import re
import shlex
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from mycli.cli.main import COMMANDS, find_command
from mycli.cli.text.layout import COMMAND
from tests.support.command_line import Mycli
from tests.support.sources import name, sources, tree
from tests.support.stored_models import quantized

NETWORK = {"pull", "search"}  # commands that need a network to succeed
STAND_INS = {"MODEL": "pico", "PROMPT": "Hi", "DRAFT": "pico-draft", "COMMAND": "run", "WORDS": "llama"}
LINE = re.compile(r"\bmycli (?=(?:spec )?[a-z]+\b)([^;,():\"`|&\n]*)")


def texts(path: Path) -> Iterator[str]:
    """Yield the strings of a module as users see them: `pico` replaces placeholders; docstrings are left out."""
    inside: set[int] = set()
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.JoinedStr):
            inside |= {id(part) for part in node.values}
            yield "".join(str(part.value) if isinstance(part, ast.Constant) else "pico" for part in node.values)
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef)
    docs = {ast.get_docstring(node, clean=False) for node in ast.walk(tree(path)) if isinstance(node, documented)}
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in inside:
            yield "" if node.value in docs else re.sub(r"\{\w+\}", "pico", node.value)


def command_of(words: list[str]) -> str | None:
    return next((candidate for count in (2, 1) if (candidate := " ".join(words[:count])) in COMMANDS), None)


def parser(name: str) -> Any:
    return find_command(name)


def takes(name: str, words: list[str]) -> bool:
    try:
        parser(name).make_context(name, list(words))
    except Exception:  # the parser's exit, for any reason
        return False
    return True


@cache  # not when the tests are collected, which every worker does
def lines() -> list[tuple[str, str]]:
    return sorted(
        {
            (name(path), match[1].strip())
            for path in sources()
            if name(path).startswith("cli/")
            for text in texts(path)
            for match in LINE.finditer(text)
            if match[1].split()[0] not in ("is", "was", "stored", "and", "did", "here", "needs", "cannot", "goes")
        }
    )


def fault(line: str) -> str | None:
    words = [STAND_INS.get(word, word) for word in line.split()]
    if words[0] == "COMMAND" or words[0] in STAND_INS.values():
        return None
    command = command_of(words)
    if command is None:
        return "no such command"
    rest = words[command.count(" ") + 1 :]
    known = {spelling for option in parser(command).params for spelling in option.opts} | {"--help"}
    options = {word for word in rest if re.fullmatch(r"--?[a-z][a-z-]*", word)}
    return f"{command} has no {sorted(options - known)}" if options - known else None


def test_every_command_in_the_words_of_the_program_is_one() -> None:
    """Prose may follow a command, so only the options behind it are checked."""
    assert len(lines()) > 30
    assert not [f"{where}: mycli {line}: {problem}" for where, line in lines() if (problem := fault(line))]


def test_an_unbreakable_command_ends_before_the_following_prose() -> None:
    """A verb missing in `COMMAND` would make a whole sentence unbreakable."""
    commands = [match[0] for _, line in lines() for match in COMMAND.finditer(f"mycli {line.partition('  #')[0]}")]
    # A value of an option may end like a verb: --to safetensors.
    prose = re.compile(r"(?<!--to)(?<!--as) [a-z]{3,}s(?= |$)")
    assert len(commands) > 30 and not [command for command in commands if prose.search(command)]


@pytest.fixture
def mine(environment: dict[str, str]) -> Path:
    return quantized("mine", Path(environment["XDG_DATA_HOME"]) / "mycli")


def cut(folder: Path) -> None:
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-5])


def foreign(folder: Path) -> None:
    (folder / "notes.txt").write_text("my own")


Change = Callable[[Path], None]
FAILURES: dict[str, tuple[str, Change | None, str, set[int]]] = {
    # command line, setup of the model, text that the hint must contain, exit codes of the suggested command
    "not-a-terminal": ("rm mine", None, "mycli rm mine --yes", {0}),
    "damaged-quantization": ("run mine Hi", cut, "mycli verify mine", {6}),
    "damaged-draft": ("run pico Hi --draft mine", cut, "mycli verify mine", {6}),
    "unknown-name": ("run nothing-like-it Hi", None, "mycli list", {0}),
    "not-stored-here": ("rm .", None, "mycli list", {0}),
    "no-such-revision": ("rm org/x@main", None, "mycli list", {0}),
    "exists": ("quantize pico --method rtn --report none -o {mine}", None, "--overwrite", set()),
    "exists-with-a-persons-file": ("quantize pico --method rtn --report none -o {mine}", foreign, "-o", set()),
    "template": ("show mine --template", lambda folder: untemplated(folder), "mycli run mine PROMPT --raw", {0}),
    "chat-without-template": ("chat mine", lambda folder: untemplated(folder), "mycli run mine PROMPT", {0}),
    "full-context": ("run pico {long}", None, "shorten the prompt", set()),
    "short-context": ("run pico {long} --ctx 64", None, "--ctx", set()),
    "no-comparison": ("bench pico --compare nope.json", None, "check the path", set()),
    "too-few-tokens": ("eval pico --tokens 1", None, "--tokens", set()),
}
NEVER = {"full-context": "--ctx", "exists-with-a-persons-file": "--overwrite", "not-stored-here": "rm -r"}


def untemplated(folder: Path) -> None:
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps({k: v for k, v in json.loads(path.read_text()).items() if k != "chat_template"}))


@pytest.mark.parametrize("failure", FAILURES)
def test_the_hint_of_a_failure_leads_on(
    failure: str, mine: Path, mycli: Mycli, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    typed, change, promised, codes = FAILURES[failure]
    monkeypatch.chdir(tmp_path)
    if change is not None:
        change(mine)
    words = [word.format(mine=mine, long="word " * 3000) for word in typed.split()]
    device = ("--device", "cpu")
    failed = mycli(*words, *device)
    assert failed.returncode != 0 and "hint: " in failed.stderr, failed.stderr
    hint = failed.stderr.split("hint: ")[1].strip()
    assert promised in hint and NEVER.get(failure, "nothing of the kind") not in hint, hint
    for match in LINE.finditer(hint):
        words = [STAND_INS.get(word, word) for word in shlex.split(match[1])]
        command = command_of(words)
        assert command is not None, hint
        if command in NETWORK:
            continue
        ends = [end for end in range(len(words), 0, -1) if takes(command, words[command.count(" ") + 1 : end])]
        done = mycli(*words[: ends[0]], *device)
        assert done.returncode in codes, f"{hint}\n{done.stderr}"
