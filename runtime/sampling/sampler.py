"""Sampling: draws a token from the distribution that the logits processors leave, or takes the most likely one."""

import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile
from typing import Protocol

import torch
from torch import Tensor

from mycli.runtime.errors import Declined, ModelError, UsageError, UserError
from mycli.runtime.kernels.cpu.sample import best_tokens, softmax_draw
from mycli.runtime.sampling.logits_processors import SeenTokens, distribution, process
from mycli.runtime.sampling.params import SamplingParams
from mycli.runtime.sampling.random_numbers import RandomNumbers
from mycli.runtime.sampling.token_filter import TokenFilter, TokenMask, nothing_allowed


class Constraint(Protocol):
    """A grammar that limits which token may come next; see `runtime.sampling.grammars.grammar`."""

    @property
    def may_be_cut(self) -> bool: ...

    @property
    def shortened(self) -> bool: ...

    def resume(self, tokens: Sequence[int], shortened: bool) -> None: ...

    def apply(self, logits: Tensor) -> Tensor:
        """Set the logits fp32 [1, vocab] of forbidden tokens to -inf. Raises ModelError if none is allowed."""
        ...

    def accept(self, token: int) -> int:
        """Advance by a sampled token; return the accepted one, which near the limits of a reply may be another."""
        ...


class Recorder(Protocol):
    """Records log-probabilities of drawn tokens; see `runtime.sampling.logprobs`."""

    def record(self, logits: Tensor, tokens: Sequence[int]) -> None: ...


@dataclass(frozen=True)
class DeviceSampling:
    """The settings with which a pass samples by itself; see `Sampler.device_sampling`. Temperature 0 is greedy.

    numbers: the request's random numbers, None for greedy; seen: what penalties count, None without penalties; biases:
    of different tokens, added to their logits first.
    """

    vocab_size: int
    temperature: float = 0.0
    top_k: int = 0  # below the vocabulary size
    top_p: float = 1.0
    min_p: float = 0.0
    repetition: float = 1.0
    presence: float = 0.0
    frequency: float = 0.0
    numbers: RandomNumbers | None = field(default=None, compare=False)
    seen: SeenTokens | None = field(default=None, compare=False)
    biases: tuple[tuple[int, float], ...] = ()

    @property
    def plain_greedy(self) -> bool:
        return not self.temperature and self.seen is None and not self.biases


