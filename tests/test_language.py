"""Holds the language of product and docs: `python -m tests.support.language PATH` prints the findings of a room."""

from functools import cache

import pytest

from tests.support.language import (
    MAX_DOCSTRING_SHARE,
    MIN_COMMENT_SHARE,
    PARTS,
    Measures,
    by_room,
    files,
    pages,
)

# room -> findings: rooms that are still being rewritten. An entry is only ever lowered, and removed at zero.
UNCLEAN: dict[str, int] = {
    "runtime": 0,
    "runtime/cache": 0,
    "runtime/diagnostics": 1,  # `found` is a key of `bench draft --json`
    "runtime/engine": 1,
    "runtime/layers": 2,
    "runtime/sampling": 3,
    "runtime/speculative": 2,
}


@cache
def rooms() -> dict[str, Measures]:
    return by_room(files(*PARTS) + pages())


def test_rooms_have_plain_language() -> None:
    unclean = {room: measures for room, measures in rooms().items() if len(measures.findings) > UNCLEAN.get(room, 0)}
    assert not unclean, "\n".join(str(finding) for measures in unclean.values() for finding in measures.findings)


def test_rooms_have_few_docstrings() -> None:
    clean = {room: measures for room, measures in rooms().items() if room not in UNCLEAN}
    shares = {room: measures.docstrings / max(measures.lines, 1) for room, measures in clean.items()}
    assert not {room: f"{share:.1%}" for room, share in shares.items() if share > MAX_DOCSTRING_SHARE}


@pytest.mark.skipif(bool(UNCLEAN), reason="rooms are being rewritten")
def test_comments_explain_decisions() -> None:
    modules = [measures for room, measures in rooms().items() if not room.endswith(".md")]
    comments, lines = (sum(getattr(measures, field) for measures in modules) for field in ("comments", "lines"))
    assert comments >= MIN_COMMENT_SHARE * lines, f"{comments} of {lines} lines"
