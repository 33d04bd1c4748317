"""The blocks of one sequence: found by its text, extended as it grows, copied before what others share is written.

Plain Python: knows numbers of blocks and tokens; does not know tensors or why a sequence grows.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from mycli.runtime.cache.block_pool import BlockPool
from mycli.runtime.cache.prefix_index import Match


@dataclass(frozen=True)
class Chunk:
    """New tokens of one sequence for a pass: from position `start` on, in `blocks`.

    `logits`: of so many tokens at the end they are wanted.
    """

    tokens: Sequence[int]
    start: int
    blocks: tuple[int, ...]
    logits: int


class BlockTable:
    """`blocks` in the order of the text, of which the first `length` tokens are filled in."""

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self.blocks: list[int] = []
        self.length = 0
        self._node = pool.index.root  # of the last whole block that the index knows
        self._indexed = 0  # whole blocks that it knows

    def match(self, tokens: Sequence[int]) -> Match:
        """Begin with what the cache holds of the text `tokens`; an empty table only."""
        pool, found = self._pool, self._pool.index.match(tokens)
        for node in found.nodes:
            pool.share(node.block)
            self.blocks.append(node.block)
            self._node, self._indexed = node, self._indexed + 1
        self.length = len(found.nodes) * pool.block_size
        if found.partial is None:
            return found
        node, count = found.partial
        # What is left of a block that was filled in part is worth less than a copy costs, if most of it is taken.
        mostly = 2 * count > len(node.tokens) and len(node.tokens) < pool.block_size
        if pool.index.is_idle(node.block) and (mostly or not pool.free):
            pool.share(node.block)
            pool.forget(node.block)
            self.blocks.append(node.block)
        elif pool.free and (fresh := pool.allocate()) is not None:
            pool.copy(node.block, fresh)
            self.blocks.append(fresh)
        else:
            return Match(found.nodes, None, self.length, "no free block to copy a shared one to")
        self.length += count
        return found

    def reserve(self, end: int) -> bool:
        """Make the positions from `length` to `end` writable by this sequence alone. False where blocks run out.

        What was reserved before they did stays reserved.
        """
        pool, size = self._pool, self._pool.block_size
        first = self.length // size
        if first < len(self.blocks):
            block = self.blocks[first]
            if pool.references(block) > 1:
                fresh = pool.allocate()
                if fresh is None:
                    return False
                pool.copy(block, fresh)
                pool.release([block])
                self.blocks[first] = fresh
            else:
                pool.forget(block)
        while len(self.blocks) * size < end:
            fresh = pool.allocate()
            if fresh is None:
                return False
            self.blocks.append(fresh)
        return True

    def fill(self, tokens: Sequence[int], length: int) -> None:
        """The first `length` of `tokens`, the text of this sequence, are there now: whole blocks can be shared."""
        self.length = length
        size, index = self._pool.block_size, self._pool.index
        while (self._indexed + 1) * size <= length:
            at = self._indexed * size
            self._node = index.insert(self._node, tuple(tokens[at : at + size]), self.blocks[self._indexed])
            self._indexed += 1

    def branch(self) -> "BlockTable":
        """A table of the same text, in the same blocks."""
        other = BlockTable(self._pool)
        other.blocks, other.length = self.blocks[: self._pool.needed(self.length)], self.length
        other._node, other._indexed = self._node, self._indexed
        for block in other.blocks:
            self._pool.share(block)
        return other

    def truncate(self, length: int) -> None:
        """What lies at and after position `length` counts no longer; its blocks are kept.

        Raises ValueError where `fill` was told that it is the text's.
        """
        if length < self._indexed * self._pool.block_size:
            raise ValueError(f"{self._indexed} whole blocks are others' too, {length} tokens are fewer")
        self.length = min(self.length, length)

    def release(self, tokens: Sequence[int] | None = None) -> None:
        """Give all blocks back. Where the text `tokens` is given, the last one is kept for others too."""
        size, index = self._pool.block_size, self._pool.index
        at = self._indexed * size
        if tokens is not None and at < self.length:
            index.insert(self._node, tuple(tokens[at : self.length]), self.blocks[self._indexed])
        self._pool.release(reversed(self.blocks))
        self.blocks, self.length, self._node, self._indexed = [], 0, index.root, 0

    def discard(self) -> None:
        """Give all blocks back and let nobody find them: what they hold is wrong."""
        for block in self.blocks:
            self._pool.forget(block)
        self.release()
