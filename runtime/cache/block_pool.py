"""Who has which block of a cache: reference counts, what is free, and what is kept for texts that begin alike.

Plain Python: knows numbers of blocks; does not know tensors or tokens. What has to be copied before the next pass is
noted down here and done by whoever runs it.
"""

import heapq
from collections.abc import Iterable

from mycli.runtime.cache.prefix_index import PrefixIndex


class BlockPool:
    """`blocks` blocks, each free, used by one or more sequences, or idle: kept by the index and used by nobody."""

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
        """Blocks with nothing in them."""
        return len(self._free)

    @property
    def available(self) -> int:
        """Blocks that `allocate` can hand out."""
        return len(self._free) + self.index.idle

    @property
    def used(self) -> int:
        """Blocks that sequences hold."""
        return self.blocks - self.available

    def references(self, block: int) -> int:
        """How many sequences use it."""
        return self._references[block]

    def needed(self, tokens: int) -> int:
        """Blocks that so many tokens take."""
        return -(-tokens // self.block_size)

    def allocate(self) -> int | None:
        """A block for one owner; what was kept in it is forgotten. None where all are in use."""
        if not self._free:
            self._recycle(self.index.evict())
        if not self._free:
            return None
        block = heapq.heappop(self._free)
        self._references[block] = 1
        return block

    def share(self, block: int) -> None:
        """One more owner of a block that is in use or idle."""
        self.index.take(block)
        self._references[block] += 1

    def release(self, blocks: Iterable[int]) -> None:
        """One owner less of each; the last block of a text is given first, so that it is forgotten first."""
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
        """The index knows the block, and what came after it, no longer."""
        if block in self.index:
            self._recycle(self.index.forget(block))

    def clear(self) -> None:
        """The index knows no idle block any longer."""
        while self.index.idle:
            self._recycle(self.index.evict())

    def _recycle(self, blocks: Iterable[int]) -> None:
        for block in blocks:
            heapq.heappush(self._free, block)

    def copy(self, source: int, target: int) -> None:
        """Before the next pass `target` must become what `source` is."""
        self._copies.append((source, target))

    def take_copies(self) -> list[tuple[int, int]]:
        """What is to be copied, in this order, before anything is written."""
        copies, self._copies = self._copies, []
        return copies
