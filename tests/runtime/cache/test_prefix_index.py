"""Test prefix index and block tables: matches, reasons for misses, eviction and block sharing.

tests/runtime/engine/test_scheduler.py tests scheduler and pool together on random histories.
"""

import pytest

from mycli.runtime.cache.block_pool import BlockPool
from mycli.runtime.cache.block_table import BlockTable
from mycli.runtime.cache.prefix_index import PrefixIndex, common_prefix_length
from mycli.runtime.cache.state_pool import StatePool

TEXT = list(range(10, 21))  # eleven tokens: two blocks of four, and three tokens


def pool(blocks: int = 9) -> BlockPool:
    return BlockPool(blocks, PrefixIndex(4))


def written(pool: BlockPool, text: list[int]) -> BlockTable:
    table = BlockTable(pool)
    table.match(text)
    assert table.reserve(len(text))
    table.fill(text, len(text))
    return table


def test_a_text_is_found_token_by_token_but_for_its_last() -> None:
    mine = pool()
    written(mine, TEXT).release(TEXT)
    for count, expected in ((11, 10), (12, 11), (9, 8), (8, 7), (5, 4), (4, 3), (1, 0)):
        text = [*TEXT, 99][:count]
        match = mine.index.match(text)
        assert (match.tokens, match.miss) == (expected, ""), count
        assert len(match.nodes) == expected // 4, "whole blocks are shared, not copied"


@pytest.mark.parametrize(
    ("text", "tokens", "miss"),
    [
        ([*TEXT[:6], 7, 7, 7], 6, "differs from all cached sequences (from token 7)"),
        ([7, *TEXT], 0, "no cached sequence has the same first token"),
        ([*TEXT, 7, 7], 11, "differs from all cached sequences (from token 12)"),
    ],
    ids=["within", "nothing", "beyond"],
)
def test_a_miss_says_why(text: list[int], tokens: int, miss: str) -> None:
    mine = pool()
    assert mine.index.match(text).miss == "the prefix cache is empty"
    written(mine, TEXT).release(TEXT)
    match = mine.index.match(text)
    assert (match.tokens, match.miss) == (tokens, miss)


def test_what_was_forgotten_is_told_from_what_never_was() -> None:
    mine = pool(3)
    written(mine, TEXT).release(TEXT)
    written(mine, [1] * 8).release([1] * 8)
    assert mine.index.match(TEXT).miss == "evicted (from token 5)"
    assert mine.index.match([3] * 9).miss == "no cached sequence has the same first token"


def test_the_end_of_a_text_is_forgotten_before_its_beginning() -> None:
    mine = pool(4)
    written(mine, TEXT).release(TEXT)
    written(mine, [1, 2]).release([1, 2])  # the free block
    written(mine, [3, 4]).release([3, 4])
    assert mine.index.match(TEXT).tokens == 8, "the last block went"


def test_equal_hashes_are_told_apart_by_their_tokens() -> None:
    """G34: children are compared token by token; hashes only explain why something is missing."""

    class Same(tuple):  # type: ignore[type-arg]  # of tokens
        def __hash__(self) -> int:
            return 0

    mine = pool()
    index = mine.index
    blocks = [mine.allocate() for _ in range(2)]
    first, second = Same((1, 2, 3, 4)), Same((4, 3, 2, 1))
    assert hash(first) == hash(second) and None not in blocks
    for tokens, block in zip((first, second), blocks, strict=True):
        assert block is not None
        index.insert(index.root, tokens, block)
    indexed = {tokens: node.block for tokens, node in index.root.children.items()}
    assert [indexed[first], indexed[second]] == blocks


def test_a_block_that_others_share_is_copied_before_it_is_written() -> None:
    mine = pool()
    first = written(mine, TEXT)
    second = first.branch()
    assert second.blocks == first.blocks and mine.used == 3
    assert second.reserve(12)
    assert second.blocks[:2] == first.blocks[:2] and second.blocks[2] != first.blocks[2]
    assert mine.take_copies() == [(first.blocks[2], second.blocks[2])] and mine.take_copies() == []
    assert first.reserve(12) and mine.take_copies() == [], "the first is alone with its own now"
    second.release([*TEXT, 1])
    first.release()
    assert mine.used == 0


