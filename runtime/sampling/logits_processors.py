"""From logits to probabilities: bias, penalties, temperature, top-k, top-p, min-p.

Pure functions in the order and with the formulas of transformers' logits processors; presence and frequency penalties
follow OpenAI's API.
"""

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from mycli.runtime.sampling.params import SamplingParams


class SeenTokens:
    """The tokens that penalties count, of `sequences` with the same settings; tensors that no penalty needs are None.

    seen: bool [sequences, vocab], tokens of prompt and reply; counts: fp32 [sequences, vocab], occurrences in the
    reply. Ids at or above `vocab_size` (the tokenizer's) count as the last one.
    """

    def __init__(self, sampling: SamplingParams, vocab_size: int, device: torch.device, sequences: int = 1) -> None:
        self._last, self._device = vocab_size - 1, device
        self.seen: Tensor | None = None
        if sampling.repetition_penalty != 1:
            self.seen = torch.zeros(sequences, vocab_size, dtype=torch.bool, device=device)
        self.counts: Tensor | None = None
        if sampling.counts_replies:
            self.counts = torch.zeros(sequences, vocab_size, device=device)
        self.needed = self.seen is not None or self.counts is not None

    def observe_prompt(self, tokens: Sequence[int]) -> None:
        if self.seen is not None:
            self.seen[:, torch.tensor(tokens, device=self._device).clamp(max=self._last)] = True

    def observe(self, tokens: Tensor) -> None:
        """Add tokens of the reply, int64 [sequences, tokens]."""
        if not self.needed:
            return
        places = tokens.clamp(max=self._last)
        if self.seen is not None:
            self.seen.scatter_(1, places, True)
        if self.counts is not None:
            self.counts.scatter_add_(1, places, torch.ones_like(places, dtype=self.counts.dtype))

    def after(self, rows: int, following: Sequence[int]) -> tuple[Tensor | None, Tensor | None]:
        """Return `seen` and `counts` [rows, vocab] of one sequence if the tokens `following` came next.

        The last row is after all of `following`, the row before it after all but the last, and so on.
        """
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


def add_bias(logits: Tensor, biases: Sequence[tuple[int, float]]) -> Tensor:
    """Add `biases` (token id, bias) to logits [rows, vocab]; biases of the same id add up."""
    tokens, values = zip(*biases, strict=True)
    index = torch.tensor(tokens, device=logits.device)
    return logits.index_add(1, index, logits.new_tensor(values).expand(logits.shape[0], -1))


def penalize(logits: Tensor, seen: Tensor, penalty: float) -> Tensor:
    """Divide positive logits of tokens in `seen` (bool, the shape of logits) by `penalty`, multiply negative ones."""
    return torch.where(seen, torch.where(logits > 0, logits / penalty, logits * penalty), logits)


def penalize_counts(logits: Tensor, counts: Tensor, presence: float, frequency: float) -> Tensor:
    """Subtract `frequency` for each occurrence in the reply (`counts`), and `presence` once."""
    return logits - frequency * counts - presence * (counts > 0)


def keep_top_k(logits: Tensor, count: int) -> Tensor:
    """Set all but the `count` largest logits [rows, vocab] to -inf; ties with the smallest one stay."""
    limit = logits.topk(min(count, logits.shape[-1]), dim=-1).values[:, -1:]
    return logits.masked_fill(logits < limit, -math.inf)


def _ascending(logits: Tensor) -> Tensor:
    if logits.device.type != "cpu":
        return logits.sort(dim=-1).values
    # numpy sorts floats with vector instructions: 0.02 ms for 4,096 new logits, where torch takes 0.25 ms.
    return torch.from_numpy(np.sort(logits.numpy(), axis=-1))


def _softmax(logits: Tensor) -> Tensor:
    # In fp64 on a CPU: functions of torch differ in the last bits of fp32 from one instruction set to another, and a
    # draw near the limit between two tokens would too.
    return logits.softmax(dim=-1, dtype=torch.float64 if logits.device.type == "cpu" else None)


def keep_top_p(logits: Tensor, share: float) -> Tensor:
    """Set the tail of logits [rows, vocab] whose probability is at most 1 - `share` to -inf; one token always stays."""
    ascending = _ascending(logits)
    # The token that crosses the share stays, with its ties.
    drop = _softmax(ascending).cumsum(dim=-1) <= 1 - share
    drop[:, -1] = False
    least = ascending.masked_fill(drop, math.inf).amin(dim=-1, keepdim=True)
    return logits.masked_fill(logits < least, -math.inf)


def keep_min_p(logits: Tensor, share: float) -> Tensor:
    """Set tokens less likely than `share` times the most likely one to -inf in logits [rows, vocab]."""
    probabilities = _softmax(logits)
    floor = share * probabilities.amax(dim=-1, keepdim=True)
    return logits.masked_fill(probabilities < floor, -math.inf)


def process(
    logits: Tensor, sampling: SamplingParams, seen: Tensor | None = None, counts: Tensor | None = None
) -> Tensor:
    """Apply bias, penalties and, unless greedy, temperature, top-k, top-p, min-p, in this order, to [rows, vocab]."""
    if sampling.logit_bias:
        logits = add_bias(logits, sampling.logit_bias)
    if seen is not None and sampling.repetition_penalty != 1:
        logits = penalize(logits, seen, sampling.repetition_penalty)
    if counts is not None:
        logits = penalize_counts(logits, counts, sampling.presence_penalty, sampling.frequency_penalty)
    if sampling.greedy:
        return logits
    if sampling.temperature != 1:
        logits = logits / sampling.temperature
    if sampling.top_k:
        logits = keep_top_k(logits, sampling.top_k)
    if sampling.top_p < 1:
        logits = keep_top_p(logits, sampling.top_p)
    if sampling.min_p > 0:
        logits = keep_min_p(logits, sampling.min_p)
    return logits


def distribution(
    logits: Tensor, sampling: SamplingParams, seen: Tensor | None = None, counts: Tensor | None = None
) -> Tensor:
    """Return the probabilities [rows, vocab] from which `sampling` draws a token; NaN for rows with non-finite logits.

    Greedy sampling has all its mass on the most likely token, the lowest id among ties.
    """
    logits = process(logits, sampling, seen, counts)
    if not sampling.greedy:
        return _softmax(logits).to(logits.dtype)
    largest, best = logits.max(dim=-1, keepdim=True)
    nothing = largest * 0  # NaN where logits are not finite, as in softmax
    return nothing.repeat(1, logits.shape[-1]).scatter(1, best, nothing + 1)
