"""The printer: streams, verbosity, and escaping of text for terminals."""

import io
import json
import math
import os
import re

import pyte
import pytest

from mycli.cli.output import Column, Output
from mycli.runtime.errors import GateError, ModelError, ResourceError, UsageError


class Screen(io.StringIO):
    def isatty(self) -> bool:
        return True


def streams(terminal: bool = False) -> tuple[io.StringIO, io.StringIO]:
    return (Screen(), Screen()) if terminal else (io.StringIO(), io.StringIO())


@pytest.mark.parametrize("terminal", [False, True], ids=["pipe", "terminal"])
def test_a_model_writes_escape_sequences(terminal: bool) -> None:
    """C21: escape sequences are cleaned for a terminal, kept in a pipe, and raw on a terminal only on request."""
    out, err = streams(terminal)
    output = Output(stdout=out, stderr=err)
    for piece in ("\x1b", "]0;owned", "\x07", "ok\n"):
        output.stream(piece)
    assert out.getvalue() == ("^[]0;owned^Gok\n" if terminal else "\x1b]0;owned\x07ok\n")
    output.stream("\x1b[1m", raw=True)
    assert out.getvalue().endswith("\x1b[1m")


def test_a_result_is_written_at_once() -> None:
    """The address of a server reaches the program that started it, which reads a pipe, while the server runs."""
    pipe = io.BytesIO()
    stdout = io.TextIOWrapper(pipe, encoding="utf-8")
    Output(stdout=stdout).result("http://127.0.0.1:8000")
    assert pipe.getvalue() == b"http://127.0.0.1:8000\n"


def test_json_has_no_raw_bidirectional_characters() -> None:
    out, err = streams()
    text = "a\u202eb\u2066\x7f\U000e0041é"
    Output(stdout=out, stderr=err, json_mode=True).json_record({"text": text})
    line = out.getvalue()
    assert "\\u202eb\\u2066\\u007f\\udb40\\udc41é" in line and json.loads(line)["text"] == text


def test_names_in_messages_cannot_act_on_a_terminal_or_forge_lines() -> None:
    """C22: errors, warnings, notes, cards and tables."""
    out, err = streams(terminal=True)
    output = Output(stdout=out, stderr=err, environment={"NO_COLOR": "1"})
    evil = "a\x1b[2Jb\nerror: forged"
    output.error(ModelError(evil, evil))
    output.warn("x\x1b[2J")
    output.note("x\x9b2J")
    output.card("title", [("name", evil)])
    output.table([{"name": evil}], [Column("name", "name")])
    assert "\x1b" not in out.getvalue() + err.getvalue() and "\x9b" not in err.getvalue()
    assert sum(line.startswith("error:") for line in err.getvalue().splitlines()) == 1
    assert not any(line.startswith("error:") for line in out.getvalue().splitlines())


def test_an_error_is_a_line_of_cause_and_one_of_what_to_do() -> None:
    out, err = streams()
    Output(stdout=out, stderr=err).error(ModelError("config.json: bad", "mycli pull it"))
    assert (out.getvalue(), err.getvalue()) == ("", "error: config.json: bad\nhint: mycli pull it\n")


def test_in_json_mode_stdout_is_json_even_for_errors_and_bugs() -> None:
    out, err = streams()
    output = Output(json_mode=True, stdout=out, stderr=err)
    output.error(ModelError("bad", "try"))
    output.bug(ValueError("boom"))
    first, second = (json.loads(line) for line in out.getvalue().splitlines())
    assert first == {"schema_version": 1, "error": {"message": "bad", "hint": "try", "exit_code": 3}}
    assert second["error"]["exit_code"] == 1 and "boom" in second["error"]["message"]
    assert err.getvalue() == ""


