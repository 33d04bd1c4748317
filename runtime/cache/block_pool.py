"""The pool of the blocks of a KV cache.

Policy: a block that no sequence uses stays in the prefix index until its memory is needed; then the least recently used
one is evicted. Plain Python over block numbers; copies are queued here and performed before the next pass.
"""

from mycli.runtime.cache.prefix_index import PrefixIndex
from mycli.runtime.cache.shared_blocks import SharedBlocks


class BlockPool(SharedBlocks):
    """The blocks of a cache: free, used by one or more sequences, or idle (cached in the index, otherwise unused)."""

    def __init__(self, blocks: int, index: PrefixIndex) -> None:
        super().__init__(blocks)
        self.index = index
        self.block_size = index.block_size
        self.states, self.windows = index.states, index.windows

    @property
    def available(self) -> int:
        """Blocks that `allocate` can return: free and idle ones."""
        return len(self._free) + self.index.idle

    @property
    def used(self) -> int:
        return self.blocks - self.available

    def blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.block_size)

    def forget(self, block: int) -> None:
        """Remove a block and its descendants from the index."""
        if block in self.index:
            self._recycle(self.index.remove(block))

    def clear(self) -> None:
        while self.index.idle:
            self._evict()

    def _evict(self) -> None:
        self._recycle(self.index.evict())

    def _mark_used(self, block: int) -> None:
        self.index.mark_used(block)

    def _retire(self, block: int) -> None:
        if block in self.index:
            self.index.mark_idle(block)
        else:
            self._recycle([block])
