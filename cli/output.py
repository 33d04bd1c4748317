"""The only printer: results on stdout, everything else on stderr, as a person, a pipe or a program wants to read it.

Text from models, files and servers is made safe for terminals here, once. Does not know what any command does.
"""

import json
import os
import sys
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import IO, Any, Protocol

from mycli.runtime.errors import ExitCode, UserError
from mycli.runtime.sanitize import one_line, sanitize

SCHEMA_VERSION = 1
GIB = 1 << 30


def gib(count: float) -> str:
    """Bytes as GiB, with enough digits for small things: 5.11 GiB, 0.0107 GiB."""
    value = count / GIB
    return f"{value:.2f} GiB" if value >= 1 else f"{value:.3g} GiB"


class Progress(Protocol):
    """A task of known size under way."""

    def advance(self, amount: float) -> None:
        """`amount` more is done, in the unit of the total."""
        ...

    def describe(self, text: str) -> None:
        """What is being done now."""
        ...


class _Silent:
    def advance(self, amount: float) -> None:
        pass

    def describe(self, text: str) -> None:
        pass


class Output:
    """Everything a command says. `json_mode`: one JSON object (or JSON lines) on stdout instead of text."""

    def __init__(
        self,
        *,
        json_mode: bool = False,
        quiet: bool = False,
        verbose: bool = False,
        debug: bool = False,
        stdout: IO[str] | None = None,
        stderr: IO[str] | None = None,
        environment: Mapping[str, str] = os.environ,
    ) -> None:
        self.json_mode = json_mode
        self.verbose = verbose and not quiet
        self._quiet = quiet
        self._debug = debug
        self._stdout = sys.stdout if stdout is None else stdout
        self._stderr = sys.stderr if stderr is None else stderr
        self._environment = environment

    @property
    def interactive(self) -> bool:
        """Whether a person can be asked: both ends of the conversation are terminals."""
        return sys.stdin.isatty() and self._stdout.isatty() and not self.json_mode

    def decorated(self, stream: IO[str] | None = None) -> bool:
        """Whether colour and movement are welcome on `stream` (stderr): NO_COLOR, FORCE_COLOR and TERM=dumb count."""
        if self._environment.get("NO_COLOR") or self._environment.get("TERM") == "dumb":
            return False
        return bool(self._environment.get("FORCE_COLOR")) or (stream or self._stderr).isatty()

    def dim(self, text: str) -> str:
        """`text` in a quiet colour where stderr is a terminal that has one."""
        return f"\x1b[2m{text}\x1b[0m" if self.decorated() else text

    # Results

    def result(self, text: str) -> None:
        """A line or more of the answer."""
        self._stdout.write((sanitize(text) if self._stdout.isatty() else text) + "\n")

    def stream(self, text: str, *, raw: bool = False) -> None:
        """A piece of a model's reply, shown at once. Escape sequences reach a terminal only when asked for."""
        self._stdout.write(text if raw or not self._stdout.isatty() else sanitize(text))
        self._stdout.flush()

    def json(self, value: Mapping[str, Any]) -> None:
        """The answer, or one line of it, as an object with `schema_version`."""
        self._stdout.write(json.dumps({"schema_version": SCHEMA_VERSION, **value}, ensure_ascii=False) + "\n")
        self._stdout.flush()

    def card(self, title: str, rows: Sequence[tuple[str, str]]) -> None:
        """Names and values under a title."""
        width = max((len(name) for name, _ in rows), default=0)
        lines = [title, *(f"  {name:<{width}}  {one_line(value, 2000)}" for name, value in rows)]
        self.result("\n".join(lines))

    def table(self, columns: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[int] = ()) -> None:
        """Rows under headings, as a table that is also Markdown; `right` lists the columns to align right."""
        cells = [[one_line(cell) for cell in row] for row in rows]
        widths = [max(len(row[i]) for row in [list(columns), *cells]) for i in range(len(columns))]

        def line(row: Sequence[str]) -> str:
            aligned = zip(row, widths, strict=True)
            padded = [f"{cell:{'>' if i in right else '<'}{width}}" for i, (cell, width) in enumerate(aligned)]
            return "| " + " | ".join(padded) + " |"

        rule = ["-" * (w - 1) + ":" if i in right else "-" * w for i, w in enumerate(widths)]
        self.result("\n".join([line(columns), line(rule), *map(line, cells)]))

    # Everything else

    def note(self, text: str) -> None:
        """Something worth knowing; -q hides it."""
        if not self._quiet:
            self._stderr.write(sanitize(text) + "\n")
            self._stderr.flush()

    def footer(self, text: str) -> None:
        """A dim line of statistics; -q hides it."""
        if not self._quiet:
            self._stderr.write(self.dim(sanitize(text)) + "\n")
            self._stderr.flush()

    def detail(self, text: str) -> None:
        """Something only -v shows."""
        if self.verbose:
            self.note(text)

    def warn(self, text: str) -> None:
        """Something that may spoil the result; never hidden."""
        self._stderr.write(f"warning: {sanitize(text)}\n")
        self._stderr.flush()

    @contextmanager
    def progress(self, title: str, total: float, unit: str = "") -> Iterator[Progress]:
        """A bar with rate and time left on a terminal; otherwise nothing, or with -v a line every few seconds."""
        if self._quiet or not (self._stderr.isatty() or self.verbose):
            yield _Silent()
        elif self.decorated():
            with _rich_bar(self._stderr, sanitize(title), total, unit) as bar:
                yield bar
        else:
            yield _Lines(self, title, total, unit)

    def read_line(self, prompt: str) -> str:
        """A line that a person typed or a pipe brought. Raises EOFError at the end, KeyboardInterrupt for Ctrl-C."""
        if self.interactive:
            return input(prompt)
        line = sys.stdin.readline()
        if not line:
            raise EOFError
        return line.rstrip("\n")

    def ask(self, question: str) -> bool:
        """A yes-or-no question on a terminal; anything but yes is no."""
        self._stderr.write(f"{sanitize(question)} [y/N] ")
        self._stderr.flush()
        return sys.stdin.readline().strip().lower() in ("y", "yes")

    def error(self, error: UserError) -> None:
        """One line of cause, one of what to do; in JSON an object on stdout, so that a program gets its answer."""
        if self.json_mode:
            problem = {"message": error.message, "hint": error.hint, "exit_code": int(error.exit_code)}
            self.json({"error": problem})
            return
        self._stderr.write(f"error: {one_line(error.message)}\n")
        if error.hint:
            self._stderr.write(f"  try: {one_line(error.hint)}\n")
        if self._debug:
            traceback.print_exception(error, file=self._stderr)

    def bug(self, error: BaseException) -> None:
        """What should not have happened; the traceback only with --debug."""
        if self._debug:
            traceback.print_exception(error, file=self._stderr)
        bug = UserError(f"internal error: {type(error).__name__}: {error}", "run again with --debug and report it")
        self.error(bug)

    def flush(self) -> ExitCode:
        """Write out what is buffered; PIPE where nobody reads any more."""
        try:
            self._stdout.flush()
        except BrokenPipeError:
            # The interpreter flushes once more at exit and would complain: give it somewhere to write.
            os.dup2(os.open(os.devnull, os.O_WRONLY), self._stdout.fileno())
            return ExitCode.PIPE
        return ExitCode.OK


