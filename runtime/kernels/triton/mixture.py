"""The second half of a layer with experts, of few tokens, as launches that follow each other without the host.

The norm's operand goes to the first product of all experts, and, rounded as the plain model rounds it, to the router;
what the experts make is summed for each token and added to the residual stream; so is what one makes that all tokens go
through. How many launches there are does not depend on the route, and nothing of it is read back.
"""

# mypy: disable-error-code="no-untyped-call, no-untyped-def, untyped-decorator"
# Reason: Triton's decorators and device functions carry no types.

from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from mycli.runtime.kernels.routed import Route
from mycli.runtime.kernels.triton.experts import ExpertTable, route_tokens
from mycli.runtime.kernels.triton.gated_silu import activate_parts
from mycli.runtime.kernels.triton.pdl import pdl_wait
from mycli.runtime.kernels.triton.product.activation import columns_of, some_tiles
from mycli.runtime.kernels.triton.product.matmul import Activation, TritonMatmul, check_contiguous
from mycli.runtime.kernels.triton.residual import Norm, add, leave_sum, leaving
from mycli.runtime.kernels.triton.split_k import add_parts
from mycli.runtime.models.experts_spec import RoutingSpec

_EXPERTS = 2  # that a program of the router scores: with 128 of them 64 programs read its weight
_COLUMNS = 1024  # at a time
_SPAN = 128  # columns of a program that sums


@triton.jit
def score_kernel(
    stream,  # [tokens, size]
    gain,  # [size]
    rms,  # `RmsScale` of the stream
    router,  # [experts, size]
    gate,  # [1, size], or None
    scores,  # [tokens, experts], with a gate one more
    rows_kept,  # of the squares
    experts,
    BLOCK_E: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (blocks of experts, tokens). What the router makes of the normed stream, summed in fp32, rounded once.

    Unlike the operand of a product, the norm is rounded to the dtype of the stream: a choice hangs on it.
    """
    if PDL:
        pdl_wait()
    expert, token = tl.program_id(0) * BLOCK_E + tl.arange(0, BLOCK_E), tl.program_id(1)
    piece = tl.arange(0, rms.PIECES)
    squares = tl.load(rms.squares + piece * rows_kept + token, mask=piece < rms.pieces, other=0.0)
    root = tl.rsqrt(tl.sum(squares, 0) / rms.size + rms.eps)
    total = tl.zeros((BLOCK_E, BLOCK_K), tl.float32)
    for first in tl.range(0, rms.size, BLOCK_K):
        column = first + tl.arange(0, BLOCK_K)
        inside = column < rms.size
        x = tl.load(stream + token * rms.size + column, mask=inside, other=0.0)
        normed = x.to(tl.float32) * root * tl.load(gain + column, mask=inside, other=0.0).to(tl.float32)
        known = (expert[:, None] < experts) & inside[None, :]
        weight = tl.load(router + expert[:, None] * rms.size + column[None, :], mask=known, other=0.0)
        if gate is not None:
            last = (expert[:, None] == experts) & inside[None, :]
            weight += tl.load(gate + expert[:, None] * 0 + column[None, :], mask=last, other=0.0)
        total += weight.to(tl.float32) * normed.to(x.dtype).to(tl.float32)[None, :]
    score = tl.sum(total, axis=1).to(scores.dtype.element_ty)
    width = experts
    if gate is not None:
        width += 1
    tl.store(scores + token * width + expert, score, mask=expert < width)


@triton.jit(do_not_specialize=["count", "shared_count", "rows", "pairs", "top_k"])
def combine_kernel(
    parts,  # fp32 [count, pairs, size], of the last product of the experts
    places,  # int32 [rows, top_k]
    weights,  # fp32 [rows, top_k]
    shared,  # fp32 [shared_count, rows, size], of the expert that all go through, or None
    gates,  # [rows], `gate_stride` apart: its weight is the sigmoid of it; or None
    count,
    shared_count,
    rows,
    pairs,
    top_k,
    gate_stride,
    given,  # `Normed`, one row at a time
    RANKS: tl.constexpr,  # a power of two, at least `top_k`
    PDL: tl.constexpr,
):
    """Grid (pieces, rows). To the stream the weighted sum of what a token's experts make, in fp32; parts in order.

    All experts of a token are read at once, since each would cost the latency of the L2 cache.
    """
    if PDL:
        pdl_wait()
    piece, first = tl.program_id(0), tl.program_id(1)
    row, tile = some_tiles(first, piece * given.TILES, 1, given.TILES)
    column = columns_of(tile, given.into)
    inside = (row[:, None] < rows) & (column < given.size)
    own_place = row[:, None] * given.size + column
    x = tl.load(given.stream + own_place, mask=inside, other=0.0)
    rank = tl.arange(0, RANKS)
    place = tl.load(places + first * top_k + rank, mask=rank < top_k, other=0)
    weight = tl.load(weights + first * top_k + rank, mask=rank < top_k, other=0.0)
    LINES: tl.constexpr = RANKS * given.TILES
    source = (place[:, None, None] * given.size + column[None, :, :]).reshape(LINES, given.into.TILE_K)
    present = ((rank < top_k)[:, None, None] & inside[None, :, :]).reshape(LINES, given.into.TILE_K)
    made = add_parts(parts, source, count, pairs * given.size, present).to(x.dtype).to(tl.float32)
    made = made.reshape(RANKS, given.TILES, given.into.TILE_K)
    added = tl.sum(made * weight[:, None, None], axis=0)
    if shared is not None:
        own = add_parts(shared, own_place, shared_count, rows * given.size, inside).to(x.dtype)
        if gates is not None:
            gate = tl.load(gates + first * gate_stride).to(tl.float32)
            factor = (1.0 / (1.0 + tl.exp(-gate))).to(x.dtype)
            own = (own.to(tl.float32) * factor.to(tl.float32)).to(x.dtype)
        added = added.to(x.dtype).to(tl.float32) + own.to(tl.float32)
    leave_sum(x, added, first, row, tile, column, inside, piece, rows, given)


def score(stream: Tensor, x: Activation, norm: Norm, router: Tensor, gate: Tensor | None = None) -> Tensor:
    """[tokens, experts] in the dtype of the stream [tokens, size], of which `x` is the norm's operand.

    router: [experts, size] in the same dtype. gate: [1, size], whose score comes last.
    """
    check_contiguous(stream, norm.gain, router, gate)
    experts, pdl = len(router), norm.product.chip.pdl
    scores = stream.new_empty((len(stream), experts + (gate is not None)))
    score_kernel[(-(-scores.shape[1] // _EXPERTS), len(stream))](
        *(stream, norm.gain, x.rms, router, gate, scores, x.sums.shape[1], experts),
        BLOCK_E=_EXPERTS,
        BLOCK_K=_COLUMNS,
        PDL=pdl,
        launch_pdl=pdl,
        num_warps=4,
    )
    return scores


def combine(
    parts: Tensor,
    route: Route,
    product: TritonMatmul,
    stream: Tensor,
    norm: Norm | None,
    shared: Tensor | None = None,
    gates: Tensor | None = None,
) -> Activation | None:
    """Adds to the stream [tokens, size] what the experts make of each token, and returns its norm as an operand.

    parts: fp32 [count, pairs, size] of `product`, the first expert's, in the order of the route; shared: fp32 [count,
    tokens, size] of the one that all tokens go through, whose weights are sigmoids of `gates` [tokens, 1], if given.
    """
    check_contiguous(parts, route.places, route.weights, stream, None if norm is None else norm.gain, shared)
    (count, pairs, size), (rows, top_k), pdl = parts.shape, route.places.shape, product.chip.pdl
    each = replace(product.tile(rows), block_m=1, block_n=_SPAN)
    given, span, into = leaving(stream, norm, each)
    combine_kernel[(-(-size // span), rows)](
        *(parts, route.places, route.weights, shared, gates, count, 0 if shared is None else len(shared)),
        *(rows, pairs, top_k, 0 if gates is None else gates.stride(0), given),
        RANKS=triton.next_power_of_2(top_k),
        PDL=pdl,
        launch_pdl=pdl,
        num_warps=4,
    )
    return into


@dataclass(frozen=True, eq=False)
class SharedExpert:
    """An expert that all tokens go through; gate: [1, size], dense. Its first product is packed as the others' are."""

    gate_up: TritonMatmul
    down: TritonMatmul
    gate: Tensor | None

    def parts(self, normed: Activation, dtype: torch.dtype) -> Tensor:
        """fp32 [parts, tokens, size] from the norm's operand, of whatever tile it is."""
        down = self.down
        gate_up = self.gate_up.partial(normed)
        return down.partial(activate_parts(gate_up, dtype, down, down.tile(gate_up.shape[1])))


