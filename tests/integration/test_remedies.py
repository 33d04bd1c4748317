"""Check that no module outside `cli/` names a flag or a command; every remedy code has a message and is used."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from string import Formatter

import pytest

from mycli.cli.main import COMMANDS
from mycli.cli.remedies import REMEDIES
from tests.support.sources import name, sources, tree

COMPILER = {
    "runtime/kernels/cpu/library/compiler.py": {"-o", "--version"},
    "runtime/kernels/cpu/library/prebuilt.py": {"--as-needed"},
    "quant/readers/llama_cpp.py": {
        "--allow-requantize",
        "--build",
        "--cache-type-k",
        "--cache-type-v",
        "--flash-attn",
        "--host",
        "--no-webui",
        "--port",
        "--target",
        "--version",
    },
}  # options of other programs, not ours
WORDS = "|".join(sorted({command.split()[0] for command in COMMANDS}))
SLASHES = "set|system|show|retry|edit|undo|clear|save|load|bye"
# A long option, a short option of this program, a command line, a chat command.
TYPED = re.compile(
    rf"(?<![\w-])--[a-z][a-z-]*|(?<![\w-])-[fhoqv](?!\w)|\bmycli (?:{WORDS})\b|(?<![\w.<}}/])/(?:{SLASHES})\b"
)


def typed(text: str) -> list[str]:
    return TYPED.findall(text)


def texts(path: Path) -> Iterator[str]:
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def coded(path: Path) -> Iterator[tuple[str, set[str], int]]:
    for node in ast.walk(tree(path)):
        if not isinstance(node, ast.Call):
            continue
        arguments = {keyword.arg: keyword.value for keyword in node.keywords}
        data = arguments.get("data")
        names = (
            {key.value for key in data.keys if isinstance(key, ast.Constant)} if isinstance(data, ast.Dict) else set()
        )
        for part in ast.walk(arguments["code"]) if "code" in arguments else ():
            if isinstance(part, ast.Constant) and isinstance(part.value, str) and part.value:
                yield part.value, {str(keys) for keys in names}, node.lineno


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("ask for more with --ctx", ["--ctx"]),
        ("choose another -o", ["-o"]),
        ("mycli pull MODEL", ["mycli pull"]),
        ("start anew with /clear", ["/clear"]),
        ("the logits are -inf, exp(-x), mycli.json, int4-o, </think>, a/clear, rank-one", []),
    ],
)
def test_typed_words_are_recognised(text: str, expected: list[str]) -> None:
    assert typed(text) == expected


def test_below_the_command_line_nothing_names_a_flag_or_a_command() -> None:
    for path in sources():
        if name(path).startswith("cli/"):
            continue
        words = {word for text in texts(path) for word in typed(text)} - COMPILER.get(name(path), set())
        assert not words, f"{name(path)}: say what happened, and give the error a code that cli/remedies.py words"


def test_every_code_is_worded_its_fields_are_given_and_every_remedy_is_used() -> None:
    used = set()
    for path in sources():
        for code, names, line in coded(path):
            assert code in REMEDIES, f"{name(path)}:{line}"
            fields = {field for _, field, _, _ in Formatter().parse(REMEDIES[code]) if field}
            assert fields - {"model"} <= names, f"{name(path)}:{line}: {code} needs {sorted(fields)}"
            used.add(code)
    assert used == set(REMEDIES)
