"""What attention over a cache in blocks is asked: which tokens are whose, where their keys lie, how scores are made.

A cache that lies in one piece is the special case of one block per sequence. Does not know kernels or layers.
"""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Ragged:
    """The tokens of one pass, sequence after sequence, and the blocks that hold each sequence's keys and values.

    starts: int32 [sequences + 1], tokens of sequence s are starts[s] to starts[s + 1]; lengths: int32 [sequences],
    positions held after this pass, its tokens last; block_table: int32 [sequences, blocks], of which entry i is the
    block of positions i * block_size and on. Blocks of positions that no token sees are never looked up.
    """

    starts: Tensor
    lengths: Tensor
    block_table: Tensor


@dataclass(frozen=True)
class Scoring:
    """From products of queries and keys to weights: softmax of `scale` * product over the positions that are seen.

    window: positions a token sees, itself included, None for all; softcap: a score s becomes softcap *
    tanh(s / softcap), 0 for none (Gemma 2); sinks: fp32 [heads], a score per head that takes part in the softmax and
    has no value (gpt-oss), None for none.
    """

    scale: float
    window: int | None = None
    softcap: float = 0.0
    sinks: Tensor | None = None
