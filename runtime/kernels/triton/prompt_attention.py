"""Prompt attention: many new tokens per sequence attend to the paged KV cache, as Triton device code.

FlashAttention-2 (arXiv 2307.08691) over cache blocks: scores never leave the multiprocessor, and no mask is stored.
"""

# mypy: disable-error-code="no-untyped-call, no-untyped-def, untyped-decorator"
# Reason: Triton's decorators and device functions carry no types.

import math
from dataclasses import replace
from itertools import accumulate
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language import constexpr

from mycli.runtime.cache.kv_cache import PACKED, Stored
from mycli.runtime.errors import Declined
from mycli.runtime.kernels.paged import KEY_BLOCK, PromptKind, Ragged, Scoring
from mycli.runtime.kernels.reference_attention import attend_gathered
from mycli.runtime.kernels.triton.attention import NARROWEST_HEAD, launch_paged_attention
from mycli.runtime.kernels.triton.cache_codes import convert_int8, convert_int8_words, converted
from mycli.runtime.kernels.triton.int4_cache import hadamard_rows, load_int4, lower_and_upper, whole_rows
from mycli.runtime.kernels.triton.layer_cache import LayerCache
from mycli.runtime.kernels.triton.product.matmul import check_contiguous, uses_ptx
from mycli.runtime.kernels.triton.product.tiles import Chip
from mycli.runtime.memory.graphs import DRAFT_ROWS
from mycli.runtime.memory.workspace import MAX_PROMPT_HEAD
from mycli.runtime.quantization.int4_vectors import FUSED_INT4_HEADS

# Rows of the MMA are the new tokens of one query head, columns are keys. A turn of the loop reads keys of one cache
# block, from a multiple of `BLOCK_N` of the position on, whatever the pass begins with: the bits of a row depend on
# neither where a prompt is cut nor the other sequences. Keys that all rows of a program see need no mask. Quantized
# keys are converted as in `attention`.


class PromptArguments(NamedTuple):
    """The cache and the kind of scores of `attend_prompt_kernel`."""

    key_cache: (
        Any  # [blocks, kv_heads, block_size, HEAD_DIM], block_stride and head_stride apart; int8, int4 or as query
    )
    value_cache: Any
    key_scales: Any  # fp32 [blocks, kv_heads, block_size] for int8, bf16 [..., HEAD_DIM / 32] for int4, else None
    value_scales: Any
    block_stride: Any
    head_stride: Any
    block_size: Any
    window: Any
    chunk: Any
    scale: Any  # scale of the scores times log2(e), or where CAPPED divided by the softcap
    softcap: Any  # where CAPPED the softcap times log2(e)
    HEAD_DIM: Any
    BLOCK_D: Any
    BLOCK_N: Any
    WINDOW: Any
    CHUNK: Any  # a token sees keys from the last multiple of `chunk` on
    CAPPED: Any  # a score s becomes softcap * tanh(s / softcap)
    HALVES: Any  # a head is multiplied as two halves: of int4 vectors those of their bytes, else its dimensions
    DOT: Any  # dtype of the MMA operands
    ASM: Any


@triton.jit
def _load_lanes(source, lane, written, args, MASKED: tl.constexpr):
    if MASKED or args.HEAD_DIM != args.BLOCK_D:
        return tl.load(source, mask=written[:, None] & (lane[None, :] < args.HEAD_DIM), other=0)
    else:
        return tl.load(source)


