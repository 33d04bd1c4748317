"""The input of one forward pass: new tokens of several sequences and where their keys and values go."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor


@dataclass(frozen=True)
class Chunk:
    """New tokens of one sequence for a pass, from position `start`, whose keys and values lie in `blocks`."""

    tokens: Sequence[int]
    start: int
    blocks: tuple[int, ...]
    logits: int  # number of trailing tokens whose logits are returned
    state: int = 0  # slot of the recurrent states
    # Trailing tokens that may be rejected: with any, the states advance only at `StateStore.commit_drafts`; if all are
    # drafts, never.
    drafted: int = 0
    # Blocks of layers with a sliding window, -1 where no token sees the positions any more; None: the same blocks.
    window_blocks: tuple[int, ...] | None = None

    @property
    def count(self) -> int:
        return len(self.tokens)

    @property
    def length(self) -> int:
        return self.start + len(self.tokens)

    def blocks_of(self, windowed: bool) -> tuple[int, ...]:
        """Return the blocks of layers with a window, or of the others."""
        return self.window_blocks if windowed and self.window_blocks is not None else self.blocks


@dataclass(frozen=True)
class Batch:
    """The chunks of a pass, concatenated, as tensors."""

    # The batch is an argument and never state, so two passes cannot affect each other through it. Most passes need few
    # of the tensors below, so each is built on first use.
    tokens: Tensor  # int64 [T]
    chunks: tuple[Chunk, ...]
    block_size: int

    @classmethod
    def of(cls, chunks: Sequence[Chunk], block_size: int, device: torch.device) -> "Batch":
        """Build the batch of `chunks`, one per sequence, with its tensors on `device`."""
        tokens = torch.tensor([token for chunk in chunks for token in chunk.tokens], dtype=torch.int64)
        return cls(_on(device, tokens), tuple(chunks), block_size)

    def _tensor(self, values: Sequence[object], dtype: torch.dtype) -> Tensor:
        return _on(self.tokens.device, torch.tensor(values, dtype=dtype))

    @property
    def rows(self) -> int:
        return self.tokens.shape[0]

    @cached_property
    def first_rows(self) -> list[int]:
        # One more entry than sequences: the last is T.
        rows = [0]
        for chunk in self.chunks:
            rows.append(rows[-1] + len(chunk.tokens))
        return rows

    @cached_property
    def slot_mapping(self) -> Tensor:
        # int64 [T]: block * block_size + offset of each token's keys and values.
        return self._slots(windowed=False)

    @cached_property
    def window_slots(self) -> Tensor:
        # The same for layers with a window.
        return self._slots(windowed=True)

    def _slots(self, windowed: bool) -> Tensor:
        size = self.block_size
        places = ((chunk.blocks_of(windowed), at) for chunk in self.chunks for at in range(chunk.start, chunk.length))
        return self._tensor([blocks[at // size] * size + at % size for blocks, at in places], torch.int64)

    def positions(self) -> Tensor:
        """Return the position int64 [T] of each token in its sequence."""
        return _on(self.tokens.device, token_positions(self.chunks))

    @cached_property
    def starts(self) -> Tensor:
        # int32 [S + 1]: sequence s has the rows starts[s] .. starts[s + 1].
        return self._tensor(self.first_rows, torch.int32)

    @cached_property
    def lengths(self) -> Tensor:
        # int32 [S]: tokens of each sequence after this pass.
        return self._tensor([chunk.length for chunk in self.chunks], torch.int32)

    @cached_property
    def block_table(self) -> Tensor:
        # int32 [S, blocks], padded with 0.
        return self._table(windowed=False)

    @cached_property
    def window_table(self) -> Tensor:
        # The same for layers with a window.
        return self._table(windowed=True)

    def _table(self, windowed: bool) -> Tensor:
        widest = max(len(chunk.blocks) for chunk in self.chunks)
        return self._tensor(table_rows(self.chunks, widest, windowed), torch.int32)

    @cached_property
    def logits_at(self) -> Tensor:
        # int64 [rows]: the rows whose logits are returned, in order.
        ends = zip(self.first_rows[1:], self.chunks, strict=True)
        return self._tensor([row for end, chunk in ends for row in range(end - chunk.logits, end)], torch.int64)


def table_rows(chunks: Sequence[Chunk], width: int, windowed: bool) -> list[list[int]]:
    """Return the first `width` blocks of each chunk, padded with 0; windowed: those of layers with a window."""
    rows = [chunk.blocks_of(windowed)[:width] for chunk in chunks]
    return [[*row, *[0] * (width - len(row))] for row in rows]


def token_positions(chunks: Sequence[Chunk]) -> Tensor:
    """Return the position int64 [T] of each token of `chunks` in its sequence."""
    return torch.cat([torch.arange(chunk.start, chunk.length) for chunk in chunks])


def _on(device: torch.device, tensor: Tensor) -> Tensor:
    # The driver copies such small tensors into its own buffer first, so nothing waits for work queued on the device.
    return tensor if device.type == "cpu" else tensor.to(device, non_blocking=True)
