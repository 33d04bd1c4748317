"""An LRU cache of slot numbers."""

from collections.abc import Sequence


class SlotCache:
    """At most `slots` resident items of any number, evicting the least recently used.

    Requests for more items than slots are split into pieces (`plan`), resident items first, so that repeated passes
    over all items find as many of them resident as there are slots.
    """

    def __init__(self, slots: int) -> None:
        if slots < 1:
            raise ValueError("no slot at all")
        self.slots = slots
        self._held: dict[int, None] = {}  # the least recently used first

    @property
    def held(self) -> Sequence[int]:
        """The resident items, least recently used first."""
        return tuple(self._held)

    def __contains__(self, thing: int) -> bool:
        return thing in self._held

    def plan(self, wanted: Sequence[int]) -> list[list[int]]:
        """Split the requested items into pieces for `take`, each item once."""
        there = [thing for thing in wanted if thing in self._held]
        if len(there) == len(wanted):
            return [there] if there else []
        missing = [thing for thing in wanted if thing not in self._held]
        room = self.slots - len(there)
        first, rest = there + missing[:room], missing[room:]
        return [first, *(rest[start : start + self.slots] for start in range(0, len(rest), self.slots))]

    def take(self, piece: Sequence[int]) -> list[tuple[int, int | None]]:
        """Make all items of `piece` resident; return (new item, evicted item or None for a free slot)."""
        if len(piece) > self.slots:
            raise ValueError(f"{len(piece)} things for {self.slots} slots")
        new = [thing for thing in piece if thing not in self._held]
        for thing in piece:
            if self._held.pop(thing, thing) is None:  # was there
                self._held[thing] = None
        found = list[tuple[int, int | None]]()
        for thing in new:
            victim = next(iter(self._held)) if len(self._held) == self.slots else None
            if victim is not None:
                del self._held[victim]
            self._held[thing] = None
            found.append((thing, victim))
        return found

    def drop(self, thing: int) -> None:
        """Free the slot of an item."""
        self._held.pop(thing, None)
