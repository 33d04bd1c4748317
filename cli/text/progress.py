"""Progress of long work as a bar, as occasional lines or not at all, and a reply rendered while it grows."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import TextIO

from mycli.runtime.device.system import cpu_wait_seconds
from mycli.runtime.utils.sanitize import sanitize
from mycli.runtime.utils.units import human_bytes

LINE_SECONDS = 5  # between two progress lines in a pipe
STEP_SECONDS = 1  # the same for work of few and long steps, such as the layers of a model
READING_SECONDS = 0.7  # before the first line about reading a prompt, and between updates
# Other programs count as a disturbance when they cost 0.3 s of CPU time per second; a run under 1 s tells nothing.
BUSY_SECONDS, BUSY_SHARE = 1.0, 0.3


def duration(seconds: float) -> str:
    # 0.4 s, 42 s, 12 min, 3.5 h
    if seconds < 100:
        return f"{seconds:.0f} s" if seconds >= 9.95 else f"{seconds:.2g} s"
    return f"{seconds / 60:.0f} min" if seconds < 100 * 60 else f"{seconds / 3600:.1f} h"


class Progress:
    """A task of known size; this base class shows nothing."""

    def advance(self, amount: float) -> None: ...  # in the unit of the total

    def describe(self, text: str) -> None: ...  # replaces the title


class CheckedProgress(Progress):
    """Calls `check`, which may raise, before each step of `bar`."""

    def __init__(self, bar: Progress, check: Callable[[], None]) -> None:
        self._bar, self._check = bar, check

    def advance(self, amount: float) -> None:
        self._check()
        self._bar.advance(amount)

    def describe(self, text: str) -> None:
        self._bar.describe(text)


class Lines(Progress):
    """Reports progress as a line through `report`, at most one in `seconds`. The unit "B" means bytes."""

    def __init__(
        self, report: Callable[[str], None], title: str, total: float, unit: str, seconds: float = LINE_SECONDS
    ) -> None:
        self._report, self._title, self._total, self._unit = report, title, total, unit
        self._seconds = seconds
        self._done = 0.0
        self._start = self._last = time.monotonic()

    def advance(self, amount: float) -> None:
        self._done += amount
        now = time.monotonic()
        if now - self._last < self._seconds or self._done <= 0 or self._total <= 0:
            return
        self._last = now
        size = human_bytes(self._total) if self._unit == "B" else f"{self._total:g} {self._unit}".rstrip()
        done = f"{self._done / self._total:.0%}" if self._unit == "B" else f"{self._done:g}"
        step = (now - self._start) / self._done
        rate = f"{human_bytes(1 / step)}/s" if self._unit == "B" else f"{duration(step)} each"
        left = duration(step * max(self._total - self._done, 0))
        self._report(f"{self._title}: {done} of {size}, {rate}, {left} left")

    def describe(self, text: str) -> None:
        self._title = text


@contextmanager
def progress_bar(stream: TextIO, title: str, total: float, unit: str, *, plain: bool) -> Iterator[Progress]:
    """Show a bar with rate and time left on the terminal `stream` and erase it at the end; `plain`: no colour."""
    # Rich takes 50 ms to import: only where a bar is drawn.
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
    # Model names come from outside; square brackets in them must not be read as Rich markup.
    description = progress.TextColumn("{task.description}", markup=False)
    columns = (description, progress.BarColumn(), *amount, progress.TimeRemainingColumn())
    with progress.Progress(*columns, console=Console(file=stream, no_color=plain), transient=True) as bars:
        task = bars.add_task(sanitize(title), total=total)

        class Bar(Progress):
            def advance(self, amount: float) -> None:
                bars.advance(task, amount)

            def describe(self, text: str) -> None:
                bars.update(task, description=sanitize(text))

        yield Bar()


class CpuContention:
    """Measures from its creation to `note` how much CPU time other programs took from this one."""

    def __init__(self) -> None:
        self._start, self._waited = time.monotonic(), cpu_wait_seconds()

    def note(self) -> str:
        """Return a sentence for the user; "" without a disturbance, or if the system does not report it."""
        seconds, lost = time.monotonic() - self._start, cpu_wait_seconds()
        if lost is None or self._waited is None or seconds < BUSY_SECONDS:
            return ""
        share = (lost - self._waited) / seconds
        return f"busy machine: other programs used {share:.1f} s of CPU time per second" if share > BUSY_SHARE else ""


def show_reading(
    stream: TextIO, pieces: Iterator[str], total: int, progress: Callable[[], tuple[int, int]]
) -> Iterator[str]:
    """Yield the `pieces` of a reply; until the first one, show on `stream` how much of the prompt has been read."""
    first_arrived = threading.Event()

    # In a thread of its own: the main thread is busy computing the prompt.
    def watch() -> None:
        start, shown = time.monotonic(), False
        while not first_arrived.wait(READING_SECONDS):
            (count, cached), shown = progress(), True  # finding cached tokens took no time
            computed, seconds = min(count, total) - cached, time.monotonic() - start
            rate = f", {computed / seconds:.0f} tok/s" if computed > 0 else ""
            stream.write(f"\r\x1b[Kreading the prompt: {min(count, total)} of {total} tokens{rate}")
            stream.flush()
        if shown:
            stream.write("\r\x1b[K")
            stream.flush()

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        first = next(pieces, None)
    finally:
        first_arrived.set()
        watcher.join()
    if first is not None:
        yield first
        yield from pieces


class LiveMarkdown:
    """Text on a terminal, rendered as Markdown again after each addition; links are shown as text."""

    def __init__(self, stream: TextIO, plain: bool) -> None:
        from rich.console import Console
        from rich.live import Live

        console = Console(file=stream, no_color=plain, highlight=False)
        # Text taller than the terminal ends in an ellipsis until it is complete: scrolled lines cannot be redrawn.
        self._live = Live(console=console, refresh_per_second=8, redirect_stdout=False, redirect_stderr=False)
        self._text = ""
        self._live.start()

    def add(self, text: str) -> None:
        from rich.markdown import Markdown

        self._text += text
        self._live.update(Markdown(sanitize(self._text), hyperlinks=False))

    def end(self) -> None:
        self._live.stop()


@contextmanager
def stages(
    begin: Callable[[str, float], AbstractContextManager[Progress]],
) -> Iterator[Callable[[str, int, int], None]]:
    """Yield a callback (stage, done, total) that shows one `begin(title, total)` bar per stage.

    A new stage, or the same stage starting again, closes the previous bar.
    """
    with ExitStack() as stack:
        bar: Progress | None = None
        current, position = "", 0

        def report(stage: str, done: int, total: int) -> None:
            nonlocal bar, current, position
            if bar is None or stage != current or done < position:
                stack.close()
                bar = stack.enter_context(begin(stage, total))
                current, position = stage, 0
            bar.advance(done - position)
            position = done

        yield report
