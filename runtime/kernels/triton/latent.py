"""Launches latent attention over the paged cache on a GPU; `triton.latent_kernel` has the kernels."""

import math

import torch
from torch import Tensor

from mycli.runtime.cache.kv_cache import PACKED, Stored
from mycli.runtime.errors import Declined
from mycli.runtime.kernels.paged import Ragged
from mycli.runtime.kernels.triton.product.matmul import ACTIVATION_DTYPES, check_contiguous, chip_of, uses_ptx
from mycli.runtime.kernels.triton.product.tiles import Chip

# Imports Triton when it launches: the registry of kernels is used where Triton is not installed.

_HEADS = 16  # of a program: the least number of rows of an MMA
_KEYS = 32  # of a turn of the loop
_MAX_SPLITS = 32
_LEAST_KEYS = 256  # of a split, at the end of the cache
LATENT_STAGES = 2  # 55 KiB of shared memory for latents of 512; one stage would take 82 and copy nothing ahead


def latent_warps(stored: torch.dtype) -> int:
    return 8 if stored == torch.int8 else 4  # in 4 warps its conversion would spill registers


def triton_latent_attention(
    query: Tensor, rotated_query: Tensor, latents: Stored, rotated: Stored, ragged: Ragged, scale: float
) -> Tensor | Declined:
    """Compute `reference.attend_latent` of a captured pass, whose sequences have equally many rows."""
    if query.device.type != "cuda":
        return Declined("not-on-cuda", {"device": str(query.device)})
    if ragged.tokens is None:
        return Declined("unequal-tokens")
    if query.dtype not in ACTIVATION_DTYPES:
        return Declined("activation-dtype", {"dtype": str(query.dtype).removeprefix("torch.")})
    if latents.data.dtype == PACKED:
        return Declined("latents-in-int4")
    return launch_latent_attention(query, rotated_query, latents, rotated, ragged, scale, chip_of(query.device))


def launch_latent_attention(
    query: Tensor, rotated_query: Tensor, latents: Stored, rotated: Stored, ragged: Ragged, scale: float, chip: Chip
) -> Tensor:
    """Compute `triton_latent_attention` on a chip: query [rows, heads, rank] to the same shape."""
    from triton import cdiv, language, next_power_of_2

    from mycli.runtime.kernels.triton.latent_kernel import combine_latent_kernel, latent_kernel

    check_contiguous(latents.data, rotated.data, ragged.lengths, ragged.counts, ragged.block_table)
    (rows, heads, rank), rope = query.shape, rotated_query.shape[2]
    block_size, width = latents.data.shape[2], ragged.block_table.shape[1]
    blocks = cdiv(heads, _HEADS)
    fill = max(1, 2 * chip.processors // (rows * blocks))
    splits = min(_MAX_SPLITS, fill, max(1, width * block_size // _LEAST_KEYS))
    out = torch.empty((rows, heads, rank), dtype=query.dtype, device=query.device)
    parts, stats = out, None
    if splits > 1:
        parts = torch.empty((rows, splits, heads, rank), dtype=torch.float32, device=query.device)
        stats = torch.empty((rows, splits, heads, 2), dtype=torch.float32, device=query.device)
    dot = language.float16 if query.dtype is torch.float16 else language.bfloat16
    block_r = max(16, next_power_of_2(rank))
    latent_kernel[(splits, blocks, rows)](
        *(query.contiguous(), rotated_query.contiguous(), latents.data, rotated.data, latents.scales, rotated.scales),
        *(ragged.lengths, ragged.counts, ragged.block_table, parts, stats, block_size, width),
        *(scale * math.log2(math.e), ragged.tokens),
        HEADS=heads,
        RANK=rank,
        ROPE=rope,
        BLOCK_H=_HEADS,
        BLOCK_R=block_r,
        BLOCK_P=max(16, next_power_of_2(rope)),
        BLOCK_K=_KEYS,
        DOT=dot if uses_ptx() else language.float32,  # the interpreter would multiply bf16 as integers
        ASM=uses_ptx(),
        num_warps=latent_warps(latents.data.dtype),
        num_stages=LATENT_STAGES,
    )
    if stats is not None:
        combine_latent_kernel[(heads, rows)](parts, stats, out, splits, RANK=rank, BLOCK_R=block_r)
    return out
