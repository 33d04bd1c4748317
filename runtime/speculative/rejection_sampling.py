"""Verification of draft tokens such that the output has the target model's own distribution.

Leviathan et al. (arXiv 2211.17192): a draft token d drawn from q is accepted with probability min(1, p(d) / q(d)). At
the first refusal the token is drawn from max(0, p - q), normalized; if all are accepted, one more is drawn from p.
Greedy sampling accepts the most likely token.
"""

import math

import torch
from torch import Tensor

from mycli.runtime.sampling.sampler import Sampler, leading
from mycli.runtime.speculative.proposers import Proposal


def rejection_sample(logits: Tensor, proposal: Proposal, sampler: Sampler) -> list[int]:
    """Return the accepted part of the proposal, and one token of the model's own.

    logits fp32 [1 + proposed, vocab or more]: row i is after the first i proposed tokens. `sampler` has observed the
    tokens before, and observes those returned. Raises ModelError if the first row is not finite.
    """
    accept = _accept_greedy if sampler.plain_greedy else _accept_drawn
    return _committed(logits, accept(logits, proposal, sampler), sampler)


def _committed(logits: Tensor, tokens: list[int], sampler: Sampler) -> list[int]:
    # Without tokens, as without a draft: it samples from the first row, or fails.
    if not tokens:
        return [int(sampler.sample(logits[:1]))]
    sampler.commit(logits, tokens)
    return tokens


def _accept_greedy(logits: Tensor, proposal: Proposal, sampler: Sampler) -> list[int]:
    # Empty if the first row is not finite: the caller then samples as without a draft.
    best = sampler.best(logits)
    drafted = proposal.tokens
    accepted = next((i for i, (a, b) in enumerate(zip(best, drafted, strict=False)) if a != b), len(drafted))
    return best[: accepted + 1]


def _accept_drawn(logits: Tensor, proposal: Proposal, sampler: Sampler) -> list[int]:
    target = sampler.probabilities(logits, proposal.tokens)
    rows = leading(map(math.isfinite, target[:, 0].tolist()))
    if rows < 2:
        return []
    drafted = proposal.tokens[: rows - 1]
    index = torch.tensor(drafted, device=target.device)[:, None]
    chances = target[: len(drafted)].gather(1, index)
    if proposal.probabilities is not None:
        chances = chances / proposal.probabilities[: len(drafted)].gather(1, index)
    accepted = sampler.accept(chances[:, 0])
    if accepted == len(drafted):
        return [*drafted, int(sampler.draw(target[accepted][None]))]
    if proposal.probabilities is None:
        weights = target[accepted].clone()
        weights[drafted[accepted]] = 0
    else:
        weights = (target[accepted] - proposal.probabilities[accepted]).clamp_(min=0)
    token = int(sampler.draw(weights[None]))
    if token == len(weights):  # p and q are equal up to rounding: draw from p
        token = int(sampler.draw(target[accepted][None]))
    return [*drafted[:accepted], token]


def sample_matching(logits: Tensor, proposal: Proposal, sampler: Sampler) -> list[int]:
    target = sampler.probabilities(logits, proposal.tokens)
    rows = leading(map(math.isfinite, target[:, 0].tolist()))
    tokens: list[int] = []
    for row, guess in zip(target[:rows], [*proposal.tokens, None], strict=False):
        tokens.append(int(sampler.draw(row[None])))
        if tokens[-1] != guess:
            break
    return _committed(logits, tokens, sampler)
