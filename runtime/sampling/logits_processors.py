"""The chain from logits to probabilities: bias, penalties, temperature, top-k, top-p, min-p.

Pure functions, in the order and with the formulas of transformers' logits processors; presence and frequency penalties
are those of OpenAI's API. Does not draw, and does not know
models or text.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from mycli.runtime.sampling.params import SamplingParams


def add_bias(logits: Tensor, biases: Sequence[tuple[int, float]]) -> Tensor:
    """Add to logits [rows, vocab] what `biases` give for some token ids; equal ids add up."""
    tokens, values = zip(*biases, strict=True)
    index = torch.tensor(tokens, device=logits.device)
    return logits.index_add(1, index, logits.new_tensor(values).expand(logits.shape[0], -1))


def penalize(logits: Tensor, seen: Tensor, penalty: float) -> Tensor:
    """Make tokens of `seen` (bool, the shape of logits) less likely: positive logits / penalty, negative * penalty."""
    return torch.where(seen, torch.where(logits > 0, logits / penalty, logits * penalty), logits)


def penalize_counts(logits: Tensor, counts: Tensor, presence: float, frequency: float) -> Tensor:
    """Logits less `frequency` as often as a token came in the reply (`counts`, of their shape) and `presence` once."""
    return logits - frequency * counts - presence * (counts > 0)


def keep_top_k(logits: Tensor, count: int) -> Tensor:
    """Logits [rows, vocab] with all but the `count` largest at -inf; what equals the smallest of them stays too."""
    limit = logits.topk(min(count, logits.shape[-1]), dim=-1).values[:, -1:]
    return logits.masked_fill(logits < limit, -math.inf)


def keep_top_p(logits: Tensor, share: float) -> Tensor:
    """Logits [rows, vocab] with the tail whose total stays within 1 - `share` at -inf; at least one token stays."""
    ascending = logits.sort(dim=-1, descending=False).values
    # The token that crosses the share is kept, with its equals.
    drop = ascending.softmax(dim=-1).cumsum(dim=-1) <= 1 - share
    drop[:, -1] = False
    least = ascending.masked_fill(drop, math.inf).amin(dim=-1, keepdim=True)
    return logits.masked_fill(logits < least, -math.inf)


def keep_min_p(logits: Tensor, share: float) -> Tensor:
    """Logits [rows, vocab] with tokens less likely than `share` of the likeliest at -inf."""
    probabilities = logits.softmax(dim=-1)
    floor = share * probabilities.amax(dim=-1, keepdim=True)
    return logits.masked_fill(probabilities < floor, -math.inf)


def process(
    logits: Tensor, sampling: SamplingParams, seen: Tensor | None = None, counts: Tensor | None = None
) -> Tensor:
    """Logits [rows, vocab] after bias, penalties and, unless greedy, temperature, top-k, top-p, min-p, in this order.

    `seen` are the tokens of prompt and reply, `counts` how often each came in the reply, where penalties ask for them.
    """
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
    """Probabilities [rows, vocab] in the dtype of `logits`: of a token drawn with `sampling`.

    Greedy sampling is the distribution with all its mass on the likeliest token (the lowest id among equals). A row
    with a logit of NaN or infinity is all NaN.
    """
    logits = process(logits, sampling, seen, counts)
    if not sampling.greedy:
        return logits.softmax(dim=-1)
    largest, best = logits.max(dim=-1, keepdim=True)
    nothing = largest * 0  # NaN for logits that are no numbers, as softmax has it
    return nothing.repeat(1, logits.shape[-1]).scatter(1, best, nothing + 1)
