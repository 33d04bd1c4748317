"""Check the language of product and docs: `python -m tests.support.language PATH` prints a package's findings."""

from functools import cache

from tests.support.language import (
    MAX_DOCSTRING_SHARE,
    MIN_COMMENT_SHARE,
    PARTS,
    Measures,
    by_room,
    files,
    pages,
)

# package -> allowed findings: `found` is a key of `bench draft --json`.
ALLOWED: dict[str, int] = {"runtime/diagnostics": 1}
# Small packages of many short public functions, each with shapes: their own maximum share of docstring lines.
DENSE: dict[str, float] = {
    "runtime": 0.10,
    "runtime/cache": 0.10,
    "runtime/engine": 0.10,
    "runtime/layers": 0.13,
    "runtime/sampling": 0.14,
    "runtime/speculative": 0.13,
}


@cache
def rooms() -> dict[str, Measures]:
    return by_room(files(*PARTS) + pages())


def _product() -> dict[str, Measures]:
    return {room: measures for room, measures in rooms().items() if not room.endswith(".md")}


def test_rooms_have_plain_language() -> None:
    unclean = {room: measures for room, measures in rooms().items() if len(measures.findings) > ALLOWED.get(room, 0)}
    assert not unclean, "\n".join(str(finding) for measures in unclean.values() for finding in measures.findings)


def test_docstrings_are_few() -> None:
    shares = {room: measures.docstrings / max(measures.lines, 1) for room, measures in _product().items()}
    wordy = {room: share for room, share in shares.items() if share > DENSE.get(room, MAX_DOCSTRING_SHARE)}
    assert not {room: f"{share:.1%}" for room, share in wordy.items()}
    docstrings, lines = (sum(getattr(one, field) for one in _product().values()) for field in ("docstrings", "lines"))
    assert docstrings <= MAX_DOCSTRING_SHARE * lines, f"{docstrings} of {lines} lines"


def test_comments_explain_decisions() -> None:
    comments, lines = (sum(getattr(one, field) for one in _product().values()) for field in ("comments", "lines"))
    assert comments >= MIN_COMMENT_SHARE * lines, f"{comments} of {lines} lines"
