"""Test which shapes of captured passes have graphs, and that every pass is padded to one of them."""

from mycli.runtime.memory.graphs import (
    DRAFT_ROWS,
    MOST_GRAPHS,
    TOKEN_BUCKETS,
    decode_shapes,
    padded_sequences,
    padded_tokens,
)


def test_captured_passes_are_padded_to_powers_of_two() -> None:
    for count in range(1, 257):
        power = 1 << (count - 1).bit_length()
        assert padded_sequences(count) == power
        assert padded_tokens((1, count), drafts=False) == (max(power, 8), True) or count == 1
    assert padded_sequences(257) is None and padded_tokens((1, 257), drafts=False) == (384, True)


def test_drafts_of_several_sequences_are_padded_to_few_shapes_that_all_have_graphs() -> None:
    counts = [(first, second) for first in range(1, DRAFT_ROWS + 1) for second in range(1, DRAFT_ROWS + 1)]
    padded = {padded_tokens(pair, drafts=True) for pair in counts}
    assert padded == {(1, False), (2, True), (4, True), (8, True)}
    assert [padded_tokens((count,), drafts=True) for count in (1, 3, 8, 9)] == [
        (1, False),
        (3, False),
        (8, False),
        (16, True),
    ]
    for sequences in (1, 5, 256):
        shapes = decode_shapes(sequences, True)
        assert len({*shapes}) == len(shapes) and max(rows * new for rows, new in shapes) <= 256
        assert len(shapes) + len(TOKEN_BUCKETS) <= MOST_GRAPHS
        assert set(decode_shapes(sequences, False)) <= set(shapes)
