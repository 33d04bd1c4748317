"""List the kernels of recurrent states and latent attention, as `builds` lists the others.

Shapes are those of Qwen3.5-35B-A3B, Kimi-Linear-48B, Nemotron-3-Nano-30B-A3B, Jamba2-3B and DeepSeek-V3.
"""

from collections.abc import Iterator

import torch
import triton.language as tl

from mycli.runtime.kernels.triton.latent import LATENT_STAGES, latent_warps
from mycli.runtime.kernels.triton.latent_kernel import combine_latent_kernel, latent_kernel
from mycli.runtime.kernels.triton.recurrent_kernel import convolve_kernel, delta_kernel, scan_kernel
from tests.ptx.build import Build

_RUNS = {"starts": "*i32", "slots": "*i64", "counts": "*i32", "advances": "*i32", "stride": "i32", "tokens": "i32"}
_LOOSE = ("tokens",)


def recurrent_builds() -> Iterator[Build]:
    """Yield the convolutions of one row and of many, the delta rules and the scans."""
    convolved = {"x": "*bf16", "weight": "*fp32", "bias": "*fp32", "state": "*fp32", "y": "*bf16", "channels": "i32"}
    for rows, channels in ((1, 256), (16, 16)):
        block = {"TAPS": 4, "BLOCK_T": rows, "BLOCK_C": channels, "SILU": True}
        yield Build(f"convolve rows {rows}", convolve_kernel, convolved | _RUNS, block, unaligned=_LOOSE)
    ruled = {"qkv": "*bf16", "gates": "*bf16", "rate": "*fp32", "dt_bias": "*fp32", "state": "*fp32", "y": "*bf16"}
    ruled |= _RUNS | {"beta_scale": "fp32", "floor": "fp32"}
    state = {"KEY_DIM": 128, "VALUE_DIM": 128, "BLOCK_K": 128, "BLOCK_V": 8}
    for how, heads, by_channel in (("", (2, 16), False), (" by channel", (1, 32), True)):
        options = {"COPIES": heads[0], "KEY_HEADS": heads[1], "BY_CHANNEL": by_channel, "FLOORED": by_channel}
        yield Build(f"delta rule{how}", delta_kernel, ruled, state | options, warps=1, unaligned=_LOOSE)
    scanned = {"x": "*bf16", "steps": "*bf16", "skip": "*fp32", "low": "fp32", "high": "fp32"}
    many = {"HEADS": 64, "GROUPS": 8, "HEAD_DIM": 64, "STATE_DIM": 128, "BLOCK_S": 128, "BLOCK_V": 8}
    channels = {"HEADS": 1, "GROUPS": 1, "HEAD_DIM": 5120, "STATE_DIM": 16, "BLOCK_S": 16, "BLOCK_V": 8}
    for how, sizes in (("", many), (" by channel", channels)):
        options = sizes | {"BY_CHANNEL": bool(how)}
        yield Build(f"state space scan{how}", scan_kernel, ruled | scanned, options, warps=1, unaligned=_LOOSE)


def latent_builds() -> Iterator[Build]:
    """Yield latent attention of one split and of several, to latents of 16 and of 8 bits."""
    given = {"query": "*bf16", "rotated_query": "*bf16", "lengths": "*i32", "counts": None, "block_table": "*i32"}
    given |= {"block_size": "i32", "table_width": "i32", "scale": "fp32", "tokens": "i32"}
    sizes = {"HEADS": 128, "RANK": 512, "ROPE": 64, "BLOCK_H": 16, "BLOCK_R": 512, "BLOCK_P": 64, "BLOCK_K": 32}
    for how, cached, scales in (("", "*bf16", None), (" int8", "*i8", "*fp32")):
        held = {"latents": cached, "rotated": cached, "latent_scales": scales, "rotated_scales": scales}
        for split, out in (("", {"out": "*bf16", "stats": None}), (" in splits", {"out": "*fp32", "stats": "*fp32"})):
            yield Build(
                f"attend to latents{how}{split}",
                latent_kernel,
                given | held | out,
                sizes | {"DOT": tl.bfloat16, "ASM": True},
                latent_warps(torch.int8 if scales else torch.bfloat16),
                LATENT_STAGES,
                unaligned=("tokens", "table_width"),
            )
    parts = {"parts": "*fp32", "stats": "*fp32", "out": "*bf16", "splits": "i32"}
    yield Build("combine splits of latents", combine_latent_kernel, parts, {"RANK": 512, "BLOCK_R": 512})
