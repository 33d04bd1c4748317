"""The MoE half of a layer for few tokens, as launches that follow each other without the host."""

# mypy: disable-error-code="no-untyped-call, no-untyped-def, untyped-decorator"
# Reason: Triton's decorators and device functions carry no types.

from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from mycli.runtime.kernels.routed import Route
from mycli.runtime.kernels.triton.experts import ExpertTable, route_tokens
from mycli.runtime.kernels.triton.gated_silu import GatedActivation, activate_parts
from mycli.runtime.kernels.triton.pdl import pdl_wait
from mycli.runtime.kernels.triton.product.activation import columns_of, some_tiles
from mycli.runtime.kernels.triton.product.matmul import Activation, FewRowsProduct, TritonMatmul, check_contiguous
from mycli.runtime.kernels.triton.residual import (
    PLAIN_SUM,
    Norm,
    Residual,
    add,
    embed,
    load_gain,
    residual_arguments,
    store_sum,
)
from mycli.runtime.kernels.triton.split_k import add_parts
from mycli.runtime.memory.graphs import MOST_ROWS
from mycli.runtime.models.experts_spec import RoutingSpec

# The norm's operand feeds the first product of all experts; the router reads the same norm rounded as the plain pass
# rounds it. The weighted sum of the experts, and the shared expert, are added to the residual stream. The number of
# launches does not depend on the routing, and nothing is read back.

_EXPERTS = 2  # per program of the router: with 128 experts, 64 programs read its weight
_COLUMNS = 1024  # per iteration of the router
_SPAN = 128  # columns of a program that sums


