"""The slots of recurrent states: which sequence or snapshot owns which.

A recurrent state summarizes all tokens before it and cannot be truncated, so a sequence resumes only where a snapshot
was stored. Snapshots belong to a node of the prefix index, or to a sequence whose last block is not indexed yet. The
least recently used snapshot is evicted first. Copies are queued here and performed before the next pass.
"""

import heapq
from collections import OrderedDict

Snapshots = dict[int, int]  # number of tokens -> slot of the state after them


class StatePool:
    """The slots for states: each is free, owned by a sequence, or a snapshot; more slots than sequences that run."""

    def __init__(self, slots: int) -> None:
        self.slots = slots
        self._free = list(range(slots))  # a heap
        # The dict and the key under which each snapshot is stored, by slot, least recently used first.
        self._snapshots: OrderedDict[int, tuple[Snapshots, int]] = OrderedDict()
        self._copies: list[tuple[int, int]] = []

    @property
    def num_snapshots(self) -> int:
        return len(self._snapshots)

    @property
    def free(self) -> int:
        return len(self._free)

    def allocate(self) -> int:
        """Return a slot for a sequence. Raises RuntimeError if running sequences own all slots."""
        slot = self._allocate()
        if slot is None:
            raise RuntimeError(f"running sequences own all {self.slots} recurrent states")
        return slot

    def _allocate(self, protected: int | None = None) -> int | None:
        # A free slot, or that of the least recently used snapshot other than `protected`.
        if not self._free:
            oldest = next((slot for slot in self._snapshots if slot != protected), None)
            if oldest is None:
                return None
            self._evict(oldest)
        return heapq.heappop(self._free)

    def _evict(self, slot: int) -> None:
        owner, length = self._snapshots.pop(slot)
        del owner[length]
        self.release(slot)

    def resume(self, slot: int) -> int:
        """Return a slot for a sequence that resumes at the snapshot in `slot`."""
        fresh = self._allocate(protected=slot)
        if fresh is None:
            # No slot for a copy: the sequence takes over the snapshot itself, and no other can resume there.
            owner, length = self._snapshots.pop(slot)
            del owner[length]
            return slot
        self._snapshots.move_to_end(slot)
        self._copies.append((slot, fresh))
        return fresh

    def branch(self, slot: int) -> int:
        fresh = self.allocate()
        self._copies.append((slot, fresh))
        return fresh

    def snapshot(self, slot: int, owner: Snapshots, length: int) -> None:
        """Store a copy of a sequence's state as `owner[length]`, unless there is one or no slot is available."""
        if length not in owner and (fresh := self._allocate()) is not None:
            self._copies.append((slot, fresh))
            self._store(fresh, owner, length)

    def convert(self, slot: int, owner: Snapshots, length: int) -> None:
        """Turn the state of a finished sequence into the snapshot `owner[length]`, or free it if there is one."""
        if length in owner:
            self.release(slot)
        else:
            self._store(slot, owner, length)

    def _store(self, slot: int, owner: Snapshots, length: int) -> None:
        owner[length] = slot
        self._snapshots[slot] = owner, length

    def move(self, source: Snapshots, length: int, target: Snapshots, target_length: int) -> None:
        """Move the snapshot `source[length]` to `target[target_length]`, or free it if there is one."""
        slot = source.pop(length)
        del self._snapshots[slot]
        self.convert(slot, target, target_length)

    def drop(self, owner: Snapshots) -> None:
        for slot in list(owner.values()):
            self._evict(slot)

    def release(self, slot: int) -> None:
        # A queued copy into this slot is pointless, unless a later copy reads the slot.
        if not any(source == slot for source, _ in self._copies):
            self._copies = [copy for copy in self._copies if copy[1] != slot]
        heapq.heappush(self._free, slot)

    def take_copies(self) -> list[tuple[int, int]]:
        """Return the queued (source, target) copies, to be performed in this order, and empty the queue."""
        copies, self._copies = self._copies, []
        return copies