@dataclass(frozen=True, eq=False)
class FusedMixture:
    """A mixture of experts behind a norm, whose `product` is the first expert's gate and up.

    router: [experts, size], dense, in the dtype of the stream; `correction` as in `reference.route`.
    """

    norm: Norm
    router: Tensor
    choice: RoutingSpec
    correction: Tensor | None
    gate_up: ExpertTable
    down: ExpertTable
    shared: SharedExpert | None = None

    def largest(self) -> int:
        """The most rows of a weight that needs counters; these products need none."""
        return 0

    def add_to(
        self, attended: Activation, o: TritonMatmul, stream: Tensor, following: Norm | None, counters: Tensor
    ) -> Activation | None:
        """As `decode_step.SecondHalf.add_to`."""
        first, last = self.norm.product, self.down.weights[0]
        count = len(stream) * self.choice.top_k
        share = -(-count // len(self.router))  # the rows of an expert, were all to have as many
        normed = add(attended, o, stream, self.norm, counters, first.tile(share))
        assert normed is not None
        experts, gate = len(self.router), None if self.shared is None else self.shared.gate
        scores = score(stream, normed, self.norm, self.router, gate)
        route = route_tokens(scores[:, :experts], self.choice, self.correction, first.chip.pdl)
        gate_up = first.partial(normed, routed=self.gate_up.rows(route.starts, route.tokens, count))
        active = activate_parts(gate_up, stream.dtype, last, last.tile(share))
        made = last.partial(active, routed=self.down.rows(route.starts, None, count))
        if self.shared is None:
            return combine(made, route, last, stream, following)
        shared, gates = self.shared.parts(normed, stream.dtype), None if gate is None else scores[:, experts:]
        return combine(made, route, last, stream, following, shared, gates)
