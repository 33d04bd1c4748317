"""Log-probabilities (natural) of sampled tokens, from the raw logits: before temperature, filters and constraints."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from mycli.runtime.errors import UsageError

MAX_TOP = 20  # as in OpenAI's API


@dataclass(frozen=True)
class TokenLogprob:
    """A token, its logprob, and (id, logprob) of the most likely tokens at its position, most likely first.

    rank: 1 for the most likely token; None where it was not computed.
    """

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]
    rank: int | None = field(default=None, compare=False)


class LogprobRecorder:
    """Collects a `TokenLogprob` with the `top` most likely tokens for each sampled token of a sequence."""

    def __init__(self, top: int) -> None:
        if not 0 <= top <= MAX_TOP:
            raise UsageError(f"top_logprobs {top} is out of range", f"choose between 0 and {MAX_TOP}")
        self._top = top
        self.entries: list[TokenLogprob] = []

    def record(self, logits: Tensor, tokens: Sequence[int]) -> None:
        self.entries += token_logprobs(logits, tokens, self._top)


def token_logprobs(logits: Tensor, tokens: Sequence[int], top: int, *, ranked: bool = False) -> list[TokenLogprob]:
    """Return the logprobs of one token per row of logits fp32 [rows, vocab], with the `top` most likely."""
    logs = logits.log_softmax(dim=-1)
    index = torch.tensor(tokens, device=logits.device)[:, None]
    chosen = logs.gather(1, index)
    drawn = chosen[:, 0].tolist()
    ranks = ((logs > chosen).sum(dim=-1) + 1).tolist() if ranked else [None] * len(drawn)
    best = logs.topk(min(top, logs.shape[-1]), dim=-1)
    values, indices = best.values.tolist(), best.indices.tolist()
    return [
        TokenLogprob(token, drawn[row], tuple(zip(indices[row], values[row], strict=True)), ranks[row])
        for row, token in enumerate(tokens)
    ]
