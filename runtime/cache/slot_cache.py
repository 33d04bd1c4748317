"""Which of many things lie in a few slots: those that were used last. Knows their numbers; not what they are."""

from collections.abc import Sequence


class SlotCache:
    """At most `slots` (one or more) of any number of things, the least recently used being given up for others.

    Whoever wants more at once than there are slots gets them piece by piece (`plan`), each once: those that are there
    first, so that going through all of them over and over finds as many as there are slots every time.
    """

    def __init__(self, slots: int) -> None:
        if slots < 1:
            raise ValueError("no slot at all")
        self.slots = slots
        self._held: dict[int, None] = {}  # the least recently used first

    @property
    def held(self) -> Sequence[int]:
        """What is in the slots, the least recently used first."""
        return tuple(self._held)

    def __contains__(self, thing: int) -> bool:
        return thing in self._held

    def plan(self, wanted: Sequence[int]) -> list[list[int]]:
        """`wanted`, each once, as pieces for `take`, one after the other; none where nothing is wanted."""
        there = [thing for thing in wanted if thing in self._held]
        if len(there) == len(wanted):
            return [there] if there else []
        missing = [thing for thing in wanted if thing not in self._held]
        room = self.slots - len(there)
        first, rest = there + missing[:room], missing[room:]
        return [first, *(rest[start : start + self.slots] for start in range(0, len(rest), self.slots))]

    def take(self, piece: Sequence[int]) -> list[tuple[int, int | None]]:
        """Use all of `piece`, at most as many as there are slots: what is new among them, each with what it replaces.

        None for a slot that was free.
        """
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
        """It is not there after all, and its slot is free."""
        self._held.pop(thing, None)
