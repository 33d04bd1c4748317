"""Test the slots of recurrent states: one snapshot per position, LRU eviction, ordered copies."""

import pytest

from mycli.runtime.cache.state_pool import Snapshots, StatePool


def test_a_place_has_one_snapshot() -> None:
    pool, owner = StatePool(4), Snapshots()
    slot = pool.allocate()
    pool.snapshot(slot, owner, 16)
    assert owner == {16: 1} and pool.take_copies() == [(slot, 1)]
    pool.snapshot(slot, owner, 16)
    assert owner == {16: 1} and pool.take_copies() == [] and (pool.num_snapshots, pool.free) == (1, 2)
    pool.convert(slot, owner, 16)
    assert owner == {16: 1} and (pool.num_snapshots, pool.free) == (1, 3), "the sequence ended where a snapshot is"


def test_the_least_recently_used_snapshot_makes_room() -> None:
    pool, owner = StatePool(3), Snapshots()
    slot = pool.allocate()
    pool.snapshot(slot, owner, 8)
    pool.snapshot(slot, owner, 16)
    assert pool.free == 0 and set(owner) == {8, 16}
    resumed = pool.resume(owner[8])
    assert set(owner) == {8} and resumed not in (slot, owner[8]), "16 was evicted, not the one that is read"
    last = pool.resume(owner[8])
    assert owner == {} and last not in (slot, resumed), "without a slot for a copy the snapshot itself is taken over"
    with pytest.raises(RuntimeError, match="own all 3 recurrent states"):
        pool.allocate()


def test_a_full_pool_stores_no_snapshot() -> None:
    pool, owner = StatePool(1), Snapshots()
    pool.snapshot(pool.allocate(), owner, 8)
    assert owner == {} and pool.take_copies() == []


def test_copies_into_a_released_slot_are_dropped_unless_they_are_read() -> None:
    pool = StatePool(4)
    first = pool.allocate()
    second = pool.branch(first)
    third = pool.branch(second)
    pool.release(third)
    assert pool.take_copies() == [(first, second)]
    third = pool.branch(second)
    pool.branch(third)
    pool.release(third)
    assert pool.take_copies()[0] == (second, third), "a later copy reads it"


def test_a_moved_snapshot_keeps_its_slot() -> None:
    pool, source, target = StatePool(3), Snapshots(), Snapshots()
    pool.convert(pool.allocate(), source, 8)
    pool.move(source, 8, target, 4)
    assert (source, target) == ({}, {4: 0}) and pool.num_snapshots == 1
    pool.drop(target)
    assert target == {} and pool.free == 3
