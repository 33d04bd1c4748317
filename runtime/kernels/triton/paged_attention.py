"""Attention to a paged cache on a GPU; `triton.attention` and `triton.prompt_attention` have the kernels."""

from dataclasses import replace
from functools import cache
from importlib.util import find_spec

import torch
from torch import Tensor

from mycli.runtime.cache.kv_cache import Stored
from mycli.runtime.device.placement import decline_packed
from mycli.runtime.errors import Declined
from mycli.runtime.kernels.paged import KEY_BLOCK, Ragged, Scoring
from mycli.runtime.kernels.triton.product.matmul import ACTIVATION_DTYPES, chip_of

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
    """Attend with query [tokens, heads, head_dim] of any number of tokens a sequence: [tokens, heads * head_dim]."""
    if query.device.type != "cuda":
        return Declined("not-on-cuda", {"device": str(query.device)})
    if ragged.longest is None:
        return Declined("unequal-tokens")
    declined = decline_paged(query.device, query.dtype, keys.data.shape[2], ragged.block_table.shape[1])
    if declined is not None:
        return declined
    from mycli.runtime.kernels.triton.prompt_attention import launch_prompt_attention

    return launch_prompt_attention(query, keys, values, ragged, scoring, chip_of(query.device))


def decline_paged(device: torch.device, dtype: torch.dtype, block_size: int, width: int) -> Declined | None:
    """Return why queries of `dtype` do not attend to sequences of `width` blocks on a device, or None if they do."""
    if dtype not in ACTIVATION_DTYPES:
        return Declined("activation-dtype", {"dtype": str(dtype).removeprefix("torch.")})
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