class Sampler:
    """Draws the tokens of one request: its settings, random numbers and, for penalties, the tokens seen so far.

    vocab_size: the tokenizer's; rows that pad the head beyond it are never drawn. plain_greedy: the token is the
    largest logit, and nothing else counts. plain: a token depends on its logits and the settings alone, and is not
    recorded.
    """

    def __init__(
        self,
        sampling: SamplingParams,
        vocab_size: int,
        device: torch.device,
        *,
        constraint: Constraint | None = None,
        recorder: Recorder | None = None,
        numbers: RandomNumbers | None = None,
        stop_ids: Collection[int] = (),
        min_tokens: int = 0,
        token_filter: TokenFilter | None = None,
    ) -> None:
        """numbers: None for new ones; stop_ids: tokens that are not drawn before the reply has `min_tokens` tokens.

        Raises UsageError for a bias of a token that is not in the vocabulary.
        """
        for token, _ in sampling.logit_bias:
            if token >= vocab_size:
                raise UsageError(
                    f"logit_bias: there is no token {token}",
                    f"the ids of this model's vocabulary end at {vocab_size - 1}",
                )
        self.sampling, self.unseeded = sampling, replace(sampling, seed=None)
        self.vocab_size = vocab_size
        self.numbers = numbers or RandomNumbers(sampling.seed)
        self.seen = SeenTokens(sampling, vocab_size, device)
        self._plain = not self.seen.needed and constraint is None and recorder is None
        self._plain_greedy = sampling.greedy and not self.seen.needed and not sampling.logit_bias
        self._constraint = constraint
        self._recorder = recorder
        self._device = device
        stops = [token for token in stop_ids if token < vocab_size] if min_tokens else []
        self._stops = torch.tensor(stops, dtype=torch.long, device=device)
        self._missing = min_tokens if stops else 0  # tokens to draw before a stop token
        self._mask = None if token_filter is None else TokenMask(token_filter, device)

    @property
    def plain(self) -> bool:
        return self._plain and not self.masks_tokens

    @property
    def plain_greedy(self) -> bool:
        return self._plain_greedy and not self.masks_tokens

    @property
    def masks_tokens(self) -> bool:
        """Whether a pass that samples by itself could draw a token that must not come next."""
        return self._mask is not None or self.masks_stops

    @property
    def masks_stops(self) -> bool:
        """Whether the next token must not be a stop token."""
        return self._missing > 0

    def resume(self, tokens: Sequence[int], shortened: bool) -> None:
        """Observe the tokens of a reply that were drawn before it was interrupted. Raises ModelError as grammars do."""
        if tokens:
            self.seen.observe(torch.tensor([tokens], device=self._device))
        self._missing -= len(tokens)
        if self._mask is not None:
            self._mask.extend(tokens)
        if self._constraint is not None:
            self._constraint.resume(tokens, shortened)

    @property
    def repeatable(self) -> bool:
        return self.sampling.seed is not None and not self.sampling.greedy

    @property
    def constrained(self) -> bool:
        return self._constraint is not None

    @property
    def may_be_cut(self) -> bool:
        """Whether the reply so far may end at any token: without a grammar, or under one of any text."""
        return self._constraint is None or self._constraint.may_be_cut

    @property
    def shortened(self) -> bool:
        """Whether a limit made the reply end under its grammar earlier than the model would have."""
        return self._constraint is not None and self._constraint.shortened

    def sample(self, logits: Tensor) -> Tensor:
        """Draw a token from fp32 logits [1, vocab or more]: int64 [1, 1]. Raises ModelError for non-finite logits."""
        logits = raw = logits if logits.shape[1] == self.vocab_size else logits[:, : self.vocab_size]
        if self._constraint is not None:
            logits = self._constraint.apply(logits)
        logits = self._masked(logits)
        largest, token = logits.max(dim=-1, keepdim=True)  # NaN and infinity win every maximum
        if not math.isfinite(largest.item()):
            raise nothing_allowed() if self._mask is not None and bool(raw.isfinite().all()) else not_finite()
        self._missing -= self.masks_stops
        if not self._plain_greedy:
            token = self.draw(distribution(logits, self.sampling, self.seen.seen, self.seen.counts))
        if self._constraint is not None:
            token = token.new_tensor([[self._constraint.accept(int(token))]])
        if self._mask is not None:
            self._mask.extend(token[:, 0].tolist())
        if not self._plain:
            self.seen.observe(token)
            if self._recorder is not None:
                self._recorder.record(raw, token[:, 0].tolist())
        return token

    def _masked(self, logits: Tensor, following: Sequence[int] = ()) -> Tensor:
        # Rows of successive positions, the last one after the tokens `following`.
        if self._mask is not None:
            logits = self._mask.apply(logits, following)
        count = self._missing - len(following) + len(logits) - 1
        if count <= 0:
            return logits
        masked = logits.clone()
        masked[:count].index_fill_(1, self._stops.to(logits.device), -math.inf)
        if self._constraint is None:
            return masked
        # A format that is complete and allows nothing more ends the reply nevertheless.
        return torch.where(masked.amax(dim=-1, keepdim=True) == -math.inf, logits, masked)

    def device_sampling(self) -> DeviceSampling | None:
        """Return the settings for sampling in a pass (`runtime.kernels.triton.sample`), or None if none can.

        It cannot with two biases of a token or a grammar, or if logprobs are recorded, and it masks no tokens.
        Draws use the same random numbers as here.
        """
        params = self.sampling
        if (
            len(dict(params.logit_bias)) < len(params.logit_bias)
            or self._constraint is not None
            or self._recorder is not None
        ):
            return None
        penalties = params.repetition_penalty, params.presence_penalty, params.frequency_penalty
        numbers, seen = None if self._plain_greedy else self.numbers, self.seen if self.seen.needed else None
        if params.greedy:
            return DeviceSampling(self.vocab_size, 0.0, 0, 1.0, 0.0, *penalties, numbers, seen, params.logit_bias)
        top_k = params.top_k if params.top_k < self.vocab_size else 0
        cuts = top_k, params.top_p, params.min_p
        return DeviceSampling(self.vocab_size, params.temperature, *cuts, *penalties, numbers, seen, params.logit_bias)

    def follow(self, tokens: Sequence[int]) -> None:
        """Take the numbers of `tokens`, which a pass drew with `device_sampling`, and count them for penalties."""
        if not self.plain_greedy:
            self.numbers.take(len(tokens))
        if self.seen.needed:
            self.seen.observe(torch.tensor([tokens], device=self._device))

    # What follows serves speculation (`runtime.speculative`): one sequence, whose rows are successive positions.

    def commit(self, logits: Tensor, tokens: Sequence[int]) -> None:
        """Observe and record `tokens`, each drawn from its row of logits [rows or more, vocab or more]."""
        self._missing -= len(tokens)
        if self._mask is not None:
            self._mask.extend(tokens)
        if self.seen.needed:
            self.seen.observe(torch.tensor([tokens], device=self._device))
        if self._recorder is not None:
            self._recorder.record(logits[: len(tokens), : self.vocab_size], tokens)

    def best(self, logits: Tensor) -> list[int]:
        """Return the most likely token of each row of logits [rows, vocab or more], up to the first non-finite row."""
        tokens: list[int] = []
        for token in most_likely(logits[:, : self.vocab_size]):
            if token is None:
                break
            tokens.append(token)
        return tokens

    def probability_rows(self, count: int, dtype: torch.dtype) -> Tensor | None:
        """Allocate the distributions [count, vocab] of `count` draft tokens; None for greedy sampling."""
        if self.plain_greedy:
            return None
        return torch.empty(count, self.vocab_size, dtype=dtype, device=self._device)

    def sample_draft(self, logits: Tensor, following: Sequence[int], out: Tensor | None) -> int | None:
        """Draw a draft token from logits [1, vocab or more] after `following`, without observing it.

        out [1, vocab], a row of `probability_rows`, receives its distribution. Returns None if the logits are not
        finite.
        """
        if out is None:
            best = self.best(logits)
            return best[0] if best else None
        if self.sampling.greedy:
            token = int(self.draw(out.copy_(self.probabilities(logits, following))))
        else:
            logits = logits if logits.shape[1] == self.vocab_size else logits[:, : self.vocab_size]
            logits = process(self._masked(logits, following), self.sampling, *self.seen.after(1, following))
            # With a seed the draft uses the number that the token at this position will be drawn with.
            number = self.numbers.peek(1, len(following))[0] if self.repeatable else None
            drawn = softmax_draw(logits, self.numbers.take(1)[0] if number is None else number, out)
            if isinstance(drawn, Declined):
                weights = out.copy_(logits.softmax(dim=-1))
                token = int(self.draw(weights) if number is None else tokens_at(weights, [number]))
            else:
                token = drawn
        return token if token < self.vocab_size else None

    def probabilities(self, logits: Tensor, following: Sequence[int] = ()) -> Tensor:
        """Return the distribution [rows, vocab] from which each row of logits [rows, vocab or more] is drawn.

        following: tokens assumed after those observed; the last row is after all of these, the row before it after all
        but the last, and so on.
        """
        counted = self.seen.after(len(logits), following)
        logits = self._masked(logits[:, : self.vocab_size], following)
        return distribution(logits, self.sampling, *counted)

    def draw(self, weights: Tensor) -> Tensor:
        return tokens_at(weights, self.numbers.take(len(weights)))

    def accept(self, chances: Tensor) -> int:
        """Return how many draft tokens are accepted, each with its chance of chances [n], up to the first refusal."""
        limits: list[float] = chances.tolist()
        return leading(number < limit for number, limit in zip(self.numbers.take(len(limits)), limits, strict=True))


