"""Which drafted tokens stand, so that the output is distributed as the target model's own.

Follows Leviathan et al. (arXiv 2211.17192): a proposal d drawn from q stands with probability min(1, p(d) / q(d)); at
the first refusal the token is drawn from max(0, p - q), normalized; if all stand, one more is drawn from p. Greedy, a
proposal stands where it is the likeliest token. Knows logits and a sampler; does not know models or sessions.
"""

import math

import torch
from torch import Tensor

from mycli.runtime.sampling.sampler import leading
from mycli.runtime.sampling.sampler import Sampler
from mycli.runtime.speculative.proposers import Proposal


def rejection_sample(logits: Tensor, proposal: Proposal, sampler: Sampler) -> list[int]:
    """The tokens that follow: the part of the proposal that stands, and one of the model's own.

    logits fp32 [1 + proposed, vocab or more]: row i comes after the first i proposed tokens. `sampler` has observed
    the text before, and takes in what is returned. Raises ModelError where the first row is not a number.
    """
    tokens = (
        _accept_greedy(logits, proposal, sampler) if sampler.plain_greedy else _accept_drawn(logits, proposal, sampler)
    )
    if not tokens:
        return [int(sampler.sample(logits[:1]))]
    sampler.commit(logits, tokens)
    return tokens


def _accept_greedy(logits: Tensor, proposal: Proposal, sampler: Sampler) -> list[int]:
    """As `rejection_sample`; none where there are numbers for no more than the first row."""
    own = sampler.best(logits)
    drafted = proposal.tokens[: max(len(own) - 1, 0)]
    accepted = next((i for i, (a, b) in enumerate(zip(own, drafted, strict=False)) if a != b), len(drafted))
    return own[: accepted + 1]


def _accept_drawn(logits: Tensor, proposal: Proposal, sampler: Sampler) -> list[int]:
    """As `rejection_sample`; none where there are numbers for no more than the first row."""
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
    if token == len(weights):  # p and q differ by less than rounding: a refusal is chance, p is right
        token = int(sampler.draw(target[accepted][None]))
    return [*drafted[:accepted], token]


def sample_matching(logits: Tensor, proposal: Proposal, sampler: Sampler) -> list[int]:
    """As `rejection_sample`, by drawing each token as it would be drawn without the proposal, while the two are equal.

    One random number a token, whatever was proposed: the reply to a seed does not depend on drafts. A draft that draws
    with the same numbers (Daliri et al., arXiv 2408.07978, of sharing them) is right somewhat less often than rejection
    sampling would let it stand.
    """
    target = sampler.probabilities(logits, proposal.tokens)
    rows = leading(map(math.isfinite, target[:, 0].tolist()))
    tokens: list[int] = []
    for row, guess in zip(target[:rows], [*proposal.tokens, None], strict=False):
        tokens.append(int(sampler.draw(row[None])))
        if tokens[-1] != guess:
            break
    if not tokens:
        return [int(sampler.sample(logits[:1]))]
    sampler.commit(logits, tokens)
    return tokens
