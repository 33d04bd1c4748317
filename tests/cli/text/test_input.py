"""Test standard input as part of the prompt: pipes that end, are silent or never end, and other kinds of files."""

import io
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from mycli.cli.text import input as prompt_input
from mycli.cli.text.input import read_prompt
from mycli.runtime.errors import UsageError


class Pipe:
    def __init__(self) -> None:
        reader, self.writer = os.pipe()
        self.stdin = os.fdopen(reader)

    def write(self, text: str) -> None:
        os.write(self.writer, text.encode())

    def end(self) -> None:
        os.close(self.writer)
        self.writer = -1


@pytest.fixture
def pipe(monkeypatch: pytest.MonkeyPatch) -> Iterator[Pipe]:
    made = Pipe()
    monkeypatch.setattr("sys.stdin", made.stdin)
    monkeypatch.setattr(prompt_input, "PATIENCE", 0.05)
    monkeypatch.setattr(prompt_input, "SILENCE", 0.1)
    yield made
    made.stdin.close()
    if made.writer >= 0:
        made.end()


def asked(words: str | None, file: Path | None = None) -> tuple[str, list[str]]:
    notes: list[str] = []
    return read_prompt(words, file, "strict", notes.append), notes


@pytest.mark.parametrize("typed", ["an essay\n", "an\nessay", "", "\n"], ids=repr)
def test_what_is_piped_in_comes_after_the_words(typed: str, pipe: Pipe) -> None:
    pipe.write(typed)
    pipe.end()
    assert asked("Summarize:") == ("Summarize:" + ("\n" + typed.removesuffix("\n") if typed else ""), [])


def test_a_pipe_that_never_ends_does_not_hold_a_whole_prompt_for_good(pipe: Pipe) -> None:
    notes: list[str] = []
    with pytest.raises(UsageError, match="nothing came from it") as error:
        read_prompt("Hi", None, "strict", notes.append)
    assert "< /dev/null" in str(error.value.hint)
    assert len(notes) == 1 and "waiting for the end of standard input" in notes[0]


def test_a_writer_that_stops_in_the_middle_is_not_taken_for_its_end(pipe: Pipe) -> None:
    pipe.write("the first half of")
    with pytest.raises(UsageError, match="nothing came from it"):
        asked("Summarize:")


@pytest.mark.parametrize("words", ["-", None], ids=["dash", "no-words"])
def test_standard_input_that_is_the_prompt_is_waited_for(words: str | None, pipe: Pipe) -> None:
    writer = subprocess.Popen(["sh", "-c", "sleep 0.4; printf Hel; sleep 0.2; printf lo"], stdout=pipe.writer)
    pipe.end()
    prompt, notes = asked(words)
    assert writer.wait() == 0 and prompt == "Hello" and len(notes) == 1


def test_a_flood_is_refused_and_not_kept(pipe: Pipe, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompt_input, "MAX_BYTES", 1 << 20)
    monkeypatch.setattr(prompt_input, "SILENCE", 60.0)  # a busy machine may keep the writer waiting
    flood = subprocess.Popen(["yes"], stdout=pipe.writer, stderr=subprocess.DEVNULL)
    pipe.end()
    try:
        with pytest.raises(UsageError, match="larger than 1 MiB"):
            asked("Summarize:")
    finally:
        flood.kill()
        flood.wait()


def test_nothing_is_read_from_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Standard input of services and containers is a device; /dev/zero never ends."""
    for device in ("/dev/null", "/dev/zero"):
        with open(device) as stdin:
            monkeypatch.setattr("sys.stdin", stdin)
            assert asked("Hi") == ("Hi", [])
    with open("/dev/null") as stdin:
        monkeypatch.setattr("sys.stdin", stdin)
        with pytest.raises(UsageError, match="standard input is empty"):
            asked(None)


def test_a_socket_and_a_file_are_read(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Remote shells and supervisors pass on sockets."""
    ours, theirs = socket.socketpair()
    with theirs, ours.makefile() as stdin:
        theirs.sendall(b"an essay")
        theirs.shutdown(socket.SHUT_WR)
        monkeypatch.setattr("sys.stdin", stdin)
        assert asked("Summarize:") == ("Summarize:\nan essay", [])
    ours.close()
    (tmp_path / "essay").write_text("an essay")
    with (tmp_path / "essay").open() as stdin:
        monkeypatch.setattr("sys.stdin", stdin)
        assert asked("Summarize:") == ("Summarize:\nan essay", [])


@pytest.mark.parametrize("closed", ["0<&-", "1>&-", "2>&-"])
def test_what_is_written_to_a_closed_stream_goes_nowhere(closed: str, environment: dict[str, str]) -> None:
    program = "from mycli.cli.text.input import *; prepare_streams(); sys.stderr.write('err'); "
    program += "print('out', sys.stdin is None, flush=True)"
    command = ["sh", "-c", f'exec "$0" -c "$1" {closed}', sys.executable, program]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    assert (done.returncode != 0) == (closed == "1>&-"), "a reply that cannot be written is an error"
    assert done.stdout == ("" if closed == "1>&-" else "out False\n")
    assert "out False" not in done.stderr and done.stderr.startswith("" if closed == "2>&-" else "err")


def test_the_way_to_wait_longer_is_true(environment: dict[str, str]) -> None:
    """The command in the hint works: a prompt of words and of /dev/stdin, read once."""
    program = "from mycli.cli.text.input import *; print(read_prompt('Hi', Path('/dev/stdin'), 'strict', print))"
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, input="an essay\n", env=environment, capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("an essay\nHi\n", "")


@pytest.mark.parametrize("memory", [False, True], ids=["pipe", "bytes-in-memory"])
@pytest.mark.parametrize("size", [7, 8, 9])
def test_as_many_bytes_as_allowed_are_read(
    size: int, memory: bool, pipe: Pipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prompt_input, "MAX_BYTES", 8)
    if memory:
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"x" * size)))
    pipe.write("x" * size)
    pipe.end()
    if size <= 8:
        assert asked("-")[0] == "x" * size
        return
    with pytest.raises(UsageError, match="standard input: larger than"):
        asked("-")


def test_the_first_bad_byte_is_named() -> None:
    assert prompt_input.decode("grüß".encode(), "a.txt") == "grüß"
    with pytest.raises(UsageError, match="a.txt: not UTF-8 at byte 2"):
        prompt_input.decode(b"ok\xff\xfe", "a.txt")
    assert prompt_input.decode(b"ok\xff", "a.txt", "replace") == "ok\ufffd"


def test_a_document_is_read_without_its_byte_order_mark(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(b"\xef\xbb\xbfabc")
    assert prompt_input.read_document(path) == "abc"
    monkeypatch.setattr(prompt_input, "MAX_DOCUMENT", 5)
    with pytest.raises(UsageError):
        prompt_input.read_document(path)


@pytest.mark.parametrize(
    ("encoding", "text", "written"),
    [("utf-8", "caf\udce9", b"caf\xe9"), ("ascii", "café", b"caf\\xe9")],
    ids=["a file name that is not UTF-8", "a character that the encoding lacks"],
)
def test_every_character_can_be_written(
    encoding: str, text: str, written: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = io.BytesIO()
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(stream, encoding=encoding))
    prompt_input.prepare_streams()
    sys.stdout.write(text)
    sys.stdout.flush()
    assert stream.getvalue() == written
