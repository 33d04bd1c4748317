"""The prefix cache: a trie that finds cached blocks by their tokens.

A node is a block with its tokens; its children are the blocks that followed it. The last block of a sequence may be
partly filled. Policy: idle blocks are evicted least recently used first, with their descendants.
"""

import hashlib
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice

from mycli.runtime.cache.state_pool import Snapshots, StatePool
from mycli.runtime.cache.window_pool import NONE, WindowBlock, WindowPool

# Where sequences part within a block, only this number of the latest children is compared: bounds a lookup when
# thousands of prompts share a system prompt.
MAX_COMPARED = 32
PIECE = 64  # tokens per file of the disk prefix cache
MAX_EVICTED = 1 << 14  # hashes of evicted blocks, so that a miss is reported as "evicted", not "differs"


@dataclass(eq=False)
class Node:
    """A block with keys and values of `tokens`, which follow the tokens of its parent; the root has no block."""

    block: int
    tokens: tuple[int, ...]
    parent: "Node | None"
    key: int  # hash of all tokens from the start of the sequence
    children: dict[tuple[int, ...], "Node"] = field(default_factory=dict)
    states: Snapshots = field(default_factory=dict)  # by number of tokens of this block
    window: WindowBlock = field(default_factory=WindowBlock)  # its block in layers with a window


@dataclass(frozen=True)
class Match:
    """The cached prefix of a prompt: whole blocks, then optionally the first `partial[1]` tokens of `partial[0]`."""

    nodes: tuple[Node, ...]
    partial: tuple[Node, int] | None
    miss: str  # why it is not longer; "" if everything usable is cached
    cached: int  # tokens with cached keys and values; more than `tokens` if no snapshot follows them
    state: int | None = None  # slot of the snapshot of the recurrent state

    @property
    def tokens(self) -> int:
        return sum(len(node.tokens) for node in self.nodes) + (0 if self.partial is None else self.partial[1])


@dataclass(frozen=True)
class StoredPiece:
    """Piece `index` of a token sequence, with the digest that names its file and its tokens as int64 bytes."""

    index: int
    name: bytes
    tokens: bytes
    # Nanoseconds since 1970. Earlier pieces of a sequence count as used later, so they are evicted last: the others
    # cannot be used without them.
    used: int = 0

    @property
    def state(self) -> "StoredPiece":
        """The file of the recurrent state after this piece."""
        return replace(self, name=hashlib.sha256(self.name + b"state").digest())


@dataclass(frozen=True)
class StoredPrefix:
    """The leading pieces of a prompt that are stored, and why there are no more."""

    pieces: tuple[StoredPiece, ...] = ()
    miss: str = ""


def common_prefix_length(first: Sequence[int], second: Sequence[int]) -> int:
    for count, (left, right) in enumerate(zip(first, second, strict=False)):
        if left != right:
            return count
    return min(len(first), len(second))


