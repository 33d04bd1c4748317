"""Test what line editing keeps of a chat: its history."""

import readline
from collections.abc import Iterator

import pytest

from mycli.cli.chat.terminal import _remember


@pytest.fixture
def history() -> Iterator[None]:
    readline.clear_history()
    yield
    readline.clear_history()


@pytest.mark.usefixtures("history")
def test_the_history_has_each_line_once_in_a_row_and_no_pasted_text() -> None:
    for line in ("one", "one", " ", "", "two", "pasted\ntext", "one"):
        _remember(line)
    lines = [readline.get_history_item(index) for index in range(1, readline.get_current_history_length() + 1)]
    assert lines == ["one", "two", "one"]