def test_a_gate_that_fails_adds_its_error_to_the_answer() -> None:
    """With --json, error and result are one object regardless of order; as text they go to separate streams."""
    out, err = streams()
    output = Output(json_mode=True, stdout=out, stderr=err)
    output.json({"kl": 0.5})
    output.error(GateError("too far", "more bits"))
    output.flush(), output.release()
    error = {"message": "too far", "hint": "more bits", "exit_code": 6}
    assert json.loads(out.getvalue()) == {"schema_version": 1, "kl": 0.5, "error": error} and err.getvalue() == ""
    out, err = streams()
    output = Output(stdout=out, stderr=err)
    output.json({"kl": 0.5})
    output.error(GateError("too far", "more bits"))
    output.release()
    assert json.loads(out.getvalue()) == {"schema_version": 1, "kl": 0.5} and err.getvalue().startswith("error: too")


def test_in_json_mode_text_keeps_off_stdout() -> None:
    out, err = streams()
    output = Output(json_mode=True, stdout=out, stderr=err)
    output.result("line"), output.stream("piece "), output.card("title", [("a", "b")])
    assert (out.getvalue(), err.getvalue()) == ("", "line\npiece title\n  a  b\n")


def test_quiet_hides_notes_but_not_warnings_and_verbose_shows_details() -> None:
    _, err = streams()
    quiet = Output(quiet=True, verbose=True, stderr=err)
    quiet.note("note"), quiet.footer("footer"), quiet.detail("detail"), quiet.warn("careful")
    assert err.getvalue() == "warning: careful\n"
    _, err = streams()
    Output(stderr=err).detail("detail")
    assert err.getvalue() == ""
    Output(verbose=True, stderr=err).detail("detail")
    assert err.getvalue() == "detail\n"


@pytest.mark.parametrize(
    ("environment", "terminal", "expected"),
    [
        ({}, True, True),
        ({}, False, False),
        ({"NO_COLOR": "1"}, True, False),
        ({"TERM": "dumb"}, True, False),
        ({"FORCE_COLOR": "1"}, False, True),
        ({"FORCE_COLOR": "0"}, False, False),
        ({"FORCE_COLOR": "1", "NO_COLOR": "1"}, True, False),
    ],
    ids=str,
)
def test_colour(environment: dict[str, str], terminal: bool, expected: bool) -> None:
    out, err = streams(terminal)
    output = Output(stdout=out, stderr=err, environment=environment)
    assert output.decorated() is expected
    output.footer("dim")
    assert ("\x1b[2m" in err.getvalue()) is expected


def test_a_table_is_markdown_and_aligned() -> None:
    out, _ = streams()
    columns = (Column("test", "test"), Column("t/s", lambda row: f"{row['rate']:g}", right=True))
    Output(stdout=out).table([{"test": "pp512", "rate": 7.1}, {"test": "tg128", "rate": 123.45}], columns)
    assert out.getvalue() == ("| test  |    t/s |\n| ----- | -----: |\n| pp512 |    7.1 |\n| tg128 | 123.45 |\n")


def test_a_result_is_shown_as_json_or_as_text_from_the_same_fields() -> None:
    answer = {"folder": "x", "files": [{"name": "a", "bytes": 1}, {"name": "b", "bytes": None}]}
    columns = (Column("file", "name"), Column("bytes", "bytes", right=True))
    out, _ = streams()
    output = Output(json_mode=True, stdout=out)
    output.show(answer, columns, rows="files"), output.flush()
    assert json.loads(out.getvalue()) == {"schema_version": 1, **answer}
    out, _ = streams()
    Output(stdout=out).show(answer, columns, rows="files")
    assert out.getvalue().splitlines()[2:] == ["| a    |     1 |", "| b    |       |"]
    out, _ = streams()
    fields = (Column("folder", "folder"), Column("files", lambda a: f"{len(a['files'])}"), Column("no", lambda _: None))
    Output(stdout=out).show(answer, fields, title="model")
    assert out.getvalue() == "model\n  folder  x\n  files   2\n"


