"""Scaled dot-product attention with grouped queries, a causal mask and an optional sliding window.

Decides which keys a query sees and where they are: in the tokens of one pass (`PromptAttention`) or in a paged cache
(`PagedAttention`). The kernels are in `runtime.kernels.registry`.
"""

from collections.abc import MutableMapping
from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor

from mycli.runtime.cache.batch import Batch, Chunk
from mycli.runtime.cache.kv_cache import KVCache, Stored
from mycli.runtime.kernels.paged import Ragged, Scoring
from mycli.runtime.kernels.registry import (
    ATTENTION,
    CACHE_VECTORS,
    LATENT_ATTENTION,
    PAGED_ATTENTION,
    PROMPT_ATTENTION,
)
from mycli.runtime.models.latent_spec import LatentAttentionSpec
from mycli.runtime.models.part_spec import AttentionSpec


def attention_mask(
    start: int, count: int, window: int | None, device: torch.device, chunk: int | None = None
) -> Tensor | None:
    """Return the mask bool [count, start + count] of the last `count` positions, or None if none is needed."""
    end = start + count
    if count == 1 or (start == 0 and (window is None or window >= end) and (chunk is None or chunk >= end)):
        return None
    query = torch.arange(start, end, device=device).unsqueeze(1)
    key = torch.arange(end, device=device)
    causal = key <= query
    causal = causal if window is None else causal & (query - key < window)
    return causal if chunk is None else causal & (key >= query - query % chunk)


def attention_scoring(spec: AttentionSpec, sinks: Tensor | None) -> Scoring:
    return Scoring(spec.softmax_scale, spec.window, spec.softcap or 0.0, sinks, spec.chunk)


KeyValue = tuple[Tensor, Tensor]
SharedKeyValues = MutableMapping[int, tuple[Stored, Stored]]  # by layer


class AttentionContext(Protocol):
    """The keys and values that the queries of a pass attend to."""

    def attend(
        self, layer: int, query: Tensor, new: KeyValue | None, spec: AttentionSpec, sinks: Tensor | None = None
    ) -> Tensor:
        """Attend with query [sequences, tokens, heads, head_dim]; return [sequences, tokens, heads * head_dim].

        new: keys and values [sequences, tokens, kv_heads, head_dim] of this layer; None if it reads those of layer
        `spec.kv_source`. Queries and keys are rotated.
        """
        ...

    def attend_latent(self, layer: int, spec: LatentAttentionSpec, query: KeyValue, new: KeyValue) -> Tensor:
        """Attend in latent space; return [tokens, heads, rank].

        query: [tokens, heads, rank] and rotated [tokens, heads, rope_dim]; new: latents [tokens, rank] and rotated
        values [tokens, rope_dim] of this layer.
        """
        ...


class PromptAttention:
    """Attention within whole prompts of equal length; keys and values are rounded as a cache of `dtype` rounds them."""

    def __init__(self, dtype: torch.dtype | None = None, shared: SharedKeyValues | None = None) -> None:
        self._dtype = dtype
        self._shared: SharedKeyValues = {} if shared is None else shared
        self._masks: dict[tuple[int, int | None, int | None], Tensor | None] = {}

    def with_shared(self, shared: SharedKeyValues) -> "PromptAttention":
        return PromptAttention(self._dtype, shared)

    def attend(
        self, layer: int, query: Tensor, new: KeyValue | None, spec: AttentionSpec, sinks: Tensor | None = None
    ) -> Tensor:
        shape = query.shape[1], spec.window, spec.chunk
        if shape not in self._masks:
            self._masks[shape] = attention_mask(0, shape[0], spec.window, query.device, spec.chunk)
        if new is None:
            assert spec.kv_source is not None
            stored = self._shared[spec.kv_source]
        else:
            key, value = new
            stored = self._stored(key.transpose(1, 2)), self._stored(value.transpose(1, 2))
        if spec.kv_shared:
            self._shared[layer] = stored
        return ATTENTION(query, *stored, self._masks[shape], spec.window, spec.scale, spec.softcap, sinks, spec.chunk)

    def attend_latent(self, layer: int, spec: LatentAttentionSpec, query: KeyValue, new: KeyValue) -> Tensor:
        raise NotImplementedError("whole prompts expand keys and values")

    def cached(self, x: Tensor) -> Tensor:
        """Return latents or rotated values x [sequences, tokens, size] as a cache of `dtype` rounds them."""
        return x if self._dtype is None else self._stored(x).dense(x.dtype)

    def attend_expanded(self, spec: LatentAttentionSpec, query: Tensor, expanded: Tensor, rotated: Tensor) -> Tensor:
        """Attend with query [sequences, tokens, heads, head_dim]; return [sequences, tokens, heads * value_dim].

        expanded: kv_b(latent), [sequences, tokens, heads * (nope_dim + value_dim)]; rotated: [sequences, tokens,
        rope_dim], which all heads share.
        """
        heads = expanded.view(*query.shape[:3], spec.nope_dim + spec.value_dim)
        shared = rotated.unsqueeze(2).expand(*query.shape[:3], spec.rope_dim)
        key = Stored(torch.cat((heads[..., : spec.nope_dim], shared), dim=-1).transpose(1, 2))
        value = Stored(heads[..., spec.nope_dim :].transpose(1, 2))
        mask = attention_mask(0, query.shape[1], None, query.device)
        return ATTENTION(query, key, value, mask, None, spec.scale, None, None, None)

    def _stored(self, values: Tensor) -> Stored:
        return Stored(values) if self._dtype is None else CACHE_VECTORS(values, self._dtype)


