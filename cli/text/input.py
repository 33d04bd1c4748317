"""Reads prompts and messages from the command line, files, pipes and the terminal, always as valid text."""

import io
import os
import select
import signal
import stat
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType

from mycli.runtime.errors import UsageError
from mycli.runtime.utils.files import read_input

MAX_BYTES = 1 << 26
MAX_DOCUMENT = 1 << 20  # limit of /read: far more than a context holds
PATIENCE = 2.0  # seconds without input on an open pipe before a note says that mycli waits for it
# Programs that start mycli often pass on a pipe that they never write to or close. 60 s is longer than any program
# under test needed to write its first byte.
SILENCE = 60.0
CONVERT = "convert it to UTF-8"
REPLACE = f"{CONVERT}, or pass --encoding-errors replace"


def prepare_streams() -> None:
    """Open closed standard streams and let them write any character; call it before the first output."""
    # A closed stdout is opened for reading, so that writing to it still fails: a reply that was written nowhere must
    # not end with success.
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:  # `open` takes the lowest free number, which is this one
            os.open(os.devnull, os.O_WRONLY if number == 2 else os.O_RDONLY)
    sys.stdin = sys.stdin or os.fdopen(0)
    sys.stdout = sys.stdout or os.fdopen(1, "w")
    sys.stderr = sys.stderr or os.fdopen(2, "w")
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="strict")  # in the C locale Python would read bad bytes as half surrogate pairs
    if isinstance(sys.stdout, io.TextIOWrapper):
        # File names that are not UTF-8 are written as their bytes; characters the encoding lacks as escapes.
        unicode = sys.stdout.encoding.lower().replace("-", "") == "utf8"
        sys.stdout.reconfigure(errors="surrogateescape" if unicode else "backslashreplace")


def decode(data: bytes, source: str, errors: str = "strict", hint: str = CONVERT) -> str:
    """Decode UTF-8, without a byte-order mark. Raises UsageError naming the first bad byte if `errors` is "strict"."""
    if len(data) > MAX_BYTES:
        raise UsageError(f"{source}: larger than {MAX_BYTES >> 20} MiB", "shorten it")
    try:
        return data.decode("utf-8", errors).removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        raise UsageError(f"{source}: not UTF-8 at byte {error.start}", hint) from None


def read_file(path: Path, errors: str = "strict", hint: str = CONVERT) -> str:
    """Read a text file or a named pipe. Raises NotFoundError or UsageError naming it."""
    return decode(read_input(path, MAX_BYTES, pipes=True), str(path), errors, hint)


def read_document(path: Path) -> str:
    """Read a regular text file of at most `MAX_DOCUMENT` bytes. Raises NotFoundError or UsageError naming it."""
    return decode(read_input(path, MAX_DOCUMENT), str(path))


def read_prompt(prompt: str | None, file: Path | None, errors: str, note: Callable[[str], None]) -> str:
    """Join the file, the PROMPT argument and piped input, in this order, one per line.

    `note` receives a message when mycli waits for an open pipe. Raises UsageError if there is no prompt.
    """
    # With "-", or with neither prompt nor file, standard input is required and read until its end, however long that
    # takes. Otherwise it is optional, and `SILENCE` ends the wait for it.
    parts = [] if file is None else [read_file(file, errors, REPLACE)]
    if prompt is not None and prompt != "-":
        parts.append(decode(prompt.encode("utf-8", "surrogateescape"), "PROMPT", errors, REPLACE))
    required = prompt == "-" or not parts
    if required and sys.stdin.isatty():
        raise UsageError("no prompt", code="no-prompt")
    if required or _is_piped():
        piped = read_standard_input(note, errors, REPLACE, None if required else SILENCE)
        if required and not piped.strip():
            raise UsageError("standard input is empty", code="no-prompt")
        if piped:
            parts.append(piped)
    return "\n".join(part.removesuffix("\n") for part in parts)


def read_standard_input(
    note: Callable[[str], None], errors: str = "strict", hint: str = CONVERT, silence: float | None = None
) -> str:
    """Read standard input to its end. Raises UsageError for a terminal, and after `silence` seconds without input."""
    if sys.stdin.isatty():
        raise UsageError("standard input is a terminal", "name a file, or pipe the text to this command")
    return decode(_standard_input(note, silence), "standard input", errors, hint)


def _is_piped() -> bool:
    # /dev/null is a character device: it means that no input is meant.
    try:
        mode = os.fstat(sys.stdin.fileno()).st_mode
    except (OSError, io.UnsupportedOperation):  # closed; or bytes in memory, which have an end
        return not sys.stdin.closed
    return stat.S_ISFIFO(mode) or stat.S_ISREG(mode) or stat.S_ISSOCK(mode)


def _standard_input(note: Callable[[str], None], silence: float | None) -> bytes:
    try:
        descriptor = sys.stdin.fileno()
    except io.UnsupportedOperation:  # bytes in memory
        return sys.stdin.buffer.read(MAX_BYTES + 1)
    data, noted = bytearray(), False
    while len(data) <= MAX_BYTES:  # one byte more than allowed: `decode` refuses it
        if not noted and not _readable(descriptor, PATIENCE):
            note("waiting for the end of standard input (to send none: < /dev/null)")
            noted = True
        if not _readable(descriptor, silence):
            raise UsageError(
                f"standard input is open, but nothing came from it for {silence:.0f} seconds",
                "add < /dev/null if the prompt is complete; -f /dev/stdin waits without a limit",
            )
        piece = os.read(descriptor, 1 << 16)
        if not piece:
            break
        data += piece
    return bytes(data)


def _readable(descriptor: int, seconds: float | None) -> bool:
    return bool(select.select([descriptor], [], [], seconds)[0])


class _Suspended(Exception):
    pass


def read_typed_line(prompt: str) -> str:
    """Read a line at a terminal with GNU readline, without its end; Ctrl-Z suspends and `fg` restores the line.

    Raises EOFError at the end, KeyboardInterrupt for Ctrl-C, UnicodeDecodeError.
    """
    import readline

    typed = ""

    # readline restores neither the terminal's modes nor the typed text around SIGTSTP. The exception leaves `input`,
    # which resets the terminal for the shell; after `fg` a new `input` starts with the text typed so far.
    def suspend(number: int, frame: FrameType | None) -> None:
        nonlocal typed
        typed = readline.get_line_buffer()
        raise _Suspended

    def restore() -> None:
        readline.insert_text(typed)
        readline.redisplay()

    before = signal.signal(signal.SIGTSTP, suspend)
    readline.set_pre_input_hook(restore)
    try:
        while True:
            try:
                return input(prompt)
            except _Suspended:
                signal.signal(signal.SIGTSTP, signal.SIG_DFL)
                os.kill(os.getpid(), signal.SIGTSTP)  # returns after `fg`
                signal.signal(signal.SIGTSTP, suspend)
    finally:
        readline.set_pre_input_hook(None)
        signal.signal(signal.SIGTSTP, before)
