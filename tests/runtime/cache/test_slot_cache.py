"""Test the slot cache against a list ordered by last use, for any access pattern."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mycli.runtime.cache.slot_cache import SlotCache

THINGS = 9
PATTERNS = st.lists(st.lists(st.integers(0, THINGS - 1), unique=True, max_size=THINGS), max_size=12)


def go_through(cache: SlotCache, items: list[int], used: list[int]) -> int:
    """Load `items` group by group, compare with `used` (items by last use), and return the number of hits."""
    resident = [item for item in items if item in used]
    groups = cache.plan(items)
    assert sorted(item for group in groups for item in group) == sorted(items)
    assert not items or groups[0][: len(resident)] == resident  # before any of them is evicted
    for group in groups:
        assert 0 < len(group) <= cache.slots
        loads = cache.load(group)
        assert [item for item, _ in loads] == [item for item in group if item not in used]
        for item in group:
            if item in used:
                used.remove(item)
                used.append(item)
        for item, victim in loads:
            assert victim == (used.pop(0) if len(used) == cache.slots else None)
            used.append(item)
        assert list(cache.resident) == used and all(item in cache for item in group)
    return len(resident)


@given(slots=st.integers(1, THINGS + 1), patterns=PATTERNS)
@settings(max_examples=150, deadline=None)
def test_each_is_there_once_and_the_least_recently_used_goes(slots: int, patterns: list[list[int]]) -> None:
    cache, used = SlotCache(slots), list[int]()
    for items in patterns:
        go_through(cache, items, used)


@given(slots=st.integers(1, THINGS), patterns=PATTERNS, lost=st.integers(0, THINGS - 1))
@settings(max_examples=50, deadline=None)
def test_what_was_dropped_is_missing_and_leaves_a_free_slot(slots: int, patterns: list[list[int]], lost: int) -> None:
    cache, used = SlotCache(slots), list[int]()
    for items in patterns:
        go_through(cache, items, used)
        cache.drop(lost)
        used = [item for item in used if item != lost]
        assert lost not in cache and list(cache.resident) == used


@pytest.mark.parametrize("slots", [1, 4, 8])
def test_going_through_all_over_and_over_finds_as_many_as_there_are_slots(slots: int) -> None:
    """Check that cyclic access, as of prompts using all experts, gets one hit per slot, where LRU would get none."""
    cache, used = SlotCache(slots), list[int]()
    hits = [go_through(cache, list(range(THINGS)), used) for _ in range(5)]
    assert hits == [0, *[slots] * 4]


def test_a_piece_larger_than_the_slots_is_a_mistake() -> None:
    with pytest.raises(ValueError, match="3 items do not fit 2 slots"):
        SlotCache(2).load([1, 2, 3])
    with pytest.raises(ValueError, match="slots must be at least 1"):
        SlotCache(0)
