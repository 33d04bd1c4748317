"""Test terminal output: word wrap, notices after replies, progress, and columns that fit."""

import io
import itertools
import re
import time
from collections.abc import Iterator

import pytest

from mycli.cli.output import Output
from mycli.cli.text.layout import WordWrap, column_widths, fitting, table_lines, table_width, width, wrap_lines
from mycli.cli.text.progress import show_reading
from mycli.runtime.errors import ModelError, UsageError


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_values_of_a_card_are_broken_between_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    value, path = "temperature, top_k, top_p, min_p, repetition_penalty, seed", "/tmp/" + "x" * 60
    shown, piped = Terminal(), io.StringIO()
    for stream in (shown, piped):
        Output(stdout=stream, stderr=stream).card("Commands", [("/set", value), ("folder", path)])
    lines = shown.getvalue().splitlines()
    assert all(len(line) <= 40 for line in lines[:-1]) and lines[-1] == f"  folder  {path}"
    assert " ".join(line.strip() for line in lines[1:-1]) == f"/set    {value}"
    assert f"  /set    {value}\n" in piped.getvalue()


@pytest.mark.parametrize("columns", [80, 40, 30])
def test_what_is_said_is_broken_between_words_and_never_in_a_command(
    columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    typed = "mycli quantize 'my model, the first; and only' --bits 4 --group 64"
    error = ModelError(
        "config.json of a model that nobody has quantized before: hidden_size is missing in it",
        f"quantize it: {typed}; mycli list shows the models on this machine, or ask for another one",
    )
    notes = ("it continues where it was: " + typed, "\nanother program writes to the folder for the time being")
    shown, piped = Terminal(), io.StringIO()
    for stream in (shown, piped):
        out = Output(stdout=stream, stderr=stream, environment={"NO_COLOR": "1"})
        out.error(error), out.warn(error.message), out.footer(" · ".join(["38 tok"] * 9))
        for note in notes:
            out.note(note)
    lines = shown.getvalue().splitlines()
    assert sum(typed in line for line in lines) == 2, "whole: where the terminal breaks it, a copy has no line's end"
    assert all(len(line) <= columns for line in lines if typed not in line)
    assert any("mycli list" in line for line in lines)
    assert shown.getvalue().split() == piped.getvalue().split(), "words are not broken"
    assert len(piped.getvalue().splitlines()) == 7 and "\n\nanother" in shown.getvalue()


def test_a_notice_waits_for_the_end_of_the_reply() -> None:
    shown = Terminal()
    out = Output(stdout=shown, stderr=shown, environment={"TERM": "dumb"})
    with out.reply():
        out.stream("The capital")
        out.note("speculation is off")
        out.stream(" is Tokyo.")
    assert shown.getvalue() == "The capital is Tokyo.\nspeculation is off\n"


def test_a_refused_reply_leaves_no_line() -> None:
    stdout = io.StringIO()
    out = Output(stdout=stdout, stderr=io.StringIO())
    with pytest.raises(UsageError), out.reply():
        raise UsageError("too long")
    assert stdout.getvalue() == ""


@pytest.mark.parametrize("pieces", [1, 3, 1000], ids=lambda size: f"pieces-of-{size}")
def test_words_are_not_broken_at_the_edge(pieces: int) -> None:
    text = "It was a dark and stormy night, and the rain fell in torrents.\n\n" * 2 + "日本語の文章は空白なしで続く"
    wrap = WordWrap(lambda: 20)
    shown = "".join(wrap.feed(text[i : i + pieces]) for i in range(0, len(text), pieces)) + wrap.flush()
    assert all(width(line) <= 20 for line in shown.splitlines())
    assert shown.replace("\n", "").replace(" ", "") == text.replace("\n", "").replace(" ", "")
    assert "torrents.\n\n" in shown


@pytest.mark.parametrize(
    "line", ["    indented = code(that, must, keep, its, line)", "| a | table | of | many | cells |"]
)
def test_lines_that_mean_something_as_they_are_stay(line: str) -> None:
    wrap = WordWrap(lambda: 20)
    assert wrap.feed(line + "\n") + wrap.flush() == line + "\n"
    fenced = f"```\n{line.strip()}\n```\n"
    assert wrap.feed(fenced) + wrap.flush() == fenced


def test_a_long_prompt_shows_how_far_it_is_and_a_short_one_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mycli.cli.text.progress.READING_SECONDS", 0.01)
    stream, counts = io.StringIO(), iter(range(0, 10_000, 10))

    def slow() -> Iterator[str]:
        while "of 512 tokens" not in stream.getvalue():  # wraps only where the line is shown
            pass
        yield "a"
        yield "b"

    assert list(show_reading(stream, slow(), 512, lambda: (next(counts), 0))) == ["a", "b"]
    assert stream.getvalue().endswith("\r\x1b[K")
    assert all(int(rate) > 0 for rate in re.findall(r", (\d+) tok/s", stream.getvalue()))
    monkeypatch.setattr("mycli.cli.text.progress.READING_SECONDS", 60)
    silent = io.StringIO()
    assert list(show_reading(silent, iter(["a"]), 5, lambda: (5, 0))) == ["a"] and silent.getvalue() == ""


def test_the_speed_of_a_prompt_counts_no_cached_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt that continues a conversation finds 4,000 tokens: they are not read at 40,000 tokens per second."""
    monkeypatch.setattr("mycli.cli.text.progress.READING_SECONDS", 0.1)
    stream, counts = io.StringIO(), itertools.chain([(0, 0), (4000, 4000)], itertools.repeat((4001, 4000)))

    def slow() -> Iterator[str]:
        while "4001 of 4100 tokens" not in stream.getvalue():
            time.sleep(0.01)
        yield "a"

    assert list(show_reading(stream, slow(), 4100, lambda: next(counts))) == ["a"]
    assert "4000 of 4100 tokens\r" in stream.getvalue()
    assert all(int(rate) < 10 for rate in re.findall(r", (\d+) tok/s", stream.getvalue()))


def test_a_narrow_terminal_shows_the_columns_that_matter() -> None:
    widths = column_widths([["model", "size", "t/s"], ["a-long-name", "12.00 GiB", "12.3 ± 0.1"]])
    assert fitting(widths, (0, 2, 1), 32) == [0, 2] and fitting(widths, (0, 2, 1), 80) == [0, 1, 2]
    assert fitting(widths, (0, 2, 1), 5) == []


def test_all_lines_of_a_table_have_one_width() -> None:
    assert table_lines([["name", "bytes"], ["a", "12"]], {1}) == [
        "| name | bytes |",
        "| ---- | ----: |",
        "| a    |    12 |",
    ]


def test_what_fits_exactly_is_neither_wrapped_nor_left_out() -> None:
    rows = [["model", "size"], ["a-long-name", "12.00 GiB"]]
    widths = column_widths(rows)
    assert table_width(widths) == len(table_lines(rows, {1})[2]) == 27
    assert [fitting(widths, (0, 1), columns) for columns in (27, 26)] == [[0, 1], [0]]
    text = "twenty columns are 20"
    assert [wrap_lines(text, columns) for columns in (19, 20, 21)] == [text, "twenty columns are\n20", text]
    wrap = WordWrap(lambda: 20)
    assert wrap.feed("twenty columns is 20 and 日本") + wrap.flush() == "twenty columns is 20\nand 日本"


def test_a_word_longer_than_the_line_begins_where_it_is() -> None:
    wrap, long = WordWrap(lambda: 10), "x" * 15
    assert wrap.feed(f"{long} a\n{long} b\na {long}") + wrap.flush() == f"{long}\na\n{long}\nb\na\n{long}"
    assert width("e\u0301") == 1 and width("日e") == 3


def test_a_piece_that_was_shown_counts_for_the_next() -> None:
    wrap = WordWrap(lambda: 10)
    shown = "".join(wrap.feed(piece) + wrap.flush() for piece in ("one two", " ", "three"))
    assert shown == "one two \nthree"
