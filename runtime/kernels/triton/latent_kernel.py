"""Latent attention over the paged cache of a captured pass, as Triton device code (MLA, arXiv 2405.04434).

All heads read the same latents, so the heads of a token are the rows of the MMA. The keys of a token are split among
programs with a running maximum and sum each; a second launch combines them in a fixed order.
"""

# mypy: disable-error-code="no-untyped-call, no-untyped-def, untyped-decorator"
# Reason: Triton's decorators and device functions carry no types.

import triton
import triton.language as tl

from mycli.runtime.kernels.triton.cache_codes import convert_int8


@triton.jit
def _load(pointers, mask, DOT: tl.constexpr, ASM: tl.constexpr):
    """Load numbers of the cache as DOT; int8 codes without their scale."""
    stored = tl.load(pointers, mask=mask, other=0)
    if stored.dtype == tl.int8:
        return convert_int8(stored, DOT, ASM)
    else:
        return stored.to(DOT)


@triton.jit(do_not_specialize=["tokens", "table_width"])
def latent_kernel(
    query,  # [rows, heads, RANK]
    rotated_query,  # [rows, heads, ROPE]
    latents,  # [blocks, 1, block_size, RANK]; int8 or as query
    rotated,  # [blocks, 1, block_size, ROPE]
    latent_scales,  # fp32 [blocks, 1, block_size] for int8, else None
    rotated_scales,
    lengths,  # int32 [sequences]: positions of each sequence, those of its `tokens` rows included
    counts,  # int32 [sequences]: rows that are not padding, or None
    block_table,  # int32 [sequences, table_width]
    out,  # [rows, heads, RANK] as query, of one split; else fp32 [rows, splits, heads, RANK]
    stats,  # fp32 [rows, splits, heads, 2]: maximum and sum of exponentials, base 2; None for one split
    block_size,
    table_width,
    scale,  # of the scores, times log2(e)
    tokens,  # rows of each sequence
    HEADS: tl.constexpr,
    RANK: tl.constexpr,
    ROPE: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_K: tl.constexpr,
    DOT: tl.constexpr,  # dtype of the MMA operands
    ASM: tl.constexpr,
):
    """Grid (splits, blocks of BLOCK_H heads, rows)."""
    split, row = tl.program_id(0), tl.program_id(2)
    splits, sequence = tl.num_programs(0), row // tokens
    head = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    lane, turned = tl.arange(0, BLOCK_R), tl.arange(0, BLOCK_P)
    start = tl.load(lengths + sequence) - tokens
    length = start + row % tokens + 1
    if counts is not None:  # latents of padding are not stored
        length = tl.minimum(length, start + tl.load(counts + sequence))
    place = row.to(tl.int64) * HEADS + head
    q_mask = (head < HEADS)[:, None] & (lane < RANK)[None, :]
    q = tl.load(query + place[:, None] * RANK + lane[None, :], mask=q_mask, other=0.0).to(DOT)
    turned_mask = (head < HEADS)[:, None] & (turned < ROPE)[None, :]
    q_turned = tl.load(rotated_query + place[:, None] * ROPE + turned[None, :], mask=turned_mask, other=0.0).to(DOT)
    share = tl.cdiv(tl.cdiv(length, BLOCK_K), splits) * BLOCK_K
    first = split * share
    end = tl.minimum(first + share, length)
    top = tl.full((BLOCK_H,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_H,), tl.float32)
    sums = tl.zeros((BLOCK_H, BLOCK_R), tl.float32)
    for begin in tl.range(first, end, BLOCK_K):
        key = begin + tl.arange(0, BLOCK_K)
        seen = key < end
        page = tl.load(block_table + sequence * table_width + key // block_size, mask=seen, other=0).to(tl.int64)
        cell = page * block_size + key % block_size
        inside = seen[:, None] & (lane < RANK)[None, :]
        latent = _load(latents + cell[:, None] * RANK + lane[None, :], inside, DOT, ASM)
        inside = seen[:, None] & (turned < ROPE)[None, :]
        turned_key = _load(rotated + cell[:, None] * ROPE + turned[None, :], inside, DOT, ASM)
        score, other = tl.dot(q, latent.trans()), tl.dot(q_turned, turned_key.trans())
        if latent_scales is not None:
            latent_scale = tl.load(latent_scales + cell, mask=seen, other=0.0)
            score = score * latent_scale[None, :]
            other = other * tl.load(rotated_scales + cell, mask=seen, other=0.0)[None, :]
        score = tl.where(seen[None, :], (score + other) * scale, float("-inf"))
        new_top = tl.maximum(top, tl.max(score, axis=1))
        weight, shrink = tl.exp2(score - new_top[:, None]), tl.exp2(top - new_top)
        total = total * shrink + tl.sum(weight, axis=1)
        if latent_scales is not None:
            weight = weight * latent_scale[None, :]
        sums = sums * shrink[:, None] + tl.dot(weight.to(DOT), latent)
        top = new_top
    if stats is None:
        result = (sums / total[:, None]).to(out.dtype.element_ty)
        tl.store(out + place[:, None] * RANK + lane[None, :], result, mask=q_mask)
    else:
        part = (row.to(tl.int64) * splits + split) * HEADS + head
        if first < end:  # otherwise nothing reads them
            tl.store(out + part[:, None] * RANK + lane[None, :], sums, mask=q_mask)
        tl.store(stats + part * 2, top, mask=head < HEADS)
        tl.store(stats + part * 2 + 1, total, mask=head < HEADS)


@triton.jit
def combine_latent_kernel(
    parts,  # fp32 [rows, splits, heads, RANK]
    stats,  # fp32 [rows, splits, heads, 2]
    out,  # [rows, heads, RANK]
    splits,
    RANK: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    """Grid (heads, rows): combine the splits of a head; one without keys has a maximum of -inf."""
    head, row, heads = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.num_programs(0)
    lane = tl.arange(0, BLOCK_R)
    top = -float("inf")
    for split in tl.range(splits):
        top = tl.maximum(top, tl.load(stats + ((row * splits + split) * heads + head) * 2))
    total, sums = 0.0, tl.zeros((BLOCK_R,), tl.float32)
    for split in tl.range(splits):
        part = (row * splits + split) * heads + head
        split_top = tl.load(stats + part * 2)
        weight, stored = tl.exp2(split_top - top), tl.where(split_top > float("-inf"), RANK, 0)
        total += weight * tl.load(stats + part * 2 + 1)
        sums += weight * tl.load(parts + part * RANK + lane, mask=lane < stored, other=0.0)
    result = (sums / total).to(out.dtype.element_ty)
    tl.store(out + (row * heads + head) * RANK + lane, result, mask=lane < RANK)
