"""The part of one sequence in a pass."""

from dataclasses import dataclass

from mycli.runtime.cache.batch import Chunk
from mycli.runtime.engine.sequence import RequestSequence


@dataclass(frozen=True)
class ScheduledSequence:
    """The part of one sequence in a pass: tokens `start` .. `start + count`, and blocks for `drafts` draft tokens.

    is_decode: the only token is the one sampled last; scored: logits of all tokens are needed.
    """

    sequence: RequestSequence
    start: int
    count: int
    drafts: int = 0
    is_decode: bool = False
    scored: bool = False

    @property
    def completes(self) -> bool:
        """Whether all tokens are computed after the pass, so that the next one can be sampled."""
        return self.start + self.count == len(self.sequence.tokens)

    def chunk(self, drafted: list[int]) -> Chunk:
        """Return the input of the pass, with the tokens `drafted` at the end."""
        sequence, end = self.sequence, self.start + self.count
        tokens = [*sequence.tokens[self.start : end], *drafted]
        logits = len(tokens) if self.scored else (1 + len(drafted)) * (end == len(sequence.tokens))
        table = sequence.table
        windows = tuple(table.window_blocks) or None
        return Chunk(tokens, self.start, tuple(table.blocks), logits, table.state or 0, len(drafted), windows)
