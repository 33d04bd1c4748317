"""What one forward pass is asked to do. An argument, never state: two passes cannot disturb each other through it."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from mycli.runtime.cache.block_table import Chunk


@dataclass(frozen=True)
class Span:
    """One sequence in a batch: `count` rows from `row` on, `length` tokens once they are there, in `blocks`.

    `state`, `drafted`: as of `Chunk`.
    """

    row: int
    count: int
    length: int
    blocks: tuple[int, ...]
    state: int = 0
    drafted: int = 0

    @property
    def start(self) -> int:
        """Position of the first new token."""
        return self.length - self.count


def _on(device: torch.device, made: Tensor) -> Tensor:
    """`made` on `device`, without waiting for what is under way there: the driver copies such small tensors first."""
    return made if device.type == "cpu" else made.to(device, non_blocking=True)


@dataclass(frozen=True)
class Batch:
    """New tokens of several sequences, one after another; the only thing a model sees of who is being served.

    tokens: int64 [T]; spans: what of them belongs to which sequence; wanted: of how many tokens at the end of each the
    logits are wanted. Tensors of these are made where they are first asked for: few passes need all.
    """

    tokens: Tensor
    spans: tuple[Span, ...]
    wanted: tuple[int, ...]
    block_size: int

    @classmethod
    def of(cls, chunks: Sequence[Chunk], block_size: int, device: torch.device) -> "Batch":
        """The chunks, each of another sequence, in order. `device`: where the tensors are wanted."""
        tokens: list[int] = []
        spans = []
        for chunk in chunks:
            count = len(chunk.tokens)
            spans.append(Span(len(tokens), count, chunk.start + count, chunk.blocks, chunk.state, chunk.drafted))
            tokens += chunk.tokens
        made = _on(device, torch.tensor(tokens))
        return cls(made, tuple(spans), tuple(chunk.logits for chunk in chunks), block_size)

    def _made(self, values: Sequence[object], dtype: torch.dtype) -> Tensor:
        return _on(self.tokens.device, torch.tensor(values, dtype=dtype))

    @property
    def rows(self) -> int:
        """T: new tokens of all sequences."""
        return self.tokens.shape[0]

    @cached_property
    def slots(self) -> Tensor:
        """int64 [T]: where each token's keys and values go, block * block_size + offset."""
        size = self.block_size
        places = ((span.blocks, at) for span in self.spans for at in range(span.start, span.length))
        return self._made([blocks[at // size] * size + at % size for blocks, at in places], torch.int64)

    @property
    def starts_and_lengths(self) -> tuple[list[int], list[int]]:
        """What `starts` and `lengths` hold."""
        last = self.spans[-1]
        return [*[span.row for span in self.spans], last.row + last.count], [span.length for span in self.spans]

    @property
    def padded_blocks(self) -> tuple[list[int], int]:
        """What `block_table` holds, row after row, and how many a row has."""
        widest = max([len(span.blocks) for span in self.spans])
        return [block for span in self.spans for block in (*span.blocks, *[0] * (widest - len(span.blocks)))], widest

    @cached_property
    def starts(self) -> Tensor:
        """int32 [S + 1]: sequence s has the rows starts[s] .. starts[s + 1]."""
        return self._made(self.starts_and_lengths[0], torch.int32)

    @cached_property
    def lengths(self) -> Tensor:
        """int32 [S]: of each sequence after this pass."""
        return self._made(self.starts_and_lengths[1], torch.int32)

    @cached_property
    def block_table(self) -> Tensor:
        """int32 [S, blocks], padded with 0."""
        blocks, widest = self.padded_blocks
        return self._made(blocks, torch.int32).view(-1, widest)

    @cached_property
    def logits_at(self) -> Tensor:
        """int64 [rows]: whose logits are wanted, in order."""
        ends = ((span.row + span.count, count) for span, count in zip(self.spans, self.wanted, strict=True))
        return self._made([row for end, count in ends for row in range(end - count, end)], torch.int64)

    @property
    def lanes(self) -> int | None:
        """The first block, where each sequence has one block, one after another, and all have as many new tokens."""
        first, count = self.spans[0].blocks[0], self.spans[0].count
        for index, span in enumerate(self.spans):
            if span.blocks != (first + index,) or span.count != count:
                return None
        return first
