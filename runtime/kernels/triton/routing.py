"""Selection of experts, sorting of (token, expert) pairs, and the weighted sum, as Triton device code."""

# mypy: disable-error-code="no-untyped-call, no-untyped-def, untyped-decorator"
# Reason: Triton's decorators and device functions carry no types.

import triton
import triton.language as tl

from mycli.runtime.kernels.triton.pdl import pdl_wait

# `runtime.kernels.routed` defines a route; `triton.experts` launches. Nothing is read back by the host.

_LOWEST = tl.constexpr(-(1 << 63))


@triton.jit
def _in_best_groups(
    ranked, expert, known, experts, top_groups, EXPERTS: tl.constexpr, GROUPS: tl.constexpr, BEST: tl.constexpr
):
    """Return which experts are in the `top_groups` groups with the largest sum of their BEST highest scores."""
    LANES: tl.constexpr = triton.next_power_of_2(GROUPS)
    group, lane = expert // (experts // GROUPS), tl.arange(0, LANES)
    sums = tl.full((LANES,), float("-inf"), tl.float32)
    for index in tl.static_range(GROUPS):
        inside = tl.where(known & (group == index), ranked, float("-inf"))
        best = tl.max(inside, 0)
        if BEST == 2:
            first = tl.min(tl.where(inside == best, expert, EXPERTS), 0)
            best += tl.max(tl.where(expert == first, float("-inf"), inside), 0)
        sums = tl.where(lane == index, best, sums)
    taken = expert < 0
    for index in tl.static_range(GROUPS):
        mine = tl.max(tl.where(lane == index, sums, float("-inf")), 0)
        ahead = (lane < GROUPS) & (
            (sums > mine) | ((sums == mine) & (lane < index))
        )  # among equals the first is higher
        taken = taken | ((group == index) & (tl.sum(ahead.to(tl.int32), 0) < top_groups))
    return taken


@triton.jit
def choose_kernel(
    scores,  # [tokens, experts], rows `stride` apart
    correction,  # fp32 [experts], or None
    chosen,  # int32 [tokens, top_k]
    weights,  # fp32 [tokens, top_k]
    stride,
    experts,
    top_k,
    epsilon,
    scale,
    softcap,  # where CAPPED a score s becomes softcap * tanh(s / softcap)
    top_groups,
    EXPERTS: tl.constexpr,  # a power of two, at least `experts`
    GROUPS: tl.constexpr,
    BEST: tl.constexpr,  # scores of a group that count, 1 or 2
    NORMALIZED: tl.constexpr,
    SIGMOID: tl.constexpr,
    OF_SCORES: tl.constexpr,  # scores are corrected and compared, not values
    CAPPED: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (tokens): select experts and weights as `RoutingSpec` describes."""
    if PDL:
        pdl_wait()
    token, expert = tl.program_id(0), tl.arange(0, EXPERTS)
    known = expert < experts
    score = tl.load(scores + token.to(tl.int64) * stride + expert, mask=known, other=0.0).to(tl.float32)
    if CAPPED:  # tanh(s), exact at both ends
        score = softcap - 2.0 * softcap / (tl.exp(score * 2.0 / softcap) + 1.0)
    top = tl.max(tl.where(known, score, float("-inf")), 0)
    if SIGMOID:
        value = tl.where(known, 1.0 / (1.0 + tl.exp(-score)), 0.0)
        total = 1.0
    else:
        value = tl.where(known, tl.exp(score - top), 0.0)
        total = tl.sum(value, 0)
    # The softmax keeps the order of scores, so these are compared, but not their sums. A key has the score in the order
    # of its bits, so that NaN has a place too, above the expert's index: among equals the first is higher, and none is
    # selected twice.
    compared, taken = score, known
    if not OF_SCORES and (correction is not None or GROUPS > 1):
        compared = value / total
    if correction is not None:
        compared += tl.load(correction + expert, mask=known, other=0.0)
    if GROUPS > 1:
        taken = taken & _in_best_groups(compared, expert, known, experts, top_groups, EXPERTS, GROUPS, BEST)
    bits = tl.where(compared == 0.0, 0.0, compared).to(tl.int32, bitcast=True)  # -0.0 and 0.0 are equal
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    key = tl.where(taken, (ordered.to(tl.int64) << 32) | (EXPERTS - expert).to(tl.int64), _LOWEST)
    if NORMALIZED:
        rest = key
        total = epsilon * total  # values are not divided by their sum yet
        for _ in tl.range(top_k):
            best = tl.max(rest, 0)
            total += tl.sum(tl.where(rest == best, value, 0.0), 0)
            rest = tl.where(rest == best, _LOWEST, rest)
    for rank in tl.range(top_k):
        best = tl.max(key, 0)
        mine = key == best
        tl.store(chosen + token * top_k + rank, tl.sum(tl.where(mine, expert, 0), 0))
        tl.store(weights + token * top_k + rank, tl.sum(tl.where(mine, value, 0.0), 0) / total * scale)
        key = tl.where(mine, _LOWEST, key)


@triton.jit(do_not_specialize=["pairs", "top_k"])
def place_kernel(
    chosen,  # int32 [pairs], by token
    starts,  # int32 [experts + 1]
    tokens,  # int32 [pairs], by expert
    places,  # int32 [pairs], by token
    pairs,
    top_k,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (experts): find the places of the pairs of an expert, sorted by expert, and within an expert by token."""
    if PDL:
        pdl_wait()
    expert, lane = tl.program_id(0), tl.arange(0, BLOCK)
    lower = tl.zeros((BLOCK,), tl.int32)
    for first in tl.range(0, pairs, BLOCK):
        other = tl.load(chosen + first + lane, mask=first + lane < pairs, other=0x7FFFFFFF)
        lower += (other < expert).to(tl.int32)
    begin = tl.sum(lower, 0)
    tl.store(starts + expert, begin)
    for first in tl.range(0, pairs, BLOCK):
        pair = first + lane
        other = tl.load(chosen + pair, mask=pair < pairs, other=-1)
        mine = (other == expert).to(tl.int32)
        place = begin + tl.cumsum(mine, 0) - 1
        tl.store(places + pair, place, mask=mine > 0)
        tl.store(tokens + place, pair // top_k, mask=mine > 0)
        begin += tl.sum(mine, 0)
    if expert == tl.num_programs(0) - 1:
        tl.store(starts + expert + 1, pairs)


@triton.jit(do_not_specialize=["top_k"])
def weighted_sum_kernel(
    x,  # [pairs, size]
    places,  # int32 [tokens, top_k]
    weights,  # fp32 [tokens, top_k]
    y,  # [tokens, size]
    size,
    top_k,
    BLOCK: tl.constexpr,
):
    """Grid (tokens, blocks of BLOCK columns): sum in fp32 in the order of `places`."""
    token, column = tl.program_id(0), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < size
    total = tl.zeros((BLOCK,), tl.float32)
    for rank in tl.range(top_k):
        place = tl.load(places + token * top_k + rank).to(tl.int64)
        weight = tl.load(weights + token * top_k + rank)
        total += tl.load(x + place * size + column, mask=inside, other=0.0).to(tl.float32) * weight
    tl.store(y + token.to(tl.int64) * size + column, total.to(y.dtype.element_ty), mask=inside)
