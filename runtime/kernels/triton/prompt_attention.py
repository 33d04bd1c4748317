"""Prompt attention: many new tokens per sequence attend to the paged KV cache, as Triton device code.

FlashAttention-2 (arXiv 2307.08691) over cache blocks: scores never leave the multiprocessor, and no mask is stored.
"""

# mypy: disable-error-code="no-untyped-call, no-untyped-def, untyped-decorator"
# Reason: Triton's decorators and device functions carry no types.

import math
from dataclasses import replace
from itertools import accumulate
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from mycli.runtime.cache.kv_cache import PACKED, Stored
from mycli.runtime.errors import Declined
from mycli.runtime.kernels.paged import KEY_BLOCK, PromptKind, Ragged, Scoring
from mycli.runtime.kernels.reference import attend_gathered
from mycli.runtime.kernels.triton.attention import launch_paged_attention
from mycli.runtime.kernels.triton.int4_cache import hadamard_rows, load_int4, lower_and_upper, whole_rows
from mycli.runtime.kernels.triton.layer_cache import LayerCache
from mycli.runtime.kernels.triton.product.matmul import check_contiguous, uses_ptx
from mycli.runtime.kernels.triton.product.tiles import Chip
from mycli.runtime.memory.attention import MAX_PROMPT_HEAD
from mycli.runtime.memory.graphs import DRAFT_ROWS
from mycli.runtime.quantization.int4_vectors import FUSED_INT4_HEADS

# Rows of the MMA are the new tokens of one query head, columns are keys. A turn of the loop reads keys of one cache
# block, from a multiple of `BLOCK_N` of the position on, whatever the pass begins with: the bits of a row depend on
# neither where a prompt is cut nor the other sequences. Keys that all rows of a program see need no mask. Quantized
# keys are converted as in `attention`.


@triton.jit
def _keys(
    turn,
    last,
    page,
    q,
    q_upper,
    top,
    total,
    out,
    out_upper,
    position,
    keys,
    values,
    key_scales,
    value_scales,
    head_base,
    scale_base,
    block_stride,
    scale_stride,
    turns,
    window,
    chunk,
    scale,
    softcap,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WINDOW: tl.constexpr,
    CHUNK: tl.constexpr,
    CAPPED: tl.constexpr,
    MASKED: tl.constexpr,
    DOT: tl.constexpr,
):
    """Attend to one block of keys; return the new maximum, sum and weighted values."""
    INT4: tl.constexpr = keys.dtype.element_ty == tl.uint8
    key, lane = turn * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_D)
    inside = turn % turns
    held = page.to(tl.int64) * block_stride + head_base
    written = key <= last if MASKED else key >= 0
    if INT4:
        ROW: tl.constexpr = HEAD_DIM // 2 + HEAD_DIM // 16
        place = held + inside * tl.full((), BLOCK_N * ROW, tl.int64)
        k, k_upper = load_int4(keys, key_scales, place, written, BLOCK_N, HEAD_DIM, DOT)
        v, v_upper = load_int4(values, value_scales, place, written, BLOCK_N, HEAD_DIM, DOT)
        score = tl.dot(q_upper, k_upper.trans(), tl.dot(q, k.trans()))
    else:
        place = held + inside * tl.full((), BLOCK_N * HEAD_DIM, tl.int64)
        cell = tl.arange(0, BLOCK_N)[:, None] * HEAD_DIM + lane[None, :]
        if MASKED or HEAD_DIM != BLOCK_D:
            present = written[:, None] & (lane[None, :] < HEAD_DIM)
            k = tl.load(keys + place + cell, mask=present, other=0)
            v = tl.load(values + place + cell, mask=present, other=0)
        else:
            k = tl.load(keys + place + cell)
            v = tl.load(values + place + cell)
        score = tl.dot(q, k.to(DOT).trans())
        if key_scales is not None:
            at = page.to(tl.int64) * scale_stride + scale_base + inside * BLOCK_N + tl.arange(0, BLOCK_N)
            score *= tl.load(key_scales + at, mask=written, other=0.0)[None, :]
    if CAPPED:  # tanh(s), exact at both ends
        score = softcap - 2.0 * softcap / (tl.exp2(score * scale * 2.8853900817779268) + 1.0)
        scale = 1.0
    if MASKED:
        seen = key[None, :] <= position[:, None]
        if WINDOW:
            seen = seen & (position[:, None] - key[None, :] < window)
        if CHUNK:
            seen = seen & (key[None, :] >= (position - position % chunk)[:, None])
        score = tl.where(seen, score, float("-inf"))
    new_top = tl.maximum(top, tl.max(score, axis=1))
    base = new_top * scale
    if MASKED:  # a row may see no key of the first blocks of its program
        base = tl.where(new_top == float("-inf"), 0.0, base)
    # Written out, so that blocks with and without a mask round alike.
    weight = tl.exp2(tl.fma(score, scale, -base[:, None]))
    shrink = tl.exp2(tl.fma(top, scale, -base))
    total = total * shrink + tl.sum(weight, axis=1)
    if key_scales is not None and not INT4:
        at = page.to(tl.int64) * scale_stride + scale_base + inside * BLOCK_N + tl.arange(0, BLOCK_N)
        weight *= tl.load(value_scales + at, mask=written, other=0.0)[None, :]
    out = tl.dot(weight.to(DOT), v.to(DOT), out * shrink[:, None])
    if INT4:
        out_upper = tl.dot(weight.to(DOT), v_upper, out_upper * shrink[:, None])
    return new_top, total, out, out_upper


