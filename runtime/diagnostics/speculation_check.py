"""Does speculation change nothing? Greedy replies compared token by token, and draws tested against the target.

Knows engines, proposers and statistics. Does not print, and does not know where prompts come from.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from mycli.runtime.cache.batch import Chunk
from mycli.runtime.cache.prefix_index import shared
from mycli.runtime.diagnostics.speculation_benchmark import SpeculationSubject
from mycli.runtime.engine.model_runner import CacheShape, ModelRunner
from mycli.runtime.errors import UsageError
from mycli.runtime.memory.plan import prefill_chunk
from mycli.runtime.sampling.logits_processors import distribution
from mycli.runtime.sampling.params import SamplingParams
from mycli.runtime.sampling.sampler import Sampler
from mycli.runtime.speculative.draft_length import FixedDraftLength
from mycli.runtime.speculative.mtp_head import MtpHead
from mycli.runtime.speculative.prediction import PredictionProposer
from mycli.runtime.speculative.proposers import DraftModel, Proposal
from mycli.runtime.speculative.rejection_sampling import rejection_sample

TIE_ROUNDINGS = 8  # roundings of the largest logit; a smaller lead of the first over the second token is a tie


@dataclass(frozen=True)
class ReplyDivergence:
    """Where two replies part. `margin`: the lead of the likeliest logit over the second; `tie`: not beyond rounding."""

    prompt: int
    position: int
    margin: float
    tie: bool


def greedy_divergences(
    subject: SpeculationSubject, prompts: Sequence[Sequence[int]], limit: int, length: int
) -> Iterator[ReplyDivergence | None]:
    """For each prompt the first difference between the replies with and without speculation, None for none."""
    plain, after = subject.engine(), Prefix(subject.runner, subject.context)
    drafted = subject.engine(lambda proposer: FixedDraftLength(length))
    for number, prompt in enumerate(prompts):
        (ours, _), (theirs, _) = subject.reply(plain, prompt, limit), subject.reply(drafted, prompt, limit)
        if ours == theirs:
            yield None
            continue
        position = next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), len(ours))
        logits = after.logits([*prompt, *ours[:position]])[: subject.vocabulary_size]
        first, second = logits.topk(2).values.tolist()
        rounding = float(torch.finfo(subject.runner.dtype).eps) * float(logits.abs().max())
        lead = first - second
        yield ReplyDivergence(number, position, lead, lead <= TIE_ROUNDINGS * rounding)


@dataclass(frozen=True)
class ChiSquared:
    """Pearson's test of `draws` against the target's distribution; `p_value` is near 0 where they disagree."""

    draws: int
    statistic: float
    freedom: int

    @property
    def p_value(self) -> float:
        half = torch.tensor([self.freedom / 2, self.statistic / 2], dtype=torch.float64)
        return float(torch.special.gammaincc(half[0], half[1]))


class Prefix:
    """A model that is asked what follows a text; of one text and the next what they share is read once."""

    def __init__(self, runner: ModelRunner, context: int) -> None:
        self._runner, self._context = runner, context
        self._cache = runner.make_cache(CacheShape.contiguous(context))
        self._text: list[int] = []

    def logits(self, text: Sequence[int]) -> Tensor:
        """fp32 [vocab] after `text`, of at least one token and at most the context."""
        if not 0 < len(text) <= self._context:
            raise UsageError(f"{len(text)} tokens, room for 1 to {self._context}", code="more-context")
        start = min(shared(self._text, text), len(text) - 1)
        if self._runner.config.has_recurrent and start < len(self._text):
            start = 0  # a state cannot be cut back
        chunk = prefill_chunk(self._runner.device.type == "cuda")
        for begin in range(start, len(text), chunk):
            logits = self._runner.run([Chunk(text[begin : begin + chunk], begin, (0,), 1)], self._cache)
        self._text = list(text)
        return logits[0]


def _rows(prefix: Prefix, prompt: Sequence[int]) -> Callable[..., Tensor]:
    @cache
    def row(*tokens: int) -> Tensor:
        return prefix.logits([*prompt, *tokens]).clone()

    return row


def _predicted(target: ModelRunner, head: MtpHead, prompt: Sequence[int]) -> Callable[..., Tensor]:
    if len(prompt) < 2:
        raise UsageError("a prompt of one token, after which the head has nothing to go by", "take a longer prompt")
    states: list[Tensor] = []
    read = len(prompt) - 1
    target.run([Chunk(prompt[:-1], 0, (0,), 0)], target.make_cache(CacheShape.contiguous(read)), states.append)

    @cache
    def row(*tokens: int) -> Tensor:
        shape = CacheShape.contiguous(read + len(tokens))
        own, rope = head.make_cache(shape), target.rope(shape.context)

        def step(text: Sequence[int], place: int, hidden: Tensor) -> tuple[Tensor, Tensor]:
            made, logits = head([Chunk(text, place, (0,), 1)], hidden, rope, own)
            return made[-1:], logits[0]

        made, logits = step(prompt[1:], 0, states[0])
        for place, token in enumerate(tokens, read):
            made, logits = step([token], place, made)
        return logits.clone()

    return row


def least_certain(subject: SpeculationSubject, prompts: Sequence[Sequence[int]]) -> Sequence[int]:
    """The prompt after which most tokens are likely: where a wrong distribution shows."""
    prefix = Prefix(subject.runner, subject.context)

    def largest(prompt: Sequence[int]) -> float:
        return float(prefix.logits(prompt)[: subject.vocabulary_size].softmax(dim=-1).max())

    return min(prompts, key=largest)


def chi_squared(
    subject: SpeculationSubject,
    draft: DraftModel | PredictionProposer,
    prompt: Sequence[int],
    sampling: SamplingParams,
    draws: int,
) -> ChiSquared:
    """Draws the first two tokens after `prompt` through rejection sampling with two drafted ones, and counts pairs.

    `sampling` should leave few tokens (top-k), as both models are asked once for each, and have no penalty.
    """
    sampler = Sampler(sampling, subject.vocabulary_size, subject.runner.device)
    sampler.observe(torch.tensor([prompt], device=subject.runner.device))
    target = _rows(Prefix(subject.runner, subject.context), prompt)
    if isinstance(draft, DraftModel):
        guess = _rows(Prefix(draft.runner, draft.context), prompt)
    else:
        guess = _predicted(subject.runner, draft.head, prompt)
    seen = sampler.probabilities
    expected: dict[tuple[int, int], float] = {}
    after: dict[int, Tensor] = {}
    start = seen(target()[None])[0]
    for first in start.nonzero()[:, 0].tolist():
        after[first] = distribution(target(first)[None, : subject.vocabulary_size], sampling)
        for second in after[first][0].nonzero()[:, 0].tolist():
            expected[first, second] = float(start[first]) * float(after[first][0, second])
    counts: dict[tuple[int, int], int] = {}
    first_guess = seen(guess()[None])
    for _ in range(draws):
        one = int(sampler.draw(first_guess))
        second_guess = seen(guess(one)[None])
        two = int(sampler.draw(second_guess))
        # The row after both is for a third token, which is not counted: the row before stands in.
        logits = torch.stack([target(), target(one), target(one)])
        tokens = rejection_sample(logits, Proposal([one, two], torch.cat([first_guess, second_guess])), sampler)
        pair = (tokens[0], tokens[1] if len(tokens) > 1 else int(sampler.draw(after[tokens[0]])))
        counts[pair] = counts.get(pair, 0) + 1
    return _pearson(counts, expected, draws)


def _pearson(counts: dict[tuple[int, int], int], expected: dict[tuple[int, int], float], draws: int) -> ChiSquared:
    if not counts.keys() <= expected.keys():
        return ChiSquared(draws, float("inf"), 1)
    cells = [(counts.get(pair, 0), chance * draws) for pair, chance in expected.items()]
    frequent = [cell for cell in cells if cell[1] >= 5]
    rare = [cell for cell in cells if cell[1] < 5]
    if sum(chance for _, chance in rare) >= 5:
        frequent.append((sum(count for count, _ in rare), sum(chance for _, chance in rare)))
    statistic = sum((count - chance) ** 2 / chance for count, chance in frequent)
    return ChiSquared(draws, statistic, max(len(frequent) - 1, 1))
