"""Attention to a paged cache on a GPU; `triton.attention_kernel` and `triton.prompt_attention` have the kernels."""

from dataclasses import replace
from functools import cache
from importlib.util import find_spec

import torch
from torch import Tensor

from mycli.runtime.cache.kv_cache import Stored
from mycli.runtime.device.placement import decline_dtype, decline_packed
from mycli.runtime.errors import Declined, summarize_error
from mycli.runtime.kernels.paged import KEY_BLOCK, PromptKind, Ragged, Scoring
from mycli.runtime.kernels.triton.product.matmul import ACTIVATION_DTYPES, chip_of
from mycli.runtime.kernels.triton.toolchain import missing_tool

# Imports Triton on first use: the registry of kernels is imported where Triton is not installed.


def triton_attend_paged(
    query: Tensor, keys: Stored, values: Stored, ragged: Ragged, scoring: Scoring
) -> Tensor | Declined:
    """Attend with query [tokens, heads, head_dim]: [tokens, heads * head_dim]; rows of padding become zeros."""
    if query.device.type != "cuda":
        return Declined("not-on-cuda", {"device": str(query.device)})
    if ragged.tokens is None:
        return Declined("unequal-tokens")
    declined = decline_paged(query.device, query.dtype, keys.data.shape[2], ragged.block_table.shape[1])
    if declined is not None:
        return declined
    from mycli.runtime.kernels.triton.attention import launch_paged_attention

    # What runs before it is not launched with programmatic dependencies, so waiting for it gains nothing.
    return launch_paged_attention(query, keys, values, ragged, scoring, replace(chip_of(query.device), pdl=False))


def triton_attend_prompt(
    query: Tensor, keys: Stored, values: Stored, ragged: Ragged, scoring: Scoring
) -> Tensor | Declined:
    """Attend with query [tokens, heads, head_dim] of any number of tokens a sequence: [tokens, heads * head_dim].

    Rows of padding become zeros.
    """
    device, (_, heads, head_dim) = query.device, query.shape
    if device.type != "cuda":
        return Declined("not-on-cuda", {"device": str(device)})
    if ragged.known is None and ragged.tokens is None:
        return Declined("unequal-tokens")
    declined = decline_paged(device, query.dtype, keys.data.shape[2], ragged.block_table.shape[1])
    if declined is not None:
        return declined
    options = scoring.window is not None, scoring.chunk is not None, bool(scoring.softcap), scoring.sinks is not None
    kind = PromptKind(device, query.dtype, keys.data.dtype, heads // keys.data.shape[1], head_dim, *options)
    if (declined := decline_prompts(kind)) is not None:
        return declined
    from mycli.runtime.kernels.triton.prompt_attention import launch_prompt_attention

    return launch_prompt_attention(query, keys, values, ragged, scoring, chip_of(device))


@cache  # compiling takes seconds, and the answer does not change
def decline_prompts(kind: PromptKind) -> Declined | None:
    """Return why the kernel for prompts cannot be used, None if a small result is right; the first call compiles."""
    from mycli.runtime.kernels.triton.prompt_attention import small_attention

    try:
        error = small_attention(kind, chip_of(kind.device))
    except Exception as trouble:  # noqa: BLE001  (reason: compilers and drivers raise all kinds)
        return missing_tool() or Declined("prompt-attention-raises", {"error": summarize_error(trouble)})
    if isinstance(error, Declined):
        return error
    return None if error < 0.02 else Declined("prompt-attention-differs", {"head_dim": kind.head_dim, "error": error})


def decline_paged(device: torch.device, dtype: torch.dtype, block_size: int, width: int) -> Declined | None:
    """Return why queries of `dtype` do not attend to sequences of `width` blocks on a device, or None if they do."""
    if dtype not in ACTIVATION_DTYPES:
        return decline_dtype(dtype)
    if width > 1 and block_size % KEY_BLOCK:
        return Declined("cache-block-size", {"size": block_size})
    return _decline_device(device)


@cache
def _decline_device(device: torch.device) -> Declined | None:
    if torch.version.hip is not None:
        return Declined("untested-on-amd")
    if find_spec("triton") is None:
        return Declined("triton-not-installed")
    return decline_packed(device)
