"""Test parsing of counts, memory sizes and times, and options as words of a command line."""

import pytest
import typer

from mycli.cli.flags.address import AddressFlags
from mycli.cli.flags.options import (
    complete_word,
    given_options,
    option_words,
    parse_biases,
    parse_count,
    parse_counts,
    parse_duration,
    parse_limit,
    parse_memory,
)
from mycli.cli.flags.records import RunFlags
from mycli.cli.main import COMMANDS, find_command
from mycli.runtime.errors import UsageError


@pytest.mark.parametrize(
    ("text", "count"), [("0", 0), ("512", 512), ("32k", 32768), ("2K", 2048), ("1M", 1 << 20), ("9" * 12, 10**12 - 1)]
)
def test_counts(text: str, count: int) -> None:
    assert parse_count(text) == parse_limit(text) == count


@pytest.mark.parametrize("text", ["", "-2", "1.5k", "k", "1kk", "٣", "1e3", "9" * 13, "9" * 20, "0x10"])
def test_what_is_no_count(text: str) -> None:
    for parse in (parse_count, parse_limit):
        with pytest.raises(typer.BadParameter):
            parse(text)


def test_only_a_limit_may_be_minus_one() -> None:
    assert parse_limit("-1") == -1
    with pytest.raises(typer.BadParameter):
        parse_count("-1")


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("2", 2), ("30s", 30), ("500ms", 0.5), ("1.5m", 90), ("1h", 3600), ("24 h", 86400), ("1d", 86400)],
)
def test_times(text: str, seconds: float) -> None:
    assert parse_duration(text) == pytest.approx(seconds)


@pytest.mark.parametrize("text", ["", "s", "-1s", "1y", "1e3", "0", "0ms", "86401", "2d", "1000000000"])
def test_what_is_no_time(text: str) -> None:
    with pytest.raises(typer.BadParameter):
        parse_duration(text)


def test_biases_of_tokens() -> None:
    assert parse_biases(["17=-100", "5=0.5"]) == ((17, -100.0), (5, 0.5))
    for wrong in ("5", "x=1", "5=", "=1"):
        with pytest.raises(UsageError, match="not TOKEN_ID=NUMBER"):
            parse_biases(["17=-100", wrong])


def test_words_that_begin_as_typed_are_completed() -> None:
    complete = complete_word("auto", "cpu", "cuda")
    assert (complete("c"), complete("cu"), complete("x"), complete("")) == (
        ["cpu", "cuda"],
        ["cuda"],
        [],
        ["auto", "cpu", "cuda"],
    )


def test_options_become_the_words_that_give_them_again() -> None:
    """The words have a unit after a size, repeat the option of a list, and leave defaults out."""
    flags = RunFlags(device="cpu", threads=None, shadow=True, expert_memory=1 << 20)
    assert given_options(flags) == ["--device", "--shadow", "--expert-memory"]
    assert option_words(flags) == ["--device", "cpu", "--shadow", "--expert-memory", "1048576B"]
    assert option_words(AddressFlags(hosts=["a", "b"], port=0)) == [
        "--port",
        "0",
        "--allow-host",
        "a",
        "--allow-host",
        "b",
    ]


def test_lists_of_counts() -> None:
    assert parse_counts("-p", "0,512,8k") == (0, 512, 8192)
    with pytest.raises(UsageError, match="^-p 512,,1: '' is not a count"):
        parse_counts("-p", "512,,1")


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("24GiB", 24 << 30),
        ("24GB", 24 * 10**9),
        ("1.5 gib", 3 << 29),
        ("24G", 24 << 30),
        ("8m", 8 << 20),
        ("1024B", 1024),
    ],
)
def test_memory(text: str, size: int) -> None:
    assert parse_memory(text) == size


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("24", "has no unit: write 24GiB or 24MiB"),
        ("10", "has no unit"),
        ("0GiB", "must be above zero"),
        ("0.1B", "must be above zero"),
        *((text, "is not a memory size") for text in ("", "GiB", "-1GiB", "24XB", "nan", "1e9GiB")),
    ],
)
def test_what_is_no_memory(text: str, problem: str) -> None:
    with pytest.raises(typer.BadParameter) as refused:
        parse_memory(text)
    assert problem in refused.value.message


# Every option that takes a memory size; the test fails if one loses its parser.
SIZES = {
    "--gpu": {"choose", "estimate"},
    "--max-ram": {"pull", "quantize"},
    "--max-vram": {"quantize"},
    "--target-size": {"pull", "quantize"},
    "--prefix-cache-size": {"chat", "run", "serve"},
    "--expert-memory": {"bench", "bench draft", "bench serve", "chat", "embed", "estimate", "run", "serve"},
    "--memory": {"serve"},
}


def test_options_that_take_memory_read_it_as_memory() -> None:
    found: dict[str, set[str]] = {}
    for name in COMMANDS:
        command = find_command(name)
        for option in command.params:
            if option.metavar != "SIZE":
                continue
            found.setdefault(option.opts[0], set()).add(name)
            names = ["pico"] * sum(parameter.required for parameter in command.params if parameter.name != "output")
            for text, size in (("24G", 24 << 30), ("24GB", 24 * 10**9), ("800 MiB", 800 << 20)):
                assert command.make_context(name, [*names, option.opts[0], text]).params[option.name] == size
            for text, problem in (("24", "has no unit"), ("10", "has no unit"), ("0GiB", "must be above zero")):
                with pytest.raises(typer.TyperException, match=problem):
                    command.make_context(name, [*names, option.opts[0], text])
    assert found == SIZES


_BOTH = ((False, False), (True, False), (False, True))


def test_one_copy_for_prompts_is_chosen() -> None:
    copies = [RunFlags(shadow=shadow, fp8_prompts=fp8).resolve().prompt_copy for shadow, fp8 in _BOTH]
    assert copies == ["none", "16bit", "fp8"]
    with pytest.raises(UsageError, match="--shadow and --fp8-prompts"):
        RunFlags(shadow=True, fp8_prompts=True).resolve()
    assert option_words(RunFlags(fp8_prompts=True)) == ["--fp8-prompts"]


def test_portable_bits_reach_the_engine_and_a_server() -> None:
    flags = RunFlags(portable_bits=True)
    assert flags.resolve().portable and option_words(flags) == ["--portable-bits"]
    assert not RunFlags().resolve().portable and not option_words(RunFlags())
