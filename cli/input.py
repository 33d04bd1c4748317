"""Where a prompt comes from: the command line, a file or standard input, always as valid text."""

import sys
from pathlib import Path

from mycli.runtime.errors import UsageError

MAX_BYTES = 1 << 26
MAX_DOCUMENT = 1 << 20  # what /read takes: far more than a context holds


def decode(data: bytes, source: str, errors: str = "strict") -> str:
    """`data` as text. Raises UsageError naming the first byte that is not UTF-8, unless `errors` is replace."""
    if len(data) > MAX_BYTES:
        raise UsageError(f"{source}: more than {MAX_BYTES} bytes", "shorten it")
    try:
        return data.decode("utf-8", errors)
    except UnicodeDecodeError as error:
        raise UsageError(
            f"{source}: not UTF-8 at byte {error.start}", "convert it, or pass --encoding-errors replace"
        ) from None


def read_file(path: Path, errors: str = "strict") -> str:
    """The text of a file, which may be a pipe. Raises UsageError naming it."""
    try:
        with path.open("rb") as file:
            return decode(file.read(MAX_BYTES + 1), str(path), errors)
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}", "name a file that can be read") from None


def read_document(path: Path) -> str:
    """The text of a regular file of at most `MAX_DOCUMENT` bytes. Raises UsageError naming it."""
    try:
        if not path.is_file():  # a pipe would wait for a writer
            raise UsageError(f"{path}: {'not a regular file' if path.exists() else 'no such file'}", "name a text file")
        with path.open("rb") as file:
            data = file.read(MAX_DOCUMENT + 1)
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}", "name a file that can be read") from None
    if len(data) > MAX_DOCUMENT:
        raise UsageError(f"{path}: more than {MAX_DOCUMENT} bytes", "give a part of it")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UsageError(f"{path}: not UTF-8 at byte {error.start}", "convert it") from None


def read_prompt(words: str | None, file: Path | None, errors: str) -> str:
    """The prompt of `mycli run`: text, `-` or nothing for standard input, or a file; a file and text are joined."""
    parts = []
    if file is not None:
        parts.append(read_file(file, errors))
    if words == "-" or (words is None and file is None):
        if sys.stdin.isatty():
            raise UsageError("there is no prompt", 'mycli run MODEL "a question", or pipe a text into it')
        parts.append(decode(sys.stdin.buffer.read(MAX_BYTES + 1), "standard input", errors))
    elif words is not None:
        parts.append(words)
    return "\n".join(part.removesuffix("\n") for part in parts)
