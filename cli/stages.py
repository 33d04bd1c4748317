"""Shows work that goes through named stages, one bar after another. Does not know what the stages do."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

from mycli.cli.output import Output
from mycli.cli.progress import Progress


@contextmanager
def stages(out: Output) -> Iterator[Callable[[str, int, int], None]]:
    """A callback (stage, done, total); a new stage, or the same begun anew, closes the bar of the one before."""
    with ExitStack() as stack:
        bar: Progress | None = None
        current, position = "", 0

        def report(stage: str, done: int, total: int) -> None:
            nonlocal bar, current, position
            if bar is None or stage != current or done < position:
                stack.close()
                bar = stack.enter_context(out.progress(stage, total))
                current, position = stage, 0
            bar.advance(done - position)
            position = done

        yield report