@pytest.mark.parametrize(("shared", "copied"), [(1, True), (2, False)])
def test_an_idle_block_is_copied_unless_more_than_half_matches(shared: int, copied: bool) -> None:
    mine, text = pool(), TEXT[: 8 + 2]
    written(mine, text).release(text)
    table = BlockTable(mine)
    assert table.match([*text[: 8 + shared], 99, 99]).tokens == 8 + shared
    assert bool(mine.take_copies()) == copied and mine.index.match([*text, 99]).tokens == (10 if copied else 8)


def test_a_full_block_is_copied_though_most_of_it_matches() -> None:
    mine, text = pool(), TEXT[:8]
    written(mine, text).release(text)
    table = BlockTable(mine)
    assert table.match([*text[:7], 99, 99]).tokens == 7
    assert mine.take_copies() and mine.index.match([*text, 99]).tokens == 8


def test_a_prompt_continues_at_its_last_snapshot() -> None:
    index = PrefixIndex(4, StatePool(4))
    first = index.insert(index.root, (1, 2, 3, 4), 0)
    last = index.insert(first, (5, 6, 7, 8), 1)
    first.states |= {2: 0, 4: 1}
    last.states |= {1: 2, 2: 3}
    for tokens, reached, state in (((1, 2, 3, 4, 5, 6, 9), 6, 3), ((1, 2, 3, 4, 5, 9), 5, 2), ((1, 2, 3, 9), 2, 0)):
        match = index.match([*tokens, 9])
        assert (match.tokens, match.state) == (reached, state)
    assert index.match([1, 2, 3, 4, 9]).tokens == 4 and index.match([1, 9, 9]).tokens == 0


def test_a_branch_starts_with_a_copy_of_the_recurrent_state() -> None:
    states = StatePool(2)
    first = BlockTable(BlockPool(9, PrefixIndex(4, states=states)))
    assert first.branch().state is None
    first.allocate_state()
    second = first.branch()
    assert (first.state, second.state) == (0, 1) and states.take_copies() == [(0, 1)]


def test_a_fork_that_finds_no_block_says_so_and_keeps_what_it_has() -> None:
    mine = pool(3)
    first = written(mine, TEXT)
    second = first.branch()
    assert not second.reserve(12) and second.blocks == first.blocks
    first.release()
    assert second.reserve(12) and mine.take_copies() == []


def test_what_is_wrong_is_found_by_nobody() -> None:
    mine = pool()
    table = written(mine, TEXT)
    table.discard()
    assert mine.index.match(TEXT).miss == "the prefix cache is empty" and mine.free == mine.blocks


def test_what_others_rely_on_is_not_cut() -> None:
    table = written(pool(), TEXT)
    for length in (9, 8):
        table.truncate(length)
        assert table.length == length
    with pytest.raises(ValueError, match="2 whole blocks"):
        table.truncate(7)


def test_a_block_is_released_by_its_owners_only() -> None:
    mine = pool()
    block = mine.allocate()
    assert block is not None
    mine.release([block])
    with pytest.raises(ValueError, match="released more often than it was shared"):
        mine.release([block])


def test_beginnings() -> None:
    assert [
        common_prefix_length([1, 2], [1, 2, 3]),
        common_prefix_length([1, 2], [2]),
        common_prefix_length([], [1]),
    ] == [2, 0, 0]


def recurrent(blocks: int = 9, slots: int = 6) -> BlockPool:
    return BlockPool(blocks, PrefixIndex(4, states=StatePool(slots)))


def states_of(pool: BlockPool) -> StatePool:
    assert pool.states is not None
    return pool.states


def computed(pool: BlockPool, text: list[int]) -> tuple[BlockTable, list[int]]:
    """Compute a text with a recurrent state; return its table, and the number of tokens after each pass."""
    table, ends = BlockTable(pool), list[int]()
    table.match(text)
    table.allocate_state()
    while table.length < len(text):
        ends.append(table.chunk_end(len(text)))
        assert table.reserve(ends[-1])
        table.fill(text, ends[-1])
    return table, ends


