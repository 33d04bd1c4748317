"""The blocks of a cache: reference counts, free blocks, and blocks kept for prefix reuse.

Plain Python over block numbers. Copies of blocks are queued here and performed before the next pass.
"""

import heapq
from collections.abc import Iterable

from mycli.runtime.cache.prefix_index import PrefixIndex


class BlockPool:
    """Blocks that are free, used by one or more sequences, or idle: unused, but kept by the prefix index."""

    def __init__(self, blocks: int, index: PrefixIndex) -> None:
        self.blocks = blocks
        self.index = index
        self.block_size = index.block_size
        self.states = index.states
        self._free = list(range(blocks))  # a heap: neighbours stay neighbours
        self._references = [0] * blocks
        self._copies: list[tuple[int, int]] = []

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def available(self) -> int:
        """The number of blocks that `allocate` can return."""
        return len(self._free) + self.index.idle

    @property
    def used(self) -> int:
        return self.blocks - self.available

    def references(self, block: int) -> int:
        return self._references[block]

    def needed(self, tokens: int) -> int:
        return -(-tokens // self.block_size)

    def allocate(self) -> int | None:
        """Return a block for one owner, evicting an idle one if none is free; None if all are in use."""
        if not self._free:
            self._recycle(self.index.evict())
        if not self._free:
            return None
        block = heapq.heappop(self._free)
        self._references[block] = 1
        return block

    def share(self, block: int) -> None:
        """Add an owner to a block that is used or idle."""
        self.index.take(block)
        self._references[block] += 1

    def release(self, blocks: Iterable[int]) -> None:
        """Remove an owner of each block. The last block of a sequence comes first, so that it is evicted first."""
        for block in blocks:
            if self._references[block] < 1:
                raise ValueError(f"block {block} is released by more than have it")
            self._references[block] -= 1
            if self._references[block]:
                continue
            self._recycle(self.index.leave(block) if block in self.index else [block])

    def make_writable(self, block: int) -> int | None:
        """Return `block`, removed from the index, if it has one owner, else a copy; None without a free block."""
        if self._references[block] == 1:
            if block in self.index.nodes:
                self._recycle(self.index.forget(block))
            return block
        fresh = self.allocate()
        if fresh is not None:
            self.copy(block, fresh)
            self.release([block])
        return fresh

    def forget(self, block: int) -> None:
        """Remove a block, and the blocks that continue it, from the index."""
        if block in self.index:
            self._recycle(self.index.forget(block))

    def clear(self) -> None:
        """Evict all idle blocks."""
        while self.index.idle:
            self._recycle(self.index.evict())

    def _recycle(self, blocks: Iterable[int]) -> None:
        for block in blocks:
            heapq.heappush(self._free, block)

    def copy(self, source: int, target: int) -> None:
        """Queue a copy of block `source` to `target`, performed before the next pass."""
        self._copies.append((source, target))

    def take_copies(self) -> list[tuple[int, int]]:
        """Return and clear the queued copies, in order."""
        copies, self._copies = self._copies, []
        return copies
