"""The slots of a few among many, over any pattern of use, against a list in the order of use."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mycli.runtime.cache.slot_cache import SlotCache

THINGS = 9
PATTERNS = st.lists(st.lists(st.integers(0, THINGS - 1), unique=True, max_size=THINGS), max_size=12)


def go_through(cache: SlotCache, wanted: list[int], used: list[int]) -> int:
    """All of `wanted` piece by piece, compared with `used`, the things in slots by last use; how many were there."""
    there = [thing for thing in wanted if thing in used]
    pieces = cache.plan(wanted)
    assert sorted(thing for piece in pieces for thing in piece) == sorted(wanted)
    assert not wanted or pieces[0][: len(there)] == there  # before anything takes their place
    for piece in pieces:
        assert 0 < len(piece) <= cache.slots
        taken = cache.take(piece)
        assert [thing for thing, _ in taken] == [thing for thing in piece if thing not in used]
        for thing in piece:
            if thing in used:
                used.remove(thing)
                used.append(thing)
        for thing, victim in taken:
            assert victim == (used.pop(0) if len(used) == cache.slots else None)
            used.append(thing)
        assert list(cache.held) == used and all(thing in cache for thing in piece)
    return len(there)


@given(slots=st.integers(1, THINGS + 1), patterns=PATTERNS)
@settings(max_examples=150, deadline=None)
def test_each_is_there_once_and_the_least_recently_used_goes(slots: int, patterns: list[list[int]]) -> None:
    cache, used = SlotCache(slots), list[int]()
    for wanted in patterns:
        go_through(cache, wanted, used)


@given(slots=st.integers(1, THINGS), patterns=PATTERNS, lost=st.integers(0, THINGS - 1))
@settings(max_examples=50, deadline=None)
def test_what_was_dropped_is_missing_and_leaves_a_free_slot(slots: int, patterns: list[list[int]], lost: int) -> None:
    cache, used = SlotCache(slots), list[int]()
    for wanted in patterns:
        go_through(cache, wanted, used)
        cache.drop(lost)
        used = [thing for thing in used if thing != lost]
        assert lost not in cache and list(cache.held) == used


@pytest.mark.parametrize("slots", [1, 4, 8])
def test_going_through_all_over_and_over_finds_as_many_as_there_are_slots(slots: int) -> None:
    """Where the plain order of use would find none: prompts go through all experts of a layer."""
    cache, used = SlotCache(slots), list[int]()
    found = [go_through(cache, list(range(THINGS)), used) for _ in range(5)]
    assert found == [0, *[slots] * 4]


def test_a_piece_larger_than_the_slots_is_a_mistake() -> None:
    with pytest.raises(ValueError, match="3 things for 2 slots"):
        SlotCache(2).take([1, 2, 3])
    with pytest.raises(ValueError, match="no slot"):
        SlotCache(0)
