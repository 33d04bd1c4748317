"""Where a prompt comes from: the command line, a file, standard input, or several of them, always as valid text."""

import codecs
import io
import os
import select
import stat
import sys
from collections.abc import Callable
from pathlib import Path

from mycli.runtime.errors import UsageError
from mycli.runtime.utils.files import read_input

MAX_BYTES = 1 << 26
MAX_DOCUMENT = 1 << 20  # what /read takes: far more than a context holds
PATIENCE = 2.0  # seconds that an open pipe may be silent before a person is told that it is waited for
SILENCE = 60.0  # seconds of silence after which nobody is taken to be writing to a pipe that was not asked for
CONVERT = "convert it to UTF-8"
REPLACE = f"{CONVERT}, or pass --encoding-errors replace"


def decode(data: bytes, source: str, errors: str = "strict", hint: str = CONVERT) -> str:
    """`data` as text. Raises UsageError naming the first byte that is not UTF-8, unless `errors` is replace."""
    if len(data) > MAX_BYTES:
        raise UsageError(f"{source}: more than {MAX_BYTES >> 20} MiB", "shorten it")
    try:
        return data.decode("utf-8", errors)
    except UnicodeDecodeError as error:
        raise UsageError(f"{source}: not UTF-8 at byte {error.start}", hint) from None


def read_file(path: Path, errors: str = "strict", hint: str = CONVERT) -> str:
    """The text of a file, which may be a pipe. Raises NotFoundError or UsageError naming it."""
    return decode(read_input(path, MAX_BYTES, pipes=True), str(path), errors, hint)


def read_document(path: Path) -> str:
    """The text of a regular file of at most `MAX_DOCUMENT` bytes. Raises NotFoundError or UsageError naming it."""
    return decode(read_input(path, MAX_DOCUMENT).removeprefix(codecs.BOM_UTF8), str(path))


def read_prompt(words: str | None, file: Path | None, errors: str, note: Callable[[str], None]) -> str:
    """The prompt of `mycli run`: a file, then `words`, then what is piped in, each on lines of its own.

    `words` of "-", or nothing else, ask for standard input, which is then waited for however long it takes. Beside a
    prompt it may be a pipe that a program inherited and nobody writes to: `SILENCE` ends the wait. Raises UsageError
    then, and where there is no prompt; `note` is told when an open pipe is waited for.
    """
    parts = [] if file is None else [read_file(file, errors, REPLACE)]
    if words not in (None, "-"):
        parts.append(str(words))
    asked = words == "-" or not parts
    if asked and sys.stdin.isatty():
        raise UsageError("there is no prompt", code="no-prompt")
    if asked or _is_piped():
        piped = decode(_standard_input(note, None if asked else SILENCE), "standard input", errors, REPLACE)
        if asked and not piped.strip():
            raise UsageError("standard input is empty", code="no-prompt")
        if piped:
            parts.append(piped)
    return "\n".join(part.removesuffix("\n") for part in parts)


def _is_piped() -> bool:
    """Whether somebody gave standard input: a pipe or a file, not a terminal, and not nothing (/dev/null)."""
    try:
        mode = os.fstat(sys.stdin.fileno()).st_mode
    except (OSError, io.UnsupportedOperation):  # closed; or not a file but bytes in memory, which end
        return not sys.stdin.closed
    return stat.S_ISFIFO(mode) or stat.S_ISREG(mode) or stat.S_ISSOCK(mode)


def _standard_input(note: Callable[[str], None], silence: float | None) -> bytes:
    """All of it, up to one byte more than is allowed. Raises UsageError after `silence` seconds without a byte."""
    try:
        descriptor = sys.stdin.fileno()
    except io.UnsupportedOperation:  # bytes in memory
        return sys.stdin.buffer.read(MAX_BYTES + 1)
    data, told = bytearray(), False
    while len(data) <= MAX_BYTES:
        if not told and not _has_more(descriptor, PATIENCE):
            note("waiting for the end of standard input, which is part of the prompt (to send none: < /dev/null)")
            told = True
        if not _has_more(descriptor, silence):
            raise UsageError(
                f"standard input is open, but nothing came from it for {silence:.0f} seconds",
                "where the prompt is whole, add < /dev/null; -f /dev/stdin waits as long as it takes",
            )
        piece = os.read(descriptor, 1 << 16)
        if not piece:
            break
        data += piece
    return bytes(data)


def _has_more(descriptor: int, seconds: float | None) -> bool:
    """Whether there is something to read, or the end, within so many seconds."""
    return bool(select.select([descriptor], [], [], seconds)[0])
