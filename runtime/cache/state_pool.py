"""The slots of recurrent states: of running sequences, and snapshots for prefix reuse.

A state stands for a whole prefix and cannot be truncated, so a sequence resumes only where a snapshot was taken.
Snapshots belong to a node of the prefix index, or to a sequence until its blocks are indexed; the least recently used
one is evicted. Plain Python over slot numbers; copies are queued here and performed before the next pass.
"""

import heapq
from collections import OrderedDict

Holder = dict[int, int]  # number of tokens -> slot of the state after them


class StatePool:
    """Slots that are free, owned by a sequence, or snapshots. There are more slots than running sequences."""

    def __init__(self, slots: int) -> None:
        self.slots = slots
        self._free = list(range(slots))  # a heap
        self._kept: OrderedDict[int, tuple[Holder, int]] = OrderedDict()  # by slot, the least recently used first
        self._copies: list[tuple[int, int]] = []

    @property
    def kept(self) -> int:
        return len(self._kept)

    @property
    def free(self) -> int:
        return len(self._free)

    def allocate(self) -> int:
        """Return a slot for a sequence. Raises RuntimeError if more sequences run than were planned for."""
        slot = self._take()
        if slot is None:
            raise RuntimeError(f"all {self.slots} states belong to running sequences")
        return slot

    def _take(self, but: int | None = None) -> int | None:
        """Return a free slot, or that of the least recently used snapshot other than `but`."""
        if not self._free:
            oldest = next((slot for slot in self._kept if slot != but), None)
            if oldest is None:
                return None
            self._forget(oldest)
        return heapq.heappop(self._free)

    def _forget(self, slot: int) -> None:
        holder, at = self._kept.pop(slot)
        del holder[at]
        self.release(slot)

    def resume(self, slot: int) -> int:
        """Return a slot with a copy of a snapshot, or the snapshot itself if no slot is left."""
        fresh = self._take(but=slot)
        if fresh is None:
            holder, at = self._kept.pop(slot)
            del holder[at]
            return slot
        self._kept.move_to_end(slot)
        self._copies.append((slot, fresh))
        return fresh

    def branch(self, slot: int) -> int:
        """Return a slot with a copy of the state in `slot`."""
        fresh = self.allocate()
        self._copies.append((slot, fresh))
        return fresh

    def snapshot(self, slot: int, holder: Holder, at: int) -> None:
        """Copy a state into a snapshot `holder[at]`, if a slot is left."""
        if at not in holder and (fresh := self._take()) is not None:
            self._copies.append((slot, fresh))
            self._keep(fresh, holder, at)

    def keep(self, slot: int, holder: Holder, at: int) -> None:
        """Turn the state of a finished sequence into the snapshot `holder[at]`, unless there is one."""
        if at in holder:
            self.release(slot)
        else:
            self._keep(slot, holder, at)

    def _keep(self, slot: int, holder: Holder, at: int) -> None:
        holder[at] = slot
        self._kept[slot] = holder, at

    def move(self, holder: Holder, at: int, to: Holder, there: int) -> None:
        """Move the snapshot `holder[at]` to `to[there]`, unless there is one."""
        slot = holder.pop(at)
        del self._kept[slot]
        self.keep(slot, to, there)

    def drop(self, holder: Holder) -> None:
        """Free all snapshots of a holder."""
        for slot in list(holder.values()):
            self._forget(slot)

    def release(self, slot: int) -> None:
        """Free a slot, and drop the queued copy into it unless it is copied on."""
        if not any(source == slot for source, _ in self._copies):
            self._copies = [copy for copy in self._copies if copy[1] != slot]
        heapq.heappush(self._free, slot)

    def take_copies(self) -> list[tuple[int, int]]:
        """Return and clear the queued (source, target) copies, in order."""
        copies, self._copies = self._copies, []
        return copies
