"""Tokens that a reply may not have: all but a set of allowed ones, and the last tokens of words that are complete."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mycli.runtime.errors import ModelError, UsageError


@dataclass(frozen=True)
class TokenFilter:
    """allowed: the only tokens of a reply, None for all; words: sequences of tokens that no reply contains."""

    allowed: frozenset[int] | None = None
    words: tuple[tuple[int, ...], ...] = ()

    def check(self, vocab_size: int) -> None:
        """Raise UsageError for a token that is not in the vocabulary, and if no token is left."""
        largest_in_words = max((max(word) for word in self.words), default=0)
        largest_allowed = max(self.allowed or (), default=0)
        for setting, largest in (("allowed_token_ids", largest_allowed), ("bad_words", largest_in_words)):
            if largest >= vocab_size:
                raise UsageError(
                    f"{setting}: there is no token {largest}",
                    f"the ids of this model's vocabulary end at {vocab_size - 1}",
                    data={"setting": setting},
                )
        if self.allowed is not None and not self.allowed - {word[0] for word in self.words if len(word) == 1}:
            raise UsageError(
                "allowed_token_ids has no token that is not a bad word",
                "allow a further token",
                data={"setting": "allowed_token_ids"},
            )


class TokenMask:
    """Applies a `TokenFilter` to the logits of one reply, whose tokens it counts."""

    def __init__(self, tokens: TokenFilter, vocab_size: int, device: torch.device) -> None:
        tokens.check(vocab_size)
        self._always = torch.zeros(vocab_size, dtype=torch.bool, device=device)
        if tokens.allowed is not None:
            self._always.fill_(True)
            self._always[sorted(tokens.allowed)] = False
        self._always[sorted({word[0] for word in tokens.words if len(word) == 1})] = True
        self._words = [(list(word[:-1]), word[-1]) for word in tokens.words if len(word) > 1]
        self._longest = max((len(prefix) for prefix, _ in self._words), default=0)
        self._last: list[int] = []  # the last tokens of the reply, as many as a word has before its last one

    def extend(self, tokens: Sequence[int]) -> None:
        if self._longest:
            self._last = [*self._last, *tokens][-self._longest :]

    def apply(self, logits: Tensor, following: Sequence[int] = ()) -> Tensor:
        """Set the logits of excluded tokens in [rows, vocab] to -inf.

        following: tokens assumed after the reply so far; the last row is after all of these, the row before it after
        all but the last, and so on.
        """
        logits = logits.masked_fill(self._always.to(logits.device), -math.inf)
        for row in range(len(logits) if self._words else 0):
            before = [*self._last, *following[: max(0, len(following) - (len(logits) - 1 - row))]]
            ended = [last for prefix, last in self._words if before[-len(prefix) :] == prefix]
            if ended:
                logits[row, ended] = -math.inf
        return logits


def nothing_allowed() -> ModelError:
    return ModelError("allowed_token_ids and bad_words leave no token that may follow", "allow more tokens")
