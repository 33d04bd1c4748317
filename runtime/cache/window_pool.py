"""The cache blocks of layers with a sliding window: a sequence holds those that its next tokens see.

A block that no sequence holds stays with its node of the prefix index until its memory is needed; then the least
recently used one is evicted. Plain Python over block numbers; copies are queued here and performed before the next
pass.
"""

import heapq
from collections import OrderedDict
from dataclasses import dataclass

NONE = -1  # instead of a block


@dataclass(eq=False)
class WindowBlock:
    """The block of a node of the prefix index in layers with a window; `NONE` if it was evicted."""

    block: int = NONE


class WindowPool:
    """The blocks of layers whose tokens see at most `window` positions: free, held by sequences, or idle."""

    def __init__(self, blocks: int, window: int, block_size: int) -> None:
        self._window, self._block_size = window, block_size
        self._free = list(range(blocks))  # a heap
        self._references = [0] * blocks
        self._nodes: dict[int, WindowBlock] = {}  # by block
        self._idle: OrderedDict[int, None] = OrderedDict()  # least recently used first
        self._copies: list[tuple[int, int]] = []

    @property
    def available(self) -> int:
        """Blocks that `allocate` can return: free and idle ones."""
        return len(self._free) + len(self._idle)

    def first_seen(self, length: int) -> int:
        """Return the index of the first block of a sequence that the token at position `length` sees."""
        return max(0, length - self._window + 1) // self._block_size

    def allocate(self) -> int | None:
        """Return a block with one owner, evicting an idle one if none is free; None if all are held."""
        if not self._free:
            oldest = next(iter(self._idle), None)
            if oldest is None:
                return None
            self.forget(self._nodes[oldest])
        block = heapq.heappop(self._free)
        self._references[block] = 1
        return block

    def share(self, block: int) -> int:
        self._idle.pop(block, None)
        self._references[block] += 1
        return block

    def release(self, block: int) -> None:
        if self._references[block] < 1:
            raise ValueError(f"window block {block} is released more often than it was shared")
        self._references[block] -= 1
        if self._references[block]:
            return
        if block in self._nodes:
            self._idle[block] = None
        else:
            heapq.heappush(self._free, block)

    def remember(self, node: WindowBlock, block: int) -> None:
        """Give a held block to a node, unless the node has one, or the block a node."""
        if node.block == NONE and block not in self._nodes:
            node.block, self._nodes[block] = block, node

    def forget(self, node: WindowBlock) -> None:
        """Take the block from a node."""
        block, node.block = node.block, NONE
        if block == NONE:
            return
        del self._nodes[block]
        if block in self._idle:
            del self._idle[block]
            heapq.heappush(self._free, block)

    def make_writable(self, block: int) -> int | None:
        """Return `block`, taken from its node, if it has one owner, else a copy; None without a free block."""
        if self._references[block] == 1:
            if block in self._nodes:
                self.forget(self._nodes[block])
            return block
        fresh = self.allocate()
        if fresh is not None:
            self.copy(block, fresh)
            self.release(block)
        return fresh

    def copy(self, source: int, target: int) -> None:
        self._copies.append((source, target))

    def take_copies(self) -> list[tuple[int, int]]:
        """Return the queued (source, target) copies, to be performed in this order, and empty the queue."""
        copies, self._copies = self._copies, []
        return copies
