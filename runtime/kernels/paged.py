"""Arguments of paged attention: the tokens and cache blocks of each sequence, and how scores are computed.

A contiguous cache is the special case of one block per sequence.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

# Positions that GPU attention reads at a time. There a cache block is a multiple of it, or holds a whole sequence.
KEY_BLOCK = 64


@dataclass(frozen=True)
class Ragged:
    """The tokens of one pass, sequence after sequence, and the cache blocks of each sequence.

    tokens: of each sequence, if all have equally many; a sequence of length 0 is then padding. counts: int32
    [sequences], the tokens that are not padding, if some are. known: tokens of each sequence, if the host knows them.
    """

    starts: Tensor  # int32 [sequences + 1]: sequence s has the tokens starts[s] to starts[s + 1]
    lengths: Tensor  # int32 [sequences]: cached positions after this pass, its tokens last
    # int32 [sequences, blocks]: entry i is the block of positions from i * block_size. Entries of blocks that no token
    # attends to are not read.
    block_table: Tensor
    tokens: int | None = None
    counts: Tensor | None = None
    known: tuple[int, ...] | None = None
    portable: bool = False  # the same bits on every CPU


@dataclass(frozen=True)
class Scoring:
    """How query-key products become weights: softmax of `scale` * product over the visible positions."""

    scale: float
    window: int | None = None  # positions that a token attends to, itself included; None: all
    softcap: float = 0.0  # a score s becomes softcap * tanh(s / softcap) (Gemma 2); 0: none
    sinks: Tensor | None = None  # fp32 [heads]: a score per head in the softmax that has no value (gpt-oss)
    chunk: int | None = None  # a token attends to positions from the last multiple of `chunk` on (Llama 4); None: all


@dataclass(frozen=True)
class PromptKind:
    """The properties for which the GPU kernel for prompts is compiled."""

    device: torch.device
    dtype: torch.dtype
    stored: torch.dtype  # of the cache
    group: int  # heads that share a key-value head
    head_dim: int
    window: bool
    chunk: bool
    softcap: bool
    sinks: bool
