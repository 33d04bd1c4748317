"""The only printer: results go to stdout, all else to stderr, adapted to a terminal, a pipe or a JSON reader.

Text from models, files and servers is made safe for terminals here.
"""

import errno
import os
import select
import shutil
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, TextIO

from mycli.cli.remedies import Subject, remedy
from mycli.cli.text.format import error_fields, json_line
from mycli.cli.text.input import decode, read_typed_line
from mycli.cli.text.layout import WordWrap, column_widths, fitting, pad, table_lines, table_width, width, wrap_lines
from mycli.cli.text.progress import (
    LINE_SECONDS,
    CheckedProgress,
    Lines,
    LiveMarkdown,
    Progress,
    progress_bar,
    show_reading,
)
from mycli.runtime.errors import Declined, ResourceError, UsageError, UserError
from mycli.runtime.utils.sanitize import one_line, sanitize

Record = Mapping[str, Any]


@dataclass(frozen=True)
class Column:
    """A column of a table or a row of a card: its heading and how its text is made from a record.

    `value` is a key of the record or a function of the record; None is shown as "" in a table and left out of a card.
    On a narrow terminal the columns with the lowest `priority` are shown.
    """

    heading: str
    value: str | Callable[[Any], str | None]
    right: bool = False
    priority: int | None = None

    def text(self, record: Record) -> str | None:
        value = record[self.value] if isinstance(self.value, str) else self.value(record)
        return None if value is None else str(value)


@contextmanager
def writing_stdout() -> Iterator[None]:
    """Raise ResourceError for an OSError of stdout, which has no file name; leave BrokenPipeError as it is."""
    # A closed pipe ends with its own exit code.
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        if error.filename is not None:
            raise
        reason = "it is closed" if error.errno == errno.EBADF else error.strerror
        raise ResourceError(f"standard output: {reason}", "write it to another place") from error


