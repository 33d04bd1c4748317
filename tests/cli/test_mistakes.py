"""What is told of a mistake: in our words, and with the command that a foreign one means."""

import os

import pytest

from mycli.cli.main import COMMANDS
from mycli.cli.mistakes import _FOREIGN, as_typed
from tests.support.command_line import Mycli


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("run", "pico", "hi", "-t", "hot"), "error: -t / --temperature: not a number"),
        (("estimate", "pico", "--batch", "two"), "error: --batch: not a whole number"),
        (("estimate", "pico", "--batch", "0"), "error: --batch: less than 1"),
        (("serve", "pico", "--port", "99999"), "error: --port: more than 65535"),
        (("run", "pico", "--temprature", "1"), "error: no such option: --temprature; did you mean --temperature?"),
        (("show",), "error: missing argument 'MODEL'"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, tuple) else None,
)
def test_a_value_that_cannot_be(mycli: Mycli, words: tuple[str, ...], said: str) -> None:
    done = mycli(*words)
    assert done.returncode == 2 and done.stderr.splitlines()[0] == said


@pytest.mark.parametrize("word", _FOREIGN)
def test_verbs_of_other_programs_lead_to_ours(mycli: Mycli, word: str) -> None:
    done = mycli(word, "pico")
    assert done.returncode == 2
    error, hint = done.stderr.splitlines()
    assert error == f"error: no such command '{word}'"
    named = [name for name in COMMANDS if f"mycli {name}" in hint]
    assert word not in COMMANDS and (named or "mycli --version" in hint or "mycli COMMAND" in hint)


def test_what_a_locale_could_not_decode_is_utf8() -> None:
    assert as_typed("grüß") == "grüß"
    assert as_typed("grüß".encode().decode("ascii", "surrogateescape")) == "grüß" or os.fsencode("ü") != "ü".encode()
    assert as_typed("\udcff") == "\udcff"  # which is no UTF-8 either: refused where it is used
