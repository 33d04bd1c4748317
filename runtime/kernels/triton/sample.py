"""Samples the next token of every sequence on the device: greedy, or random with the settings of each."""

# mypy: disable-error-code="no-untyped-call, no-untyped-def, untyped-decorator"
# Reason: Triton's decorators and device functions carry no types.

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from mycli.runtime.kernels.triton.top_k_top_p import (
    Filters,
    Limit,
    LogitSource,
    find_limit,
    key_of,
    largest_of,
    load_logits,
    search_bound,
)

# Two launches for greedy tokens: the largest logit of each block of the vocabulary, then the largest of all, which also
# writes what the next pass reads. To draw, one more sums the weights of each block, and top-k and top-p need others
# (`triton.top_k_top_p`). Nothing is read back, so a CUDA graph can contain all of it.
#
# A draw gives the same token as on the host: the one at which the sum of probabilities passes the request's next random
# number. Gumbel noise would need no sums, but the token would depend on where it is sampled. Weights are integers (exp
# times 2^40), because their sums are exact in any order; sums of fp32 would depend on the blocks. The host's sums have
# 53 bits.

NO_NUMBER = -1  # in place of a token if logits are NaN or infinite
GREEDY = -1  # in place of a random number: the largest logit
VOCABULARY_BLOCK = 1024  # tokens per program
NUMBER_BITS = 63
NO_FILTERS = Filters()


@triton.jit
def peak_kernel(
    source,  # `LogitSource`
    peaks,  # fp32 [sequences, blocks]: largest logit; infinity where a logit is invalid
    index,  # int32 [sequences, blocks]: its token
    BLOCK: tl.constexpr,
):
    """Grid (sequences, blocks)."""
    sequence, block = tl.program_id(0), tl.program_id(1)
    place = block * BLOCK + tl.arange(0, BLOCK)
    x = load_logits(source, sequence, place)
    x = tl.where((x != x) | (x == float("inf")), float("inf"), x)
    largest = tl.max(x, 0)
    where = sequence * tl.num_programs(1) + block
    tl.store(peaks + where, largest)
    tl.store(index + where, tl.min(tl.where(x == largest, place, 2147483647), 0))  # among equals the lowest


