"""Reference counts and free list of the blocks of a KV cache.

Policy: a block that no sequence uses stays in the prefix index until its memory is needed; then the least recently used
one is evicted. Plain Python over block numbers; copies are queued here and performed before the next pass.
"""

import heapq
from collections.abc import Iterable

from mycli.runtime.cache.prefix_index import PrefixIndex


class BlockPool:
    """The blocks of a cache: free, used by one or more sequences, or idle (cached in the index, otherwise unused)."""

    def __init__(self, blocks: int, index: PrefixIndex) -> None:
        self.blocks = blocks
        self.index = index
        self.block_size = index.block_size
        self.states, self.windows = index.states, index.windows
        # A heap returns the lowest number, so a sequence tends to get adjacent blocks.
        self._free = list(range(blocks))
        self._references = [0] * blocks
        self._copies: list[tuple[int, int]] = []

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def available(self) -> int:
        """Blocks that `allocate` can return: free and idle ones."""
        return len(self._free) + self.index.idle

    @property
    def used(self) -> int:
        return self.blocks - self.available

    def references(self, block: int) -> int:
        return self._references[block]

    def blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.block_size)

    def allocate(self) -> int | None:
        """Return a block with one owner, evicting an idle one if none is free; None if all are in use."""
        if not self._free:
            self._recycle(self.index.evict())
        if not self._free:
            return None
        block = heapq.heappop(self._free)
        self._references[block] = 1
        return block

    def share(self, block: int) -> None:
        self.index.mark_used(block)
        self._references[block] += 1

    def release(self, blocks: Iterable[int]) -> None:
        # Callers pass the last block of a sequence first: it becomes idle first and so is evicted before its prefix.
        for block in blocks:
            if self._references[block] < 1:
                raise ValueError(f"block {block} is released more often than it was shared")
            self._references[block] -= 1
            if self._references[block]:
                continue
            if block in self.index:
                self.index.mark_idle(block)
            else:
                self._recycle([block])

    def make_writable(self, block: int) -> int | None:
        """Return `block`, removed from the index, if it has one owner, else a copy; None without a free block."""
        if self._references[block] == 1:
            if block in self.index.nodes:
                self._recycle(self.index.remove(block))
            return block
        fresh = self.allocate()
        if fresh is not None:
            self.copy(block, fresh)
            self.release([block])
        return fresh

    def forget(self, block: int) -> None:
        """Remove a block and its descendants from the index."""
        if block in self.index:
            self._recycle(self.index.remove(block))

    def clear(self) -> None:
        while self.index.idle:
            self._recycle(self.index.evict())

    def _recycle(self, blocks: Iterable[int]) -> None:
        for block in blocks:
            heapq.heappush(self._free, block)

    def copy(self, source: int, target: int) -> None:
        self._copies.append((source, target))

    def take_copies(self) -> list[tuple[int, int]]:
        """Return the queued (source, target) copies, to be performed in this order, and empty the queue."""
        copies, self._copies = self._copies, []
        return copies
