"""Test the options of other programs that are accepted because they mean the same."""

from typing import Any

import pytest

from mycli.cli.flags.spellings import EQUIVALENT_OPTIONS, spelling_rule
from mycli.cli.main import find_command
from mycli.runtime.errors import UsageError


def parse(command: str, *words: str) -> dict[str, Any]:
    parameters: dict[str, Any] = find_command(command).make_context(command, ["pico", *words]).params
    return parameters


@pytest.mark.parametrize(
    ("command", "theirs", "ours"),
    [
        ("run", ("--temp", "0.5"), ("--temperature", "0.5")),
        ("run", ("--temp=0.5",), ("--temperature", "0.5")),
        ("run", ("--ctx-size", "1k"), ("--ctx", "1k")),
        ("run", ("-c", "1k"), ("--ctx", "1k")),
        ("run", ("--n-predict", "3"), ("-n", "3")),
        ("serve", ("--max-model-len", "1k"), ("--ctx", "1k")),
        ("serve", ("--parallel", "4"), ("--max-sequences", "4")),
        ("run", ("--num-beams", "3"), ("--beams", "3")),
        ("run", ("--num-return-sequences", "3"), ("--samples", "3")),
        ("serve", ("--served-model-name", "gpt"), ("--alias", "gpt")),
        ("run", ("--num-predict", "3"), ("-n", "3")),
        ("run", ("--num-ctx", "1k"), ("--ctx", "1k")),
        ("run", ("--num-thread", "3"), ("--threads", "3")),
        ("run", ("-n", "-1"), ("--max-tokens", "-1")),
        ("quantize", ("--q-bits", "8"), ("--bits", "8")),
        ("quantize", ("--q-group-size", "64"), ("--group", "64")),
        ("quantize", ("--group-size", "64"), ("--group", "64")),
        ("quantize", ("--bits", "Q4_K_M"), ("--bits", "q4_k_m")),
        ("quantize", ("--mlx-path", "out"), ("-o", "out")),
        ("quantize", ("--outfile", "out.gguf"), ("-o", "out.gguf")),
        ("chat", ("--system-prompt", "Be brief."), ("--system", "Be brief.")),
    ],
    ids=str,
)
def test_an_option_of_another_program_sets_ours(command: str, theirs: tuple[str, ...], ours: tuple[str, ...]) -> None:
    assert parse(command, *theirs) == parse(command, *ours) != parse(command)


def test_every_equivalent_is_an_option_of_a_command() -> None:
    known = {
        spelling
        for name in ("run", "serve", "quantize")
        for option in find_command(name).params
        for spelling in option.opts
    }
    assert set(EQUIVALENT_OPTIONS.values()) <= known and not known & set(EQUIVALENT_OPTIONS)


def test_a_command_s_own_option_wins_and_help_shows_only_ours() -> None:
    assert spelling_rule({"--temp", "--temperature"}, "")("temp") == "temp"
    assert spelling_rule({"--bits"}, "")("temp") == "temp"
    assert "--temp " not in find_command("run").get_help(find_command("run").make_context("run", ["pico"]))


@pytest.mark.parametrize("words", [("-ngl", "99"), ("-ngl=99",), ("-fa",), ("-hf", "org/name")], ids=str)
def test_an_option_of_several_letters_is_no_cluster_of_ours(words: tuple[str, ...]) -> None:
    """The parser would read -ngl as -n gl, -fa as -f a and -hf as -h."""
    with pytest.raises(UsageError, match=f"no such option: {words[0].partition('=')[0]}$"):
        parse("run", "Hi", *words)


def test_values_and_clusters_remain() -> None:
    assert parse("run", "Hi", "--stop", "--temp")["stop"] == ["--temp"]
    assert parse("run", "Hi", "-qn3") == parse("run", "Hi", "-q", "-n", "3")