def sample_rows(logits: Tensor, samplers: Sequence[Sampler]) -> list[int | UserError]:
    """Draw the token of `samplers[i]` from row i of logits fp32 [rows, vocab or more], or return its error.

    Rows with equal settings are drawn together; each draws what it draws alone. All samplers have one vocabulary.
    """
    tokens: list[int | UserError] = [0] * len(samplers)
    alike: defaultdict[SamplingParams, list[int]] = defaultdict(list)
    for row, sampler in enumerate(samplers):
        # One sampled sequence alone takes the shorter way below; greedy ones are cheapest together.
        if sampler.plain and (sampler.plain_greedy or len(samplers) > 1):
            alike[sampler.unseeded].append(row)
            continue
        try:
            tokens[row] = int(sampler.sample(logits if len(samplers) == 1 else logits[row : row + 1]))
        except UserError as error:
            tokens[row] = error
    for sampling, rows in alike.items():
        chosen = logits if len(rows) == len(logits) else logits[rows]
        drawn = _sample_alike(chosen, sampling, [samplers[row] for row in rows])
        for row, token in zip(rows, drawn, strict=True):
            tokens[row] = token
    return tokens


def _sample_alike(logits: Tensor, sampling: SamplingParams, samplers: Sequence[Sampler]) -> list[int | UserError]:
    logits = logits[:, : samplers[0].vocab_size]
    tokens = most_likely(logits)
    if not samplers[0].plain_greedy:
        weights = distribution(logits, sampling)
        shares = [
            0.0 if best is None else sampler.numbers.take(1)[0] for sampler, best in zip(samplers, tokens, strict=True)
        ]
        drawn: list[int] = tokens_at(weights, shares)[:, 0].tolist()
        tokens = [None if best is None else token for token, best in zip(drawn, tokens, strict=True)]
    return [not_finite() if token is None else token for token in tokens]


