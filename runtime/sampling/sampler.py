"""From logits to a token: drawn from the distribution that the logits processors leave, or the likeliest.

Knows random numbers, and the tokens that a penalty counts. Does not know models, text or why a reply ends.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Protocol

import torch
from torch import Tensor

from mycli.runtime.errors import ModelError, UsageError
from mycli.runtime.kernels.cpu.sample import best_tokens, softmax_draw
from mycli.runtime.sampling.logits_processors import distribution, process
from mycli.runtime.sampling.params import SamplingParams

RANDOM_NUMBERS = 256  # made at a time


def leading(found: Iterable[bool]) -> int:
    """How many are true before the first that is not."""
    return sum(1 for _ in takewhile(bool, found))


class Constraint(Protocol):
    """What may be drawn next; see `runtime.sampling.grammar`."""

    def apply(self, logits: Tensor) -> Tensor:
        """Logits fp32 [sequences, vocab] with -inf for what may not; never for all. Raises ModelError instead."""
        ...

    def follow(self, tokens: Sequence[int]) -> None:
        """One drawn token for every sequence."""
        ...


class Recorder(Protocol):
    """Keeps what a person wants to know of the draws; see `runtime.sampling.logprobs`."""

    def record(self, logits: Tensor, tokens: Tensor) -> None:
        """The model's own logits fp32 [sequences, vocab], and the tokens [sequences, 1] drawn."""
        ...


@dataclass(frozen=True)
class DeviceSampling:
    """What a device must know to sample by itself; see `Sampler.device_sampling`. Temperature 0: the likeliest."""

    vocab_size: int
    temperature: float
    seed: int  # of 64 bits, signed
    top_k: int = 0  # below the vocabulary
    top_p: float = 1.0
    min_p: float = 0.0


def tokens_at(weights: Tensor, shares: Sequence[float]) -> Tensor:
    """int64 [rows, 1]: the token of each row of weights [rows, vocab] at which their sum passes a share of the whole.

    `vocab` where the weights of a row are all zero or not numbers. Sums are fp64.
    """
    sums = weights.cumsum(dim=-1, dtype=torch.float64)
    share = torch.tensor(shares, dtype=torch.float64, device=weights.device)
    return torch.searchsorted(sums, sums[:, -1:] * share[:, None], right=True)


def likeliest(logits: Tensor) -> list[int | None]:
    """The likeliest token of each row of logits [rows, vocab], the lowest id among equals; None for a row with NaN or
    infinity, or with nothing but -inf."""
    found = best_tokens(logits)
    if not isinstance(found, str):
        return found
    largest, best = logits.max(dim=-1)  # NaN and infinity win every maximum
    return [token if math.isfinite(top) else None for token, top in zip(best.tolist(), largest.tolist(), strict=True)]


def not_numbers() -> ModelError:
    """What is raised where logits cannot be drawn from."""
    return ModelError(
        "the model's output is not a number (NaN or infinite logits)",
        code="verify-files-or-fp32",
    )


