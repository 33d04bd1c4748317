"""The prefix cache: a trie of blocks by their tokens, with LRU eviction.

A node is a block with its tokens; its children are the blocks that followed the same prefix. A child is found by the
hash of its tokens and compared token by token, so a collision cannot return another prefix. The last block of a
sequence may be partly filled. Plain Python over block numbers and tokens.
"""

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice

from mycli.runtime.cache.state_pool import Holder, StatePool

COMPARED = 32  # of the texts that part within a block: the latest of them are looked at
REMEMBERED = 1 << 14  # forgotten blocks whose texts are told apart from texts that never were


@dataclass(eq=False)
class Node:
    """A block with the keys and values of `tokens`, after the prefix of its parent. The root has no block.

    states: slots of recurrent states by number of its tokens.
    """

    block: int
    tokens: tuple[int, ...]
    parent: "Node | None"
    key: int  # hash of the whole text up to here
    children: dict[tuple[int, ...], "Node"] = field(default_factory=dict)
    states: Holder = field(default_factory=dict)


@dataclass(frozen=True)
class Match:
    """The cached prefix of a sequence: whole blocks, then maybe the first `partial[1]` tokens of the node `partial[0]`.

    miss: why it is not longer, "" if it is complete. known: cached tokens, including those after the last recurrent
    state; state: slot of the state after the prefix, None without recurrent layers.
    """

    nodes: tuple[Node, ...]
    partial: tuple[Node, int] | None
    tokens: int
    miss: str
    known: int = 0
    state: int | None = None


def shared(first: Sequence[int], second: Sequence[int]) -> int:
    """Return the length of the common prefix."""
    for count, (one, other) in enumerate(zip(first, second, strict=False)):
        if one != other:
            return count
    return min(len(first), len(second))


class PrefixIndex:
    """The trie and its idle blocks, at most `limit` of them.

    states: for models with recurrent layers, whose prefixes are usable only up to a state.
    """

    def __init__(self, block_size: int, limit: int | None = None, states: StatePool | None = None) -> None:
        self.block_size = block_size
        self.limit = limit
        self.states = states
        self.root = Node(-1, (), None, 0)
        self.nodes: dict[int, Node] = {}  # by block
        self._idle: OrderedDict[int, None] = OrderedDict()  # blocks, the least recently used first
        self._evicted: OrderedDict[int, None] = OrderedDict()  # keys

    def __contains__(self, block: int) -> bool:
        return block in self.nodes

    @property
    def idle(self) -> int:
        return len(self._idle)

    def is_idle(self, block: int) -> bool:
        return block in self._idle

    def match(self, tokens: Sequence[int]) -> Match:
        """Return the longest cached prefix of `tokens`, without the last one, which is computed for its logits."""
        usable, size = len(tokens) - 1, self.block_size
        node, nodes, at = self.root, list[Node](), 0
        while at + size <= usable and (child := node.children.get(tuple(tokens[at : at + size]))) is not None:
            node, at = child, at + size
            nodes.append(child)
        best, count = None, 0
        rest = tuple(tokens[at : min(at + size, usable)])
        for child in self._latest(node):
            if (found := shared(child.tokens, rest)) > count:
                best, count = child, found
        partial = None if best is None else (best, count)
        miss = self._miss(tokens, node, at, count, usable)
        match = Match(tuple(nodes), partial, at + count, miss, at + count)
        return match if self.states is None else self._resumable(match, rest)

    def _resumable(self, found: Match, rest: tuple[int, ...]) -> Match:
        """Shorten a match to where a recurrent state is stored; `rest`: the tokens after its whole blocks."""
        nodes, size = list(found.nodes), self.block_size
        ends = [
            (count, child)
            for child in self._latest(nodes[-1] if nodes else self.root)
            for reach in [shared(child.tokens, rest)]
            for count in child.states
            if count <= reach
        ]
        while not ends and nodes:
            last = nodes.pop()
            ends = [(count, last) for count in last.states]
        if not ends:
            miss = "recurrent state not kept" if found.known else found.miss
            return Match((), None, 0, miss, found.known)
        count, node = max(ends, key=lambda end: end[0])
        tokens = len(nodes) * size + count
        miss = found.miss if tokens == found.known else f"recurrent state not kept from token {tokens + 1} on"
        if count < size:
            return Match(tuple(nodes), (node, count), tokens, miss, found.known, node.states[count])
        return Match((*nodes, node), None, tokens, miss, found.known, node.states[count])

    def _latest(self, node: Node) -> Iterator[Node]:
        return islice(reversed(node.children.values()), COMPARED)

    def _miss(self, tokens: Sequence[int], node: Node, at: int, count: int, usable: int) -> str:
        if at + count >= usable:
            return ""
        if hash((node.key, tuple(tokens[at : at + self.block_size]))) in self._evicted:
            return f"evicted from token {at + count + 1} on"
        if not self.nodes:
            return "nothing is kept yet"
        if at + count == 0:
            return "no text began like this"
        return f"first difference at token {at + count + 1}"

    def insert(self, parent: Node, tokens: tuple[int, ...], block: int) -> Node:
        """Add `block` with `tokens` after `parent` and return its node, or that of another block with the same tokens.

        A partly filled block is not added if a longer one is known.
        """
        known = parent.children.get(tokens)
        if known is not None:
            return known
        if len(tokens) < self.block_size:
            for other in self._latest(parent):
                if shared(other.tokens, tokens) == len(tokens):
                    return other
        node = Node(block, tokens, parent, hash((parent.key, tokens)))
        parent.children[tokens] = node
        self.nodes[block] = node
        return node

    def reaches(self, node: Node) -> bool:
        """Return whether the index can find `node`: it may have been evicted while a sequence was there."""
        while node.parent is not None:
            node = node.parent
        return node is self.root

    def take(self, block: int) -> None:
        """Mark a block as used."""
        self._idle.pop(block, None)

    def leave(self, block: int) -> list[int]:
        """Mark a block as idle; return the blocks evicted to stay within the limit."""
        self._idle[block] = None
        forgotten: list[int] = []
        while self.limit is not None and len(self._idle) > self.limit:
            forgotten += self.evict()
        return forgotten

    def evict(self) -> list[int]:
        """Evict the least recently used idle block and those that continue it; return the freed blocks."""
        block = next(iter(self._idle), None)
        if block is None:
            return []
        self._evicted[self.nodes[block].key] = None
        while len(self._evicted) > REMEMBERED:
            self._evicted.popitem(last=False)
        return self.forget(block)

    def forget(self, block: int) -> list[int]:
        """Remove a block and those that continue it; return those that were idle."""
        node = self.nodes[block]
        if node.parent is not None:
            del node.parent.children[node.tokens]
        freed, waiting = [], [node]
        while waiting:
            one = waiting.pop()
            waiting += one.children.values()
            one.children.clear()
            one.parent = None
            del self.nodes[one.block]
            if self.states is not None:
                self.states.drop(one.states)
            if one.block in self._idle:
                del self._idle[one.block]
                freed.append(one.block)
        return freed