def test_a_pipe_without_a_reader_is_noticed_before_anything_is_written() -> None:
    reader, writer = os.pipe()
    with os.fdopen(writer, "w") as stdout:
        output = Output(stdout=stdout, stderr=io.StringIO())
        output.require_reader()
        os.close(reader)
        with pytest.raises(BrokenPipeError):
            output.require_reader()
    with open(os.devnull, "w") as stdout:
        Output(stdout=stdout).require_reader()
    Output(stdout=io.StringIO()).require_reader()


@pytest.mark.parametrize(("verbose", "terminal"), [(False, False), (False, True), (True, False)])
def test_progress_never_fails_and_is_silent_in_a_pipe(verbose: bool, terminal: bool) -> None:
    out, err = streams(terminal)
    output = Output(verbose=verbose, stdout=out, stderr=err, environment={})
    with output.progress("loading\x1b[2J", 10, "layers") as bar:
        bar.advance(5)
        bar.describe("more\x1b[2J")
    assert out.getvalue() == ""
    assert "\x1b[2J" not in err.getvalue()
    if not (verbose or terminal):
        assert err.getvalue() == ""


@pytest.mark.parametrize(
    ("variables", "moves", "coloured"),
    [
        ({"TERM": "xterm"}, True, True),
        ({"TERM": "xterm", "NO_COLOR": "1"}, True, False),
        ({"TERM": "dumb"}, False, False),
        ({"TERM": "dumb", "FORCE_COLOR": "1"}, False, False),
    ],
    ids=str,
)
def test_a_bar_moves_and_has_colour_where_that_is_welcome(
    variables: dict[str, str], moves: bool, coloured: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """D19."""
    for name in ("TERM", "NO_COLOR", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    _, err = streams(terminal=True)
    with Output(stderr=err, environment=variables).progress("loading", 10, "layers") as shown:
        shown.advance(5)
    assert ("\x1b[2K" in err.getvalue()) is moves, "erases its line"
    assert ("\x1b[90m" in err.getvalue()) is coloured
    if not moves:
        assert err.getvalue() == ""


def test_colour_that_is_forced_does_not_make_a_pipe_move() -> None:
    _, err = streams()
    with Output(verbose=True, stderr=err, environment={"FORCE_COLOR": "1"}).progress("loading", 10) as shown:
        shown.advance(5)
    assert "\x1b" not in err.getvalue()


@pytest.mark.parametrize("columns", [20, 40, 80])
def test_a_bar_stays_on_one_line_of_a_narrow_terminal(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """D19: square brackets in a name are not Rich markup."""
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setenv("TERM", "xterm")
    _, err = streams(terminal=True)
    with Output(stderr=err, environment={}).progress("[red]model", 10, "layers") as shown:
        shown.advance(5)
        screen = pyte.Screen(columns, 6)
        pyte.Stream(screen).feed(err.getvalue().replace("\n", "\r\n"))
    lines = [line for line in screen.display if line.strip()]
    assert len(lines) == 1 and lines[0].startswith("[red]")


@pytest.mark.parametrize(("environment", "coloured"), [({}, True), ({"NO_COLOR": "1"}, False)])
def test_markdown_has_colours_where_they_are_wanted(
    environment: dict[str, str], coloured: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    out, err = streams(terminal=True)
    shown = Output(stdout=out, stderr=err, environment=environment).markdown()
    shown.add("Type `ls`.")
    shown.end()
    assert "ls" in out.getvalue() and bool(re.search(r"\x1b\[[\d;]*3[1-7]", out.getvalue())) is coloured


def test_progress_in_lines_says_what_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """D21: the remaining time uses a monotonic clock."""
    now = [100.0]
    monkeypatch.setattr("mycli.cli.text.progress.time.monotonic", lambda: now[0])
    _, err = streams()
    with Output(verbose=True, stderr=err, environment={}).progress("layers", 8, "layers") as shown:
        shown.advance(1)
        now[0] += 10
        shown.advance(1)
    assert err.getvalue() == "layers: 2 of 8 layers, 5 s each, 30 s left\n"


@pytest.mark.parametrize("columns", [30, 80])
def test_a_table_too_wide_for_the_terminal_is_cards(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    out, _ = streams(terminal=True)
    record = {"model": "a-model-of-a-name", "size": "5.00 GiB", "speed": "12.3 t/s"}
    Output(stdout=out).table([record], [Column(name, name) for name in record])
    if columns == 80:
        assert out.getvalue().startswith("| model ")
    else:
        assert out.getvalue() == "model a-model-of-a-name\n  size   5.00 GiB\n  speed  12.3 t/s\n"


def test_a_narrow_terminal_shows_the_columns_that_fit_and_names_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "30")
    out, err = streams(terminal=True)
    record = {"model": "a-model", "size": "5.00 GiB", "folder": "/a/long/path/to/it", "speed": "12.3 t/s"}
    columns = [Column(name, name, priority=place) for place, name in enumerate(record)]
    Output(stdout=out, stderr=err).table([record], columns)
    assert out.getvalue().splitlines()[0].split() == ["|", "model", "|", "size", "|"]
    assert " ".join(err.getvalue().split()) == "(a wider terminal, or a pipe, also shows: folder, speed)"


@pytest.mark.parametrize(("columns", "whole"), [(27, True), (26, False)])
def test_a_table_as_wide_as_the_terminal_is_shown_whole(
    columns: int, whole: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    out, _ = streams(terminal=True)
    Output(stdout=out).table([{"model": "a-long-name", "size": "12.00 GiB"}], [Column(n, n) for n in ("model", "size")])
    assert out.getvalue().startswith("| model ") is whole


def test_wide_characters_are_aligned() -> None:
    out, _ = streams()
    columns = (Column("name", "name"), Column("n", "n", right=True))
    Output(stdout=out).table([{"name": "模型", "n": 1}, {"name": "e\u0301", "n": 22}], columns)
    assert out.getvalue().splitlines()[2:] == ["| 模型 |  1 |", "| e\u0301    | 22 |"]


def test_json_is_json_whatever_it_holds() -> None:
    """C21: JSON on a terminal cannot control it and stays parseable."""
    value = {"text": "é\x1b\x7f\x9b2J\u202e", "perplexity": math.inf, "list": [math.nan, (1.5,)]}
    for terminal in (False, True):
        out, _ = streams(terminal)
        Output(json_mode=True, stdout=out).json_record(value)
        found = json.loads(out.getvalue(), parse_constant=lambda name: pytest.fail(name))
        assert found == {"schema_version": 1, **value, "perplexity": None, "list": [None, [1.5]]}
        assert not terminal or not set(out.getvalue()) & set("\x1b\x7f\x9b\u202e")


def test_nobody_is_asked_away_from_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("yes\n"))
    out, err = streams()
    assert Output(stdout=out, stderr=err).ask("Remove it?") is False and err.getvalue() == ""
    monkeypatch.setattr("sys.stdin", Screen("yes\nno\n"))
    out, err = streams(terminal=True)
    output = Output(stdout=out, stderr=err)
    assert [output.ask("Remove it?"), output.ask("Really?")] == [True, False]


def test_input_that_is_not_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"ok \xff\n"), encoding="utf-8"))
    with pytest.raises(UsageError, match="byte 3"):
        Output().read_line(">>> ")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs a device that is always full")
@pytest.mark.parametrize("way", ["stream", "json_record", "result"])
def test_an_answer_that_does_not_fit_names_where_it_went(way: str) -> None:
    """A full disk is reported at the first chunk of a stream, or when buffered output is written."""
    with open("/dev/full", "w") as full:
        out = Output(stdout=full, stderr=io.StringIO())
        with pytest.raises(ResourceError, match="standard output: No space left"):
            getattr(out, way)({"a": 1} if way == "json_record" else "Hello")
            out.flush()
        out.release()