@triton.jit
def _load_block(cache, scales, place, vector, written, args, MASKED: tl.constexpr, WORDS: tl.constexpr):
    """Return keys or values from `place` [BLOCK_N, BLOCK_D], or where HALVES their lower and upper half.

    vector: as in `load_int4`. WORDS: load words of four bytes, for operands that pass through shared memory once
    converted.
    """
    if cache.dtype.element_ty == tl.uint8:
        x, upper = load_int4(
            cache, scales, place, vector, written, args.BLOCK_N, args.HEAD_DIM, args.DOT, args.ASM, WORDS
        )
    elif WORDS and cache.dtype.element_ty == tl.int8 and args.HEAD_DIM % 4 == 0:
        word = tl.arange(0, args.BLOCK_D // 4)
        cell = place // 4 + tl.arange(0, args.BLOCK_N)[:, None] * (args.HEAD_DIM // 4) + word[None, :]
        source = cache.to(tl.pointer_type(tl.int32)) + tl.max_contiguous(cell, [1, 2])  # no bank conflicts, as below
        if MASKED or args.HEAD_DIM != args.BLOCK_D:
            words = tl.load(source, mask=written[:, None] & (word[None, :] < args.HEAD_DIM // 4), other=0)
        else:
            words = tl.load(source)
        x = convert_int8_words(words, args.BLOCK_N, args.BLOCK_D // 4, args.DOT, args.ASM, False)
        upper = x
    else:
        lane = tl.arange(0, args.BLOCK_D // 2 if args.HALVES else args.BLOCK_D)
        cell = place + tl.arange(0, args.BLOCK_N)[:, None] * args.HEAD_DIM + lane[None, :]
        # With 8 codes a thread stores 16 bytes, which meet in no bank; of rows of 256 they would spill registers.
        if cache.dtype.element_ty == tl.int8 and (args.HEAD_DIM <= 128 or args.HALVES):
            cell = tl.max_contiguous(cell, [1, 8])
        x = _load_lanes(cache + cell, lane, written, args, MASKED)
        upper = x
        if args.HALVES:
            upper = _load_lanes(cache + cell + args.HEAD_DIM // 2, lane, written, args, MASKED)
        if cache.dtype.element_ty == tl.int8 and args.BLOCK_N < 64:
            x = convert_int8(x, args.DOT, args.ASM)
    if WORDS and cache.dtype.element_ty.primitive_bitwidth == 8:
        x, upper = converted(x, args.ASM, False), converted(upper, args.ASM, False)
    return x, upper


@triton.jit
def _attend_block(turn, last, page, kv_head, kv_heads, q, q_upper, position, state, args, MASKED: tl.constexpr):
    """Attend to one block of keys; return the new maximum, sum and weighted values."""
    top, total, out, out_upper = state
    INT4: tl.constexpr = args.key_cache.dtype.element_ty == tl.uint8
    # Chips with asynchronous MMA convert a block once for all warps; on others each warp would convert all of it, but
    # for words. The keys of int4 vectors stay bytes: two halves of words would spill registers.
    WORDS: tl.constexpr = args.BLOCK_N < 64
    ROW: tl.constexpr = args.HEAD_DIM // 2 if INT4 else args.HEAD_DIM
    key = turn * args.BLOCK_N + tl.arange(0, args.BLOCK_N)
    inside = turn % tl.cdiv(args.block_size, args.BLOCK_N)
    place = page.to(tl.int64) * args.block_stride + kv_head.to(tl.int64) * args.head_stride
    place += inside * tl.full((), args.BLOCK_N * ROW, tl.int64)
    written = key <= last if MASKED else key >= 0
    vector = page.to(tl.int64) * (kv_heads * args.block_size) + kv_head * args.block_size + inside * args.BLOCK_N
    k, k_upper = _load_block(args.key_cache, args.key_scales, place, vector, written, args, MASKED, WORDS and not INT4)
    v, v_upper = _load_block(args.value_cache, args.value_scales, place, vector, written, args, MASKED, WORDS)
    score = tl.dot(q, k.to(args.DOT).trans())
    if args.HALVES:
        score = tl.dot(q_upper, k_upper.to(args.DOT).trans(), score)
    if args.key_scales is not None and not INT4:
        at = vector + tl.arange(0, args.BLOCK_N)
        score *= tl.load(args.key_scales + at, mask=written, other=0.0)[None, :]
    scale = args.scale
    if args.CAPPED:  # tanh(s), exact at both ends
        score = args.softcap - 2.0 * args.softcap / (tl.exp2(score * scale * 2.8853900817779268) + 1.0)
        scale = 1.0
    if MASKED:
        seen = key[None, :] <= position[:, None]
        if args.WINDOW:
            seen = seen & (position[:, None] - key[None, :] < args.window)
        if args.CHUNK:
            seen = seen & (key[None, :] >= (position - position % args.chunk)[:, None])
        score = tl.where(seen, score, float("-inf"))
    new_top = tl.maximum(top, tl.max(score, axis=1))
    base = new_top * scale
    if MASKED:  # a row may see no key of the first blocks of its program
        base = tl.where(new_top == float("-inf"), 0.0, base)
    # Written out, so that blocks with and without a mask round alike.
    weight = tl.exp2(tl.fma(score, scale, -base[:, None]))
    shrink = tl.exp2(tl.fma(top, scale, -base))
    total = total * shrink + tl.sum(weight, axis=1)
    if args.key_scales is not None and not INT4:
        at = vector + tl.arange(0, args.BLOCK_N)
        weight *= tl.load(args.value_scales + at, mask=written, other=0.0)[None, :]
    out = tl.dot(weight.to(args.DOT), v.to(args.DOT), out * shrink[:, None])
    if args.HALVES:
        out_upper = tl.dot(weight.to(args.DOT), v_upper.to(args.DOT), out_upper * shrink[:, None])
    return new_top, total, out, out_upper


@triton.jit(do_not_specialize=["table_width", "skipped"])
def attend_prompt_kernel(
    query,  # [tokens, heads, HEAD_DIM], sequence after sequence
    starts,  # int32 [sequences + 1]: the first row of each sequence
    lengths,  # int32 [sequences]: number of keys, those of the new tokens included
    counts,  # int32 [sequences]: new tokens of each sequence, if the rows after them are padding; else None
    block_table,  # int32 [sequences, table_width]: the cache blocks of each sequence in order
    sinks,  # fp32 [heads]: a score per head that has no value, or None
    result,  # [tokens, heads, HEAD_DIM]
    table_width,
    skipped,  # sequences before the first one of this launch
    args,  # `PromptArguments`
    GROUP: tl.constexpr,  # heads that share a key-value head
    BLOCK_M: tl.constexpr,
):
    """Grid (heads, query blocks of the longest sequence, sequences); the blocks with most keys start first."""
    HEAD_DIM: tl.constexpr = args.HEAD_DIM
    head, sequence = tl.program_id(0), tl.program_id(2) + skipped
    heads, done = tl.num_programs(0), (tl.num_programs(1) - 1 - tl.program_id(1)) * BLOCK_M
    first_row = tl.load(starts + sequence)
    count = tl.load(starts + sequence + 1) - first_row
    start = tl.load(lengths + sequence) - count + done  # position of the first row
    if counts is not None:
        count = tl.load(counts + sequence)
    if done >= count:
        return
    here = tl.minimum(count - done, BLOCK_M)
    INT4: tl.constexpr = args.key_cache.dtype.element_ty == tl.uint8
    WIDTH: tl.constexpr = args.BLOCK_D // 2 if args.HALVES and not INT4 else args.BLOCK_D
    line, lane = tl.arange(0, BLOCK_M), tl.arange(0, WIDTH)
    position, last = start + line, start + here - 1
    row = (first_row + done + line).to(tl.int64) * heads + head
    q_mask = (line[:, None] < here) & (lane[None, :] < HEAD_DIM)
    cell = row[:, None] * HEAD_DIM + lane[None, :]
    q = tl.load(query + cell, mask=q_mask, other=0.0).to(args.DOT)
    FACTOR: tl.constexpr = HEAD_DIM**-0.5  # makes the Hadamard transform orthonormal
    q_upper = q
    if INT4:
        rotated_q = hadamard_rows(q.to(tl.float32), BLOCK_M, HEAD_DIM) * FACTOR
        q, q_upper = lower_and_upper(rotated_q.to(args.DOT), BLOCK_M, HEAD_DIM)
    elif args.HALVES:
        q_upper = tl.load(query + cell + HEAD_DIM // 2, mask=q_mask, other=0.0).to(args.DOT)
    kv_head, kv_heads = head // GROUP, heads // GROUP
    table, turns = block_table + sequence * table_width, tl.cdiv(args.block_size, args.BLOCK_N)
    out = tl.zeros((BLOCK_M, args.BLOCK_D // 2 if args.HALVES else args.BLOCK_D), tl.float32)
    # The largest score, the sum of weights and the weighted values; where HALVES also the upper ones.
    state = tl.full((BLOCK_M,), float("-inf"), tl.float32), tl.zeros((BLOCK_M,), tl.float32), out, out
    first = 0
    if args.WINDOW:
        first = tl.maximum(start - args.window + 1, 0) // args.BLOCK_N
    if args.CHUNK:
        first = tl.maximum(first, (start - start % args.chunk) // args.BLOCK_N)
    whole, end = first, last // args.BLOCK_N + 1
    if not (args.WINDOW or args.CHUNK):
        whole = (start + 1) // args.BLOCK_N  # up to here every row sees every key
        for turn in tl.range(first, whole):
            page = tl.load(table + turn // turns)
            state = _attend_block(turn, last, page, kv_head, kv_heads, q, q_upper, position, state, args, False)
    for turn in tl.range(whole, end):
        page = tl.load(table + turn // turns)
        state = _attend_block(turn, last, page, kv_head, kv_heads, q, q_upper, position, state, args, True)
    top, total, out, out_upper = state
    if sinks is not None:  # one more score in the softmax of the head, without a value
        sink = tl.load(sinks + head) * 1.4426950408889634
        top = top if args.CAPPED else top * args.scale
        base = tl.maximum(top, sink)
        shrink = tl.exp2(top - base)
        total = total * shrink + tl.exp2(sink - base)
        out, out_upper = out * shrink[:, None], out_upper * shrink[:, None]
    out = out / total[:, None]
    if INT4:
        rotated = whole_rows(out, out_upper / total[:, None], BLOCK_M, HEAD_DIM)
        out = hadamard_rows(rotated, BLOCK_M, HEAD_DIM) * FACTOR
    elif args.HALVES:
        tl.store(result + cell + HEAD_DIM // 2, out_upper / total[:, None], mask=q_mask)
    tl.store(result + cell, out, mask=q_mask)


class PromptTile(NamedTuple):
    """The new tokens and keys of a turn of the loop, warps, pipeline stages, and whether heads are halved."""

    rows: int
    keys: int
    warps: int
    stages: int
    halves: bool


def prompt_tile(chip: Chip, head_dim: int, stored: torch.dtype) -> PromptTile | None:
    """Return the largest tile without spilled registers for a cache of dtype `stored`; None if none fits."""
    asynchronous = chip.capability[0] in (9, 10, 11)
    rows, keys, warps = 128 if head_dim <= 128 else 64, 64 if asynchronous else 32, 8
    if stored == PACKED and head_dim > 128:  # the rotation takes the registers
        rows, keys, warps = 16, 32, 4
    # An upper bound of the shared memory that Triton 3.6 and 3.7 allocate, with 8 bytes of scales for each int8 key.
    # Converted keys and values are there too, and on chips with asynchronous MMA queries.
    lanes, quantized = 1 << (head_dim - 1).bit_length(), stored.itemsize == 1
    block = keys * (2 * lanes * stored.itemsize + 8 * quantized)
    others = 2 * rows * keys + 4 * keys * lanes * quantized + 2 * rows * lanes * asynchronous
    # Copies ahead take registers, which the conversion needs.
    alone = quantized and (not asynchronous or (stored == torch.int8 and head_dim > 128))
    stages = min(1 if alone else 2, (chip.shared - others) // block)
    fits = stages > 0 and NARROWEST_HEAD <= head_dim <= MAX_PROMPT_HEAD
    # Halves of int8 codes need fewer registers on sm_90, and more on newer chips, which keep sums elsewhere.
    halves = stored == PACKED or (stored == torch.int8 and head_dim == 256 and chip.capability[0] == 9)
    return PromptTile(rows, keys, warps, stages, halves) if fits else None


def launch_prompt_attention(
    query: Tensor, keys: Stored, values: Stored, ragged: Ragged, scoring: Scoring, chip: Chip
) -> Tensor | Declined:
    """Compute `triton_attend_prompt` on a chip."""
    _, heads, head_dim = query.shape
    tile = prompt_tile(chip, head_dim, keys.data.dtype)
    if tile is None or (keys.data.dtype == PACKED and head_dim not in FUSED_INT4_HEADS):
        return Declined("attention-shape", {"group": heads // keys.data.shape[1], "head_dim": head_dim})
    cache = LayerCache(keys.data, values.data, keys.scales, values.scales)
    query = query.contiguous()
    if ragged.known is None:  # the device alone knows how many tokens are no padding
        assert ragged.tokens is not None
        decoded, others, result = 0, (ragged.tokens,) * len(ragged.lengths), torch.zeros_like(query)
    else:
        result = torch.empty_like(query)
        decoded = _decode(query, keys, values, ragged, scoring, chip, result)
        others = ragged.known[decoded:]
    if not others:
        return result.flatten(1)
    check_contiguous(query, ragged.starts, ragged.lengths, ragged.counts, ragged.block_table, scoring.sinks)
    dot = tl.float16
    if query.dtype is torch.bfloat16:
        dot = tl.bfloat16 if uses_ptx() else tl.float32  # the interpreter would multiply bf16 as integers
    log2e = math.log2(math.e)
    args = PromptArguments(
        cache.keys, cache.values, cache.key_scales, cache.value_scales,
        cache.keys.stride(0), cache.keys.stride(1), cache.keys.shape[2],
        scoring.window or 0, scoring.chunk or 0,
        scoring.scale / scoring.softcap if scoring.softcap else scoring.scale * log2e, scoring.softcap * log2e,
        constexpr(head_dim), constexpr(triton.next_power_of_2(head_dim)), constexpr(tile.keys),
        constexpr(scoring.window is not None), constexpr(scoring.chunk is not None),
        constexpr(bool(scoring.softcap)), constexpr(tile.halves), constexpr(dot), constexpr(uses_ptx()),
    )  # fmt: skip
    attend_prompt_kernel[(heads, -(-max(others) // tile.rows), len(others))](
        *(query, ragged.starts, ragged.lengths, ragged.counts, ragged.block_table, scoring.sinks, result),
        *(ragged.block_table.shape[1], decoded, args),
        GROUP=heads // cache.keys.shape[1],
        BLOCK_M=tile.rows,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
    return result.flatten(1)


def _decode(
    query: Tensor, keys: Stored, values: Stored, ragged: Ragged, scoring: Scoring, chip: Chip, result: Tensor
) -> int:
    """Attend for the first sequences with one new token, or for all with as few each; return their number.

    A row alone would leave most of a tile empty, and one program of a head would read all keys of its sequence: the
    kernel for decoding takes all heads of a key-value head together and splits the keys.
    """
    assert ragged.known is not None
    tokens = ragged.known[0]
    if tokens > DRAFT_ROWS or len(set(ragged.known)) > 1:
        tokens = 1
    sequences = next((place for place, count in enumerate(ragged.known) if count != tokens), len(ragged.known))
    if not sequences or scoring.chunk is not None:
        return 0
    rows, lengths, table = sequences * tokens, ragged.lengths[:sequences], ragged.block_table[:sequences]
    part = Ragged(ragged.starts, lengths, table, tokens)
    chip, out = replace(chip, pdl=False), result[:rows].flatten(1)
    attended = launch_paged_attention(query[:rows], keys, values, part, scoring, chip, out)
    return 0 if isinstance(attended, Declined) else sequences


def small_attention(kind: PromptKind, chip: Chip) -> float | Declined:
    """Return the relative error of a small attention of this kind against the reference, or why it has no kernel."""
    generator, device = torch.Generator().manual_seed(0), kind.device
    tokens, lengths, block = (1, 140, 3), (130, 150, 70), KEY_BLOCK
    width = -(-max(lengths) // block)

    def stored() -> Stored:
        shape = len(tokens) * width, 2, block, kind.head_dim
        cpu = Stored.of(torch.randn(shape, generator=generator).to(kind.dtype), kind.stored)
        return Stored(cpu.data.to(device), None if cpu.scales is None else cpu.scales.to(device))

    def int32(values: object) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    heads = 2 * kind.group
    query = torch.randn((sum(tokens), heads, kind.head_dim), generator=generator).to(device, kind.dtype)
    sinks = torch.randn(heads, generator=generator).to(device) if kind.sinks else None
    table = int32([list(range(place * width, (place + 1) * width)) for place in range(len(tokens))])
    ragged = Ragged(int32([0, *accumulate(tokens)]), int32(lengths), table, known=tokens)
    window, chunk = 50 if kind.window else None, 48 if kind.chunk else None
    scoring = Scoring(kind.head_dim**-0.5, window, 5.0 if kind.softcap else 0.0, sinks, chunk)
    keys, values = stored(), stored()
    result = launch_prompt_attention(query, keys, values, ragged, scoring, chip)
    if isinstance(result, Declined):
        return result
    expected = attend_gathered(query.float(), keys, values, ragged, scoring)
    return float((result.float() - expected).norm() / expected.norm())
