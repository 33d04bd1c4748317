"""Arguments of paged attention: the tokens and cache blocks of each sequence, and how scores are computed.

A contiguous cache is the special case of one block per sequence.
"""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Ragged:
    """The tokens of one pass, sequence after sequence, and the cache blocks of each sequence.

    starts: int32 [sequences + 1], sequence s has the tokens starts[s] to starts[s + 1]; lengths: int32 [sequences],
    cached positions after this pass, its tokens last; block_table: int32 [sequences, blocks], entry i is the block of
    positions from i * block_size. Entries of blocks that no token attends to are not read.
    """

    starts: Tensor
    lengths: Tensor
    block_table: Tensor


@dataclass(frozen=True)
class Scoring:
    """How query-key products become weights: softmax of `scale` * product over the visible positions.

    window: positions that a token attends to, itself included, None for all; softcap: a score s becomes softcap *
    tanh(s / softcap), 0 for none (Gemma 2); sinks: fp32 [heads], a score per head that is part of the softmax but has
    no value (gpt-oss), None for none.
    """

    scale: float
    window: int | None = None
    softcap: float = 0.0
    sinks: Tensor | None = None
