"""The tokens that penalties count: those of prompt and reply, and how often each came in the reply.

Knows settings and ids; does not know logits or how a token is chosen.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from mycli.runtime.sampling.params import SamplingParams


class SeenTokens:
    """Of `sequences` with one setting; what no penalty asks for is None and takes nothing.

    `vocab_size` is the tokenizer's: an id beyond it counts as the last.
    """

    def __init__(self, sampling: SamplingParams, vocab_size: int, device: torch.device, sequences: int) -> None:
        self._last, self._device = vocab_size - 1, device
        self.seen: Tensor | None = None  # bool [sequences, vocab]: of prompt and reply
        if sampling.repetition_penalty != 1:
            self.seen = torch.zeros(sequences, vocab_size, dtype=torch.bool, device=device)
        self.counts: Tensor | None = None  # fp32 [sequences, vocab]: of the reply alone
        if sampling.counts_replies:
            self.counts = torch.zeros(sequences, vocab_size, device=device)

    @property
    def wanted(self) -> bool:
        """Whether a token depends on those before it beyond its own logits."""
        return self.seen is not None or self.counts is not None

    def observe(self, tokens: Tensor) -> None:
        """Count tokens [sequences, n] of the prompt or the reply towards the repetition penalty."""
        if self.seen is not None:
            self.seen.scatter_(1, tokens.clamp(max=self._last), True)

    def observe_ids(self, tokens: Sequence[int]) -> None:
        """As `observe`, of one sequence."""
        if self.seen is not None:
            self.observe(torch.tensor([tokens], device=self._device))

    def count(self, tokens: Tensor) -> None:
        """Count tokens [sequences, n] of the reply towards presence and frequency penalties."""
        if self.counts is not None:
            places = tokens.clamp(max=self._last)
            self.counts.scatter_add_(1, places, torch.ones_like(places, dtype=self.counts.dtype))

    def after(self, rows: int, following: Sequence[int]) -> tuple[Tensor | None, Tensor | None]:
        """`seen` and `counts` of one sequence in `rows` rows, of which the last is after all tokens of `following`, the
        row before after all but the last, and so on. Nothing is counted."""
        seen, counts = self.seen, self.counts
        if following:
            seen = None if seen is None else seen.repeat(rows, 1)
            counts = None if counts is None else counts.repeat(rows, 1)
        for index, token in enumerate(following, start=rows - len(following)):
            if seen is not None:
                seen[max(index, 0) :, token] = True
            if counts is not None:
                counts[max(index, 0) :, token] += 1
        return seen, counts
