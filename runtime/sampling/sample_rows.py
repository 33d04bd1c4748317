"""A token for each of many sequences, each with its own settings and random numbers, in as few operations as can be.

What a sequence draws is the same as alone. Knows samplers; does not know whose they are.
"""

from collections import defaultdict
from collections.abc import Sequence

from torch import Tensor

from mycli.runtime.errors import UserError
from mycli.runtime.sampling.logits_processors import distribution
from mycli.runtime.sampling.params import SamplingParams
from mycli.runtime.sampling.row_tokens import likeliest, not_numbers, tokens_at
from mycli.runtime.sampling.sampler import Sampler


def sample_rows(logits: Tensor, samplers: Sequence[Sampler]) -> list[int | UserError]:
    """The token of `samplers[i]` after row i of logits fp32 [rows, vocab or more], or why it has none.

    The samplers have one vocabulary.
    """
    tokens: list[int | UserError] = [0] * len(samplers)
    alike: defaultdict[SamplingParams, list[int]] = defaultdict(list)
    for row, sampler in enumerate(samplers):
        if sampler.plain and (sampler.plain_greedy or len(samplers) > 1):  # one that draws does so in one call
            alike[sampler.unseeded].append(row)
            continue
        try:
            tokens[row] = int(sampler.sample(logits[row : row + 1]))
        except UserError as error:
            tokens[row] = error
    for sampling, rows in alike.items():
        chosen = logits if len(rows) == len(logits) else logits[rows]
        found = _sample_alike(chosen, sampling, [samplers[row] for row in rows])
        for row, token in zip(rows, found, strict=True):
            tokens[row] = token
    return tokens


def _sample_alike(logits: Tensor, sampling: SamplingParams, samplers: Sequence[Sampler]) -> list[int | UserError]:
    """As `sample_rows`, for plain samplers with the same settings."""
    logits = logits[:, : samplers[0].vocab_size]
    found = likeliest(logits)
    if not samplers[0].plain_greedy:
        weights = distribution(logits, sampling)
        shares = [0.0 if best is None else sampler.random() for sampler, best in zip(samplers, found, strict=True)]
        drawn: list[int] = tokens_at(weights, shares)[:, 0].tolist()
        found = [None if best is None else token for token, best in zip(drawn, found, strict=True)]
    return [not_numbers() if token is None else token for token in found]
