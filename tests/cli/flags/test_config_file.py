"""Test config.toml: flags and environment override it, it overrides defaults, and errors name file and key."""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from mycli.cli.flags.config_file import config_path, option_key, read_settings
from mycli.runtime.errors import UsageError
from tests.support.command_line import Mycli

# command -> key -> parameter
KEYS = {"chat": {"device": "device", "top_p": "top_p"}, "run": {"device": "device", "max_tokens": "limit"}}


def read(tmp_path: Path, text: str, command: str = "chat") -> dict[str, object]:
    path = tmp_path / "config.toml"
    path.write_text(text)
    return read_settings(path, command, KEYS, KEYS.__getitem__)


def test_a_table_counts_for_its_command_and_the_top_for_all_that_have_the_option(tmp_path: Path) -> None:
    text = 'device = "cpu"\nmax-tokens = "1k"\n[chat]\ntop-p = 0.5\ndevice = "auto"\n'
    assert read(tmp_path, text, "chat") == {"device": "auto", "top_p": 0.5}
    assert read(tmp_path, text, "run") == {"device": "cpu", "limit": "1k"}


@pytest.mark.parametrize("table", ["[bench.serve]", '["bench serve"]', "[bench]\ndepth = 1\n[bench.serve]"])
def test_a_command_of_two_words_has_a_table_in_a_table(tmp_path: Path, table: str) -> None:
    path = tmp_path / "config.toml"
    path.write_text(f"{table}\nclients = 3\n")
    keys = {"bench": {"depth": "depth"}, "bench serve": {"clients": "clients"}}
    assert read_settings(path, "bench serve", keys, keys.__getitem__) == {"clients": 3}
    assert read_settings(path, "bench", keys, keys.__getitem__) == ({"depth": 1} if "depth" in table else {})


def test_other_commands_are_looked_at_only_for_a_key_that_this_one_lacks(tmp_path: Path) -> None:
    path = tmp_path / "config.toml"
    path.write_text('device = "cpu"\n[run]\nmax_tokens = 1\n')
    asked: list[str] = []

    def keys(name: str) -> dict[str, str]:
        asked.append(name)
        return KEYS[name]

    read_settings(path, "chat", KEYS, keys)
    assert asked == ["chat"]


@pytest.mark.parametrize(
    ("spellings", "key"), [(["--top-p"], "top_p"), (["-n"], "n"), (["-t", "--temperature"], "temperature")]
)
def test_an_option_goes_by_its_longest_spelling(spellings: list[str], key: str) -> None:
    assert option_key(spellings) == key


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x = [", "Invalid value"),
        ("colour = 1", "colour"),
        ("[cook]\na = 1", "cook"),
        ("[chat]\nmax_tokens = 1", "max_tokens"),
        ("[chat.deep]\na = 1", "deep"),
        ("x = '\udcff'", "not UTF-8 at byte 5"),
    ],
    ids=["not-toml", "unknown-option", "unknown-command", "option-of-another-command", "table-in-a-table", "not-utf-8"],
)
def test_mistakes_are_named_with_the_file(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "config.toml"
    path.write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(UsageError, match=f"config.toml.*{message}"):
        read_settings(path, "chat", KEYS, KEYS.__getitem__)


def test_a_file_without_an_end_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "config.toml")
    with pytest.raises(UsageError, match="config.toml: not a regular file"):
        read_settings(tmp_path / "config.toml", "chat", KEYS, KEYS.__getitem__)


def test_no_file_is_no_settings(tmp_path: Path) -> None:
    assert read_settings(tmp_path / "none.toml", "chat", KEYS, KEYS.__getitem__) == {}
    assert read(tmp_path, "") == {}
    assert config_path({"XDG_CONFIG_HOME": "/x"}) == Path("/x/mycli/config.toml")
    assert config_path({"XDG_CONFIG_HOME": "x"}) == Path.home() / ".config/mycli/config.toml"


def answer(done: "subprocess.CompletedProcess[str]") -> dict[str, Any]:
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_precedence_flag_environment_file_model(mycli: Mycli, environment: dict[str, str]) -> None:
    path = Path(environment["XDG_CONFIG_HOME"]) / "mycli" / "config.toml"
    path.parent.mkdir(parents=True)
    path.write_text("temperature = 0\nmax_tokens = 6\n[run]\nmax-tokens = 5\nstop = ['never']\n")
    command = ("run", "pico", "Tell me a story.", "--json", "--device", "cpu")
    general, special = {"MYCLI_MAX_TOKENS": "4"}, {"MYCLI_MAX_TOKENS": "4", "MYCLI_RUN_MAX_TOKENS": "3"}
    assert answer(mycli(*command))["completion_tokens"] == 5
    assert answer(mycli(*command, env=general))["completion_tokens"] == 4
    assert answer(mycli(*command, env=special))["completion_tokens"] == 3
    assert answer(mycli(*command, "-n", "2", env=special))["completion_tokens"] == 2


@pytest.mark.parametrize(
    ("text", "variables", "message"),
    [
        ("[run]\nmax-tokens = 'many'\n", {}, "config.toml: max_tokens: "),
        ("temperature = 'warm'\n", {}, "config.toml: temperature: "),
        ("json = 'perhaps'\n", {}, "config.toml: json: "),
        ("stop = 'END'\n", {}, 'config.toml: stop: not a list such as ["a", "b"]'),
        ("", {"MYCLI_TEMPERATURE": "warm"}, "MYCLI_TEMPERATURE: "),
        ("", {"MYCLI_RUN_CTX": "long", "MYCLI_CTX": "8k"}, "MYCLI_RUN_CTX: "),
        ("", {"HF_HUB_OFFLINE": "perhaps"}, "HF_HUB_OFFLINE: "),
    ],
    ids=[
        "file-table",
        "file-top",
        "file-flag",
        "file-list",
        "environment",
        "environment-of-a-command",
        "foreign-variable",
    ],
)
def test_a_bad_value_is_named_by_where_it_came_from(
    text: str, variables: dict[str, str], message: str, mycli: Mycli, environment: dict[str, str]
) -> None:
    path = Path(environment["XDG_CONFIG_HOME"]) / "mycli" / "config.toml"
    path.parent.mkdir(parents=True)
    path.write_text(text)
    done = mycli("run", "pico", "Hi", env=variables)
    assert done.returncode == 2 and message in done.stderr.splitlines()[0]
    assert len(done.stderr.splitlines()) == 2 and done.stdout == ""


def test_help_works_whatever_the_file_says(mycli: Mycli, environment: dict[str, str]) -> None:
    path = Path(environment["XDG_CONFIG_HOME"]) / "mycli" / "config.toml"
    path.parent.mkdir(parents=True)
    path.write_text("x = [")
    assert mycli("--help").returncode == mycli("run", "--help").returncode == 0