class PrefixIndex:
    """The trie of cached blocks. `states`: for recurrent models; `windows`: for blocks of layers with a window."""

    def __init__(self, block_size: int, states: StatePool | None = None, windows: WindowPool | None = None) -> None:
        self.block_size = block_size
        self.states, self.windows = states, windows
        self.root = Node(-1, (), None, 0)
        self.nodes: dict[int, Node] = {}  # by block
        self._idle: OrderedDict[int, None] = OrderedDict()  # blocks, least recently used first
        self._evicted: OrderedDict[int, None] = OrderedDict()  # keys

    def __contains__(self, block: int) -> bool:
        return block in self.nodes

    @property
    def idle(self) -> int:
        return len(self._idle)

    def is_idle(self, block: int) -> bool:
        return block in self._idle

    def match(self, tokens: Sequence[int]) -> Match:
        """Return the longest cached prefix of `tokens`, without the last token."""
        # The last token is always computed: sampling needs its logits.
        usable, size = len(tokens) - 1, self.block_size
        node, nodes, at = self.root, list[Node](), 0
        # Children are keyed by their tokens, not by a hash, so a collision cannot return another sequence's block.
        while at + size <= usable and (child := node.children.get(tuple(tokens[at : at + size]))) is not None:
            node, at = child, at + size
            nodes.append(child)
        best, count = None, 0
        rest = tuple(tokens[at : min(at + size, usable)])
        for child in self._latest_children(node):
            if (length := common_prefix_length(child.tokens, rest)) > count:
                best, count = child, length
        partial = None if best is None else (best, count)
        miss = self._miss(tokens, node, at, count, usable)
        match = Match(tuple(nodes), partial, miss, at + count)
        if self.windows is not None:
            return self._up_to_window(match, self.windows)
        return match if self.states is None else self._up_to_snapshot(match, rest)

    def _up_to_window(self, match: Match, windows: WindowPool) -> Match:
        # `match`, cut after the last whole block whose next token sees only cached blocks in layers with a window.
        usable = first = 0  # the window blocks first .. count are cached
        for count, node in enumerate(match.nodes, 1):
            if node.window.block == NONE:
                first = count
            if first <= windows.first_seen(count * self.block_size):
                usable = count
        partial = match.partial if usable == len(match.nodes) else None
        if partial is not None and partial[0].window.block == NONE:
            partial = None
        short = replace(match, nodes=match.nodes[:usable], partial=partial)
        if short.tokens == match.cached:
            return match
        return replace(short, miss=f"a block of the sliding window was evicted (from token {short.tokens + 1})")

    def _up_to_snapshot(self, match: Match, rest: tuple[int, ...]) -> Match:
        # `match`, cut at its last snapshot; `rest`: the tokens after its whole blocks.
        nodes, size = list(match.nodes), self.block_size
        ends = [
            (count, child)
            for child in self._latest_children(nodes[-1] if nodes else self.root)
            for reach in [common_prefix_length(child.tokens, rest)]
            for count in child.states
            if count <= reach
        ]
        while not ends and nodes:
            last = nodes.pop()
            ends = [(count, last) for count in last.states]
        if not ends:
            miss = "no snapshot of the recurrent state" if match.cached else match.miss
            return Match((), None, miss, match.cached)
        count, node = max(ends, key=lambda end: end[0])
        tokens = len(nodes) * size + count
        miss = (
            match.miss
            if tokens == match.cached
            else f"no later snapshot of the recurrent state (from token {tokens + 1})"
        )
        if count < size:
            return Match(tuple(nodes), (node, count), miss, match.cached, node.states[count])
        return Match((*nodes, node), None, miss, match.cached, node.states[count])

    def _latest_children(self, node: Node) -> Iterator[Node]:
        return islice(reversed(node.children.values()), MAX_COMPARED)

    def _miss(self, tokens: Sequence[int], node: Node, at: int, count: int, usable: int) -> str:
        # The text before " (" is a metric label, so it must not contain numbers.
        if at + count >= usable:
            return ""
        if hash((node.key, tuple(tokens[at : at + self.block_size]))) in self._evicted:
            return f"evicted (from token {at + count + 1})"
        if not self.nodes:
            return "the prefix cache is empty"
        if at + count == 0:
            return "no cached sequence has the same first token"
        return f"differs from all cached sequences (from token {at + count + 1})"

    def insert(self, parent: Node, tokens: tuple[int, ...], block: int) -> Node:
        """Record that `block` holds `tokens` after those of `parent`; return their node, possibly of another block."""
        cached = parent.children.get(tokens)
        if cached is not None:
            return cached
        # A partly filled block adds nothing if a block that starts with the same tokens is cached.
        if len(tokens) < self.block_size:
            for other in self._latest_children(parent):
                if common_prefix_length(other.tokens, tokens) == len(tokens):
                    return other
        node = Node(block, tokens, parent, hash((parent.key, tokens)))
        parent.children[tokens] = node
        self.nodes[block] = node
        return node

    def reaches(self, node: Node) -> bool:
        """Return whether `node` is still in the trie, from which it may have been evicted."""
        while node.parent is not None:
            node = node.parent
        return node is self.root

    def mark_used(self, block: int) -> None:
        self._idle.pop(block, None)

    def mark_idle(self, block: int) -> None:
        self._idle[block] = None

    def evict(self) -> list[int]:
        """Evict the least recently used idle block and its descendants; return the blocks that are free now."""
        block = next(iter(self._idle), None)
        if block is None:
            return []
        self._evicted[self.nodes[block].key] = None
        while len(self._evicted) > MAX_EVICTED:
            self._evicted.popitem(last=False)
        return self.remove(block)

    def remove(self, block: int) -> list[int]:
        """Remove a block and its descendants from the trie; return those that were idle, which are free now."""
        node = self.nodes[block]
        if node.parent is not None:
            del node.parent.children[node.tokens]
        freed, removing = [], [node]
        while removing:
            node = removing.pop()
            removing += node.children.values()
            node.children.clear()
            node.parent = None
            del self.nodes[node.block]
            if self.states is not None:
                self.states.drop(node.states)
            if self.windows is not None:
                self.windows.forget(node.window.block)
            if node.block in self._idle:
                del self._idle[node.block]
                freed.append(node.block)
        return freed
