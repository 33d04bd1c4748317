"""Decode attention: a few new tokens per sequence attend to the paged KV cache, as Triton device code."""

# mypy: disable-error-code="no-untyped-call, no-untyped-def, untyped-decorator"
# Reason: Triton's decorators and device functions carry no types.

import math

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language import constexpr

from mycli.runtime.cache.kv_cache import Stored
from mycli.runtime.errors import Declined
from mycli.runtime.kernels.paged import KEY_BLOCK, Ragged, Scoring
from mycli.runtime.kernels.triton.cache_codes import (
    INT8_BIAS,
    biased_int8,
    biased_int8_words,
    convert_int8_words,
    converted,
)
from mycli.runtime.kernels.triton.int4_cache import (
    hadamard_rows,
    load_int4,
    lower_and_upper,
    whole_rows,
)
from mycli.runtime.kernels.triton.layer_cache import LayerCache
from mycli.runtime.kernels.triton.pdl import pdl_wait
from mycli.runtime.kernels.triton.product.activation import (
    Operand,
    columns_of,
    scaled_rows,
    some_tiles,
    store_activation,
)
from mycli.runtime.kernels.triton.product.matmul import Activation, TritonMatmul, check_contiguous, uses_ptx
from mycli.runtime.kernels.triton.product.tiles import Chip
from mycli.runtime.kernels.triton.split_k import last_to_arrive

# The keys of a sequence are split among programs with a running maximum and sum each; the last program to finish
# combines them in a fixed order and writes the operand of the next product. Keys are the rows of the MMA; its columns
# are the queries that share a key-value head (grouped heads times new tokens). Lengths and block tables are read on the
# device, so a captured CUDA graph stays valid while sequences grow, come and go. A turn of the loop reads keys of one
# cache block only, so its size is a multiple of `BLOCK_K`, or the block holds a whole sequence. int8 scales are applied
# to scores and probabilities; int4 vectors are multiplied in their rotated basis.

BLOCK_K = KEY_BLOCK  # keys per iteration of the loop
NARROWEST_HEAD = 9  # rounded up to a power of two, the inner dimension of a product of MMAs is at least 16
MAX_QUERIES = 64  # per program: tokens times the heads that share a key-value head
_MAX_SPLITS = 64
_LEAST_SCALE = tl.constexpr(1e-30)  # of an int8 value: its inverse, summed over keys, stays finite


@triton.jit(noinline=True)  # inlined, its addresses would take registers from the key loop
def _combine(
    outputs,  # of one query block: fp32 [kv_heads, splits, BLOCK_Q, HEAD_DIM], and stats [.., 2]
    stats,
    row,  # row of the first token
    tokens,
    tile,  # first of TILES tiles
    end,  # end of the tiles whose heads are complete
    heads,
    splits,
    sinks,
    into,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    ROWS: tl.constexpr,  # a power of two, at least the tokens
    TILES: tl.constexpr,
    SPLITS: tl.constexpr,  # splits read per iteration
    DTYPE: tl.constexpr,
):
    """Combine the splits of some heads in order; a split without visible keys has a maximum of -inf."""
    token, tile = some_tiles(0, tile, ROWS, TILES)
    present = (token < tokens) & (tile < end)
    column = columns_of(tile, into)
    head, lane = column // HEAD_DIM, column % HEAD_DIM
    inside = (present[:, None] & (head < heads))[None]
    place = head // GROUP * splits * BLOCK_Q + token[:, None] * GROUP + head % GROUP
    top = tl.full(place.shape, float("-inf"), tl.float32)
    total = tl.zeros(place.shape, tl.float32)
    out = tl.zeros(place.shape, tl.float32)
    for first in tl.range(0, splits, SPLITS):
        split = (first + tl.arange(0, SPLITS))[:, None, None]
        source, mask = place[None] + split * BLOCK_Q, inside & (split < splits)
        tops = tl.load(stats + source * 2, mask=mask, other=float("-inf"), cache_modifier=".cg")
        totals = tl.load(stats + source * 2 + 1, mask=mask, other=0.0, cache_modifier=".cg")
        outs = tl.load(outputs + source * HEAD_DIM + lane[None], mask=mask, other=0.0, cache_modifier=".cg")
        new_top = tl.maximum(top, tl.max(tops, axis=0))
        base = tl.where(new_top == float("-inf"), 0.0, new_top)
        shrink, weight = tl.exp2(top - base), tl.exp2(tops - base[None])
        total = total * shrink + tl.sum(weight * totals, axis=0)
        out = out * shrink + tl.sum(weight * outs, axis=0)
        top = new_top
    if sinks is not None:  # one more score in the softmax of each head, without a value
        sink = tl.load(sinks + head, mask=head < heads, other=0.0) * 1.4426950408889634
        base = tl.where(total > 0.0, tl.maximum(top, sink), sink)
        shrink = tl.where(total > 0.0, tl.exp2(top - base), 0.0)
        total, out = total * shrink + tl.exp2(sink - base), out * shrink
    # Padding sequences have no keys: 0 instead of 0 / 0. A NaN stays one.
    known = present[:, None] & (head < heads) & (total != 0.0)
    result = tl.where(known, out / total, 0.0).to(DTYPE).to(tl.float32)
    store_activation(result, row + token, tile, present, into)


