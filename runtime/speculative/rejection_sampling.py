"""Which drafted tokens stand, so that the output is distributed as the target model's own.

Follows Leviathan et al. (arXiv 2211.17192): a proposal d drawn from q stands with probability min(1, p(d) / q(d)); at
the first refusal the token is drawn from max(0, p - q), normalized; if all stand, one more is drawn from p. Greedy, a
proposal stands where it is the likeliest token. Knows logits and a sampler; does not know models or sessions.
"""

import math

import torch
from torch import Tensor

from mycli.runtime.sampling.sampler import Sampler, leading
from mycli.runtime.speculative.proposers import Proposal


def judge(logits: Tensor, proposal: Proposal, sampler: Sampler) -> list[int]:
    """The tokens that follow: the part of the proposal that stands, and one of the model's own.

    logits fp32 [1 + proposed, vocab or more]: row i comes after the first i proposed tokens. `sampler` has observed
    the text before, and takes in what is returned. Raises ModelError where the first row is not a number.
    """
    tokens = (
        _judge_greedy(logits, proposal, sampler) if sampler.plain_greedy else _judge_drawn(logits, proposal, sampler)
    )
    if not tokens:
        return [int(sampler.sample(logits[:1]))]
    sampler.take(logits, tokens)
    return tokens


def _judge_greedy(logits: Tensor, proposal: Proposal, sampler: Sampler) -> list[int]:
    """As `judge`; none where there are numbers for no more than the first row."""
    own = sampler.best(logits)
    drafted = proposal.tokens[: max(len(own) - 1, 0)]
    kept = next((i for i, (a, b) in enumerate(zip(own, drafted, strict=False)) if a != b), len(drafted))
    return own[: kept + 1]


def _judge_drawn(logits: Tensor, proposal: Proposal, sampler: Sampler) -> list[int]:
    """As `judge`; none where there are numbers for no more than the first row."""
    target = sampler.probabilities(logits, proposal.tokens)
    rows = leading(map(math.isfinite, target[:, 0].tolist()))
    if rows < 2:
        return []
    drafted = proposal.tokens[: rows - 1]
    index = torch.tensor(drafted, device=target.device)[:, None]
    chances = target[: len(drafted)].gather(1, index)
    if proposal.probabilities is not None:
        chances = chances / proposal.probabilities[: len(drafted)].gather(1, index)
    kept = sampler.accept(chances[:, 0])
    if kept == len(drafted):
        return [*drafted, int(sampler.draw(target[kept][None]))]
    if proposal.probabilities is None:
        weights = target[kept].clone()
        weights[drafted[kept]] = 0
    else:
        weights = (target[kept] - proposal.probabilities[kept]).clamp_(min=0)
    token = int(sampler.draw(weights[None]))
    if token == len(weights):  # p and q differ by less than rounding: a refusal is chance, p is right
        token = int(sampler.draw(target[kept][None]))
    return [*drafted[:kept], token]
