"""The block table of one sequence: matches cached prefixes, grows, and copies shared blocks before they are written.

Plain Python over block numbers and tokens.
"""

from collections.abc import Sequence
from dataclasses import replace

from mycli.runtime.cache.block_pool import BlockPool
from mycli.runtime.cache.prefix_index import Match, Node
from mycli.runtime.cache.state_pool import Holder

_NO_BLOCK = "no free block to copy a shared one to"


APART = 64  # tokens at most between a text's last snapshot and its end; so many are read at once in no time


class BlockTable:
    """The blocks of a sequence in order; the first `length` tokens are computed.

    state: slot of the recurrent state after them, from `begin` on; None without recurrent layers.
    """

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self.blocks: list[int] = []
        self.length = 0
        self.state: int | None = None
        self._snapshots: Holder = {}  # by length, of the block that the index does not know yet
        self._marks: tuple[int, ...] = ()  # lengths at which snapshots are wanted
        self._node = pool.index.root  # of the last whole block that the index knows
        self._indexed = 0  # whole blocks that it knows

    def match(self, tokens: Sequence[int]) -> Match:
        """Start an empty table with the cached prefix of `tokens`."""
        pool, found = self._pool, self._pool.index.match(tokens)
        for node in found.nodes:
            pool.share(node.block)
            self.blocks.append(node.block)
            self._node, self._indexed = node, self._indexed + 1
        self.length = len(found.nodes) * pool.block_size
        if pool.states is not None:
            self._mark(found.known, len(tokens) - 1)
            if found.partial is not None and not pool.free and not pool.index.is_idle(found.partial[0].block):
                self.release()
                return replace(found, nodes=(), partial=None, tokens=0, miss=_NO_BLOCK)
            if found.state is not None:
                self.state = pool.states.resume(found.state)
        if found.partial is None:
            return found
        node, count = found.partial
        # What is left of a block that was filled in part is worth less than a copy costs, if most of it is taken.
        mostly = 2 * count > len(node.tokens) and len(node.tokens) < pool.block_size
        if pool.index.is_idle(node.block) and (mostly or not pool.free):
            pool.share(node.block)
            if pool.states is not None and count in node.states:
                pool.states.move(node.states, count, self._snapshots, self.length + count)
            pool.forget(node.block)
            self.blocks.append(node.block)
        elif pool.free and (fresh := pool.allocate()) is not None:
            pool.copy(node.block, fresh)
            self.blocks.append(fresh)
        else:
            return replace(found, partial=None, tokens=self.length, miss=_NO_BLOCK)
        self.length += count
        return found

    def _mark(self, known: int, end: int) -> None:
        step = min(APART, self._pool.block_size)
        self._marks = tuple(sorted({known // step * step, end // step * step} - {0}))

    def begin(self) -> None:
        """Allocate a state slot if recurrent layers need one."""
        if self.state is None and self._pool.states is not None:
            self.state = self._pool.states.allocate()

    def pause(self, end: int) -> int:
        """Return `end`, or an earlier position at which a pass must end for a state snapshot."""
        return next((mark for mark in self._marks if self.length < mark < end), end)

    def reserve(self, end: int) -> bool:
        """Make positions `length` .. `end` writable by this sequence alone; False if blocks run out.

        Blocks reserved before that stay reserved.
        """
        pool, size = self._pool, self._pool.block_size
        first = self.length // size
        if first < len(self.blocks):
            block = pool.make_writable(self.blocks[first])
            if block is None:
                return False
            self.blocks[first] = block
        while len(self.blocks) * size < end:
            fresh = pool.allocate()
            if fresh is None:
                return False
            self.blocks.append(fresh)
        return True

    def fill(self, tokens: Sequence[int], length: int) -> None:
        """Note that the first `length` of `tokens` are computed; whole blocks can be shared from now on."""
        self.length = length
        size, index, states = self._pool.block_size, self._pool.index, self._pool.states
        if states is not None and self.state is not None and length in self._marks:
            states.snapshot(self.state, self._snapshots, length)
        while (self._indexed + 1) * size <= length:
            at = self._indexed * size
            self._node = index.insert(self._node, tuple(tokens[at : at + size]), self.blocks[self._indexed])
            self._indexed += 1
            self._hand_over(self._node, at)

    def _hand_over(self, node: Node, start: int) -> None:
        """Move the snapshots within a block, which begins at `start`, to its node, if the index still reaches it."""
        states = self._pool.states
        if not self._snapshots or not self._pool.index.reaches(node):
            return
        for length in [one for one in self._snapshots if one <= start + self._pool.block_size]:
            assert states is not None
            states.move(self._snapshots, length, node.states, length - start)

    @property
    def snapshots(self) -> dict[int, int]:
        """The slots of state snapshots by length: those of this table and those in the index."""
        found, node, end = dict(self._snapshots), self._node, self._indexed * self._pool.block_size
        while node.parent is not None:
            end -= self._pool.block_size
            found |= {end + at: slot for at, slot in node.states.items()}
            node = node.parent
        return found

    def branch(self) -> "BlockTable":
        """Return another table that shares all blocks."""
        other = BlockTable(self._pool)
        other.blocks, other.length = self.blocks[: self._pool.needed(self.length)], self.length
        other._node, other._indexed = self._node, self._indexed
        for block in other.blocks:
            self._pool.share(block)
        if self._pool.states is not None and self.state is not None:
            other.state = self._pool.states.branch(self.state)
        return other

    def truncate(self, length: int) -> None:
        """Discard the tokens from position `length` on; their blocks stay.

        Raises ValueError for positions that `fill` has shared.
        """
        if length < self._indexed * self._pool.block_size:
            raise ValueError(f"{self._indexed} whole blocks are others' too, {length} tokens are fewer")
        self.length = min(self.length, length)

    def release(self, tokens: Sequence[int] | None = None) -> None:
        """Free all blocks; given `tokens`, also keep the last, partly filled block for prefix reuse."""
        size, index = self._pool.block_size, self._pool.index
        at, node = self._indexed * size, self._node
        if tokens is not None and at < self.length:
            node = index.insert(node, tuple(tokens[at : self.length]), self.blocks[self._indexed])
        self._release_states(node, at, kept=tokens is not None)
        self._pool.release(reversed(self.blocks))
        self.blocks, self.length, self._node, self._indexed = [], 0, index.root, 0

    def _release_states(self, node: Node, at: int, kept: bool) -> None:
        states = self._pool.states
        if states is None:
            return
        if kept and at < self.length:
            self._hand_over(node, at)
        states.drop(self._snapshots)
        if self.state is not None and kept and self.length and self._pool.index.reaches(node):
            states.keep(self.state, node.states, self.length - at or self._pool.block_size)
        elif self.state is not None:
            states.release(self.state)
        self.state, self._marks = None, ()

    def discard(self) -> None:
        """Free all blocks and remove them from the index: their contents are wrong."""
        for block in self.blocks:
            self._pool.forget(block)
        self.release()