class PagedAttention:
    """Attention of a ragged batch over a paged cache, for one pass: new keys and values are written there first.

    The kernels of CPUs and GPUs read blocks in place. Where none does, each sequence is one call, over gathered blocks
    if it has several.
    """

    def __init__(self, batch: Batch, cache: KVCache, portable: bool) -> None:
        """portable: with the same bits on every CPU."""
        self._batch, self._cache = batch, cache
        self._masks: dict[tuple[int, int | None, int | None], Tensor | None] = {}
        known = tuple(chunk.count for chunk in batch.chunks)
        self._ragged = Ragged(batch.starts, batch.lengths, batch.block_table, known=known, portable=portable)
        self._windows = replace(self._ragged, block_table=batch.window_table) if cache.window_blocks else self._ragged

    def attend(
        self, layer: int, query: Tensor, new: KeyValue | None, spec: AttentionSpec, sinks: Tensor | None = None
    ) -> Tensor:
        batch, cache = self._batch, self._cache
        if new is not None:
            key, value = (CACHE_VECTORS(part[0], cache.dtype) for part in new)
            cache.write(layer, batch, key, value)
        layer = layer if spec.kv_source is None else spec.kv_source
        scoring, ragged = attention_scoring(spec, sinks), self._windows if cache.windowed(layer) else self._ragged
        if query.device.type == "cpu":
            return PAGED_ATTENTION(query[0], *cache.all(layer), ragged, scoring)[None]
        attended = PROMPT_ATTENTION.attempt(query[0], *cache.all(layer), ragged, scoring)
        return self._attend_gathered(layer, query, spec, sinks) if attended is None else attended[None]

    def _attend_gathered(self, layer: int, query: Tensor, spec: AttentionSpec, sinks: Tensor | None) -> Tensor:
        batch = self._batch
        parts = [
            self._attend_one(layer, query[:, first : first + chunk.count], chunk, spec, sinks)
            for chunk, first in zip(batch.chunks, batch.first_rows, strict=False)
        ]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)

    def attend_latent(self, layer: int, spec: LatentAttentionSpec, query: KeyValue, new: KeyValue) -> Tensor:
        latent, rotated = (CACHE_VECTORS(part.unsqueeze(1), self._cache.dtype) for part in new)
        self._cache.write(layer, self._batch, latent, rotated)
        return LATENT_ATTENTION(*query, *self._cache.all(layer), self._ragged, spec.scale)

    def _attend_one(self, layer: int, query: Tensor, chunk: Chunk, spec: AttentionSpec, sinks: Tensor | None) -> Tensor:
        blocks = chunk.blocks_of(self._cache.windowed(layer))
        keys, values = self._cache.read(layer, blocks, chunk.length)
        length = chunk.length
        if spec.window is not None:  # no token sees an older key, and the mask has no column for it
            length = min(length, spec.window + chunk.count - 1)
            keys, values = keys.last(length), values.last(length)
        key = id(chunk), spec.window, spec.chunk  # the batch keeps its chunks alive
        if key not in self._masks:
            needed = spec.chunk is not None or (spec.window is not None and spec.window < length)
            mask = attention_mask(length - chunk.count, chunk.count, spec.window, query.device, spec.chunk)
            self._masks[key] = mask if needed else None
        return ATTENTION(
            query, keys, values, self._masks[key], spec.window, spec.scale, spec.softcap, sinks, spec.chunk
        )
