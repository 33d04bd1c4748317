"""What one forward pass is asked to do. An argument, never state: two passes cannot disturb each other through it."""

from dataclasses import dataclass
from typing import Literal

from torch import Tensor


@dataclass(frozen=True)
class Batch:
    """New tokens for sequences that advance in step.

    tokens: int64 [sequences, new]; start: position of the first new token, which is what the cache already holds;
    logits: for the last token only (decoding), for all (scoring), or none (a prefill chunk that is not the last).
    """

    tokens: Tensor
    start: int
    logits: Literal["last", "all", "none"] = "last"

    @property
    def count(self) -> int:
        """New tokens per sequence."""
        return self.tokens.shape[1]

    @property
    def end(self) -> int:
        """Length of the sequences after this pass."""
        return self.start + self.count
