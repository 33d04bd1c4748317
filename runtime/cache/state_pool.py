"""Who has which slot for the states of recurrent layers: sequences, and snapshots of texts that others may go on from.

A state stands for a whole text and cannot be cut back, so a text is gone on from only where a snapshot was kept: in the
holder of a node of the prefix index, or of a sequence whose blocks the index does not know yet. The least recently used
snapshot makes room. Plain Python: knows numbers of slots; does not know tensors, texts or blocks. What has to be copied
before the next pass is noted down here and done by whoever runs it.
"""

import heapq
from collections import OrderedDict

Holder = dict[int, int]  # number of tokens -> slot of the state after them


class StatePool:
    """`slots` places, each free, a sequence's own, or a snapshot's. There are more of them than sequences run."""

    def __init__(self, slots: int) -> None:
        self.slots = slots
        self._free = list(range(slots))  # a heap
        self._kept: OrderedDict[int, tuple[Holder, int]] = OrderedDict()  # by slot, the least recently used first
        self._copies: list[tuple[int, int]] = []

    @property
    def kept(self) -> int:
        """Snapshots."""
        return len(self._kept)

    @property
    def free(self) -> int:
        """Slots of nobody."""
        return len(self._free)

    def allocate(self) -> int:
        """A slot for a sequence. Raises RuntimeError where all are sequences' own: more of them run than were planned
        for."""
        slot = self._take()
        if slot is None:
            raise RuntimeError(f"all {self.slots} states belong to running sequences")
        return slot

    def _take(self, but: int | None = None) -> int | None:
        """A free slot, or that of the snapshot least recently used, `but` one."""
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
        """A slot for a sequence that goes on from a snapshot: a copy, or the snapshot itself where that is the last."""
        fresh = self._take(but=slot)
        if fresh is None:
            holder, at = self._kept.pop(slot)
            del holder[at]
            return slot
        self._kept.move_to_end(slot)
        self._copies.append((slot, fresh))
        return fresh

    def branch(self, slot: int) -> int:
        """A slot for another sequence that goes on from what a sequence has in `slot`."""
        fresh = self.allocate()
        self._copies.append((slot, fresh))
        return fresh

    def snapshot(self, slot: int, holder: Holder, at: int) -> None:
        """Keep a copy of a sequence's state in `holder[at]`, if a slot is left."""
        if at not in holder and (fresh := self._take()) is not None:
            self._copies.append((slot, fresh))
            self._keep(fresh, holder, at)

    def keep(self, slot: int, holder: Holder, at: int) -> None:
        """The state of a sequence that goes on no more becomes the snapshot `holder[at]`, unless there is one."""
        if at in holder:
            self.release(slot)
        else:
            self._keep(slot, holder, at)

    def _keep(self, slot: int, holder: Holder, at: int) -> None:
        holder[at] = slot
        self._kept[slot] = holder, at

    def move(self, holder: Holder, at: int, to: Holder, there: int) -> None:
        """The snapshot `holder[at]` becomes `to[there]`, unless there is one."""
        slot = holder.pop(at)
        del self._kept[slot]
        self.keep(slot, to, there)

    def drop(self, holder: Holder) -> None:
        """Forget all snapshots of a holder."""
        for slot in list(holder.values()):
            self._forget(slot)

    def release(self, slot: int) -> None:
        """A slot is nobody's. A copy into it that nothing was copied from is not made."""
        if not any(source == slot for source, _ in self._copies):
            self._copies = [copy for copy in self._copies if copy[1] != slot]
        heapq.heappush(self._free, slot)

    def take_copies(self) -> list[tuple[int, int]]:
        """(source, target) of what is to be copied, in this order, before the next pass."""
        copies, self._copies = self._copies, []
        return copies
