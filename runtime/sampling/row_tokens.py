"""The token that a row of logits or weights gives: the likeliest, or the one at a share of their sum.

Knows rows of numbers; does not know settings, random numbers or whose the rows are.
"""

import math
from collections.abc import Iterable, Sequence
from itertools import takewhile

import torch
from torch import Tensor

from mycli.runtime.errors import Declined, ModelError
from mycli.runtime.kernels.cpu.sample import best_tokens


def leading(found: Iterable[bool]) -> int:
    """How many are true before the first that is not."""
    return sum(1 for _ in takewhile(bool, found))


def tokens_at(weights: Tensor, shares: Sequence[float]) -> Tensor:
    """int64 [rows, 1]: the token of each row of weights [rows, vocab] at which their sum passes a share of the whole.

    `vocab` where the weights of a row are all zero or not numbers. Sums are fp64: torch.multinomial draws a number for
    each token of the vocabulary instead, which at 32,000 tokens takes longer than a layer of a small draft.
    """
    sums = weights.cumsum(dim=-1, dtype=torch.float64)
    share = torch.tensor(shares, dtype=torch.float64, device=weights.device)
    return torch.searchsorted(sums, sums[:, -1:] * share[:, None], right=True)


def likeliest(logits: Tensor) -> list[int | None]:
    """The likeliest token of each row of logits [rows, vocab], the lowest id among equals; None for a row with NaN or
    infinity, or with nothing but -inf."""
    found = best_tokens(logits)
    if not isinstance(found, Declined):
        return found
    largest, best = logits.max(dim=-1)  # NaN and infinity win every maximum
    return [token if math.isfinite(top) else None for token, top in zip(best.tolist(), largest.tolist(), strict=True)]


def not_numbers() -> ModelError:
    """What is raised where logits cannot be drawn from."""
    return ModelError(
        "the model's output is not a number (NaN or infinite logits)",
        code="verify-files-or-fp32",
    )