@triton.jit
def score_kernel(
    stream,  # [tokens, size]
    gain,  # [size]
    rms,  # `RmsScale` of the stream
    router,  # [experts, size]
    bias,  # [experts], or None
    gate,  # [1, size], or None
    scores,  # [tokens, experts], one column more with a gate
    rows_padded,  # rows of `rms.squares`
    experts,
    BLOCK_E: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (blocks of experts, tokens): router scores of the normed stream, summed in fp32 and rounded once."""
    if PDL:
        pdl_wait()
    expert, token = tl.program_id(0) * BLOCK_E + tl.arange(0, BLOCK_E), tl.program_id(1)
    piece = tl.arange(0, rms.PIECES)
    squares = tl.load(rms.squares + piece * rows_padded + token, mask=piece < rms.pieces, other=0.0)
    root = tl.rsqrt(tl.sum(squares, 0) / rms.size + rms.eps)
    total = tl.zeros((BLOCK_E, BLOCK_K), tl.float32)
    for first in tl.range(0, rms.size, BLOCK_K):
        column = first + tl.arange(0, BLOCK_K)
        inside = column < rms.size
        x = tl.load(stream + token * rms.size + column, mask=inside, other=0.0)
        # Rounded to the dtype of the stream, unlike a product's operand: a difference could select another expert.
        normed = x.to(tl.float32) * root * tl.load(gain + column, mask=inside, other=0.0).to(tl.float32)
        known = (expert[:, None] < experts) & inside[None, :]
        weight = tl.load(router + expert[:, None] * rms.size + column[None, :], mask=known, other=0.0)
        if gate is not None:
            last = (expert[:, None] == experts) & inside[None, :]
            weight += tl.load(gate + expert[:, None] * 0 + column[None, :], mask=last, other=0.0)
        total += weight.to(tl.float32) * normed.to(x.dtype).to(tl.float32)[None, :]
    score = tl.sum(total, axis=1).to(scores.dtype.element_ty)
    if bias is not None:
        added = tl.load(bias + expert, mask=expert < experts, other=0.0).to(tl.float32)
        score = (score.to(tl.float32) + added).to(scores.dtype.element_ty)
    width = experts
    if gate is not None:
        width += 1
    tl.store(scores + token * width + expert, score, mask=expert < width)


@triton.jit(do_not_specialize=["count", "shared_count", "rows", "pairs", "top_k", "experts"])
def combine_kernel(
    parts,  # fp32 [count, pairs, size]: split-K parts of the experts' last product
    places,  # int32 [rows, top_k]
    weights,  # fp32 [rows, top_k]
    biases,  # [experts, size], or None
    starts,  # int32 [experts + 1], the pairs of each expert, or None without biases
    shared,  # fp32 [shared_count, rows, size]: the shared expert's, or None
    gates,  # [rows], `gate_stride` apart: router scores of its gate, or None
    count,
    shared_count,
    rows,
    pairs,
    top_k,
    experts,
    gate_stride,
    args,  # `ResidualArguments`, one row at a time
    RANKS: tl.constexpr,  # a power of two, at least `top_k`
    EXPERTS: tl.constexpr,  # a power of two, at least `experts`
    PDL: tl.constexpr,
):
    """Grid (pieces, rows): add the weighted sum of a token's experts to the stream, in fp32, parts in order."""
    if PDL:
        pdl_wait()
    piece, first = tl.program_id(0), tl.program_id(1)
    row, tile = some_tiles(first, piece * args.TILES, 1, args.TILES)
    column = columns_of(tile, args.into)
    inside = (row[:, None] < rows) & (column < args.size)
    stream_place = row[:, None] * args.size + column
    x = tl.load(args.stream + stream_place, mask=inside, other=0.0)
    gain = load_gain(column, inside, args)
    rank = tl.arange(0, RANKS)
    place = tl.load(places + first * top_k + rank, mask=rank < top_k, other=0)
    weight = tl.load(weights + first * top_k + rank, mask=rank < top_k, other=0.0)
    # All experts of a token are loaded in one step: a loop would pay the latency of the L2 cache for each.
    LINES: tl.constexpr = RANKS * args.TILES
    source = (place[:, None, None] * args.size + column[None, :, :]).reshape(LINES, args.into.TILE_K)
    present = ((rank < top_k)[:, None, None] & inside[None, :, :]).reshape(LINES, args.into.TILE_K)
    outputs = add_parts(parts, source, count, pairs * args.size, present).to(x.dtype).to(tl.float32)
    if biases is not None:
        ends = tl.load(starts + 1 + tl.arange(0, EXPERTS), mask=tl.arange(0, EXPERTS) < experts, other=0x7FFFFFFF)
        owner = tl.sum((ends[None, :] <= place[:, None]).to(tl.int32), axis=1)
        bias = (owner[:, None, None] * args.size + column[None, :, :]).reshape(LINES, args.into.TILE_K)
        outputs += tl.load(biases + bias, mask=present, other=0.0).to(tl.float32)
        outputs = outputs.to(x.dtype).to(tl.float32)
    outputs = outputs.reshape(RANKS, args.TILES, args.into.TILE_K)
    added = tl.sum(outputs * weight[:, None, None], axis=0)
    if shared is not None:
        output = add_parts(shared, stream_place, shared_count, rows * args.size, inside).to(x.dtype)
        if gates is not None:
            gate = tl.load(gates + first * gate_stride).to(tl.float32)
            factor = (1.0 / (1.0 + tl.exp(-gate))).to(x.dtype)
            output = (output.to(tl.float32) * factor.to(tl.float32)).to(x.dtype)
        added = added.to(x.dtype).to(tl.float32) + output.to(tl.float32)
    store_sum(x, added, gain, first, row, tile, column, inside, piece, rows, args)


def score(
    stream: Tensor,
    x: Activation,
    norm: Norm,
    router: Tensor,
    gate: Tensor | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    """Return router scores [tokens, experts] in the dtype of the stream [tokens, size]; `x` is the norm's operand.

    router: [experts, size]. gate: [1, size], the shared expert's, whose score is the last column. bias: [experts].
    """
    check_contiguous(stream, norm.gain, router, gate, bias)
    experts, pdl = len(router), norm.product.chip.pdl
    scores = stream.new_empty((len(stream), experts + (gate is not None)))
    score_kernel[(-(-scores.shape[1] // _EXPERTS), len(stream))](
        *(stream, norm.gain, x.rms, router, bias, gate, scores, x.sums.shape[1], experts),
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
    product: FewRowsProduct,
    stream: Tensor,
    norm: Norm | None,
    shared: Tensor | None = None,
    gates: Tensor | None = None,
    residual: Residual = PLAIN_SUM,
    biases: Tensor | None = None,
) -> Activation | None:
    """Add the experts' outputs to the stream [tokens, size] in place; return its norm as an operand, or None.

    parts: fp32 [count, pairs, size] of `product`, the first expert's, by expert. shared: fp32 [count, tokens, size] of
    the shared expert, multiplied by the sigmoid of `gates` [tokens, 1] if given. biases: [experts, size].
    """
    check_contiguous(parts, route.places, route.weights, stream, None if norm is None else norm.gain, shared, biases)
    (count, pairs, size), (rows, top_k), pdl = parts.shape, route.places.shape, product.chip.pdl
    tile = replace(product.tile(rows), block_m=1, block_n=_SPAN)
    args, span, into = residual_arguments(stream, norm, tile, residual=residual)
    experts, starts = (0, None) if biases is None else (len(biases), route.starts)
    combine_kernel[(-(-size // span), rows)](
        *(parts, route.places, route.weights, biases, starts, shared, gates),
        *(count, 0 if shared is None else len(shared)),
        *(rows, pairs, top_k, experts, 0 if gates is None else gates.stride(0), args),
        RANKS=triton.next_power_of_2(top_k),
        EXPERTS=triton.next_power_of_2(max(1, experts)),
        PDL=pdl,
        launch_pdl=pdl,
        num_warps=4,
    )
    return into


@dataclass(frozen=True, eq=False)
class SharedExpert:
    """The expert that every token goes through; gate: [1, size], dense.

    norm, rows: the norm before `gate_up` and the numbers of the rows, int64, where `gate_up` is packed otherwise than
    the other experts and reads an operand of its own.
    """

    gate_up: FewRowsProduct
    down: FewRowsProduct
    gate: Tensor | None
    norm: Norm | None = None
    rows: Tensor | None = None

    @classmethod
    def after(cls, norm: Norm, gate_up: FewRowsProduct, down: FewRowsProduct, gate: Tensor | None) -> "SharedExpert":
        """Return the shared expert after `norm`, whose product is the other experts'."""
        first = norm.product
        if isinstance(first, TritonMatmul) and isinstance(gate_up, TritonMatmul) and first.packing == gate_up.packing:
            return cls(gate_up, down, gate)
        assert norm.gain is not None  # experts have a norm before them
        rows = torch.arange(MOST_ROWS, device=norm.gain.device)
        return cls(gate_up, down, gate, replace(norm, product=gate_up), rows)

    def parts(self, normed: Activation, stream: Tensor) -> Tensor:
        """Return split-K parts fp32 [parts, tokens, size] from the stream and its norm, an operand of any tile."""
        down = self.down
        if self.norm is not None and self.rows is not None:
            # The launch that writes the first stream and operand of a pass, with the stream as its table.
            _, normed = embed(self.rows[: len(stream)], stream, self.norm)
        gate_up = self.gate_up.partial(normed)
        return down.partial(activate_parts(gate_up, stream.dtype, down, down.tile(gate_up.shape[1])))


@dataclass(frozen=True, eq=False)
class FusedRouter:
    """The router of a mixture. weight: [experts, size], dense, in the dtype of the stream; bias: [experts].

    correction: as in `reference.route`.
    """

    weight: Tensor
    bias: Tensor | None
    routing: RoutingSpec
    correction: Tensor | None


@dataclass(frozen=True, eq=False)
class FusedMixture:
    """A mixture of experts after a norm, whose `product` is the first expert's gate_up, and after attention.

    down_bias: [experts, size].
    """

    norm: Norm
    router: FusedRouter
    gate_up: ExpertTable
    activation: GatedActivation
    down: ExpertTable
    down_bias: Tensor | None
    shared: SharedExpert | None
    residual: Residual

    def largest(self) -> int:
        """Return the most weight rows that need counters: none here."""
        return 0

    def add_to(
        self,
        attended: Activation,
        o: FewRowsProduct,
        residual: Residual,
        stream: Tensor,
        next_norm: Norm | None,
        counters: Tensor,
        router_scores: Tensor | None = None,
    ) -> Activation | None:
        """Add the product with `o`, and then the mixture, to the stream [rows, size]; return it normed by `next_norm`.

        residual: bias, norm and factors of `o`. counters: as in `residual.add`. router_scores: instead of the router's.
        """
        first, last, router = self.gate_up.weights[0], self.down.weights[0], self.router
        experts, count = len(router.weight), len(stream) * router.routing.top_k
        share = -(-count // experts)  # mean number of rows per expert
        normed = add(attended, o, stream, self.norm, counters, first.tile(share), residual)
        assert normed is not None
        gate = None if self.shared is None else self.shared.gate
        scores = score(stream, normed, self.norm, router.weight, gate, router.bias)
        chosen_by = scores[:, :experts] if router_scores is None else router_scores
        route = route_tokens(chosen_by, router.routing, router.correction, first.chip.pdl)
        gate_up = first.partial(normed, routed=self.gate_up.rows(route.starts, route.tokens, count))
        active = activate_parts(gate_up, stream.dtype, last, last.tile(share), self.activation, route.starts)
        outputs = last.partial(active, routed=self.down.rows(route.starts, None, count))
        shared = None if self.shared is None else self.shared.parts(normed, stream)
        gates = None if gate is None else scores[:, experts:]
        return combine(outputs, route, last, stream, next_norm, shared, gates, self.residual, self.down_bias)
