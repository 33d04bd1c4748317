"""Blocks that several sequences may use: reference counts, the free list, and copies of those that are written to."""

import heapq
from abc import ABC, abstractmethod
from collections.abc import Iterable


class SharedBlocks(ABC):
    """Blocks by number: free, used by one or more sequences, or idle. Subclasses say which unused ones are idle."""

    def __init__(self, blocks: int) -> None:
        self.blocks = blocks
        # A heap returns the lowest number, so a sequence tends to get adjacent blocks.
        self._free = list(range(blocks))
        self._references = [0] * blocks
        self._copies: list[tuple[int, int]] = []

    @property
    def free(self) -> int:
        return len(self._free)

    def references(self, block: int) -> int:
        return self._references[block]

    def allocate(self) -> int | None:
        """Return a block with one owner, evicting an idle one if none is free; None if all are in use."""
        if not self._free:
            self._evict()
        if not self._free:
            return None
        block = heapq.heappop(self._free)
        self._references[block] = 1
        return block

    def share(self, block: int) -> int:
        self._mark_used(block)
        self._references[block] += 1
        return block

    def release(self, blocks: Iterable[int]) -> None:
        # Callers pass the last block of a sequence first: it becomes idle first and so is evicted before its prefix.
        for block in blocks:
            if self._references[block] < 1:
                raise ValueError(f"block {block} is released more often than it was shared")
            self._references[block] -= 1
            if not self._references[block]:
                self._retire(block)

    def make_writable(self, block: int) -> int | None:
        """Return `block`, no longer cached, if it has one owner, else a copy; None without a free block."""
        if self._references[block] == 1:
            self.forget(block)
            return block
        fresh = self.allocate()
        if fresh is not None:
            self.copy(block, fresh)
            self.release([block])
        return fresh

    def copy(self, source: int, target: int) -> None:
        self._copies.append((source, target))

    def take_copies(self) -> list[tuple[int, int]]:
        """Return the queued (source, target) copies, to be performed in this order, and empty the queue."""
        copies, self._copies = self._copies, []
        return copies

    def _recycle(self, blocks: Iterable[int]) -> None:
        for block in blocks:
            heapq.heappush(self._free, block)

    @abstractmethod
    def forget(self, block: int) -> None:
        """Stop caching the contents of a block, which is then free unless it is in use."""

    @abstractmethod
    def _evict(self) -> None:
        """Forget an idle block, if there is one."""

    @abstractmethod
    def _mark_used(self, block: int) -> None: ...

    @abstractmethod
    def _retire(self, block: int) -> None:
        """Make a block idle or free that nothing uses any more."""
