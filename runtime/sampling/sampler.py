"""From logits to a token: drawn from the distribution that the logits processors leave, or the likeliest.

Knows random numbers, and the tokens that a penalty counts. Does not know models, text or why a reply ends.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from mycli.runtime.errors import UsageError
from mycli.runtime.kernels.cpu.sample import softmax_draw
from mycli.runtime.sampling.logits_processors import distribution, process
from mycli.runtime.sampling.params import SamplingParams
from mycli.runtime.sampling.random_numbers import RandomNumbers
from mycli.runtime.sampling.row_tokens import leading, likeliest, not_numbers, tokens_at
from mycli.runtime.sampling.seen_tokens import SeenTokens


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
        self.numbers = RandomNumbers(sampling.seed)
        self.seen = SeenTokens(sampling, vocab_size, device, sequences)

    def observe(self, tokens: Tensor) -> None:
        """Count tokens [sequences, n] of the prompt or the reply towards the repetition penalty."""
        self.seen.observe(tokens)

    def observe_ids(self, tokens: Sequence[int]) -> None:
        """As `observe`, of one sequence."""
        self.seen.observe_ids(tokens)

    @property
    def plain(self) -> bool:
        """Whether a token depends on its logits and the settings alone, and nobody is told."""
        return not self.seen.wanted and self._constraint is None and self._recorder is None

    @property
    def repeatable(self) -> bool:
        """Whether a seed promises the same draws every time."""
        return self.sampling.seed is not None and not self.sampling.greedy

    def random(self) -> float:
        """The next uniform number."""
        return self.numbers.take(1)[0]

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
            token = self.draw(distribution(logits, self.sampling, self.seen.seen, self.seen.counts))
        self.seen.observe(token)
        self.seen.count(token)
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
        seed = (self.numbers.generator.initial_seed() + (1 << 63)) % (1 << 64) - (1 << 63)
        if given.greedy:
            return DeviceSampling(self._vocab_size, 0.0, seed)
        top_k = given.top_k if given.top_k < self._vocab_size else 0
        return DeviceSampling(self._vocab_size, given.temperature, seed, top_k, given.top_p, given.min_p)

    # For speculation (`runtime.speculative.decode`): one sequence, and rows that are positions of it.

    @property
    def plain_greedy(self) -> bool:
        """Whether the token is the largest logit, and nothing else counts."""
        return self.sampling.greedy and not self.seen.wanted and not self.sampling.logit_bias

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
        if not self.seen.wanted and self._recorder is None:
            return
        rows = torch.tensor([tokens], device=logits.device)
        self.seen.observe(rows)
        self.seen.count(rows)
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
            given = process(real, self.sampling, *self.seen.after(1, following))
            shared = self.numbers.peek(len(following)) if self.repeatable else None  # of the token to stand there
            drawn = softmax_draw(given, self.numbers.take(1)[0] if shared is None else shared, out)
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
        counted = self.seen.after(len(logits), following)
        return distribution(logits[:, : self._vocab_size], self.sampling, *counted)

    def draw(self, weights: Tensor) -> Tensor:
        """A token per row, in proportion to weights [rows, vocab]: int64 [rows, 1].

        `vocab`, one past the last token, where the weights of a row are all zero or not numbers.
        """
        return tokens_at(weights, self.numbers.take(len(weights)))

    def accept(self, chances: Tensor) -> int:
        """How many proposals are accepted: each with its chance (of chances [n]), up to the first refused."""
        found: list[float] = chances.tolist()
        return leading(coin < chance for coin, chance in zip(self.numbers.take(len(found)), found, strict=True))

    def _require_numbers(self, best: Tensor) -> None:
        if not bool(best.isfinite().all()):
            raise not_numbers()
