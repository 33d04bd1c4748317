"""The only printer: results on stdout, everything else on stderr, as a person, a pipe or a program wants to read it.

Text from models, files and servers is made safe for terminals here, once. Does not know what any command does.
"""

import errno
import os
import shutil
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, TextIO

from mycli.cli.reasons import reason
from mycli.cli.remedies import Subject, remedy
from mycli.cli.text.json_lines import error_fields, json_line
from mycli.cli.text.layout import WordWrap, broken, fitting, pad, table_lines, table_width, width
from mycli.cli.text.line_editing import typed_line
from mycli.cli.text.progress import Lines, LiveMarkdown, Progress, bar, reading
from mycli.runtime.errors import Declined, ResourceError, UsageError, UserError
from mycli.runtime.utils.sanitize import one_line, sanitize


@contextmanager
def _named() -> Iterator[None]:
    """Around writing the answer: an error of the system's names no file there. A reader that left stays what it is."""
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        reason = "it is closed" if error.errno == errno.EBADF else error.strerror
        raise ResourceError(f"standard output: {reason}", "write it somewhere else") from error


class Output:
    """Everything a command says. `json_mode`: one JSON object (or JSON lines) on stdout instead of text."""

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
        self.subject = Subject()  # whose words the remedies of errors take
        self._quiet = quiet
        self._debug = debug
        self._stdout = sys.stdout if stdout is None else stdout
        self._stderr = sys.stderr if stderr is None else stderr
        self._environment = environment
        self._answer: Mapping[str, Any] | None = None  # what `json` was given and has yet to be written
        self._held: list[str] | None = None  # what waits for the end of a reply
        self._wrap: WordWrap | None = None
        self._begun = False  # whether anything of the reply was shown

    @property
    def interactive(self) -> bool:
        """Whether a person can be asked: both ends of the conversation are terminals."""
        return sys.stdin.isatty() and self._stdout.isatty() and not self.json_mode

    def decorated(self, stream: TextIO | None = None) -> bool:
        """Whether colour is welcome on `stream` (stderr): NO_COLOR, FORCE_COLOR and TERM=dumb count."""
        if self._environment.get("NO_COLOR") or self.plain:
            return False
        return self._environment.get("FORCE_COLOR", "0") not in ("", "0") or (stream or self._stderr).isatty()

    @property
    def plain(self) -> bool:
        """Whether the terminal knows no escape sequences."""
        return self._environment.get("TERM") == "dumb"

    def dim(self, text: str) -> str:
        """`text` in a quiet colour where stderr is a terminal that has one."""
        return f"\x1b[2m{text}\x1b[0m" if self.decorated() else text

    # Results

    @property
    def _text(self) -> TextIO:
        """Where text of the answer goes: stdout is for objects alone where those were asked for."""
        return self._stderr if self.json_mode else self._stdout

    def result(self, text: str) -> None:
        """A line or more of the answer."""
        with _named():
            self._text.write((sanitize(text) if self._text.isatty() else text) + "\n")

    @contextmanager
    def reply(self, *, ends_line: bool = True) -> Iterator[None]:
        """Around the streaming of a reply, whose last line it ends: what else there is to say waits for that.

        On a terminal words are not broken at its edge.
        """
        self._held, self._begun = [], False
        if self._text.isatty():
            self._wrap = WordWrap(lambda: shutil.get_terminal_size().columns)
        try:
            yield
            self._begun = True  # an empty reply is a line too, one that was refused is none
        finally:
            wrap, self._wrap = self._wrap, None
            held, self._held = self._held, None
            with suppress(OSError):  # nobody reads any more: whoever wrote first has been told
                self._text.write((wrap.flush() if wrap else "") + "\n" * (ends_line and self._begun))
                self._text.flush()
            for line in held:
                self._say(line)

    def stream(self, text: str, *, raw: bool = False, dim: bool = False) -> None:
        """A piece of a model's reply, shown at once. Escape sequences reach a terminal only when asked for."""
        self._begun = True
        shown = text if raw or not self._text.isatty() else sanitize(text)
        if self._wrap is not None and not raw:
            shown = self._wrap.feed(shown) + (self._wrap.flush() if dim else "")
        with _named():
            self._text.write(f"\x1b[2m{shown}\x1b[0m" if dim and self.decorated(self._text) else shown)
            self._text.flush()

    def while_reading(self, pieces: Iterator[str], total: int, done: Callable[[], int]) -> Iterator[str]:
        """`pieces` of a reply; on a terminal with a sign of life until the first: `done` of the prompt's `total`."""
        silent = self._quiet or self.plain or not self._stderr.isatty()
        return pieces if silent else reading(self._stderr, pieces, total, done)

    def markdown(self) -> LiveMarkdown:
        """Begin a text that is rendered as Markdown while it grows; for a terminal."""
        return LiveMarkdown(self._stdout, plain=not self.decorated(self._stdout))

    def json(self, value: Mapping[str, Any]) -> None:
        """The answer as an object. It is written when the command ends, with the error where it ends with one."""
        self._answer = value

    def answered(self, value: Mapping[str, Any]) -> bool:
        """Give the answer as an object where one is asked for; False where it is yet to be shown as text."""
        if self.json_mode:
            self.json(value)
        return self.json_mode

    def json_record(self, value: Mapping[str, Any]) -> None:
        """One line of an answer of many, or the whole, at once: an object with `schema_version`."""
        line = json_line(value, self._stdout.encoding or "utf-8")
        if self._stdout.isatty() and line != sanitize(line):
            line = json_line(value, "ascii")
        with _named():
            self._stdout.write(line + "\n")
            self._stdout.flush()

    def card(self, title: str, rows: Sequence[tuple[str, str]]) -> None:
        """Names and values under a title; on a terminal values go on below themselves, broken between words."""
        columns = max((width(name) for name, _ in rows), default=0)
        room = shutil.get_terminal_size().columns - columns - 4 if self._stdout.isatty() else 0
        lines = [one_line(title)]
        for name, value in rows:
            value = broken(one_line(value, 2000), room).replace("\n", f"\n{' ' * (columns + 4)}")
            lines.append(f"  {pad(name, columns)}  {value}")
        self.result("\n".join(lines))

    def table(
        self,
        columns: Sequence[str],
        rows: Sequence[Sequence[str]],
        right: Sequence[int] = (),
        order: Sequence[int] = (),
    ) -> None:
        """Rows under headings, as a table that is also Markdown; `right` lists the columns to align right.

        On a terminal that is too narrow for it: the columns that come first in `order` as far as they fit, or without
        an order a card for each row. No line is broken, nothing is cut off.
        """
        cells = [list(columns), *([one_line(cell) for cell in row] for row in rows)]
        widths = [max(width(row[i]) for row in cells) for i in range(len(columns))]
        room = shutil.get_terminal_size().columns
        if not self._stdout.isatty() or table_width(widths) <= room:
            self.result("\n".join(table_lines(cells, right)))
            return
        chosen = fitting(cells, order, room)
        if len(chosen) < 2:
            for row in cells[1:]:
                self.card(f"{columns[0]} {row[0]}", list(zip(columns[1:], row[1:], strict=True)))
            return
        shown = table_lines(
            [[row[i] for i in chosen] for row in cells], [chosen.index(i) for i in right if i in chosen]
        )
        self.result("\n".join(shown))
        left_out = ", ".join(name for i, name in enumerate(columns) if i not in chosen)
        self.note(f"(a wider terminal, or a pipe, also shows: {left_out})")

    # Everything else

    def _lines(self, text: str) -> str:
        """`text` made safe, each line ended; on a terminal broken between words, commands to be typed kept whole."""
        text = sanitize(text)
        return (broken(text, shutil.get_terminal_size().columns) if self._stderr.isatty() else text) + "\n"

    def _say(self, text: str) -> None:
        if self._held is not None:
            self._held.append(text)
            return
        self._stderr.write(text)
        self._stderr.flush()

    def note(self, text: str) -> None:
        """Something worth knowing; -q hides it."""
        if not self._quiet:
            self._say(self._lines(text))

    def footer(self, text: str) -> None:
        """A dim line of statistics; -q hides it."""
        if not self._quiet:
            self._say(self.dim(self._lines(text).removesuffix("\n")) + "\n")

    def detail(self, text: str) -> None:
        """Something only -v shows."""
        if self.verbose:
            self.note(text)

    def warn(self, warning: str | Declined) -> None:
        """Something that may spoil the result; never hidden."""
        text = reason(warning) if isinstance(warning, Declined) else warning
        self._say(self._lines(f"warning: {text}"))

    @contextmanager
    def progress(self, title: str, total: float, unit: str = "") -> Iterator[Progress]:
        """A bar with rate and time left on a terminal; otherwise nothing, or with -v a line every few seconds."""
        if self._quiet or not (self._stderr.isatty() or self.verbose):
            yield Progress()
        elif self._stderr.isatty() and not self.plain:
            with bar(self._stderr, title, total, unit, plain=not self.decorated()) as shown:
                yield shown
        else:
            yield Lines(self.note, title, total, unit)

    def read_line(self, prompt: str) -> str:
        """A line that a person typed or a pipe brought.

        Raises EOFError at the end, KeyboardInterrupt for Ctrl-C, UsageError for what is not text.
        """
        try:
            line = typed_line(prompt) + "\n" if self.interactive else sys.stdin.readline()
        except UnicodeDecodeError as error:
            raise UsageError(f"standard input: not UTF-8 at byte {error.start}", "convert it to UTF-8") from None
        if not line:
            raise EOFError
        return line.rstrip("\n")

    def ask(self, question: str) -> bool:
        """A yes-or-no question; anything but yes is no. Nobody is asked away from a terminal: that is no."""
        if not self.interactive:
            return False
        self._say(f"{sanitize(question)} [y/N] ")
        return sys.stdin.readline().strip().lower() in ("y", "yes")

    def error(self, error: UserError, cause: BaseException | None = None) -> None:
        """One line of cause, one of what to do; in JSON an object on stdout, so that a program gets its answer.

        That object also holds the answer, where there is one: a gate that fails has measured something. With --debug,
        first the traceback of `cause` (the error itself).
        """
        if self._debug:
            self._say(sanitize("".join(traceback.format_exception(cause or error))))
        if self.json_mode:
            answer, self._answer = self._answer or {}, None
            self.json_record({**answer, "error": error_fields(error, self.subject)})
            return
        hint = remedy(error, self.subject)
        told = f"error: {one_line(error.message)}" + (f"\nhint: {one_line(hint)}" if hint else "")
        self._say(self._lines(told))

    def bug(self, error: BaseException) -> None:
        """What should not have happened; the traceback only with --debug."""
        what = f"internal error: {type(error).__name__}: {error}"
        self.error(UserError(what, "run again with --debug and report it"), error)

    def _write_answer(self) -> None:
        answer, self._answer = self._answer, None
        if answer is not None:
            self.json_record(answer)

    def flush(self) -> None:
        """Write out what is held. Raises BrokenPipeError where nobody reads, ResourceError where nothing fits."""
        self._write_answer()
        with _named():
            self._stdout.flush()

    def release(self) -> None:
        """The last act: what cannot be written is dropped, so that the interpreter does not complain at its exit."""
        with suppress(OSError):
            self._write_answer()
        for stream in (self._stdout, self._stderr):
            try:
                stream.flush()
            except OSError:
                with suppress(OSError):  # a stream without a file of its own
                    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