@triton.jit(do_not_specialize=["table_width", "skipped"])
def attend_prompt_kernel(
    query,  # [tokens, heads, HEAD_DIM], sequence after sequence
    keys,  # [blocks, kv_heads, block_size, HEAD_DIM], block_stride and head_stride apart; int8, int4 or as query
    values,
    key_scales,  # fp32 [blocks, kv_heads, block_size] for int8, the cache in bf16 for int4, else None
    value_scales,
    starts,  # int32 [sequences + 1]: the first row of each sequence
    lengths,  # int32 [sequences]: number of keys, those of the new tokens included
    block_table,  # int32 [sequences, table_width]: the cache blocks of each sequence in order
    sinks,  # fp32 [heads]: a score per head that has no value, or None
    result,  # [tokens, heads, HEAD_DIM]
    block_stride,
    head_stride,
    block_size,
    table_width,
    skipped,  # sequences before the first one of this launch
    window,
    chunk,
    scale,  # scale of the scores times log2(e), or where CAPPED divided by the softcap
    softcap,  # where CAPPED the softcap times log2(e)
    GROUP: tl.constexpr,  # heads that share a key-value head
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WINDOW: tl.constexpr,
    CHUNK: tl.constexpr,  # a token sees keys from the last multiple of `chunk` on
    CAPPED: tl.constexpr,  # a score s becomes softcap * tanh(s / softcap)
    DOT: tl.constexpr,  # dtype of the MMA operands
):
    """Grid (heads, query blocks of the longest sequence, sequences); the blocks with most keys start first."""
    head, sequence = tl.program_id(0), tl.program_id(2) + skipped
    heads, done = tl.num_programs(0), (tl.num_programs(1) - 1 - tl.program_id(1)) * BLOCK_M
    first_row = tl.load(starts + sequence)
    count = tl.load(starts + sequence + 1) - first_row
    if done >= count:
        return
    start = tl.load(lengths + sequence) - count + done  # position of the first row
    here = tl.minimum(count - done, BLOCK_M)
    line, lane = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D)
    position, last = start + line, start + here - 1
    row = (first_row + done + line).to(tl.int64) * heads + head
    q_mask = (line[:, None] < here) & (lane[None, :] < HEAD_DIM)
    q = tl.load(query + row[:, None] * HEAD_DIM + lane[None, :], mask=q_mask, other=0.0).to(DOT)
    INT4: tl.constexpr = keys.dtype.element_ty == tl.uint8
    FACTOR: tl.constexpr = HEAD_DIM**-0.5  # makes the Hadamard transform orthonormal
    q_upper = q
    if INT4:
        rotated_q = hadamard_rows(q.to(tl.float32), BLOCK_M, HEAD_DIM) * FACTOR
        q, q_upper = lower_and_upper(rotated_q.to(DOT), BLOCK_M, HEAD_DIM)
    kv_head, kv_heads = head // GROUP, heads // GROUP
    head_base, scale_base = kv_head.to(tl.int64) * head_stride, kv_head.to(tl.int64) * block_size
    scale_stride = kv_heads.to(tl.int64) * block_size
    table, turns = block_table + sequence * table_width, tl.cdiv(block_size, BLOCK_N)
    top = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    out = tl.zeros((BLOCK_M, BLOCK_D // 2 if INT4 else BLOCK_D), tl.float32)
    out_upper = out  # upper halves of int4 vectors
    first = 0
    if WINDOW:
        first = tl.maximum(start - window + 1, 0) // BLOCK_N
    if CHUNK:
        first = tl.maximum(first, (start - start % chunk) // BLOCK_N)
    whole, end = first, last // BLOCK_N + 1
    if not (WINDOW or CHUNK):
        whole = (start + 1) // BLOCK_N  # up to here every row sees every key
        for turn in tl.range(first, whole):
            top, total, out, out_upper = _keys(
                turn, last, tl.load(table + turn // turns), q, q_upper, top, total, out, out_upper, position,
                keys, values, key_scales, value_scales, head_base, scale_base, block_stride, scale_stride, turns,
                window, chunk, scale, softcap, HEAD_DIM, BLOCK_D, BLOCK_N, WINDOW, CHUNK, CAPPED, False, DOT,
            )  # fmt: skip
    for turn in tl.range(whole, end):
        top, total, out, out_upper = _keys(
            turn, last, tl.load(table + turn // turns), q, q_upper, top, total, out, out_upper, position,
            keys, values, key_scales, value_scales, head_base, scale_base, block_stride, scale_stride, turns,
            window, chunk, scale, softcap, HEAD_DIM, BLOCK_D, BLOCK_N, WINDOW, CHUNK, CAPPED, True, DOT,
        )  # fmt: skip
    if sinks is not None:  # one more score in the softmax of the head, without a value
        sink = tl.load(sinks + head) * 1.4426950408889634
        top = top if CAPPED else top * scale
        base = tl.maximum(top, sink)
        shrink = tl.exp2(top - base)
        total = total * shrink + tl.exp2(sink - base)
        out, out_upper = out * shrink[:, None], out_upper * shrink[:, None]
    out = out / total[:, None]
    if INT4:
        rotated = whole_rows(out, out_upper / total[:, None], BLOCK_M, HEAD_DIM)
        out = hadamard_rows(rotated, BLOCK_M, HEAD_DIM) * FACTOR
    tl.store(result + row[:, None] * HEAD_DIM + lane[None, :], out, mask=q_mask)


class PromptTile(NamedTuple):
    """The new tokens and keys of a turn of the loop, warps, and pipeline stages."""

    rows: int
    keys: int
    warps: int
    stages: int


def prompt_tile(chip: Chip, head_dim: int, stored: torch.dtype) -> PromptTile | None:
    """Return the largest tile without spilled registers for a cache of dtype `stored`; None if none fits the chip."""
    asynchronous = chip.capability[0] in (9, 10, 11)
    rows, keys, warps = 128 if head_dim <= 128 else 64, 64 if asynchronous else 32, 8
    if stored == PACKED and head_dim > 128:  # the rotation takes the registers
        rows, keys, warps = 16, 32, 4
    # An upper bound of the shared memory that Triton 3.6 and 3.7 allocate, with 8 bytes of scales for each int8 key.
    # Chips with asynchronous MMA read queries and converted keys from there too.
    lanes, quantized = 1 << (head_dim - 1).bit_length(), stored.itemsize == 1
    block, others = keys * (2 * lanes * stored.itemsize + 8 * quantized), 2 * rows * keys
    if asynchronous:
        others += 2 * rows * lanes + 4 * keys * lanes * quantized
    # Copies ahead take registers, which the conversion of wide or int4 keys needs.
    alone = head_dim > 128 if stored == torch.int8 else stored == PACKED and not asynchronous
    stages = min(1 if alone else 2, (chip.shared - others) // block)
    return PromptTile(rows, keys, warps, stages) if stages > 0 and head_dim <= MAX_PROMPT_HEAD else None


def launch_prompt_attention(
    query: Tensor, keys: Stored, values: Stored, ragged: Ragged, scoring: Scoring, chip: Chip
) -> Tensor | Declined:
    """Compute `triton_attend_prompt` on a chip."""
    _, heads, head_dim = query.shape
    assert ragged.known is not None
    tile = prompt_tile(chip, head_dim, keys.data.dtype)
    if tile is None or (keys.data.dtype == PACKED and head_dim not in FUSED_INT4_HEADS):
        return Declined("attention-shape", {"heads": heads, "head_dim": head_dim})
    cache = LayerCache(keys.data, values.data, keys.scales, values.scales)
    query = query.contiguous()
    result = torch.empty_like(query)
    decoded = _decode(query, keys, values, ragged, scoring, chip, result)
    if decoded == len(ragged.known):
        return result.flatten(1)
    check_contiguous(query, ragged.starts, ragged.lengths, ragged.block_table, scoring.sinks)
    dot = tl.float16
    if query.dtype is torch.bfloat16:
        dot = tl.bfloat16 if uses_ptx() else tl.float32  # the interpreter would multiply bf16 as integers
    log2e, others = math.log2(math.e), ragged.known[decoded:]
    attend_prompt_kernel[(heads, -(-max(others) // tile.rows), len(others))](
        query, cache.keys, cache.values, *cache.scales(), ragged.starts, ragged.lengths, ragged.block_table,
        scoring.sinks, result, *cache.keys.stride()[:2], cache.keys.shape[2], ragged.block_table.shape[1], decoded,
        scoring.window or 0, scoring.chunk or 0,
        scoring.scale / scoring.softcap if scoring.softcap else scoring.scale * log2e, scoring.softcap * log2e,
        GROUP=heads // cache.keys.shape[1], HEAD_DIM=head_dim, BLOCK_D=triton.next_power_of_2(head_dim),
        BLOCK_M=tile.rows, BLOCK_N=tile.keys, WINDOW=scoring.window is not None, CHUNK=scoring.chunk is not None,
        CAPPED=bool(scoring.softcap), DOT=dot, num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
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