class Sampler:
    """Draws tokens for one request: its settings, its random numbers and, for the penalty, the tokens it has seen.

    `vocab_size` is the tokenizer's: rows that pad the head beyond it are never drawn.
    """

    def __init__(
        self,
        sampling: SamplingParams,
        vocab_size: int,
        device: torch.device,
        sequences: int = 1,
        *,
        constraint: Constraint | None = None,
        recorder: Recorder | None = None,
    ) -> None:
        """`constraint` limits what can be drawn, `recorder` is told what was.

        Raises UsageError for a bias of a token that is not in the vocabulary.
        """
        for token, _ in sampling.logit_bias:
            if token >= vocab_size:
                raise UsageError(
                    f"logit_bias: there is no token {token}",
                    f"the ids of this model's vocabulary end at {vocab_size - 1}",
                )
        self.sampling, self.unseeded = sampling, replace(sampling, seed=None)
        self._constraint = constraint
        self._recorder = recorder
        self._vocab_size = vocab_size
        self._device = device
        self._generator = torch.Generator()
        if sampling.seed is None:
            self._generator.seed()
        else:
            self._generator.manual_seed(sampling.seed)
        self._numbers, self._used = list[float](), 0
        self._seen: Tensor | None = None
        if sampling.repetition_penalty != 1:
            self._seen = torch.zeros(sequences, vocab_size, dtype=torch.bool, device=device)
        self._counts: Tensor | None = None  # of the reply alone
        if sampling.counts_replies:
            self._counts = torch.zeros(sequences, vocab_size, device=device)

    def observe(self, tokens: Tensor) -> None:
        """Count tokens [sequences, n] of the prompt or the reply towards the repetition penalty."""
        if self._seen is not None:
            self._seen.scatter_(1, tokens.clamp(max=self._vocab_size - 1), True)

    def observe_ids(self, tokens: Sequence[int]) -> None:
        """As `observe`, of one sequence."""
        if self._seen is not None:
            self.observe(torch.tensor([tokens], device=self._device))

    @property
    def plain(self) -> bool:
        """Whether a token depends on its logits and the settings alone, and nobody is told."""
        return not self._counted and self._constraint is None and self._recorder is None

    @property
    def repeatable(self) -> bool:
        """Whether a seed promises the same draws every time."""
        return self.sampling.seed is not None and not self.sampling.greedy

    def random(self) -> float:
        """The next uniform number."""
        return self._random(1)[0]

    def _count(self, tokens: Tensor) -> None:
        """Count tokens [sequences, n] of the reply towards presence and frequency penalties."""
        if self._counts is not None:
            places = tokens.clamp(max=self._vocab_size - 1)
            self._counts.scatter_add_(1, places, torch.ones_like(places, dtype=self._counts.dtype))

    def sample(self, logits: Tensor) -> Tensor:
        """One token per row of logits fp32 [sequences, vocab or more]: int64 [sequences, 1].

        Raises ModelError where the logits are not numbers.
        """
        logits = raw = logits[:, : self._vocab_size]
        if self._constraint is not None:
            logits = self._constraint.apply(logits)
        if self.plain_greedy:
            best, token = logits.max(dim=-1, keepdim=True)
            self._require_numbers(best)
        else:
            self._require_numbers(logits.amax(dim=-1))  # NaN and infinity win every maximum
            token = self.draw(distribution(logits, self.sampling, self._seen, self._counts))
        self.observe(token)
        self._count(token)
        if self._constraint is not None:
            self._constraint.follow(token[:, 0].tolist())
        if self._recorder is not None:
            self._recorder.record(raw, token)
        return token

    def device_sampling(self) -> DeviceSampling | None:
        """The next draws as a device can do them by itself (`runtime.kernels.triton.sample`), None if it cannot.

        It can where a token depends on its own logits alone: without bias, penalty or constraint. Drawn tokens follow
        the same distribution with other random numbers, so that a seed repeats a reply on a device, not across devices.
        """
        given = self.sampling
        if given.logit_bias or not self.plain:
            return None
        seed = (self._generator.initial_seed() + (1 << 63)) % (1 << 64) - (1 << 63)
        if given.greedy:
            return DeviceSampling(self._vocab_size, 0.0, seed)
        top_k = given.top_k if given.top_k < self._vocab_size else 0
        return DeviceSampling(self._vocab_size, given.temperature, seed, top_k, given.top_p, given.min_p)

    # For speculation (`runtime.speculative.decode`): one sequence, and rows that are positions of it.

    @property
    def plain_greedy(self) -> bool:
        """Whether the token is the largest logit, and nothing else counts."""
        return self.sampling.greedy and not self._counted and not self.sampling.logit_bias

    @property
    def _counted(self) -> bool:
        """Whether a token depends on those before it beyond its own logits."""
        return self._seen is not None or self._counts is not None

    @property
    def vocab_size(self) -> int:
        """Ids that may be drawn."""
        return self._vocab_size

    @property
    def constrained(self) -> bool:
        """Whether what may come depends on the text in a way that `probabilities` does not know."""
        return self._constraint is not None

    def commit(self, logits: Tensor, tokens: Sequence[int]) -> None:
        """Observe and record `tokens`, each drawn after its row of logits [rows, vocab or more]; rows may be more."""
        if not self._counted and self._recorder is None:
            return
        rows = torch.tensor([tokens], device=logits.device)
        self.observe(rows)
        self._count(rows)
        if self._recorder is not None:
            for index in range(len(tokens)):
                self._recorder.record(logits[index : index + 1, : self._vocab_size], rows[:, index : index + 1])

    def best(self, logits: Tensor) -> list[int]:
        """The likeliest token of each row of logits [rows, vocab or more], up to the first row that is not numbers."""
        found: list[int] = []
        for token in likeliest(logits[:, : self._vocab_size]):
            if token is None:
                break
            found.append(token)
        return found

    def probability_rows(self, count: int, dtype: torch.dtype) -> Tensor | None:
        """For the distributions of `count` drafted tokens, [count, vocab]; None where the likeliest is taken."""
        if self.plain_greedy:
            return None
        return torch.empty(count, self._vocab_size, dtype=dtype, device=self._device)

    def sample_draft(self, logits: Tensor, following: Sequence[int], out: Tensor | None) -> int | None:
        """A token after logits [1, vocab or more] and `following`; to `out` [1, vocab] what it was drawn from.

        None where the logits are not numbers. `out` comes from `probability_rows`. Nothing is observed.
        """
        if out is None:
            found = self.best(logits)
            return found[0] if found else None
        if self.sampling.greedy:
            token = int(self.draw(out.copy_(self.probabilities(logits, following))))
        else:
            real = logits if logits.shape[1] == self._vocab_size else logits[:, : self._vocab_size]
            given = process(real, self.sampling, self._after(1, following), self._counts_after(1, following))
            shared = self._peek(len(following)) if self.repeatable else None  # of the token that will stand there
            drawn = softmax_draw(given, self._random(1)[0] if shared is None else shared, out)
            if isinstance(drawn, int):
                token = drawn
            else:
                weights = out.copy_(given.softmax(dim=-1))
                token = int(self.draw(weights) if shared is None else tokens_at(weights, [shared]))
        return token if token < self._vocab_size else None

    def probabilities(self, logits: Tensor, following: Sequence[int] = ()) -> Tensor:
        """The distribution [rows, vocab] that each row of logits [rows, vocab or more] is drawn from.

        `following` are tokens assumed to come after those observed: the last row is after all of them, the row before
        after all but the last, and so on. They are not observed.
        """
        seen = self._after(len(logits), following)
        counts = self._counts_after(len(logits), following)
        return distribution(logits[:, : self._vocab_size], self.sampling, seen, counts)

    def _after(self, rows: int, following: Sequence[int]) -> Tensor | None:
        """The tokens that count towards the penalty in each of the rows of `probabilities`."""
        seen = self._seen
        if seen is not None and following:
            seen = seen.repeat(rows, 1)
            for index, token in enumerate(following, start=rows - len(following)):
                seen[max(index, 0) :, token] = True
        return seen

    def _counts_after(self, rows: int, following: Sequence[int]) -> Tensor | None:
        """How often each token came in the reply, in each of the rows of `probabilities`."""
        counts = self._counts
        if counts is not None and following:
            counts = counts.repeat(rows, 1)
            for index, token in enumerate(following, start=rows - len(following)):
                counts[max(index, 0) :, token] += 1
        return counts

    def draw(self, weights: Tensor) -> Tensor:
        """A token per row, in proportion to weights [rows, vocab]: int64 [rows, 1].

        `vocab`, one past the last token, where the weights of a row are all zero or not numbers.

        By the inverse of the cumulative sum, in fp64: torch.multinomial draws a number for each token of the vocabulary
        instead, which at 32,000 tokens takes longer than a layer of a small draft.
        """
        return tokens_at(weights, self._random(len(weights)))

    def _random(self, count: int) -> list[float]:
        """Uniform numbers, a little below 1 at most: a sum times one does not round up to the sum.

        Made many at a time: beside a large model's pass the call costs more than the numbers.
        """
        self._make(count)
        self._used += count
        return self._numbers[self._used - count : self._used]

    def _peek(self, index: int) -> float:
        """The number that will be drawn after the next `index` ones."""
        self._make(index + 1)
        return self._numbers[self._used + index]

    def _make(self, count: int) -> None:
        """See to it that `count` numbers are there, which are the same however they are asked for."""
        while self._used + count > len(self._numbers):
            numbers = torch.rand(RANDOM_NUMBERS, generator=self._generator, dtype=torch.float64)
            self._numbers = self._numbers[self._used :] + (numbers * (1 - 2**-50)).tolist()
            self._used = 0

    def accept(self, chances: Tensor) -> int:
        """How many proposals are accepted: each with its chance (of chances [n]), up to the first refused."""
        found: list[float] = chances.tolist()
        return leading(coin < chance for coin, chance in zip(self._random(len(found)), found, strict=True))

    def _require_numbers(self, best: Tensor) -> None:
        if not bool(best.isfinite().all()):
            raise not_numbers()
