"""Launches the recurrences of a captured pass on a GPU; `triton.recurrent_kernel` has the kernels.

The host knows neither slots nor counts (`DeviceRuns`). Passes whose runs it knows are the references'.
"""

import torch
from torch import Tensor

from mycli.runtime.errors import Declined
from mycli.runtime.kernels.recurrent import DeltaSizes, DeviceRuns, Runs, ScanSizes

# Imports Triton when it launches: the registry of kernels is used where Triton is not installed.

_TOKENS = 16  # rows that a program convolves at a time
_CHANNELS = 256  # columns of a program that convolves one row; fewer for more rows
_COLUMNS = 8  # of a state, in one warp: a sector of memory in each row
_HOST = Declined("runs-known-by-host")


def triton_convolve(
    x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor, runs: Runs | DeviceRuns, silu: bool
) -> Tensor | Declined:
    """Compute `recurrent.convolve` of a captured pass in one launch."""
    if not isinstance(runs, DeviceRuns):
        return _HOST
    from triton import cdiv, next_power_of_2

    from mycli.runtime.kernels.triton.recurrent_kernel import convolve_kernel

    taps, channels = weight.shape
    block_t = min(_TOKENS, next_power_of_2(runs.tokens))
    block_c = _CHANNELS // block_t
    y = torch.empty((len(x), channels), dtype=x.dtype, device=x.device)
    convolve_kernel[(len(runs.slots), cdiv(channels, block_c))](
        *(x, weight, bias, state, y, runs.starts, runs.slots, runs.counts, runs.advances),
        *(x.stride(0), channels, runs.tokens),
        TAPS=taps,
        BLOCK_T=block_t,
        BLOCK_C=block_c,
        SILU=silu,
    )
    return y


def triton_delta_rule(
    qkv: Tensor, gates: Tensor, rate: Tensor, dt_bias: Tensor, state: Tensor, runs: Runs | DeviceRuns, sizes: DeltaSizes
) -> Tensor | Declined:
    """Compute `recurrent.delta_rule` of a captured pass in one launch."""
    if not isinstance(runs, DeviceRuns):
        return _HOST
    from triton import cdiv, next_power_of_2

    from mycli.runtime.kernels.triton.recurrent_kernel import delta_kernel

    y = torch.empty((len(qkv), sizes.heads * sizes.value_dim), dtype=qkv.dtype, device=qkv.device)
    delta_kernel[(cdiv(sizes.value_dim, _COLUMNS), sizes.heads, len(runs.slots))](
        *(qkv.contiguous(), gates, rate, dt_bias, state, y, runs.starts, runs.slots, runs.counts, runs.advances),
        *(gates.stride(0), runs.tokens, sizes.beta_scale, sizes.floor),
        COPIES=sizes.heads // sizes.key_heads,
        KEY_HEADS=sizes.key_heads,
        KEY_DIM=sizes.key_dim,
        VALUE_DIM=sizes.value_dim,
        BLOCK_K=next_power_of_2(sizes.key_dim),
        BLOCK_V=_COLUMNS,
        BY_CHANNEL=sizes.by_channel,
        FLOORED=sizes.floor != 0,
        num_warps=1,
    )
    return y


def triton_scan(
    x: Tensor,
    steps: Tensor,
    rate: Tensor,
    dt_bias: Tensor,
    skip: Tensor,
    state: Tensor,
    runs: Runs | DeviceRuns,
    sizes: ScanSizes,
) -> Tensor | Declined:
    """Compute `recurrent.scan` of a captured pass in one launch."""
    if not isinstance(runs, DeviceRuns):
        return _HOST
    from triton import cdiv, next_power_of_2

    from mycli.runtime.kernels.triton.recurrent_kernel import scan_kernel

    y = torch.empty((len(x), sizes.heads * sizes.head_dim), dtype=x.dtype, device=x.device)
    scan_kernel[(cdiv(sizes.head_dim, _COLUMNS), sizes.heads, len(runs.slots))](
        *(x.contiguous(), steps, rate, dt_bias, skip, state, y, runs.starts, runs.slots, runs.counts, runs.advances),
        *(steps.stride(0), runs.tokens, *sizes.limits),
        HEADS=sizes.heads,
        GROUPS=sizes.groups,
        HEAD_DIM=sizes.head_dim,
        STATE_DIM=sizes.state_dim,
        BLOCK_S=next_power_of_2(sizes.state_dim),
        BLOCK_V=_COLUMNS,
        BY_CHANNEL=sizes.by_channel,
        num_warps=1,
    )
    return y