@triton.jit(do_not_specialize=["tokens", "table_width"])
def attend_kernel(
    query,  # [sequences, tokens, heads, HEAD_DIM]
    keys,  # [blocks, kv_heads, block_size, HEAD_DIM], block_stride and head_stride apart; int8, int4 or as query
    values,
    key_scales,  # fp32 [blocks, kv_heads, block_size] for int8, the cache in bf16 for int4, else None
    value_scales,
    lengths,  # int32 [sequences]: number of keys, those of the new tokens included; 0 for a padding sequence
    counts,  # int32 [sequences]: new tokens of each sequence, if the last of its `tokens` are padding; else None
    block_table,  # int32 [sequences, table_width]: the cache blocks of each sequence in order
    outputs,  # fp32 [query_blocks, kv_heads, splits, BLOCK_Q, HEAD_DIM]
    stats,  # fp32 [query_blocks, kv_heads, splits, BLOCK_Q, 2]: maximum and sum of exponentials, base 2
    block_stride,
    head_stride,
    block_size,
    table_width,
    window,
    scale,  # scale of the scores times log2(e), or where CAPPED divided by the softcap
    softcap,  # where CAPPED the softcap times log2(e)
    sinks,  # fp32 [heads]: a score per head that has no value, or None
    counters,  # one per query block and UNIT key-value heads
    into,  # `Operand` of the next product
    tokens,  # new tokens per sequence
    TOKENS: tl.constexpr,  # new tokens per query block; the last one has the rest
    SPLIT_QUERIES: tl.constexpr,  # a sequence may have several query blocks
    GROUP: tl.constexpr,  # heads that share a key-value head
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
    TURNS: tl.constexpr,  # turns of the key loop in a cache block; 0 if each sequence is one block
    WINDOW: tl.constexpr,
    CAPPED: tl.constexpr,  # a score s becomes softcap * tanh(s / softcap)
    DOT: tl.constexpr,  # dtype of the MMA operands
    ASM: tl.constexpr,
    PURE: tl.constexpr,  # conversions may be moved (`cache_codes`)
    UNIT: tl.constexpr,  # smallest number of key-value heads whose columns are whole tiles of the operand
    ROWS: tl.constexpr,  # a power of two, at least TOKENS
    TILES: tl.constexpr,  # tiles combined at a time
    SPLITS: tl.constexpr,  # splits combined at a time
    PDL: tl.constexpr,  # programmatic dependent launch
):
    """Grid (splits, kv_heads, query blocks of all sequences)."""
    if PDL:
        pdl_wait()
    split, kv_head, query_block = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    splits, kv_heads = tl.num_programs(0), tl.num_programs(1)
    if SPLIT_QUERIES:
        query_blocks = tl.cdiv(tokens, TOKENS)
        sequence, done = query_block // query_blocks, query_block % query_blocks * TOKENS
        here, row = tl.minimum(TOKENS, tokens - done), sequence * tokens + done
        length = tl.load(lengths + sequence) - tokens + done + here  # keys visible to the last token here
    else:
        sequence, here, row = query_block, TOKENS, query_block * TOKENS
        length = tl.load(lengths + sequence)
    first_position = length - here
    if counts is not None:  # keys of padding are not stored
        length = tl.minimum(length, tl.load(lengths + sequence) - tokens + tl.load(counts + sequence))
    column = tl.arange(0, BLOCK_Q)
    token, lane = column // GROUP, tl.arange(0, BLOCK_D)
    position = first_position + token
    head = (row + token) * (kv_heads * GROUP) + kv_head * GROUP + column % GROUP
    q_mask = (column[:, None] < here * GROUP) & (lane[None, :] < HEAD_DIM)
    q = tl.load(query + head[:, None] * HEAD_DIM + lane[None, :], mask=q_mask, other=0.0).to(DOT)
    INT4: tl.constexpr = keys.dtype.element_ty == tl.uint8
    FACTOR: tl.constexpr = HEAD_DIM**-0.5  # makes the Hadamard transform orthonormal
    if INT4:
        rotated_q = hadamard_rows(q.to(tl.float32), BLOCK_Q, HEAD_DIM) * FACTOR
        q, q_upper = lower_and_upper(rotated_q.to(DOT), BLOCK_Q, HEAD_DIM)
    INT8: tl.constexpr = key_scales is not None and not INT4
    # With PTX, int8 codes keep the bias of their conversion, which is subtracted from scores, and from sums at the end.
    BIASED: tl.constexpr = INT8 and ASM
    if BIASED:
        q, up = scaled_rows(q.to(tl.float32))
        score_start = tl.broadcast_to((tl.sum(q.to(tl.float32), axis=1) * -INT8_BIAS)[None, :], (BLOCK_K, BLOCK_Q))
        scales = up * scale
    table, head_base = block_table + sequence * table_width, kv_head.to(tl.int64) * head_stride
    first = tl.maximum(first_position - window + 1, 0) // BLOCK_K if WINDOW else 0
    blocks = tl.cdiv(length, BLOCK_K)
    share = tl.cdiv(blocks - first, splits)
    start = first + split * share
    # The block of the next turn is loaded a turn early: its keys wait for it.
    next_page = tl.load(table + (tl.minimum(start // TURNS, table_width - 1) if TURNS else 0))
    top = tl.full((BLOCK_Q,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_Q,), tl.float32)
    # Of 8-bit values a thread loads 16 bytes and stores 32 to shared memory, once they are converted: stored as two
    # halves of 16 columns, 8 and 8, they meet in no bank. As words they are copied ahead, and packed by no instruction.
    HALVES: tl.constexpr = INT4 or (INT8 and BLOCK_D >= 64 and HEAD_DIM % 4 == 0)
    out = tl.zeros((BLOCK_D // 2 if HALVES else BLOCK_D, BLOCK_Q), tl.float32)
    out_upper = out
    # Scales of int8 values are part of the exponent, so that weights are at most 1 and fp16 holds them.
    sums = tl.zeros(
        (BLOCK_K, BLOCK_Q), tl.float32
    )  # of exponentials without them, and of weights: of each row of a block
    weights = sums
    for block in tl.range(start, tl.minimum(start + share, blocks)):
        key, page, inside = block * BLOCK_K + tl.arange(0, BLOCK_K), next_page, block
        if TURNS:
            next_page = tl.load(table + tl.minimum((block + 1) // TURNS, table_width - 1))
            inside = block % TURNS
        base = page.to(tl.int64) * block_stride + head_base
        scale_base = (page * kv_heads + kv_head).to(tl.int64) * block_size + inside * BLOCK_K + tl.arange(0, BLOCK_K)
        if INT4:
            ROW: tl.constexpr = HEAD_DIM // 2 + HEAD_DIM // 16
            place = base + inside * tl.full((), BLOCK_K * ROW, tl.int64)
            k, k_upper = load_int4(keys, key_scales, place, key < length, BLOCK_K, HEAD_DIM, DOT, ASM, False)
            v, v_upper = load_int4(values, value_scales, place, key < length, BLOCK_K, HEAD_DIM, DOT, ASM, True, PURE)
            score = tl.dot(k_upper, q_upper.trans(), tl.dot(k, q.trans())) * scale
        else:
            place = base + inside * tl.full((), BLOCK_K * HEAD_DIM, tl.int64)
            cell = tl.arange(0, BLOCK_K)[:, None] * HEAD_DIM + lane[None, :]
            present = (key[:, None] < length) & (lane[None, :] < HEAD_DIM)
            k = tl.load(keys + place + cell, mask=present, other=0)
            if HALVES:
                word = tl.arange(0, BLOCK_D // 4)
                cell = tl.arange(0, BLOCK_K)[:, None] * (HEAD_DIM // 4) + word[None, :]
                present = (key[:, None] < length) & (word[None, :] < HEAD_DIM // 4)
                words = tl.load(values.to(tl.pointer_type(tl.int32)) + (place // 4 + cell), mask=present, other=0)
                if BIASED:
                    v = biased_int8_words(words, BLOCK_K, BLOCK_D // 4, PURE)
                else:
                    v = convert_int8_words(words, BLOCK_K, BLOCK_D // 4, DOT, ASM, PURE)
                v, v_upper = lower_and_upper(v, BLOCK_K, BLOCK_D)
            else:
                v = tl.load(values + place + cell, mask=present, other=0)
                if BIASED:
                    v = biased_int8(v)
            if BIASED:
                score = tl.dot(biased_int8(k), q.trans(), score_start) * scales[None, :]
            else:
                score = tl.dot(k.to(DOT), q.trans()) * scale
            if INT8:
                score *= tl.load(key_scales + scale_base, mask=key < length, other=0.0)[:, None]
        if HALVES:
            v, v_upper = converted(v, ASM, PURE), converted(v_upper, ASM, PURE)
        if CAPPED:  # tanh(s), exact at both ends
            score = softcap - 2.0 * softcap / (tl.exp2(score * 2.8853900817779268) + 1.0)
        if INT8:
            value_scale = tl.load(value_scales + scale_base, mask=key < length, other=1.0)
            exponent = tl.log2(value_scale + _LEAST_SCALE)
            score += exponent[:, None]
        seen = key[:, None] <= position[None, :]
        if WINDOW:
            seen = seen & (position[None, :] - key[:, None] < window)
        score = tl.where(seen, score, float("-inf"))
        new_top = tl.maximum(top, tl.max(score, axis=0))
        base_top = tl.where(new_top == float("-inf"), 0.0, new_top)
        weight = tl.exp2(score - base_top[None, :])
        shrink = tl.exp2(top - base_top)
        if INT8:
            sums = sums * shrink[None, :] + weight * tl.exp2(-exponent)[:, None]
        else:
            total = total * shrink + tl.sum(weight, axis=0)
        if BIASED:
            weights = weights * shrink[None, :] + weight.to(DOT).to(tl.float32)
        out = out * shrink[None, :] + tl.dot(v.to(DOT).trans(), weight.to(DOT))
        if HALVES:
            out_upper = out_upper * shrink[None, :] + tl.dot(v_upper.to(DOT).trans(), weight.to(DOT))
        top = new_top
    if INT8:
        total = tl.sum(sums, axis=0)
    if BIASED:
        bias = tl.sum(weights, axis=0) * INT8_BIAS
        out, out_upper = out - bias[None, :], out_upper - bias[None, :]
    if HALVES:
        whole = whole_rows(out.trans(), out_upper.trans(), BLOCK_Q, BLOCK_D)
        if INT4:
            whole = hadamard_rows(whole, BLOCK_Q, HEAD_DIM) * FACTOR
        out = whole.trans()
    part = ((query_block * kv_heads + kv_head) * splits + split) * BLOCK_Q + column
    tl.store(outputs + part[None, :] * HEAD_DIM + lane[:, None], out, mask=lane[:, None] < HEAD_DIM)
    tl.store(stats + part * 2, top)
    tl.store(stats + part * 2 + 1, total)

    unit, units = kv_head // UNIT, tl.cdiv(kv_heads, UNIT)
    sharing = tl.minimum(UNIT, kv_heads - unit * UNIT)
    if last_to_arrive(counters + query_block * units + unit, sharing * splits):
        SPAN: tl.constexpr = UNIT * GROUP * HEAD_DIM // into.TILE_K
        parts = query_block.to(tl.int64) * kv_heads * splits * BLOCK_Q
        end = tl.minimum((unit + 1) * SPAN, into.tiles)
        for tile in tl.range(unit * SPAN, end, TILES):
            _combine(
                outputs + parts * HEAD_DIM, stats + parts * 2, row, here, tile, end, kv_heads * GROUP, splits,
                sinks, into, GROUP, HEAD_DIM, BLOCK_Q, ROWS, TILES, SPLITS, query.dtype.element_ty,
            )  # fmt: skip


def splits(chip: Chip, programs: int, capacity: int) -> int:
    """Return the number of splits of the keys: two programs per multiprocessor, at least four turns per program.

    capacity: most keys of a sequence. The number depends on nothing else of a sequence, so the split, and with it the
    bits of the result, stays while it grows.
    """
    fill = max(1, 2 * chip.processors // programs)
    return min(_MAX_SPLITS, fill, max(1, capacity // (4 * BLOCK_K)))


def combination(tokens: int, columns: int, tile_k: int, parts: int, warps: int) -> dict[str, int]:
    """Return the constants of `attend_kernel` for the combination; columns: of one key-value head's queries."""
    # A thread has up to 4 columns of 8 splits at a time, in 8 warps of 4 splits: more would cost the key loop its
    # second block on a multiprocessor.
    rows, unit = 1 << (tokens - 1).bit_length(), tile_k // math.gcd(tile_k, columns)
    tiles = min(1 << (unit * columns // tile_k - 1).bit_length(), max(1, 128 * warps // (rows * tile_k)))
    return {"UNIT": unit, "ROWS": rows, "TILES": tiles, "SPLITS": min(32 // warps, 1 << (parts - 1).bit_length())}


def attend_warps(block_q: int) -> int:
    return 4 if block_q <= 16 else 8  # more than 16 queries in 4 warps would spill registers


def attend_stages(chip: Chip, head_dim: int, queries: int, element: int) -> int:
    """Return the pipeline stages of the key loop: 3, or as many as shared memory holds, maybe 0.

    queries: `BLOCK_Q`; element: bytes per cached number. An upper bound of what Triton 3.6 and 3.7 allocate.
    """
    # Chips with asynchronous MMA copy keys and values to shared memory ahead, and have the operands there too. On other
    # chips values of 16 bits stay in registers.
    lanes, apart = 1 << (head_dim - 1).bit_length(), chip.capability[0] in (9, 10, 11)
    block = BLOCK_K * lanes * element * (2 if apart or element == 1 else 1)
    others = 2 * queries * lanes + (2 * BLOCK_K * queries if apart or element == 1 else 0) + 2048
    if element == 1:  # converted before the product, with a scale per key
        others += 2 * BLOCK_K * lanes
        block += 8 * BLOCK_K
    fitting = (chip.shared - others) // block
    if element == 1 and chip.shared < 128 << 10:  # two, so that two programs fit; they take one block ahead
        return max(0, min(2, fitting + 1))
    return max(0, min(3, fitting))


def tokens_per_program(tokens: int, group: int) -> int:
    """Return how many new tokens of a sequence one program handles, in blocks of about equal size; 0 if none fits."""
    fitting = MAX_QUERIES // group
    return fitting and -(-tokens // -(-tokens // fitting))


def query_columns(tokens: int, group: int) -> int:
    """Return `BLOCK_Q`: the columns for `tokens` new tokens of the `group` heads that share a key-value head."""
    return max(8, 1 << (tokens * group - 1).bit_length())


def head_fits(chip: Chip, group: int, head_dim: int, tokens: int, element: int) -> bool:
    """Return whether the kernel attends with `group` heads per key-value head; element: bytes per cached number."""
    block_tokens = tokens_per_program(tokens, group)
    if block_tokens == 0 or head_dim < NARROWEST_HEAD:
        return False
    return attend_stages(chip, head_dim, query_columns(block_tokens, group), element) > 0


def decode_attention(
    query: Tensor,
    cache: LayerCache,
    lengths: Tensor,
    block_table: Tensor,
    scoring: Scoring,
    product: TritonMatmul,
    counters: Tensor,
    counts: Tensor | None = None,
) -> Activation:
    """Return the attention of query [sequences, tokens, heads, head_dim] to the cache, as an operand of `product`.

    The queries are at the last positions of their sequences. lengths: int32 [sequences], including them; 0 for padding,
    whose rows become zeros. block_table: int32 [sequences, blocks]. Raises ValueError if more than 64 heads share a
    key-value head, or for a block size that is not supported. counters: int32 zeros, at least sequences * tokens *
    kv_heads; zero again afterwards. counts: int32 [sequences], new tokens of each sequence; its rows after them have
    no keys of their own, and their results mean nothing.
    """
    into = product.activation(query.shape[0] * query.shape[1])
    launch_attention(query, cache, lengths, block_table, scoring, into.operand(), product.chip, counters, counts)
    return into


def launch_attention(
    query: Tensor,
    cache: LayerCache,
    lengths: Tensor,
    block_table: Tensor,
    scoring: Scoring,
    into: Operand,
    chip: Chip,
    counters: Tensor,
    counts: Tensor | None = None,
) -> None:
    check_contiguous(query, lengths, counts, block_table, scoring.sinks)
    sequences, tokens, heads, head_dim = query.shape
    (kv_heads, block_size), table_width = cache.keys.shape[1:3], block_table.shape[1]
    if table_width > 1 and block_size % BLOCK_K:
        raise ValueError(f"{table_width} cache blocks per sequence of {block_size}, no multiple of {BLOCK_K}")
    group = heads // kv_heads
    if not head_fits(chip, group, head_dim, tokens, cache.keys.element_size()):
        raise ValueError(
            f"{group} heads of {head_dim} per key-value head: more than 64, narrow, or no shared memory left"
        )
    block_tokens = tokens_per_program(tokens, group)
    block_q = query_columns(block_tokens, group)
    query_blocks = sequences * -(-tokens // block_tokens)
    parts = splits(chip, query_blocks * kv_heads, table_width * block_size)
    dot = tl.float16
    if query.dtype is torch.bfloat16 and not (cache.keys.dtype is torch.int8 and uses_ptx()):
        dot = tl.bfloat16 if uses_ptx() else tl.float32  # the interpreter would multiply bf16 as integers
    shape = (query_blocks, kv_heads, parts, block_q)
    outputs = torch.empty((*shape, head_dim), dtype=torch.float32, device=query.device)
    stats = torch.empty((*shape, 2), dtype=torch.float32, device=query.device)
    log2e = math.log2(math.e)
    scale = scoring.scale / scoring.softcap if scoring.softcap else scoring.scale * log2e
    attend_kernel[(parts, kv_heads, query_blocks)](
        query, cache.keys, cache.values, *cache.scales(), lengths, counts, block_table, outputs, stats,
        *cache.keys.stride()[:2], block_size, table_width, scoring.window or 0, scale, scoring.softcap * log2e,
        scoring.sinks, counters, into, tokens,
        TOKENS=block_tokens, SPLIT_QUERIES=block_tokens < tokens, GROUP=group, HEAD_DIM=head_dim,
        BLOCK_D=triton.next_power_of_2(head_dim), BLOCK_Q=block_q, BLOCK_K=BLOCK_K,
        TURNS=0 if table_width == 1 else block_size // BLOCK_K, WINDOW=scoring.window is not None,
        CAPPED=bool(scoring.softcap), DOT=dot, ASM=uses_ptx(),
        PURE=chip.capability[0] in (10, 11),
        **combination(block_tokens, group * head_dim, into.TILE_K.value, parts, attend_warps(block_q)),
        PDL=chip.pdl, launch_pdl=chip.pdl,
        num_warps=attend_warps(block_q), num_stages=attend_stages(chip, head_dim, block_q, cache.keys.element_size()),
    )  # fmt: skip


def launch_paged_attention(
    query: Tensor, keys: Stored, values: Stored, ragged: Ragged, scoring: Scoring, chip: Chip, out: Tensor | None = None
) -> Tensor | Declined:
    """Compute `triton_attend_paged` on a chip; out: [tokens, heads * head_dim], where the result is written."""
    rows, heads, head_dim = query.shape
    assert ragged.tokens is not None
    if not head_fits(chip, heads // keys.data.shape[1], head_dim, ragged.tokens, keys.data.element_size()):
        return Declined("attention-shape", {"group": heads // keys.data.shape[1], "head_dim": head_dim})
    if out is None:
        out = torch.empty((rows, heads * head_dim), dtype=query.dtype, device=query.device)
    tile = min(128, head_dim & -head_dim)
    into = Operand(out, None, out.shape[1] // tile, 0, constexpr(tile), constexpr(False))
    counters = torch.zeros(rows * keys.data.shape[1], dtype=torch.int32, device=query.device)
    cache = LayerCache(keys.data, values.data, keys.scales, values.scales)
    shaped = query.reshape(rows // ragged.tokens, ragged.tokens, heads, head_dim).contiguous()
    launch_attention(shaped, cache, ragged.lengths, ragged.block_table, scoring, into, chip, counters, ragged.counts)
    return out
