"""Log-probabilities of sampled tokens and their alternatives.

Natural logarithms of the model's own probabilities, before temperature, filters and grammars.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mycli.runtime.errors import UsageError

MAX_TOP = 20


@dataclass(frozen=True)
class TokenLogprob:
    """A token, its log-probability, and (id, log-probability) of the most likely tokens at its position."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]


class LogprobRecorder:
    """Records a `TokenLogprob` for each sampled token, with `top` alternatives."""

    def __init__(self, top: int, sequences: int = 1) -> None:
        if not 0 <= top <= MAX_TOP:
            raise UsageError(f"{top} likeliest tokens at each place: out of range", f"choose between 0 and {MAX_TOP}")
        self._top = top
        self.rows: list[list[TokenLogprob]] = [[] for _ in range(sequences)]

    def record(self, logits: Tensor, tokens: Tensor) -> None:
        """Record tokens [sequences, 1] sampled from logits fp32 [sequences, vocab]."""
        for row, one in zip(self.rows, token_logprobs(logits, tokens[:, 0].tolist(), self._top), strict=True):
            row.append(one)


def token_logprobs(logits: Tensor, tokens: Sequence[int], top: int) -> list[TokenLogprob]:
    """Return the log-probability of each token under its row of logits fp32 [rows, vocab], with `top` alternatives."""
    logs = logits.log_softmax(dim=-1)
    index = torch.tensor(tokens, device=logits.device)[:, None]
    drawn = logs.gather(1, index)[:, 0].tolist()
    best = logs.topk(min(top, logs.shape[-1]), dim=-1)
    values, indices = best.values.tolist(), best.indices.tolist()
    return [
        TokenLogprob(token, drawn[row], tuple(zip(indices[row], values[row], strict=True)))
        for row, token in enumerate(tokens)
    ]
