"""Checks that speculation does not change replies: greedy ones token by token, sampled ones by a chi-squared test."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from mycli.runtime.cache.batch import Chunk
from mycli.runtime.cache.prefix_index import common_prefix_length
from mycli.runtime.diagnostics.speculation_benchmark import SpeculationSubject
from mycli.runtime.engine.model_runner import ModelRunner
from mycli.runtime.errors import UsageError
from mycli.runtime.memory.cache_shape import CacheShape
from mycli.runtime.memory.plan import prefill_chunk
from mycli.runtime.sampling.logits_processors import distribution
from mycli.runtime.sampling.params import SamplingParams
from mycli.runtime.sampling.sampler import Sampler
from mycli.runtime.speculative.draft_length import FixedDraftLength
from mycli.runtime.speculative.mtp import MtpHead, MtpProposer
from mycli.runtime.speculative.proposers import DraftModel, Proposal
from mycli.runtime.speculative.rejection_sampling import rejection_sample

TIE_ROUNDINGS = 8  # a lead of the first over the second token below 8 roundings of the largest logit is a tie


@dataclass(frozen=True)
class ReplyDivergence:
    """The first difference of two replies. margin: lead of the top logit over the second; tie: within rounding."""

    prompt: int
    position: int
    margin: float
    tie: bool


def greedy_divergences(
    subject: SpeculationSubject, prompts: Sequence[Sequence[int]], limit: int, length: int
) -> Iterator[ReplyDivergence | None]:
    """Yield for each prompt the first difference between replies with and without speculation, or None."""
    plain, after = subject.engine(), PrefixLogits(subject.runner, subject.context)
    drafted = subject.engine(lambda proposer: FixedDraftLength(length))
    for number, prompt in enumerate(prompts):
        (ours, _), (theirs, _) = subject.reply(plain, prompt, limit), subject.reply(drafted, prompt, limit)
        if ours == theirs:
            yield None
            continue
        position = common_prefix_length(ours, theirs)
        logits = after.logits([*prompt, *ours[:position]])[: subject.vocabulary_size]
        first, second = logits.topk(2).values.tolist()
        rounding = float(torch.finfo(subject.runner.dtype).eps) * float(logits.abs().max())
        lead = first - second
        yield ReplyDivergence(number, position, lead, lead <= TIE_ROUNDINGS * rounding)


@dataclass(frozen=True)
class ChiSquared:
    """Pearson's test of `draws` samples against the target's distribution; `p_value` is near 0 if they disagree."""

    draws: int
    statistic: float
    freedom: int

    @property
    def p_value(self) -> float:
        half = torch.tensor([self.freedom / 2, self.statistic / 2], dtype=torch.float64)
        return float(torch.special.gammaincc(half[0], half[1]))


class PrefixLogits:
    """Computes the logits after token sequences; a prefix shared with the previous one is computed once."""

    def __init__(self, runner: ModelRunner, context: int) -> None:
        self._runner, self._context = runner, context
        self._cache = runner.make_cache(CacheShape.contiguous(context))
        self._tokens: list[int] = []

    def logits(self, tokens: Sequence[int]) -> Tensor:
        """Return the logits fp32 [vocab] after `tokens`. Raises UsageError if there are none, or too many."""
        if not 0 < len(tokens) <= self._context:
            raise UsageError(f"{len(tokens)} tokens: the context holds 1 to {self._context}", code="more-context")
        start = min(common_prefix_length(self._tokens, tokens), len(tokens) - 1)
        if self._runner.config.has_recurrent and start < len(self._tokens):
            start = 0  # a recurrent state cannot be rolled back
        chunk = prefill_chunk(self._runner.device.type == "cuda")
        for begin in range(start, len(tokens), chunk):
            logits = self._runner.run([Chunk(tokens[begin : begin + chunk], begin, (0,), 1)], self._cache)
        self._tokens = list(tokens)
        return logits[0]


def _rows(prefix: PrefixLogits, prompt: Sequence[int]) -> Callable[..., Tensor]:
    @cache
    def row(*tokens: int) -> Tensor:
        return prefix.logits([*prompt, *tokens]).clone()

    return row


def _mtp_rows(target: ModelRunner, head: MtpHead, prompt: Sequence[int]) -> Callable[..., Tensor]:
    # As `_rows`, for an MTP head: it reads the model's hidden states of all tokens but the last.
    if len(prompt) < 2:
        raise UsageError("a prompt of one token has no hidden state for the MTP head", "use a longer prompt")
    states: list[Tensor] = []
    read = len(prompt) - 1
    target.run([Chunk(prompt[:-1], 0, (0,), 0)], target.make_cache(CacheShape.contiguous(read)), states.append)

    @cache
    def row(*tokens: int) -> Tensor:
        shape = CacheShape.contiguous(read + len(tokens))
        cache, rope = head.make_cache(shape), target.rope(shape.context)

        def step(tokens: Sequence[int], position: int, hidden: Tensor) -> tuple[Tensor, Tensor]:
            hidden, logits = head([Chunk(tokens, position, (0,), 1)], hidden, rope, cache)
            return hidden[-1:], logits[0]

        hidden, logits = step(prompt[1:], 0, states[0])
        for position, token in enumerate(tokens, read):
            hidden, logits = step([token], position, hidden)
        return logits.clone()

    return row


def least_certain(subject: SpeculationSubject, prompts: Sequence[Sequence[int]]) -> Sequence[int]:
    """Return the prompt with the flattest next-token distribution, where an error shows most."""
    prefix = PrefixLogits(subject.runner, subject.context)

    def largest(prompt: Sequence[int]) -> float:
        return float(prefix.logits(prompt)[: subject.vocabulary_size].softmax(dim=-1).max())

    return min(prompts, key=largest)


def chi_squared(
    subject: SpeculationSubject,
    draft: DraftModel | MtpProposer,
    prompt: Sequence[int],
    sampling: SamplingParams,
    draws: int,
) -> ChiSquared:
    """Sample the first two tokens after `prompt` with two draft tokens each time, and test the counts of the pairs.

    `sampling` should leave few tokens (top-k): both models run once for each; and have no penalties.
    """
    sampler = Sampler(sampling, subject.vocabulary_size, subject.runner.device)
    sampler.seen.observe_prompt(prompt)
    target = _rows(PrefixLogits(subject.runner, subject.context), prompt)
    if isinstance(draft, DraftModel):
        draft_rows = _rows(PrefixLogits(draft.runner, draft.context), prompt)
    else:
        draft_rows = _mtp_rows(subject.runner, draft.head, prompt)
    probabilities = sampler.probabilities
    expected: dict[tuple[int, int], float] = {}
    after: dict[int, Tensor] = {}
    start = probabilities(target()[None])[0]
    for first in start.nonzero()[:, 0].tolist():
        after[first] = distribution(target(first)[None, : subject.vocabulary_size], sampling)
        for second in after[first][0].nonzero()[:, 0].tolist():
            expected[first, second] = float(start[first]) * float(after[first][0, second])
    counts: dict[tuple[int, int], int] = {}
    first_draft = probabilities(draft_rows()[None])
    for _ in range(draws):
        first = int(sampler.draw(first_draft))
        second_draft = probabilities(draft_rows(first)[None])
        second = int(sampler.draw(second_draft))
        # The third row is for a third token, which is not counted: any row will do.
        logits = torch.stack([target(), target(first), target(first)])
        tokens = rejection_sample(logits, Proposal([first, second], torch.cat([first_draft, second_draft])), sampler)
        pair = (tokens[0], tokens[1] if len(tokens) > 1 else int(sampler.draw(after[tokens[0]])))
        counts[pair] = counts.get(pair, 0) + 1
    return _pearson(counts, expected, draws)


def _pearson(counts: dict[tuple[int, int], int], expected: dict[tuple[int, int], float], draws: int) -> ChiSquared:
    if not counts.keys() <= expected.keys():  # an impossible pair was sampled
        return ChiSquared(draws, float("inf"), 1)
    cells = [(counts.get(pair, 0), chance * draws) for pair, chance in expected.items()]
    # Cells with fewer than 5 expected samples are merged: the approximation does not hold for them.
    frequent = [cell for cell in cells if cell[1] >= 5]
    rare = [cell for cell in cells if cell[1] < 5]
    if sum(chance for _, chance in rare) >= 5:
        frequent.append((sum(count for count, _ in rare), sum(chance for _, chance in rare)))
    statistic = sum((count - chance) ** 2 / chance for count, chance in frequent)
    return ChiSquared(draws, statistic, max(len(frequent) - 1, 1))
