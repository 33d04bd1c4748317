"""What moves: how work shows itself, as a bar, a line now and then or nothing, and a text that grows.

`Output` chooses. Knows Rich. Does not know what the work is, nor who is looking.
"""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import TextIO

from mycli.runtime.device.system import cpu_wait_seconds
from mycli.runtime.utils.sanitize import sanitize
from mycli.runtime.utils.units import human_bytes

LINE_SECONDS = 5  # between two lines where nothing may move
READING_SECONDS = 0.7  # before the first sign that a prompt is read, and between two
BUSY_SECONDS, BUSY_SHARE = 1.0, 0.3  # shorter is chance; seconds without a core, of all threads, in a second


class Progress:
    """A task of known size under way; this one is watched by nobody."""

    def advance(self, amount: float) -> None:
        """`amount` more is done, in the unit of the total."""

    def describe(self, text: str) -> None:
        """What is being done now."""


class Lines(Progress):
    """Progress without movement: now and then a line, given to `say`. A `unit` of "B" counts bytes."""

    def __init__(self, say: Callable[[str], None], title: str, total: float, unit: str) -> None:
        self._say, self._title, self._total, self._unit = say, title, total, unit
        self._done = 0.0
        self._start = self._last = time.monotonic()

    def advance(self, amount: float) -> None:
        """Count; say it where the last line is long ago."""
        self._done += amount
        now = time.monotonic()
        if now - self._last < LINE_SECONDS or self._done <= 0 or self._total <= 0:
            return
        self._last = now
        size = human_bytes(self._total) if self._unit == "B" else f"{self._total:g} {self._unit}".rstrip()
        done = f"{self._done / self._total:.0%}" if self._unit == "B" else f"{self._done:g}"
        left = (now - self._start) * max(self._total - self._done, 0) / self._done
        self._say(f"{self._title}: {done} of {size}, {left:.0f} s left")

    def describe(self, text: str) -> None:
        """The title of the lines to come."""
        self._title = text


@contextmanager
def bar(stream: TextIO, title: str, total: float, unit: str, *, plain: bool) -> Iterator[Progress]:
    """A bar on the terminal `stream`, with rate and time left; it disappears at the end. `plain`: without colour."""
    # Rich takes 50 ms to import: only where a bar is really drawn.
    from rich import progress
    from rich.console import Console
    from rich.text import Text

    class Rate(progress.ProgressColumn):
        def render(self, task: progress.Task) -> Text:
            return Text(f"{unit} {task.speed:.3g}/s" if task.speed else unit)

    amount: tuple[progress.ProgressColumn, ...]
    if unit == "B":
        amount = (progress.DownloadColumn(binary_units=True), progress.TransferSpeedColumn())
    else:
        amount = (progress.MofNCompleteColumn(), Rate())
    # Names come from strangers: square brackets in them are no markup.
    named = progress.TextColumn("{task.description}", markup=False)
    columns = (named, progress.BarColumn(), *amount, progress.TimeRemainingColumn())
    with progress.Progress(*columns, console=Console(file=stream, no_color=plain), transient=True) as bars:
        task = bars.add_task(sanitize(title), total=total)

        class Bar(Progress):
            def advance(self, amount: float) -> None:
                bars.advance(task, amount)

            def describe(self, text: str) -> None:
                bars.update(task, description=sanitize(text))

        yield Bar()


class Neighbours:
    """Whether other programs took the cores away from this one, from its making to `note`."""

    def __init__(self) -> None:
        self._began, self._waited = time.monotonic(), cpu_wait_seconds()

    def note(self) -> str:
        """What a person may want to know of it; "" where nothing disturbed, or nothing says so."""
        seconds, lost = time.monotonic() - self._began, cpu_wait_seconds()
        if lost is None or self._waited is None or seconds < BUSY_SECONDS:
            return ""
        share = (lost - self._waited) / seconds
        held = f"other programs held the cores for {share:.1f} s of each second"
        return f"busy machine: {held}" if share > BUSY_SHARE else ""


def reading(stream: TextIO, pieces: Iterator[str], total: int, done: Callable[[], int]) -> Iterator[str]:
    """`pieces` of a reply; until the first, a line on `stream` with the tokens of the prompt read, and their rate.

    A thread of its own looks at `done`, since whoever reads the prompt is busy with it. The line goes again.
    """
    over = threading.Event()

    def watch() -> None:
        began, before, shown = time.monotonic(), done(), False
        while not over.wait(READING_SECONDS):
            count, shown = min(done(), total), True
            rate = max(count - before, 0) / (time.monotonic() - began)
            stream.write(f"\r\x1b[Kreading the prompt: {count} of {total} tokens, {rate:.0f} tok/s")
            stream.flush()
        if shown:
            stream.write("\r\x1b[K")
            stream.flush()

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        first = next(pieces, None)
    finally:
        over.set()
        watcher.join()
    if first is not None:
        yield first
        yield from pieces


class LiveMarkdown:
    """A text on a terminal that grows, rendered as Markdown each time; its links are text, not escape sequences."""

    def __init__(self, stream: TextIO, plain: bool) -> None:
        from rich.console import Console
        from rich.live import Live

        console = Console(file=stream, no_color=plain, highlight=False)
        # Taller than the terminal, it ends in an ellipsis until it is complete: what has scrolled cannot be redrawn.
        self._live = Live(console=console, refresh_per_second=8, redirect_stdout=False, redirect_stderr=False)
        self._text = ""
        self._live.start()

    def add(self, text: str) -> None:
        """More of the text."""
        from rich.markdown import Markdown

        self._text += text
        self._live.update(Markdown(sanitize(self._text), hyperlinks=False))

    def end(self) -> None:
        """Show the whole."""
        self._live.stop()


@contextmanager
def stages(
    begin: Callable[[str, float], AbstractContextManager[Progress]],
) -> Iterator[Callable[[str, int, int], None]]:
    """A callback (stage, done, total) for work in named stages, one bar of `begin(title, total)` after another.

    A new stage, or the same begun anew, closes the bar of the one before.
    """
    with ExitStack() as stack:
        shown: Progress | None = None
        current, position = "", 0

        def report(stage: str, done: int, total: int) -> None:
            nonlocal shown, current, position
            if shown is None or stage != current or done < position:
                stack.close()
                shown = stack.enter_context(begin(stage, total))
                current, position = stage, 0
            shown.advance(done - position)
            position = done

        yield report