class Output:
    """Prints everything a command prints. `json_mode`: stdout gets one JSON object (or JSON lines) instead of text."""

    def __init__(
        self,
        *,
        json_mode: bool = False,
        quiet: bool = False,
        verbose: bool = False,
        debug: bool = False,
        stdout: TextIO | None = None,
        stderr: TextIO | None = None,
        environment: Mapping[str, str] = os.environ,
    ) -> None:
        self.json_mode = json_mode
        self.verbose = verbose and not quiet
        self.subject = Subject()  # the model that hints of errors name
        self._quiet = quiet
        self._debug = debug
        self._stdout = sys.stdout if stdout is None else stdout
        self._stderr = sys.stderr if stderr is None else stderr
        self._environment = environment
        # Written when the command ends, so that an error or a failed gate becomes a field of the same object.
        self._answer: Record | None = None
        self._deferred: list[str] | None = None  # stderr lines that wait for the end of a reply
        self._wrap: WordWrap | None = None
        self._reply_begun = False

    @property
    def interactive(self) -> bool:
        """True if stdin and stdout are terminals and no JSON is printed, so that questions are possible."""
        return sys.stdin.isatty() and self._stdout.isatty() and not self.json_mode

    def decorated(self, stream: TextIO | None = None) -> bool:
        """Return whether `stream` (default stderr) may have colour: NO_COLOR, FORCE_COLOR and TERM=dumb count."""
        if self._environment.get("NO_COLOR") or self.plain:
            return False
        return self._environment.get("FORCE_COLOR", "0") not in ("", "0") or (stream or self._stderr).isatty()

    @property
    def plain(self) -> bool:
        return self._environment.get("TERM") == "dumb"

    # Results

    @property
    def _text(self) -> TextIO:
        return self._stderr if self.json_mode else self._stdout

    def result(self, text: str) -> None:
        """Print text of the result; with --json it goes to stderr."""
        with writing_stdout():
            self._text.write((sanitize(text) if self._text.isatty() else text) + "\n")
            self._text.flush()  # the address of a server is for the program that started it

    @contextmanager
    def reply(self, *, ends_line: bool = True) -> Iterator[None]:
        """Stream a reply inside this context: terminal lines are wrapped, notes and warnings wait for its end."""
        self._deferred, self._reply_begun = [], False
        if self._text.isatty():
            self._wrap = WordWrap(lambda: shutil.get_terminal_size().columns)
        try:
            yield
            self._reply_begun = True  # an empty reply is a line too; a refused one is not
        finally:
            wrap, self._wrap = self._wrap, None
            deferred, self._deferred = self._deferred, None
            with suppress(OSError):  # the error of an earlier write is already on its way
                self._text.write((wrap.flush() if wrap else "") + "\n" * (ends_line and self._reply_begun))
                self._text.flush()
            for line in deferred:
                self._write_note(line)

    def stream(self, text: str, *, raw: bool = False, dim: bool = False) -> None:
        """Show a piece of a reply immediately; `raw` lets its escape sequences reach the terminal."""
        self._reply_begun = True
        shown = text if raw or not self._text.isatty() else sanitize(text)
        if self._wrap is not None and not raw:
            shown = self._wrap.feed(shown) + (self._wrap.flush() if dim else "")
        with writing_stdout():
            self._text.write(f"\x1b[2m{shown}\x1b[0m" if dim and self.decorated(self._text) else shown)
            self._text.flush()

    def while_reading(
        self, pieces: Iterator[str], total: int, progress: Callable[[], tuple[int, int]]
    ) -> Iterator[str]:
        """Yield `pieces`; on a terminal, show until the first one how many of `total` prompt tokens are read."""
        silent = self._quiet or self.plain or not self._stderr.isatty()
        return pieces if silent else show_reading(self._stderr, pieces, total, progress)

    def markdown(self) -> LiveMarkdown:
        """Start rendering a growing text as Markdown on the terminal."""
        return LiveMarkdown(self._stdout, plain=not self.decorated(self._stdout))

    def show(self, answer: Record, columns: Sequence[Column], *, rows: str = "", title: str = "") -> None:
        """Print a result once: with --json the object `answer`, otherwise text made from the same fields.

        The text is a table of the records in `answer[rows]`, or without `rows` a card of `answer` under `title`.
        """
        if self.answered(answer):
            return
        if rows:
            self.table(answer[rows], columns)
        else:
            lines = ((column.heading, column.text(answer)) for column in columns)
            self.card(title, [(name, text) for name, text in lines if text is not None])

    def answered(self, answer: Record) -> bool:
        """With --json, take `answer` as the result and return True; False if it has to be printed as text."""
        if self.json_mode:
            self.json(answer)
        return self.json_mode

    def json(self, answer: Record) -> None:
        """Set the JSON result; it is written when the command ends, with the error if it ends with one."""
        self._answer = answer

    def json_record(self, value: Record) -> None:
        """Write one line of JSON with `schema_version` now."""
        line = json_line(value, self._stdout.encoding or "utf-8")
        with writing_stdout():
            self._stdout.write(line + "\n")
            self._stdout.flush()

    def card(self, title: str, rows: Sequence[tuple[str, str]]) -> None:
        """Print names and values under a title; on a terminal long values are wrapped below themselves."""
        columns = max((width(name) for name, _ in rows), default=0)
        room = shutil.get_terminal_size().columns - columns - 4 if self._stdout.isatty() else 0
        lines = [one_line(title)]
        for name, value in rows:
            value = wrap_lines(one_line(value, 2000), room).replace("\n", f"\n{' ' * (columns + 4)}")
            lines.append(f"  {pad(name, columns)}  {value}")
        self.result("\n".join(lines))

    def table(self, records: Sequence[Record], columns: Sequence[Column]) -> None:
        """Print one row for each record, as a table that is also Markdown.

        If a terminal is too narrow, the columns of the lowest `priority` that fit are shown; without priorities each
        record becomes a card. Lines are neither broken nor cut.
        """
        headings = [column.heading for column in columns]
        rows = [[one_line(column.text(record) or "") for column in columns] for record in records]
        cells = [headings, *rows]
        widths, room = column_widths(cells), shutil.get_terminal_size().columns
        shown = list(range(len(columns)))
        if self._stdout.isatty() and table_width(widths) > room:
            ranked = sorted((column.priority, i) for i, column in enumerate(columns) if column.priority is not None)
            shown = fitting(widths, [i for _, i in ranked], room)
            if len(shown) < 2:
                for row in rows:
                    self.card(f"{headings[0]} {row[0]}", list(zip(headings[1:], row[1:], strict=True)))
                return
        right = [position for position, i in enumerate(shown) if columns[i].right]
        self.result("\n".join(table_lines([[row[i] for i in shown] for row in cells], right)))
        if len(shown) < len(columns):
            hidden = ", ".join(heading for i, heading in enumerate(headings) if i not in shown)
            self.note(f"(a wider terminal, or a pipe, also shows: {hidden})")

    # Notes, warnings, progress and errors

    def _wrapped(self, text: str) -> str:
        text = sanitize(text)
        return (wrap_lines(text, shutil.get_terminal_size().columns) if self._stderr.isatty() else text) + "\n"

    def _write_note(self, text: str) -> None:
        if self._deferred is not None:
            self._deferred.append(text)
            return
        try:
            self._stderr.write(text)
            self._stderr.flush()
        except BrokenPipeError:
            raise
        except OSError:  # a full disk behind stderr must not end hours of work
            return

    def note(self, text: str) -> None:
        """Print a line for the user; -q hides it."""
        if not self._quiet:
            self._write_note(self._wrapped(text))

    def footer(self, text: str) -> None:
        if not self._quiet:
            line = self._wrapped(text).removesuffix("\n")
            self._write_note((f"\x1b[2m{line}\x1b[0m" if self.decorated() else line) + "\n")

    def detail(self, text: str) -> None:
        if self.verbose:
            self.note(text)

    def log(self, line: str) -> None:
        """Print a line of a log, which other programs read: never wrapped, and not hidden by -q."""
        self._write_note(sanitize(line) + "\n")

    def warn(self, warning: str | Declined) -> None:
        """Print something that may spoil the result; it is never hidden."""
        if isinstance(warning, Declined):
            from mycli.cli.reasons import reason  # a long table that most commands never need

            warning = reason(warning)
        self._write_note(self._wrapped(f"warning: {warning}"))

    @contextmanager
    def progress(
        self, title: str, total: float, unit: str = "", line_seconds: float | None = None
    ) -> Iterator[Progress]:
        """Show a bar on a terminal; elsewhere a line in `line_seconds`, by default only with -v."""
        if self._quiet or not (self._stderr.isatty() or self.verbose or line_seconds is not None):
            yield Progress()
        elif self._stderr.isatty() and not self.plain:
            with progress_bar(self._stderr, title, total, unit, plain=not self.decorated()) as bar:
                yield bar
        else:
            yield Lines(self.note, title, total, unit, LINE_SECONDS if line_seconds is None else line_seconds)

    @contextmanager
    def result_progress(
        self, title: str, total: float, unit: str = "", line_seconds: float | None = None
    ) -> Iterator[Progress]:
        """Show progress of work that only prints a result; a step raises BrokenPipeError once its reader is gone."""
        with self.progress(title, total, unit, line_seconds) as bar:
            yield CheckedProgress(bar, self.require_reader)

    def read_line(self, prompt: str) -> str:
        """Read a line from the terminal or a pipe.

        Raises EOFError at the end, KeyboardInterrupt for Ctrl-C, UsageError for input that is not UTF-8.
        """
        if not self.interactive:
            # As bytes: a text stream decodes lines ahead, and in the C locale it lets bytes that are not UTF-8 pass.
            line = sys.stdin.buffer.readline()
            if not line:
                raise EOFError
            return decode(line, "a line of standard input").rstrip("\r\n")
        try:
            return read_typed_line(prompt)
        except UnicodeDecodeError as error:
            raise UsageError(f"the line: not UTF-8 at byte {error.start}", "type it again") from None

    def ask(self, question: str) -> bool:
        """Ask a yes-or-no question; anything but yes is no, and so is a missing terminal."""
        if not self.interactive:
            return False
        self._write_note(f"{sanitize(question)} [y/N] ")
        return sys.stdin.readline().strip().lower() in ("y", "yes")

    def error(self, error: UserError, cause: BaseException | None = None) -> None:
        """Print an error and its hint; with --json add it to the answer as `error`.

        With --debug the traceback of `cause` (default: the error) comes first.
        """
        if self._debug:
            self._write_note(sanitize("".join(traceback.format_exception(cause or error))))
        if self.json_mode:
            answer, self._answer = self._answer or {}, None
            with suppress(ResourceError):  # a standard output that takes nothing: the error goes to stderr
                self.json_record({**answer, "error": error_fields(error, self.subject)})
                return
        hint = remedy(error, self.subject)
        text = f"error: {one_line(error.message)}" + (f"\nhint: {one_line(hint)}" if hint else "")
        self._write_note(self._wrapped(text))

    def bug(self, error: BaseException) -> None:
        message = f"internal error: {type(error).__name__}: {error}"
        self.error(UserError(message, "run it again with --debug and report the output"), error)

    def _write_answer(self) -> None:
        answer, self._answer = self._answer, None
        if answer is not None:
            self.json_record(answer)

    def require_reader(self) -> None:
        """Raise BrokenPipeError if the result would go into a pipe whose reader is gone; called during long work."""
        poll = select.poll()
        try:
            poll.register(self._stdout.fileno(), 0)
        except (OSError, ValueError):  # a stream without a file descriptor
            return
        if any(events & select.POLLERR for _, events in poll.poll(0)):
            raise BrokenPipeError

    def flush(self) -> None:
        """Write everything. Raises BrokenPipeError if the reader is gone, ResourceError if the disk is full."""
        self._write_answer()
        with writing_stdout():
            self._stdout.flush()

    def release(self) -> None:
        """Flush for the last time and drop what cannot be written, so that the interpreter does not complain."""
        with suppress(OSError):
            self._write_answer()
        for stream in (self._stdout, self._stderr):
            try:
                stream.flush()
            except OSError:
                with suppress(OSError):  # a stream without a file descriptor
                    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
