"""Check that stages of work are shown as consecutive progress bars."""

from collections.abc import Iterator
from contextlib import contextmanager

from mycli.cli.output import Output
from mycli.cli.text.progress import stages


class Recorded(Output):
    def __init__(self) -> None:
        super().__init__()
        self.log: list[object] = []

    @contextmanager
    def progress(self, title: str, total: float, unit: str = "") -> Iterator["Recorded"]:  # type: ignore[override]
        self.log.append((title, total))
        yield self
        self.log.append("closed")

    def advance(self, amount: float) -> None:
        self.log.append(amount)

    def describe(self, text: str) -> None:
        raise AssertionError("a stage keeps its name")


def test_each_stage_gets_a_bar_and_the_last_is_closed() -> None:
    out = Recorded()
    with stages(out.progress) as report:
        report("quantizing", 0, 4)
        report("quantizing", 2, 4)
        report("quantizing", 4, 4)
        report("layers", 1, 1)
        report("layers", 1, 1)
    assert out.log == [("quantizing", 4), 0, 2, 2, "closed", ("layers", 1), 1, 0, "closed"]


def test_the_same_stage_begun_anew_is_another_bar() -> None:
    out = Recorded()
    with stages(out.progress) as report:
        report("layers", 2, 2)
        report("layers", 1, 2)
    assert out.log == [("layers", 2), 2, "closed", ("layers", 2), 1, "closed"]
