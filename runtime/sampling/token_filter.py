"""Tokens that a reply may not have: all but a set of allowed ones, and the last tokens of words that are complete."""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from mycli.runtime.errors import ModelError, UsageError


@dataclass(frozen=True, eq=False)
class TokenFilter:
    """excluded: tokens that no reply has, bool [vocab]; words: of two tokens or more, that no reply contains."""

    excluded: Tensor
    words: Sequence[Sequence[int]]

    @classmethod
    def of(cls, vocab_size: int, allowed: Collection[int] | None = None, words: Collection[Sequence[int]] = ()) -> Self:
        """Return the filter for replies of `allowed` tokens alone, None for all, that contain none of `words`.

        Raises UsageError for a token that is not in the vocabulary, and if no token is left.
        """
        largest_in_words = max((max(word) for word in words), default=0)
        for setting, largest in (("allowed_token_ids", max(allowed or (), default=0)), ("bad_words", largest_in_words)):
            if largest >= vocab_size:
                raise UsageError(
                    f"{setting}: there is no token {largest}",
                    f"the ids of this model's vocabulary end at {vocab_size - 1}",
                    data={"setting": setting},
                )
        excluded = torch.full((vocab_size,), allowed is not None)
        excluded[list(allowed or ())] = False
        excluded[[word[0] for word in words if len(word) == 1]] = True
        if bool(excluded.all()):
            raise UsageError(
                "allowed_token_ids has no token that is not a bad word",
                "allow a further token",
                data={"setting": "allowed_token_ids"},
            )
        return cls(excluded, [word for word in words if len(word) > 1])


class TokenMask:
    """Applies a `TokenFilter` to the logits of one reply, whose last tokens it remembers."""

    def __init__(self, tokens: TokenFilter, device: torch.device) -> None:
        self._excluded = tokens.excluded.to(device)
        self._words = [(list(word[:-1]), word[-1]) for word in tokens.words]
        self._longest = max((len(prefix) for prefix, _ in self._words), default=0)
        self._last: list[int] = []  # as many as a word has before its last one

    def extend(self, tokens: Sequence[int]) -> None:
        if self._longest:
            self._last = [*self._last, *tokens][-self._longest :]

    def apply(self, logits: Tensor, following: Sequence[int] = ()) -> Tensor:
        """Set the logits of excluded tokens in [rows, vocab] to -inf.

        following: tokens assumed after the reply so far; the last row is after all of these, the row before it after
        all but the last, and so on.
        """
        logits = logits.masked_fill(self._excluded.to(logits.device), -math.inf)
        for row in range(len(logits) if self._words else 0):
            before = [*self._last, *following[: max(0, len(following) - (len(logits) - 1 - row))]]
            ended = [last for prefix, last in self._words if before[-len(prefix) :] == prefix]
            if ended:
                logits[row, ended] = -math.inf
        return logits


def nothing_allowed() -> ModelError:
    return ModelError("allowed_token_ids and bad_words leave no token that may follow", "allow more tokens")
