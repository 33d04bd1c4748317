"""Test the blocks of layers with a sliding window, by what a cache would hold after every operation."""

import random

import pytest

from mycli.runtime.cache.block_pool import BlockPool
from mycli.runtime.cache.block_table import BlockTable
from mycli.runtime.cache.prefix_index import PrefixIndex
from mycli.runtime.cache.window_pool import NONE, WindowBlock, WindowPool

Cell = tuple[int, ...] | None  # all tokens up to the one whose key a position holds


class Cache:
    """A pool of blocks, and which key each position of each block holds."""

    def __init__(self, blocks: int, windows: int, window: int, size: int) -> None:
        self.size, self.window = size, window
        self.windows = WindowPool(windows, window, size)
        self.pool = BlockPool(blocks, PrefixIndex(size, windows=self.windows))
        self.cells: dict[bool, list[list[Cell]]] = {
            False: [[None] * size for _ in range(blocks)],
            True: [[None] * size for _ in range(windows)],
        }

    def copy(self) -> None:
        for pool, windowed in ((self.pool, False), (self.windows, True)):
            for source, target in pool.take_copies():
                self.cells[windowed][target] = list(self.cells[windowed][source])

    def compute(self, table: BlockTable, tokens: list[int], end: int) -> bool:
        """Compute the keys of `tokens` up to `end`; False if blocks run out. Fails if a visible key is missing."""
        if not table.reserve(end):
            return False
        self.copy()
        for at in range(table.length, end):
            for windowed, blocks in ((False, table.blocks), (True, table.window_blocks)):
                self.cells[windowed][blocks[at // self.size]][at % self.size] = tuple(tokens[: at + 1])
        for at in range(table.length, end):
            for windowed, blocks in ((False, table.blocks), (True, table.window_blocks)):
                first = max(0, at - self.window + 1) if windowed else 0
                for seen in range(first, at + 1):
                    block = blocks[seen // self.size]
                    assert block != NONE, "a visible block was passed on"
                    assert self.cells[windowed][block][seen % self.size] == tuple(tokens[: seen + 1])
        table.fill(tokens, end)
        return True


@pytest.mark.parametrize("seed", range(60))
def test_a_token_sees_the_keys_of_its_window(seed: int) -> None:
    chance = random.Random(seed)
    size, window, running, chunk = chance.choice((1, 3, 4)), chance.choice((1, 2, 5, 9)), 3, 6
    each = -(-(window + chunk) // size) + 2
    cache = Cache(chance.choice((24, 60)), running * each + chance.choice((0, 0, 8)), window, size)
    alike = [chance.randrange(3) for _ in range(12)]
    tables: list[tuple[BlockTable, list[int]]] = []
    hits = 0
    for _ in range(120):
        if len(tables) < running and chance.random() < 0.4:
            tokens = [*alike[: chance.choice((0, 5, 12))], *(chance.randrange(3) for _ in range(chance.randint(1, 9)))]
            table = BlockTable(cache.pool)
            match = table.match(tokens)
            assert table.length == match.tokens < len(tokens)
            hits += match.tokens
            tables.append((table, tokens))
        elif tables and len(tables) < running and chance.random() < 0.2:
            table, tokens = chance.choice(tables)
            tables.append((table.branch(), tokens[: table.length] + [chance.randrange(3)]))
        if not tables:
            continue
        table, tokens = place = chance.choice(tables)
        if table.length == len(tokens):
            tokens.append(chance.randrange(3))
        full = not cache.compute(table, tokens, min(table.length + chunk, len(tokens)))
        if full:
            assert cache.pool.available < -(-len(tokens) // size), "a block of the window was missing"
        if full or chance.random() < 0.15:
            tables.remove(place)
            if chance.random() < 0.2:
                table.discard()
            else:
                table.release(tokens)
    assert hits
    for table, tokens in tables:
        table.release(tokens)
    assert cache.windows.available == len(cache.cells[True]) and not cache.pool.used
    cache.pool.clear()
    assert not cache.windows._nodes and len(cache.windows._free) == len(cache.cells[True])


def test_a_prefix_ends_where_the_window_is_cached() -> None:
    cache = Cache(20, 6, 4, 2)
    first, tokens = BlockTable(cache.pool), list(range(13))
    assert cache.compute(first, tokens, 12)
    assert first.window_blocks == [NONE] * 4 + first.window_blocks[4:]  # the token at 12 sees 9 to 12
    first.release(tokens)
    again = BlockTable(cache.pool)
    assert again.match(tokens).tokens == 12  # blocks 5 and 6 are cached
    again.release(tokens)
    taken = [cache.windows.allocate() for _ in range(4)]  # evicts those that were passed on first
    assert None not in taken
    short = BlockTable(cache.pool)
    match = short.match(list(range(9)))
    assert not match.tokens and match.cached == 8
    assert match.miss == "a block of the sliding window was evicted (from token 1)"
    assert BlockTable(cache.pool).match(tokens).tokens == 12


def test_a_block_is_not_released_twice() -> None:
    pool = WindowPool(2, 4, 2)
    block = pool.allocate()
    assert block is not None
    pool.release([block])
    with pytest.raises(ValueError, match="block 0 is released more often than it was shared"):
        pool.release([block])


def test_a_node_has_one_block() -> None:
    pool, first, second = WindowPool(3, 4, 2), WindowBlock(), WindowBlock()
    pool.remember(first, pool.share(0))
    pool.remember(first, pool.share(1))
    pool.remember(second, 0)
    assert (first.block, second.block) == (0, NONE)
