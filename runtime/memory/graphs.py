"""Sizes of captured CUDA graphs: one per shape of a pass, all in one pool. The CUDA pass uses these limits."""

from collections.abc import Iterable, Sequence

# A pass is padded to one of these numbers of sequences, so that few graphs serve all numbers. A padding sequence costs
# next to nothing: up to 8 rows cost a product no more than one, and it has no keys.
SEQUENCE_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
MOST_ROWS = SEQUENCE_BUCKETS[-1]  # tokens of a captured pass, padding included
# Prompts are padded to one of these numbers of tokens.
TOKEN_BUCKETS = (8, 16, 32, 64, 128, 256)
# Longer ones have a pass of their own, for as long as starting its launches one by one takes longer than they run.
PROMPT_BUCKETS = (384, 512, 768, 1024)
PROMPT_ROWS = PROMPT_BUCKETS[-1]
MOST_GRAPHS = 40  # per cache, all that a warm-up captures: each holds memory; the least recently used one goes
DRAFT_ROWS = 8  # most tokens per sequence of a pass with drafts that is not padded like a prompt
# With drafts, several sequences are padded to one of these numbers of tokens. One is not padded.
DRAFT_BUCKETS = (2, 4, DRAFT_ROWS)
# Partial sums of a split-K product: at most as many bytes as its weight has, and a tile of each program of one wave.
PARTIAL_SUMS = 12 << 20


def padded_sequences(sequences: int) -> int | None:
    """Return the number of sequences to which a pass is padded, None if there are too many."""
    return next((count for count in SEQUENCE_BUCKETS if count >= sequences), None)


def padded_tokens(counts: Sequence[int], drafts: bool) -> tuple[int, bool] | None:
    """Return the new tokens per sequence to which a pass is padded, and whether sequences may have padding rows.

    None if there are too many. drafts: tokens are verified, rather than a prompt computed.
    """
    most = max(counts)
    if most == 1 or (drafts and len(counts) == 1 and most <= DRAFT_ROWS):
        return most, False
    buckets = (*(DRAFT_BUCKETS if drafts else ()), *TOKEN_BUCKETS, *PROMPT_BUCKETS)
    padded = next((count for count in buckets if count >= most), None)
    return None if padded is None else (padded, True)


def decode_shapes(sequences: int, drafted: bool) -> list[tuple[int, int]]:
    """Return the padded numbers of sequences and tokens of each of every captured decode pass, and of those of drafts.

    sequences: the most that run.
    """
    most = padded_sequences(sequences) or MOST_ROWS
    counts = [count for count in SEQUENCE_BUCKETS if count <= most]
    shapes = [(count, 1) for count in counts]
    if drafted:
        shapes += [(1, new) for new in range(2, DRAFT_ROWS + 1)]
        shapes += [(count, new) for new in DRAFT_BUCKETS for count in counts[1:] if count * new <= MOST_ROWS]
    return shapes


def draft_rows(sequences: int) -> int:
    """Return the most tokens, padding included, of a captured pass over drafts of up to this many sequences."""
    return min((padded_sequences(sequences) or MOST_ROWS) * DRAFT_ROWS, MOST_ROWS)


def graph_bytes(
    rows: Iterable[int], logits: int, activations: int, weights: Iterable[int], prompt_rows: int, hidden: int = 0
) -> int:
    """Return the bytes of graphs with these `rows`, of those of prompts, and of their pools.

    logits, activations, hidden: bytes per row, the last of hidden states that an MTP head reads; weights: bytes per
    launch, of which the largest has the largest partial sums; prompt_rows: of the longest captured prompt, which
    unpacks weights where the plain pass does.
    """
    # Each graph has its results. In the pool, as large as the widest pass needs, are activations, partial sums and
    # the logits of passes that also sample. Prompts have the logits of one row.
    graphs = list(rows)
    pool = max(max(graphs, default=0) * (activations + logits), TOKEN_BUCKETS[-1] * activations + logits)
    if prompt_rows > MOST_ROWS:  # in a pool of their own
        pool += prompt_rows * activations + len(PROMPT_BUCKETS) * logits
    results = (sum(graphs) + len(TOKEN_BUCKETS)) * logits + (sum(graphs) + sum(TOKEN_BUCKETS)) * hidden
    return results + pool + min(max(weights, default=0), PARTIAL_SUMS)
