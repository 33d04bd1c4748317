"""The block table of one sequence: cached prefix blocks, new blocks, and copy-on-write of shared ones."""

from collections.abc import Sequence
from dataclasses import replace

from mycli.runtime.cache.block_pool import BlockPool
from mycli.runtime.cache.prefix_index import Match, Node
from mycli.runtime.cache.state_pool import Snapshots
from mycli.runtime.cache.window_pool import NONE

_NO_BLOCK = "no free block to copy a shared block into"

# Snapshots of recurrent states are taken at multiples of this number of tokens. A sequence that resumes at one computes
# at most 64 tokens again, which takes one pass.
SNAPSHOT_STEP = 64


class BlockTable:
    """The blocks of a sequence in order; keys and values of its first `length` tokens are computed."""

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self.blocks: list[int] = []
        # Those of layers with a window, `NONE` where no later token sees them; empty where layers have the same blocks.
        self.window_blocks: list[int] = []
        self._passed = 0  # how many of these are `NONE`
        self.length = 0
        # The slot of the recurrent state; None before `allocate_state` and for models without such layers.
        self.state: int | None = None
        self._snapshots: Snapshots = {}  # by length, in the block that is not indexed yet
        self._snapshot_lengths: tuple[int, ...] = ()  # at which `fill` takes snapshots
        self._node = pool.index.root  # of the last indexed whole block
        self._indexed = 0  # number of indexed whole blocks

    def match(self, tokens: Sequence[int]) -> Match:
        """Fill this empty table with the cached prefix of `tokens`; return what was reused."""
        pool, match = self._pool, self._pool.index.match(tokens)
        for node in match.nodes:
            pool.share(node.block)
            self.blocks.append(node.block)
            self._node, self._indexed = node, self._indexed + 1
        self.length = len(match.nodes) * pool.block_size
        if pool.windows is not None:
            self._passed = pool.windows.first_seen(self.length)
            seen = match.nodes[self._passed :]
            self.window_blocks = [NONE] * self._passed + [pool.windows.share(node.window.block) for node in seen]
        if pool.states is not None:
            self._plan_snapshots(match.cached, len(tokens) - 1)
            if match.partial is not None and not pool.free and not pool.index.is_idle(match.partial[0].block):
                self.release()
                return replace(match, nodes=(), partial=None, miss=_NO_BLOCK)
            if match.state is not None:
                self.state = pool.states.resume(match.state)
        if match.partial is None:
            return match
        node, count = match.partial
        # An idle, partly filled block of which more than half matches is taken over instead of copied: what the index
        # loses is less than half a block.
        mostly = 2 * count > len(node.tokens) and len(node.tokens) < pool.block_size
        if pool.index.is_idle(node.block) and (mostly or not pool.free):
            pool.share(node.block)
            if pool.windows is not None:
                self.window_blocks.append(pool.windows.share(node.window.block))
            if pool.states is not None and count in node.states:
                pool.states.move(node.states, count, self._snapshots, self.length + count)
            pool.forget(node.block)
            self.blocks.append(node.block)
        elif not (pool.free and self._append_copy(node)):
            return replace(match, partial=None, miss=_NO_BLOCK)
        self.length += count
        return match

    def _plan_snapshots(self, cached: int, end: int) -> None:
        # Two snapshots per prompt: where it parts from a cached sequence (probably a shared system prompt), and before
        # its end (a chat continues there).
        step = min(SNAPSHOT_STEP, self._pool.block_size)
        self._snapshot_lengths = tuple(sorted({cached // step * step, end // step * step} - {0}))

    def allocate_state(self) -> None:
        """Allocate a slot for the recurrent state, if the model has one and the table none yet."""
        if self.state is None and self._pool.states is not None:
            self.state = self._pool.states.allocate()

    def chunk_end(self, end: int) -> int:
        """Return where the next pass must end: `end`, or earlier to take a snapshot."""
        return next((length for length in self._snapshot_lengths if self.length < length < end), end)

    def reserve(self, end: int) -> bool:
        """Make positions `length` .. `end` writable; False if blocks run out, those reserved so far stay reserved."""
        size = self._pool.block_size
        first = self.length // size
        if first < len(self.blocks) and not self._make_writable(first):
            return False
        while len(self.blocks) * size < end:
            if not self._append():
                return False
        return True

    def _make_writable(self, index: int) -> bool:
        pool, windows = self._pool, self._pool.windows
        if windows is not None:
            window = windows.make_writable(self.window_blocks[index])
            if window is None:
                return False
            self.window_blocks[index] = window
        block = pool.make_writable(self.blocks[index])
        if block is None:
            return False
        self.blocks[index] = block
        return True

    def _append_copy(self, node: Node) -> bool:
        """Append a copy of the blocks of `node`; False without a free block."""
        pool, windows = self._pool, self._pool.windows
        if windows is None:
            copied = self._append()
        else:
            source = windows.share(node.window.block)  # must not be evicted for its own copy
            copied = self._append()
            if copied:
                windows.copy(source, self.window_blocks[-1])
            windows.release([source])
        if copied:
            pool.copy(node.block, self.blocks[-1])
        return copied

    def _append(self) -> bool:
        """Append a fresh block; False if none is free."""
        pool, windows = self._pool, self._pool.windows
        window = NONE if windows is None else windows.allocate()
        block = None if window is None else pool.allocate()
        if block is None:
            if windows is not None and window is not None:
                windows.release([window])
            return False
        self.blocks.append(block)
        if windows is not None and window is not None:
            self.window_blocks.append(window)
        return True

    def fill(self, tokens: Sequence[int], length: int) -> None:
        """Record that the first `length` of `tokens` are computed, and index their whole blocks for reuse."""
        self.length = length
        size, index, states = self._pool.block_size, self._pool.index, self._pool.states
        if states is not None and self.state is not None and length in self._snapshot_lengths:
            states.snapshot(self.state, self._snapshots, length)
        while (self._indexed + 1) * size <= length:
            at = self._indexed * size
            self._node = index.insert(self._node, tuple(tokens[at : at + size]), self.blocks[self._indexed])
            self._remember_window(self._node, self._indexed)
            self._indexed += 1
            self._index_snapshots(self._node, at)
        self._release_passed()

    def _remember_window(self, node: Node, index: int) -> None:
        windows = self._pool.windows
        if windows is not None and self.window_blocks[index] != NONE:
            windows.remember(node.window, self.window_blocks[index])

    def _release_passed(self) -> None:
        windows = self._pool.windows
        while windows is not None and self._passed < windows.first_seen(self.length):
            windows.release([self.window_blocks[self._passed]])
            self.window_blocks[self._passed] = NONE
            self._passed += 1

    def _index_snapshots(self, node: Node, start: int) -> None:
        # Move the snapshots within the block at `start` to its node, unless that was evicted.
        states = self._pool.states
        if not self._snapshots or not self._pool.index.reaches(node):
            return
        for length in [length for length in self._snapshots if length <= start + self._pool.block_size]:
            assert states is not None
            states.move(self._snapshots, length, node.states, length - start)

    @property
    def snapshots(self) -> dict[int, int]:
        """Slots of all snapshots of this sequence, by number of tokens, including indexed ones."""
        slots, node, end = dict(self._snapshots), self._node, self._indexed * self._pool.block_size
        while node.parent is not None:
            end -= self._pool.block_size
            slots |= {end + at: slot for at, slot in node.states.items()}
            node = node.parent
        return slots

    def branch(self) -> "BlockTable":
        """Return a table that shares the blocks of this one; a block is copied when either table writes to it."""
        other = BlockTable(self._pool)
        other.blocks, other.length = self.blocks[: self._pool.blocks_for(self.length)], self.length
        other._node, other._indexed = self._node, self._indexed
        for block in other.blocks:
            self._pool.share(block)
        if self._pool.windows is not None:
            other.window_blocks, other._passed = self.window_blocks[: len(other.blocks)], self._passed
            for block in other.window_blocks[self._passed :]:
                self._pool.windows.share(block)
        if self._pool.states is not None and self.state is not None:
            other.state = self._pool.states.branch(self.state)
        return other

    def sibling(self) -> "BlockTable":
        """Return an empty table of the same pool, with a state of its own."""
        other = BlockTable(self._pool)
        other.allocate_state()
        return other

    def truncate(self, length: int) -> None:
        """Discard the tokens from `length` on, not their blocks. Raises ValueError if they are in an indexed block."""
        if length < self._indexed * self._pool.block_size:
            raise ValueError(f"cannot truncate to {length} tokens: {self._indexed} whole blocks are indexed")
        self.length = min(self.length, length)

    def release(self, tokens: Sequence[int] | None = None) -> None:
        """Release all blocks. With `tokens`, also index the last, partly filled block for reuse."""
        size, index = self._pool.block_size, self._pool.index
        at, node = self._indexed * size, self._node
        if tokens is not None and at < self.length:
            node = index.insert(node, tuple(tokens[at : self.length]), self.blocks[self._indexed])
            if len(node.tokens) == self.length - at:
                self._remember_window(node, self._indexed)
        self._release_states(node, at, reusable=tokens is not None)
        if self._pool.windows is not None:
            self._pool.windows.release(reversed(self.window_blocks[self._passed :]))
        self._pool.release(reversed(self.blocks))
        self.blocks, self.length, self._node, self._indexed = [], 0, index.root, 0
        self.window_blocks, self._passed = [], 0

    def _release_states(self, node: Node, at: int, reusable: bool) -> None:
        # Release the state, or with `reusable` store it as a snapshot in `node`, whose block starts at `at`.
        states = self._pool.states
        if states is None:
            return
        if reusable and at < self.length:
            self._index_snapshots(node, at)
        states.drop(self._snapshots)
        if self.state is not None and reusable and self.length and self._pool.index.reaches(node):
            states.convert(self.state, node.states, self.length - at or self._pool.block_size)
        elif self.state is not None:
            states.release(self.state)
        self.state, self._snapshot_lengths = None, ()

    def discard(self) -> None:
        """Release all blocks and remove them from the index, since their contents may be wrong."""
        for block in self.blocks:
            self._pool.forget(block)
        self.release()
