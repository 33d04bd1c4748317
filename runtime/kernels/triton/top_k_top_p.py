"""Finds the smallest logit that passes top-k and top-p, on the device and without sorting."""

# mypy: disable-error-code="no-untyped-call, no-untyped-def, untyped-decorator"
# Reason: Triton's decorators and device functions carry no types.

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

# A search over the bits of the logits, four bits per round. Each program sums, for each of `WAYS` pivots, the weight of
# the tokens of its block that are not below the pivot: their count for top-k, their probability for top-p (of the
# tokens that top-k left). The next launch adds up the blocks and resumes at the largest pivot that reaches the goal.
# There are no atomics, so the same logits give the same limit. Equal logits stay or go together, as in
# `runtime.sampling.logits_processors`.

WAYS = 16
NARROW_WARPS = 8  # with 4 warps, Triton 3.6 spills the sums
# Rounds until a pivot separates any two values of the dtype.
ROUNDS = {torch.bfloat16: 4, torch.float16: 5, torch.float32: 8}


@dataclass(frozen=True)
class Filters:
    """The filters that any sequence has; their values are in device buffers, so one captured launch serves all."""

    top_k: bool = False
    top_p: bool = False
    min_p: bool = False
    penalties: bool = False

    @property
    def searches(self) -> bool:
        return self.top_k or self.top_p


class LogitSource(NamedTuple):
    """Logits with the penalties of each sequence, as kernel arguments; without penalties all after `vocab` are None."""

    logits: Any  # [sequences, stride]
    stride: Any
    vocab: Any
    seen: Any  # uint8 [sequences, vocab]: in the prompt or the reply
    counts: Any  # fp32 [sequences, vocab]: occurrences in the reply
    repetition: Any  # fp32 [sequences], and the next two
    presence: Any
    frequency: Any


@triton.jit
def load_logits(source, sequence, place):
    """Load logits fp32 after penalties; -inf from `vocab` on."""
    inside = place < source.vocab
    at = source.logits + sequence.to(tl.int64) * source.stride + place
    x = tl.load(at, mask=inside, other=float("-inf")).to(tl.float32)
    if source.seen is not None:
        entry = sequence.to(tl.int64) * source.vocab + place
        seen = tl.load(source.seen + entry, mask=inside, other=0) != 0
        penalty = tl.load(source.repetition + sequence)
        x = tl.where(seen, tl.where(x > 0, tl.div_rn(x, penalty), x * penalty), x)
        count = tl.load(source.counts + entry, mask=inside, other=0.0)
        x = x - tl.load(source.frequency + sequence) * count
        x = x - tl.where(count > 0, tl.load(source.presence + sequence), 0.0)
    return x


@triton.jit
def key_of(x):
    """Return int32 keys in the order of fp32 x; both zeros are equal."""
    # The bits of a positive float are ordered like integers; those of a negative one in reverse, so they are flipped.
    bits = tl.where(x == 0, 0.0, x).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def largest_of(peaks, sequence, blocks, BLOCKS: tl.constexpr):
    """Return the largest logit of a sequence."""
    place = tl.arange(0, BLOCKS)
    return tl.max(tl.load(peaks + sequence * blocks + place, mask=place < blocks, other=float("-inf")), 0)


@triton.jit
def search_bound(weights, lows, goal, top_p, step, sequence, blocks, WHOLE: tl.constexpr, BLOCKS: tl.constexpr):
    """Return the lower bound of the search of a sequence after a round in steps of `step`, and its goal.

    WHOLE: the first pivot of that round included all tokens, so the goal is `top_p` of its weight; with 1 all stay.
    """
    way, place = tl.arange(0, 16), tl.arange(0, BLOCKS)
    where = (sequence * blocks + place)[:, None] * 16 + way[None, :]
    total = tl.sum(tl.load(weights + where, mask=(place < blocks)[:, None], other=0.0), 0)
    if WHOLE:
        goal = tl.maximum(top_p * tl.sum(tl.where(way == 0, total, 0.0), 0), 1e-30)  # the largest logit always stays
        goal = tl.where(top_p < 1.0, goal, float("inf"))
    reached = tl.sum((total >= goal).to(tl.int32), 0)
    return tl.load(lows + sequence) + tl.maximum(reached - 1, 0) * step, goal