def leading(values: Iterable[bool]) -> int:
    return sum(1 for _ in takewhile(bool, values))


def tokens_at(weights: Tensor, shares: Sequence[float]) -> Tensor:
    """Return int64 [rows, 1]: the token at which the sum of weights [rows, vocab] passes its share; vocab if there is
    none.
    """
    # fp64 sums. torch.multinomial draws a number for each token of the vocabulary instead, which at 32,000 tokens takes
    # longer than a layer of a small draft model.
    sums = weights.cumsum(dim=-1, dtype=torch.float64)
    if len(shares) == 1:
        return torch.searchsorted(sums, sums[:, -1:] * shares[0], right=True)
    share = torch.tensor(shares, dtype=torch.float64, device=weights.device)
    return torch.searchsorted(sums, sums[:, -1:] * share[:, None], right=True)


def most_likely(logits: Tensor) -> list[int | None]:
    """Return the most likely token of each row [rows, vocab], the lowest id among ties; None for a non-finite row."""
    tokens = best_tokens(logits)
    if not isinstance(tokens, Declined):
        return tokens
    largest, best = logits.max(dim=-1)  # NaN and infinity win every maximum
    return [token if math.isfinite(top) else None for token, top in zip(best.tolist(), largest.tolist(), strict=True)]


def not_finite() -> ModelError:
    return ModelError(
        "the model's output is not a number (NaN or infinite logits)",
        code="verify-files-or-fp32",
    )
