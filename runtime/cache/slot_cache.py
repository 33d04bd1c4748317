"""An LRU cache of numbered items in a fixed number of slots."""

from collections.abc import Sequence


class SlotCache:
    """Which items are resident in `slots` slots (at least 1). Policy: the least recently used item is evicted."""

    def __init__(self, slots: int) -> None:
        if slots < 1:
            raise ValueError(f"slots must be at least 1, not {slots}")
        self.slots = slots
        self._resident: dict[int, None] = {}  # least recently used first

    @property
    def resident(self) -> Sequence[int]:
        return tuple(self._resident)

    def __contains__(self, item: int) -> bool:
        return item in self._resident

    def plan(self, items: Sequence[int]) -> list[list[int]]:
        """Split `items` into groups that fit the slots, to be passed to `load` in order."""
        # Resident items come first: cycling through more items than slots then hits on `slots` items each time, while
        # plain LRU order would hit none.
        resident = [item for item in items if item in self._resident]
        if len(resident) == len(items):
            return [resident] if resident else []
        missing = [item for item in items if item not in self._resident]
        room = self.slots - len(resident)
        first, rest = resident + missing[:room], missing[room:]
        return [first, *(rest[start : start + self.slots] for start in range(0, len(rest), self.slots))]

    def load(self, group: Sequence[int]) -> list[tuple[int, int | None]]:
        """Mark `group` as used; return the items to load, each with the item it evicts, None for a free slot."""
        if len(group) > self.slots:
            raise ValueError(f"{len(group)} items do not fit {self.slots} slots")
        new = [item for item in group if item not in self._resident]
        for item in group:
            if self._resident.pop(item, item) is None:  # it is resident
                self._resident[item] = None
        loads = list[tuple[int, int | None]]()
        for item in new:
            victim = next(iter(self._resident)) if len(self._resident) == self.slots else None
            if victim is not None:
                del self._resident[victim]
            self._resident[item] = None
            loads.append((item, victim))
        return loads

    def drop(self, item: int) -> None:
        self._resident.pop(item, None)
