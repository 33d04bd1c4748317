"""The cache blocks of layers with a sliding window: a sequence holds those that its next tokens see.

A block that no sequence holds stays with its node of the prefix index until its memory is needed; then the least
recently used one is evicted.
"""

from collections import OrderedDict
from dataclasses import dataclass

from mycli.runtime.cache.shared_blocks import SharedBlocks

NONE = -1  # instead of a block


@dataclass(eq=False)
class WindowBlock:
    """The block of a node of the prefix index in layers with a window; `NONE` if it was evicted."""

    block: int = NONE


class WindowPool(SharedBlocks):
    """The blocks of layers whose tokens see at most `window` positions; idle ones belong to a node of the index."""

    def __init__(self, blocks: int, window: int, block_size: int) -> None:
        super().__init__(blocks)
        self._window, self._block_size = window, block_size
        self._nodes: dict[int, WindowBlock] = {}  # by block
        self._idle: OrderedDict[int, None] = OrderedDict()  # least recently used first

    @property
    def available(self) -> int:
        """Blocks that `allocate` can return: free and idle ones."""
        return len(self._free) + len(self._idle)

    def first_seen(self, length: int) -> int:
        """Return the index of the first block of a sequence that the token at position `length` sees."""
        return max(0, length - self._window + 1) // self._block_size

    def remember(self, node: WindowBlock, block: int) -> None:
        """Give a held block to a node, unless the node has one, or the block a node."""
        if node.block == NONE and block not in self._nodes:
            node.block, self._nodes[block] = block, node

    def forget(self, block: int) -> None:
        """Take a block from its node, if it has one."""
        node = self._nodes.pop(block, None)
        if node is not None:
            node.block = NONE
        if block in self._idle:
            del self._idle[block]
            self._recycle([block])

    def _evict(self) -> None:
        oldest = next(iter(self._idle), NONE)
        self.forget(oldest)

    def _mark_used(self, block: int) -> None:
        self._idle.pop(block, None)

    def _retire(self, block: int) -> None:
        if block in self._nodes:
            self._idle[block] = None
        else:
            self._recycle([block])
