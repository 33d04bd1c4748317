"""Test command line errors: the message, and our equivalent of another program's option."""

import os
import re

import pytest

from mycli.cli.flags.spellings import FOREIGN_OPTIONS
from mycli.cli.main import COMMANDS, decode_argument, find_command
from mycli.cli.mistakes import FOREIGN_COMMANDS, OPTIONS_OF_COMMANDS
from tests.support.command_line import Mycli


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("run", "pico", "hi", "-t", "hot"), "error: -t / --temperature: not a number"),
        (("estimate", "pico", "--batch", "two"), "error: --batch: not a whole number"),
        (("estimate", "pico", "--batch", "0"), "error: --batch must be at least 1"),
        (("serve", "pico", "--port", "99999"), "error: --port must be 0 to 65535"),
        (("run", "pico", "--temprature", "1"), "error: no such option: --temprature; did you mean --temperature?"),
        (("run", "pico", "--tempera", "1"), "error: no such option: --tempera; did you mean --temperature?"),
        (("run", "pico", "--max_tokens", "1"), "error: no such option: --max_tokens; did you mean --max-tokens?"),
        (("run", "pico", "--wholly-else", "1"), "error: no such option: --wholly-else"),
        (("run", "pico", "-n", "9" * 30), f"error: -n / --max-tokens: '{'9' * 30}' is too large"),
        (("run", "pico", "--ctx", "9" * 99), f"error: -c / --ctx: '{'9' * 39} is too large"),
        (("chat", "pico", "Hello", "there"), "error: unexpected 'Hello there'; chat takes MODEL"),
        (("show",), "error: missing argument 'MODEL'"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, tuple) else None,
)
def test_a_value_that_cannot_be(mycli: Mycli, words: tuple[str, ...], said: str) -> None:
    done = mycli(*words)
    assert done.returncode == 2 and done.stderr.splitlines()[0] == said


@pytest.mark.parametrize("word", FOREIGN_COMMANDS)
def test_verbs_of_other_programs_lead_to_ours(mycli: Mycli, word: str) -> None:
    done = mycli(word, "pico")
    assert done.returncode == 2
    error, hint = done.stderr.splitlines()
    assert error == f"error: no such command '{word}'"
    named = [name for name in COMMANDS if f"mycli {name}" in hint]
    assert word not in COMMANDS and (named or "mycli --version" in hint)


@pytest.mark.parametrize("word", FOREIGN_OPTIONS)
def test_options_of_other_programs_lead_to_ours(mycli: Mycli, word: str) -> None:
    """The hint names an option of the command that it shows, or a command; the called command lacks the option."""
    called = "bench" if word in _spellings("run") else "run"
    done = mycli(called, "pico", word, "1")
    assert done.returncode == 2
    error, hint = done.stderr.splitlines()
    assert error == f"error: no such option: {word}" and word not in _spellings(called)
    shown = re.search(r"mycli (chat|run|serve|bench|quantize|export|eval) MODEL", hint)
    named = set(re.findall(r"(?<!\S)--?[a-z][a-z-]*", hint.removeprefix("hint: mycli")))
    assert named <= _spellings(shown[1] if shown else called) | {"--version"} and (named or shown or "omit it" in hint)


@pytest.mark.parametrize("word", OPTIONS_OF_COMMANDS, ids=" ".join)
def test_options_with_another_meaning_by_command_name_one_that_it_has(word: tuple[str, str]) -> None:
    command, option = word
    hint = OPTIONS_OF_COMMANDS[word]
    named = re.match(r"--[a-z-]+", hint)
    assert option not in _spellings(command)
    assert hint.startswith("omit it") if named is None else named[0] in _spellings(command)