@triton.jit
def _weights(
    source, limit, peaks, temperature, min_p, sequence, blocks, place,
    SEARCHED: tl.constexpr, MIN_P: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """Return the weights of tokens as int64: their probability by that of the likeliest, times 2^40; 0 if filtered."""
    x, temp = load_logits(source, sequence, place), tl.load(temperature + sequence)
    largest = largest_of(peaks, sequence, blocks, BLOCKS)
    weight = tl.exp(tl.div_rn(x, temp) - tl.div_rn(largest, temp))
    allowed = place < source.vocab
    if SEARCHED:
        goal = tl.load(limit.goals + sequence)
        low, _ = search_bound(limit.weights, limit.lows, goal, 0.0, limit.step, sequence, blocks, False, BLOCKS)
        if limit.least is not None:
            low = tl.maximum(low, tl.load(limit.least + sequence))
        allowed = allowed & (key_of(x) >= low)
    if MIN_P:
        allowed = allowed & (weight >= tl.load(min_p + sequence))
    return tl.where(allowed, weight * 1099511627776.0, 0.0).to(tl.int64)


@triton.jit
def mass_kernel(
    source,
    limit,
    peaks,
    masses,  # int64 [sequences, blocks]: sums of weights
    temperature,  # fp32 [sequences], as the next
    min_p,
    SEARCHED: tl.constexpr,
    MIN_P: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """Grid (sequences, blocks)."""
    sequence, block = tl.program_id(0), tl.program_id(1)
    blocks = tl.num_programs(1)
    place = block * BLOCK + tl.arange(0, BLOCK)
    weight = _weights(
        source, limit, peaks, temperature, min_p, sequence, blocks, place, SEARCHED, MIN_P, BLOCKS
    )  # fmt: skip
    tl.store(masses + sequence * blocks + block, tl.sum(weight, 0))


@triton.jit(do_not_specialize=["step"])
def sample_kernel(
    source,
    limit,
    peaks,
    index,
    masses,
    temperature,
    min_p,
    numbers,  # int64 [steps, sequences]: fractions of 2^63, or GREEDY
    blocks,
    chosen,  # int64 [steps, sequences]
    step,
    tokens,  # int64 [sequences]: what the next pass reads
    lengths,  # int32 [sequences]: grow by one; 0 for a padding sequence stays
    NONE: tl.constexpr,
    DRAW: tl.constexpr,
    SEARCHED: tl.constexpr,
    MIN_P: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """Grid (sequences)."""
    sequence, count = tl.program_id(0), tl.num_programs(0)
    place = tl.arange(0, BLOCKS)
    inside = place < blocks
    peak = tl.load(peaks + sequence * blocks + place, mask=inside, other=float("-inf"))
    candidates = tl.load(index + sequence * blocks + place, mask=inside, other=2147483647)
    largest = tl.max(peak, 0)
    token = tl.min(tl.where(peak == largest, candidates, 2147483647), 0).to(tl.int64)
    broken = (largest == float("inf")) | (largest == float("-inf"))
    if DRAW:
        number = tl.load(numbers + step * count + sequence)
        if number >= 0:
            mass = tl.load(masses + sequence * blocks + place, mask=inside, other=0)
            # total * number / 2^63, as the upper half of the 128-bit product of 2 * total and the number. Both are
            # positive, so the unsigned product is right.
            goal = tl.umulhi(2 * tl.sum(mass, 0), number)
            block = tl.sum((tl.cumsum(mass, 0) <= goal).to(tl.int32), 0)
            before = tl.sum(tl.where(place < block, mass, 0), 0)
            at = block * BLOCK + tl.arange(0, BLOCK)
            weight = _weights(
                source, limit, peaks, temperature, min_p, sequence, blocks, at, SEARCHED, MIN_P, BLOCKS
            )  # fmt: skip
            passed = before + tl.cumsum(weight, 0) <= goal
            token = (block * BLOCK + tl.sum(passed.to(tl.int32), 0)).to(tl.int64)
    token = tl.where(broken, 0, token)
    tl.store(chosen + step * count + sequence, tl.where(broken, NONE, token))
    tl.store(tokens + sequence, token)
    length = tl.load(lengths + sequence)
    if source.seen is not None:
        entry = sequence.to(tl.int64) * source.vocab + token
        count_before = tl.load(source.counts + entry)
    tl.debug_barrier()  # all warps load what one warp stores
    tl.store(lengths + sequence, length + (length > 0).to(tl.int32))
    if source.seen is not None:
        tl.store(source.seen + entry, 1)
        tl.store(source.counts + entry, count_before + 1.0)


@dataclass(frozen=True)
class Penalties:
    """State and settings of penalties: seen uint8 and counts fp32 [sequences, vocab], factors fp32 [sequences]."""

    seen: Tensor
    counts: Tensor
    repetition: Tensor
    presence: Tensor
    frequency: Tensor

    def arguments(self) -> tuple[Tensor, ...]:
        return self.seen, self.counts, self.repetition, self.presence, self.frequency

    @classmethod
    def make(cls, sequences: int, vocab: int, device: torch.device) -> "Penalties":
        """Return penalties that change nothing."""
        seen = torch.zeros(sequences, vocab, dtype=torch.uint8, device=device)
        counts = torch.zeros(sequences, vocab, dtype=torch.float32, device=device)
        ones = torch.ones(sequences, dtype=torch.float32, device=device)
        return cls(seen, counts, ones, torch.zeros_like(ones), torch.zeros_like(ones))


@dataclass(frozen=True)
class SamplingBuffers:
    """Device tensors of sampling: tokens and lengths are input and output, numbers and settings only input.

    tokens int64 [sequences, 1]; lengths int32 [sequences], cached tokens including `tokens`; numbers int64 [steps,
    sequences], fractions of 2^63 or GREEDY; temperature, top_k (1 to vocab), top_p, min_p fp32 [sequences]; chosen
    int64 [steps, sequences], `NO_NUMBER` where logits are NaN or infinite.
    """

    tokens: Tensor
    lengths: Tensor
    numbers: Tensor
    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    chosen: Tensor

    @classmethod
    def make(cls, steps: int, sequences: int, device: torch.device) -> "SamplingBuffers":
        """Return buffers for `steps` greedy steps."""
        temperature, top_k, top_p, min_p = (torch.ones(sequences, dtype=torch.float32, device=device) for _ in range(4))
        return cls(
            torch.zeros(sequences, 1, dtype=torch.int64, device=device),
            torch.zeros(sequences, dtype=torch.int32, device=device),
            torch.full((steps, sequences), GREEDY, dtype=torch.int64, device=device),
            temperature,
            top_k,
            top_p,
            min_p,
            torch.zeros(steps, sequences, dtype=torch.int64, device=device),
        )


def sample_tokens(
    logits: Tensor,
    vocab: int,
    draw: bool,
    to: SamplingBuffers,
    step: int,
    filters: Filters = NO_FILTERS,
    penalties: Penalties | None = None,
) -> None:
    """Sample step `step` of `to` from logits [sequences, at least vocab], of any floating dtype.

    draw: False for the argmax, the lowest id among equals; True to draw with the settings and numbers of `to` from what
    `filters` leave. Logits at and beyond `vocab` are never sampled. `penalties` apply to both and count the token.
    """
    sequences, stride = logits.shape[0], logits.stride(0)
    if logits.stride(1) != 1 or logits.shape[1] < vocab:
        raise ValueError(f"logits {tuple(logits.shape)} with strides {logits.stride()} for {vocab} tokens")
    if filters.penalties != (penalties is not None):
        raise ValueError("penalties without their buffers")
    blocks = triton.cdiv(vocab, VOCABULARY_BLOCK)
    sizes = {"BLOCK": VOCABULARY_BLOCK, "BLOCKS": triton.next_power_of_2(blocks)}
    peaks = torch.empty(sequences, blocks, dtype=torch.float32, device=logits.device)
    index = torch.empty(sequences, blocks, dtype=torch.int32, device=logits.device)
    source = LogitSource(logits, stride, vocab, *(None,) * 5 if penalties is None else penalties.arguments())
    grid = sequences, blocks
    peak_kernel[grid](source, peaks, index, BLOCK=VOCABULARY_BLOCK)
    limit, masses = Limit(None, None, None, None, None), None
    chosen = {"SEARCHED": draw and filters.searches, "MIN_P": draw and filters.min_p}
    if draw:
        if filters.searches:
            limit = find_limit(source, peaks, filters, to.temperature, to.top_k, to.top_p, VOCABULARY_BLOCK)
        masses = torch.empty(sequences, blocks, dtype=torch.int64, device=logits.device)
        mass_kernel[grid](source, limit, peaks, masses, to.temperature, to.min_p, **chosen, **sizes)
    sample_kernel[(sequences,)](
        *(source, limit, peaks, index, masses, to.temperature, to.min_p, to.numbers, blocks),
        *(to.chosen, step, to.tokens, to.lengths),
        NONE=NO_NUMBER,
        DRAW=draw,
        **chosen,
        **sizes,
    )
