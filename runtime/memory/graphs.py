"""What captured passes hold on a GPU: the logits that each of them leaves, and the memory that all work in.

The numbers of `runtime.engine.cuda_graph`, which captures a pass for each number of sequences and of new tokens that it
meets. All graphs share one pool, which is as large as the widest pass needs; results lie apart, one for each graph.
Knows sizes alone; does not import torch.
"""

from collections.abc import Iterable

MOST_ROWS = 64  # of a pass that is captured: tokens of all sequences; up to 8 cost a product no more than one
MOST_GRAPHS = 16  # of one cache: each holds memory
DRAFTED = 8  # tokens that a sequence is taken to have where it has a draft
_PARTS = 8  # partial sums of a product split by K take at most a share of 1 / 8 of its weight's bytes


def captured_rows(sequences: int, drafted: bool) -> list[int]:
    """Rows of each pass that will be captured: of so many sequences and fewer, one token each, and with a draft more.

    The largest `MOST_GRAPHS`: a cache that has more of them begins anew.
    """
    counts = range(1, min(sequences, MOST_ROWS) + 1)
    rows = [count * new for count in counts for new in ((1, DRAFTED) if drafted else (1,))]
    return sorted((each for each in rows if each <= MOST_ROWS), reverse=True)[:MOST_GRAPHS]


def graph_bytes(rows: Iterable[int], logits: int, activations: int, weights: Iterable[int]) -> int:
    """Bytes of the graphs of passes of so many `rows`, and of their pool.

    logits, activations: bytes of a row; weights: of each launch, of which the largest has the largest partial sums.
    """
    known = list(rows)
    parts = max(weights, default=0) // _PARTS
    return sum(known) * logits + max(known, default=0) * activations + parts