@triton.jit(do_not_specialize=["step", "step_before"])
def narrow_kernel(
    source,  # `LogitSource`
    peaks,  # fp32 [sequences, blocks]
    weights_before,  # fp32 [sequences, blocks, 16] of the round before
    weights,  # [sequences, blocks, 16] of this round
    lows_before,  # int32 [sequences]: lower bounds before that round
    lows,  # int32 [sequences]: lower bounds before this round
    goals,  # fp32 [sequences]: goals of top-p
    least,  # int32 [sequences]: smallest key that top-k leaves
    temperature,  # fp32 [sequences], and the next two
    top_k,
    top_p,
    step_before,
    step,
    ROUND: tl.constexpr,  # 0, 1 or 2 for all that follow
    MASS: tl.constexpr,  # weigh by probability, not by count
    AFTER: tl.constexpr,  # a search by counts came before
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    sequence, block = tl.program_id(0), tl.program_id(1)
    blocks = tl.num_programs(1)
    low = tl.full((), -2147483648, tl.int32)
    bound = low
    if ROUND == 0:
        if MASS and AFTER:
            goal = tl.load(top_k + sequence)
            bound, goal = search_bound(
                weights_before, lows_before, goal, 0.0, step_before, sequence, blocks, False, BLOCKS
            )
            if block == 0:
                tl.store(least + sequence, bound)
    else:
        if MASS and AFTER:
            bound = tl.load(least + sequence)
        goal = tl.load(top_k + sequence)
        if MASS and ROUND == 2:
            goal = tl.load(goals + sequence)
        low, goal = search_bound(
            weights_before,
            lows_before,
            goal,
            tl.load(top_p + sequence),
            step_before,
            sequence,
            blocks,
            MASS and ROUND == 1,
            BLOCKS,
        )
        if MASS and ROUND == 1 and block == 0:
            tl.store(goals + sequence, goal)
    if block == 0:
        tl.store(lows + sequence, low)
    place = block * BLOCK + tl.arange(0, BLOCK)
    x = load_logits(source, sequence, place)
    key = key_of(x)
    weight = tl.where(place < source.vocab, 1.0, 0.0)
    if MASS:
        weight = tl.exp((x - largest_of(peaks, sequence, blocks, BLOCKS)) / tl.load(temperature + sequence))
        weight = tl.where((key >= bound) & (place < source.vocab), weight, 0.0)
    way = tl.arange(0, 16)
    above = key[:, None] >= (low + way * step)[None, :]
    tl.store(weights + (sequence * blocks + block) * 16 + way, tl.sum(tl.where(above, weight[:, None], 0.0), 0))


class Limit(NamedTuple):
    """The arguments of `search_bound` for each sequence, as kernel arguments."""

    weights: Any
    lows: Any
    goals: Any  # of top-p, or the counts of top-k
    step: Any
    least: Any  # int32 [sequences], the smallest key that top-k leaves where top-p was searched after it; else None


def find_limit(
    source: LogitSource, peaks: Tensor, filters: Filters, temperature: Tensor, top_k: Tensor, top_p: Tensor, block: int
) -> Limit:
    """Launch the searches that `filters` need; peaks: the largest logit of each `block` of the vocabulary.

    temperature, top_k (1 to vocab) and top_p: fp32 [sequences].
    """
    (sequences, blocks), device = peaks.shape, peaks.device
    grid, max_blocks = (sequences, blocks), triton.next_power_of_2(blocks)
    weights = torch.empty(2, sequences, blocks, WAYS, dtype=torch.float32, device=device)
    lows = torch.empty(
        2, triton.cdiv(sequences, 4) * 4, dtype=torch.int32, device=device
    )  # both rows aligned to 16 bytes
    goals = torch.empty(sequences, dtype=torch.float32, device=device)
    least = torch.empty(sequences, dtype=torch.int32, device=device)
    current, step = 0, 0
    for mass in (False, True):
        if not (filters.top_p if mass else filters.top_k):
            continue
        for index in range(ROUNDS[torch.float32 if filters.penalties else source.logits.dtype]):
            before, current = current, 1 - current
            step_before, step = step, 1 << (28 - 4 * index)
            narrow_kernel[grid](
                source,
                peaks,
                weights[before],
                weights[current],
                lows[before],
                lows[current],
                goals,
                least,
                temperature,
                top_k,
                top_p,
                step_before,
                step,
                ROUND=min(index, 2),
                MASS=mass,
                AFTER=filters.top_k,
                BLOCK=block,
                BLOCKS=max_blocks,
                num_warps=NARROW_WARPS,
            )
    both = filters.top_k and filters.top_p  # a sequence with top_p 1 has the limit of top-k alone
    return Limit(weights[current], lows[current], goals if filters.top_p else top_k, step, least if both else None)
