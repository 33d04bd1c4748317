"""A sequence goes on from what is kept of its text outside the cache, piece by piece, before it reads the rest.

Plain Python: knows numbers of tokens and blocks; does not know tensors or files.
"""

from collections.abc import Callable
from typing import Protocol

from mycli.runtime.cache.block_table import BlockTable
from mycli.runtime.cache.prefix_store import PIECE, Found
from mycli.runtime.engine.sequence import Sequence


class TextSource(Protocol):
    """Where texts are kept; see `runtime.engine.kept_texts`."""

    def find(self, tokens: "list[int]") -> Found:
        """What there is of a text."""
        ...

    def restore(self, found: Found, table: BlockTable, end: int) -> bool:
        """Fill in a table from its length up to `end`: within one piece, or all that was found where the table has a
        state. False where that cannot be had after all."""
        ...


class Restorer:
    """Brings back what a source has of a sequence's text; without a source nothing."""

    def __init__(self, source: TextSource | None) -> None:
        self._source = source

    def find(self, sequence: Sequence) -> None:
        """Look for the text of a sequence that begins to be read, after the cache was asked."""
        if self._source is not None:
            sequence.found = self._source.find(sequence.tokens)
            if self._end(sequence) > sequence.table.length:
                sequence.miss = sequence.found.miss

    def _end(self, sequence: Sequence) -> int:
        """How far its text can be brought back; never the last token, which is run for its logits."""
        return min(len(sequence.found.pieces) * PIECE, len(sequence.tokens) - 1)

    def restore(self, sequence: Sequence, budget: int, reserve: Callable[[Sequence, int], bool]) -> int:
        """Bring back pieces until about `budget` tokens are there: how many of a prompt were found for the first time.

        `reserve` makes room for positions up to a number, and says whether it could.
        """
        began, table, hits = sequence.table.length, sequence.table, 0
        while table.length - began < budget and table.length < (last := self._end(sequence)):
            start = table.length
            end = last if table.state is not None else min((start // PIECE + 1) * PIECE, last)
            if not reserve(sequence, end):
                break
            assert self._source is not None
            if not self._source.restore(sequence.found, table, end):
                sequence.found = Found()
                break
            table.fill(sequence.tokens, end)
            if start <= sequence.cached < end and not sequence.drawn:
                hits += end - sequence.cached
                sequence.cached = end
        return hits