def test_a_state_is_stored_before_the_end_of_a_prompt_and_resumed_there() -> None:
    mine = recurrent()
    table, ends = computed(mine, TEXT)
    assert ends == [8, 11] and table.snapshots == {8: 1} and states_of(mine).take_copies() == [(0, 1)]
    second = BlockTable(mine)
    match = second.match([*TEXT[:8], 99, 99])
    assert (match.tokens, match.cached, match.miss) == (8, 8, "differs from all cached sequences (from token 9)")
    assert second.state == 2 and states_of(mine).take_copies() == [(1, 2)], "the snapshot stays"
    second.release()
    table.release(TEXT)
    assert states_of(mine).num_snapshots == 2 and mine.index.match([*TEXT, 99]).tokens == 11, (
        "and at the end of the reply"
    )
    assert mine.index.match([*TEXT[:10], 99]).miss == "no later snapshot of the recurrent state (from token 9)"


def test_a_state_is_stored_where_a_prompt_leaves_a_cached_one() -> None:
    mine = recurrent()
    first, _ = computed(mine, TEXT)
    first.release(TEXT)
    other = [*TEXT[:6], 7, 7, 7, 7, 7]
    match = mine.index.match(other)
    assert (match.tokens, match.cached, match.miss) == (0, 6, "no snapshot of the recurrent state")
    table, ends = computed(mine, other)
    assert ends == [4, 8, 11] and set(table.snapshots) == {4, 8}
    table.release(other)
    third = [*TEXT[:6], 5, 5, 5]
    match = mine.index.match(third)
    assert (match.tokens, match.cached) == (4, 6)
    assert match.miss == "no later snapshot of the recurrent state (from token 5)"
    assert computed(mine, third)[1] == [8, 9]


def test_a_reply_that_ends_with_a_block_is_resumed_after_it() -> None:
    mine = recurrent()
    table, _ = computed(mine, TEXT[:8])
    table.release(TEXT[:8])
    assert mine.index.match([*TEXT[:8], 99]).tokens == 8
    again = BlockTable(mine)
    assert again.match([*TEXT[:8], 99]).tokens == 8 and again.blocks == [0, 1] and again.length == 8


def test_states_of_a_sequence_that_is_not_kept_are_free_again() -> None:
    mine = recurrent()
    for end in (lambda table: table.release(), lambda table: table.discard()):
        table, _ = computed(mine, TEXT)
        end(table)
        assert table.state is None and mine.used == 0
        mine.clear()
        assert states_of(mine).free == states_of(mine).slots and mine.free == mine.blocks


def test_a_snapshot_of_a_block_that_is_not_reused_is_dropped() -> None:
    """The snapshot would be found under the block before it, which ends after fewer tokens."""
    mine, text = BlockPool(9, PrefixIndex(128, states=StatePool(3))), list(range(200))
    table, ends = computed(mine, text)
    assert ends == [192, 200] and set(table.snapshots) == {192}
    table.release()
    assert states_of(mine).free == 3
    match = mine.index.match(text)
    assert (match.tokens, match.cached, match.state) == (0, 128, None)


def test_a_state_within_a_block_that_cannot_be_copied_is_not_resumed() -> None:
    mine = recurrent(blocks=3)
    first, _ = computed(mine, TEXT[:10])
    first.release(TEXT[:10])
    running, ends = computed(mine, [*TEXT, 1])
    assert ends == [12] and set(running.snapshots) == {8, 10}, "resumed at 10 in the same block"
    used = states_of(mine).free
    table = BlockTable(mine)
    match = table.match([*TEXT[:10], 99, 99])
    assert (match.tokens, match.miss) == (0, "no free block to copy a shared block into")
    assert table.blocks == [] and table.length == 0 and table.state is None and states_of(mine).free == used
    running.release([*TEXT, 1])
    assert table.match([*TEXT[:10], 99, 99]).tokens == 10, "of an idle block the memory is taken"