class _Lines:
    """Progress without movement: a line at most every five seconds."""

    def __init__(self, output: Output, title: str, total: float, unit: str) -> None:
        self._output, self._title, self._total, self._unit = output, title, total, unit
        self._done = 0.0
        self._last = time.monotonic()

    def advance(self, amount: float) -> None:
        self._done += amount
        if time.monotonic() - self._last > 5:
            self._last = time.monotonic()
            self._output.note(f"{self._title}: {self._done / self._total:.0%} of {self._total:g} {self._unit}")

    def describe(self, text: str) -> None:
        self._title = text


@contextmanager
def _rich_bar(stream: IO[str], title: str, total: float, unit: str) -> Iterator[Progress]:
    # Rich takes 50 ms to import: only where a bar is really drawn.
    from rich import progress
    from rich.console import Console

    amount: tuple[progress.ProgressColumn, ...]
    if unit == "B":
        amount = (progress.DownloadColumn(binary_units=True), progress.TransferSpeedColumn())
    else:
        amount = (progress.MofNCompleteColumn(), progress.TextColumn(unit))
    columns = (progress.TextColumn("{task.description}"), progress.BarColumn(), *amount, progress.TimeRemainingColumn())
    with progress.Progress(*columns, console=Console(file=stream), transient=True) as bars:
        task = bars.add_task(title, total=total)

        class Bar:
            def advance(self, amount: float) -> None:
                bars.advance(task, amount)

            def describe(self, text: str) -> None:
                bars.update(task, description=sanitize(text))

        yield Bar()