def _spellings(command: str) -> set[str]:
    return {spelling for option in find_command(command).params for spelling in option.opts}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("pico",), "to chat with a model: mycli chat pico"),
        (("org/name",), "to chat with a model: mycli chat org/name"),
        (("file.gguf", "-p", "Hi"), "to chat with a model: mycli chat file.gguf"),
        (("-m", "pico"), "the model is an argument, not an option: mycli chat MODEL"),
        (("-hf", "org/name"), "the model is an argument, not an option: mycli chat MODEL"),
        (("-V",), "mycli --version"),
        (("export", "pico"), "for example: mycli export pico --to gguf -o pico.gguf; mycli export --help"),
        (("compare", "pico"), "for example: mycli compare pico pico-draft -n 16; mycli compare --help"),
        (("search",), "for example: mycli search llama 3.2; mycli search --help"),
        (
            ("quantize", "pico", "pico.gguf", "Q4_K_M"),
            "type and file are options: mycli quantize MODEL --bits q4_k_m -o FILE.gguf",
        ),
        (("export", "pico", "--to", "gguf:Q4_K_M", "-o", "x.gguf"), "mycli quantize pico --bits q4_k_m"),
        (("export", "pico", "--to", "q4_k_m", "-o", "x.gguf"), "mycli quantize pico --bits q4_k_m"),
        (("run", "pico", "hi", "--format", "json"), "--json-mode, or --schema FILE"),
        (("quantize", "pico", "--bits", "5", "--dry-run"), "--bits takes: 8, 4, 3, 2, q4_0,"),
        (("quantize", "pico", "--quantize", "q4_K_M"), "--bits TYPE, such as q4_k_m"),
        (("quantize", "pico", "-b", "4"), "--bits N"),
        (("run", "pico", "hi", "-ub", "512"), "omit it: no option sets how many tokens of a prompt one pass computes"),
        (("run", "pico", "hi", "-ncmoe", "8"), "omit it: a model runs on the GPU completely or not at all"),
        (("run", "pico", "hi", "--greedy"), "--temperature 0"),
        (("chat", "pico", "--greedy"), "--temperature 0"),
        (("run", "pico", "hi", "-e"), "omit it: the shell writes line breaks, as in $'first\\nsecond'"),
        (("run", "pico", "hi", "-st"), "mycli run MODEL PROMPT"),
        (
            ("run", "pico", "hi", "--draft-max", "8"),
            "--draft MODEL: its number of tokens to draft",
        ),
        (("serve", "pico", "--temp", "0.7"), "omit it: requests state it; the defaults are those of the model's"),
        (("serve", "pico", "-n", "64"), "omit it: requests state max_tokens"),
        (("rm", "-f", "pico"), "--yes"),
        (("eval", "pico", "-f", "wiki.txt"), "--text FILE"),
        (
            ("compare", "pico", "pico-draft", "hi"),
            "prompts are lines of a file: mycli compare A B --prompts FILE.jsonl",
        ),
        (("estimate", "pico", "--bits", "4"), "--quant int4-g128, or another scheme"),
        (
            ("estimate", "pico", "--quant", "q4_K_M"),
            "its exact size: mycli quantize MODEL --bits q4_k_m --dry-run",
        ),
        (("export", "pico", "--to", "mlx", "-o", "pico-mlx"), "quantize it first: mycli quantize pico"),
        (
            ("verify", "pico"),
            "to compare its weights with another program's reading: mycli verify pico --as transformers",
        ),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, tuple) else None,
)
def test_a_command_line_of_another_program_is_answered_by_ours(mycli: Mycli, words: tuple[str, ...], said: str) -> None:
    done = mycli(*words)
    assert done.returncode in (2, 3) and done.stderr.splitlines()[1].startswith(f"hint: {said}")


def test_a_mistyped_option_shows_the_arguments_of_its_own_command(mycli: Mycli) -> None:
    assert mycli("bench", "-m", "pico").stderr.splitlines()[1].endswith("not an option: mycli bench MODEL")


def test_what_a_locale_could_not_decode_is_utf8() -> None:
    assert decode_argument("grüß") == "grüß"
    assert (
        decode_argument("grüß".encode().decode("ascii", "surrogateescape")) == "grüß"
        or os.fsencode("ü") != "ü".encode()
    )
    assert decode_argument("\udcff") == "\udcff"  # not UTF-8 either: refused where it is used
