"""What a scheduler decides, and what bounds it: one sequence in a pass, limits, counts.

Plain records, without torch. Does not know why a sequence has its turn.
"""

from collections import Counter
from dataclasses import dataclass, field

from mycli.runtime.cache.batch import Chunk
from mycli.runtime.engine.sequence import Sequence


@dataclass(frozen=True)
class Limits:
    """context: tokens of a sequence at most; chunk: tokens of prompts in a pass; running: sequences at once."""

    context: int
    chunk: int
    running: int


@dataclass(frozen=True)
class Turn:
    """One sequence in a pass: its tokens `start` .. `start` + `count`, and room reserved for `drafts` more behind.

    `decodes`: it had read all but the token drawn last. `scored`: the logits of all of them are wanted.
    """

    sequence: Sequence
    start: int
    count: int
    drafts: int = 0
    decodes: bool = False
    scored: bool = False

    @property
    def completes(self) -> bool:
        """Whether all tokens are read after it, so that another can be drawn."""
        return self.start + self.count == len(self.sequence.tokens)

    def chunk(self, drafted: list[int]) -> Chunk:
        """For the pass, with `drafted` tokens behind."""
        tokens = [*self.sequence.tokens[self.start : self.start + self.count], *drafted]
        logits = len(tokens) if self.scored else (1 + len(drafted)) * self.completes
        table = self.sequence.table
        return Chunk(tokens, self.start, tuple(table.blocks), logits, table.state or 0, len(drafted))


@dataclass
class Counts:
    """What happened since the beginning: `misses` by reason, the positions left out."""

    preemptions: int = 0
    queries: int = 0  # tokens of prompts that were looked up
    hits: int = 0  # and those of them that were there
    misses: Counter[str] = field(default_factory=Counter)
