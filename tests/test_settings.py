"""config.toml: below flags and environment, above the program; mistakes are named with file and key."""

from pathlib import Path

import pytest

from mycli.cli.settings import config_path, read_settings
from mycli.runtime.errors import UsageError
from tests.conftest import Mycli

OPTIONS = {"chat": frozenset({"device", "top_p"}), "run": frozenset({"device", "limit"})}


def read(tmp_path: Path, text: str) -> dict[str, dict[str, object]]:
    path = tmp_path / "config.toml"
    path.write_text(text)
    return read_settings(path, OPTIONS)


def test_a_table_counts_for_its_command_and_the_top_for_all_that_have_the_option(tmp_path: Path) -> None:
    found = read(tmp_path, 'device = "cpu"\nlimit = "1k"\n[chat]\ntop-p = 0.5\ndevice = "auto"\n')
    assert found == {"chat": {"device": "auto", "top_p": 0.5}, "run": {"device": "cpu", "limit": "1k"}}


@pytest.mark.parametrize(
    ("text", "message"),
    [("x = [", "config.toml"), ("colour = 1", "colour"), ("[cook]\na = 1", "cook"), ("[chat]\nlimit = 1", "limit")],
    ids=["not-toml", "unknown-option", "unknown-command", "option-of-another-command"],
)
def test_mistakes_are_named(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        read(tmp_path, text)


def test_no_file_is_no_settings(tmp_path: Path) -> None:
    assert read_settings(tmp_path / "none.toml", OPTIONS) == {}
    assert config_path({"XDG_CONFIG_HOME": "/x"}) == Path("/x/mycli/config.toml")


def test_precedence_flag_environment_file_model(mycli: Mycli, environment: dict[str, str]) -> None:
    """The limit on tokens, set three ways; and the file's error as a user sees it."""
    path = Path(environment["XDG_CONFIG_HOME"]) / "mycli" / "config.toml"
    path.parent.mkdir(parents=True)
    path.write_text("[run]\nlimit = 4\ntemperature = 0\n")
    command = ("run", "pico", "Tell me a story.", "--json", "--device", "cpu")
    by_file = mycli(*command).stdout
    by_environment = mycli(*command, env={"MYCLI_RUN_LIMIT": "3"}).stdout
    by_flag = mycli(*command, "-n", "2", env={"MYCLI_RUN_LIMIT": "3"}).stdout
    assert ['"completion_tokens": %d' % n in s for n, s in ((4, by_file), (3, by_environment), (2, by_flag))] == [
        True
    ] * 3
    path.write_text("[run]\nlimit = 'many'\n")
    assert mycli(*command).returncode == 2
