"""Scaled dot-product attention with grouped queries, a causal limit and an optional sliding window.

This file says which keys a query may see, and where they come from: from the tokens of one pass, or from a cache whose
blocks lie anywhere. The kernels are listed in `runtime.kernels.registry`. Does not know rotation or layers.
"""

from collections.abc import MutableMapping
from typing import Protocol

import torch
from torch import Tensor

from mycli.runtime.cache.kv_cache import PACKED, KVCache, Stored
from mycli.runtime.kernels.paged import Ragged, Scoring
from mycli.runtime.kernels.registry import ATTENTION, PAGED_ATTENTION, VECTOR_PACKING
from mycli.runtime.layers.batch import Batch, Span
from mycli.runtime.models.part_spec import AttentionSpec


def visible(start: int, count: int, window: int | None, device: torch.device) -> Tensor | None:
    """Which of `start + count` keys each of the last `count` positions sees: bool [count, start + count].

    None where no mask is needed: a first chunk that no window cuts (plain causal), or a single token, which sees all
    that it is handed.
    """
    end = start + count
    if count == 1 or (start == 0 and (window is None or window >= end)):
        return None
    query = torch.arange(start, end, device=device).unsqueeze(1)
    key = torch.arange(end, device=device)
    seen = key <= query
    return seen if window is None else seen & (query - key < window)


KeyValue = tuple[Tensor, Tensor]
Lent = MutableMapping[int, tuple[Stored, Stored]]


class KeysAndValues(Protocol):
    """What the queries of a pass attend to."""

    def attend(
        self, layer: int, query: Tensor, new: KeyValue | None, spec: AttentionSpec, sinks: Tensor | None = None
    ) -> Tensor:
        """query [sequences, tokens, heads, head_dim], `new` keys and values [sequences, tokens, kv_heads, head_dim].

        All are rotated; `new` is None where the layer reads those of another, `spec.shares`. Returns [sequences,
        tokens, heads * head_dim].
        """
        ...


class TextAttention:
    """Attention of whole texts of equal length to themselves, for one pass, by any number of layers.

    `dtype`: keys and values are rounded as a cache of this dtype would hold them; None: left as they are. `lent`: keys
    and values that later layers read too, by layer.
    """

    def __init__(self, dtype: torch.dtype | None = None, lent: Lent | None = None) -> None:
        self._dtype = dtype
        self._lent: Lent = {} if lent is None else lent
        self._masks: dict[tuple[int, int | None], Tensor | None] = {}

    def lending(self, lent: Lent) -> "TextAttention":
        """As this, for other texts, which lend to `lent`."""
        return TextAttention(self._dtype, lent)

    def attend(
        self, layer: int, query: Tensor, new: KeyValue | None, spec: AttentionSpec, sinks: Tensor | None = None
    ) -> Tensor:
        """As `KeysAndValues.attend`: each sequence is a text."""
        shape = query.shape[1], spec.window
        if shape not in self._masks:
            self._masks[shape] = visible(0, shape[0], spec.window, query.device)
        if new is None:
            assert spec.kv_source is not None
            stored = self._lent[spec.kv_source]
        else:
            key, value = new
            stored = self._stored(key.transpose(1, 2)), self._stored(value.transpose(1, 2))
        if spec.kv_shared:
            self._lent[layer] = stored
        return ATTENTION(query, *stored, self._masks[shape], spec.window, spec.scale, spec.softcap, sinks)

    def _stored(self, values: Tensor) -> Stored:
        if self._dtype is None:
            return Stored(values)
        return Stored.of(VECTOR_PACKING(values) if self._dtype == PACKED else values, self._dtype)


class PagedAttention:
    """Attention of a ragged batch to a cache in blocks, for one pass: its keys and values are written there first.

    The CPU reads blocks as they lie. On other devices each sequence is a call of its own, over blocks that are brought
    together where it has several.
    """

    def __init__(self, batch: Batch, cache: KVCache) -> None:
        self._batch, self._cache = batch, cache
        self._masks: dict[tuple[int, int | None], Tensor | None] = {}
        self._ragged: Ragged | None = None
        if batch.tokens.device.type == "cpu":
            self._ragged = Ragged(batch.starts, batch.lengths, batch.block_table)

    def attend(
        self, layer: int, query: Tensor, new: KeyValue | None, spec: AttentionSpec, sinks: Tensor | None = None
    ) -> Tensor:
        """As `KeysAndValues.attend`, with all rows of the batch as one sequence: [1, T, ...]."""
        batch, cache = self._batch, self._cache
        if new is not None:
            key, value = new[0][0], new[1][0]
            if cache.dtype == PACKED:
                key, value = VECTOR_PACKING(key), VECTOR_PACKING(value)
            cache.write(layer, batch, key, value)
        layer = layer if spec.kv_source is None else spec.kv_source
        if self._ragged is not None:
            scale = spec.head_dim**-0.5 if spec.scale is None else spec.scale
            scoring = Scoring(scale, spec.window, spec.softcap or 0.0, sinks)
            return PAGED_ATTENTION(query[0], *cache.all(layer), self._ragged, scoring)[None]
        if len(batch.spans) == 1:
            return self._attended(layer, query, batch.spans[0], spec, sinks)
        cut = ((query[:, span.row : span.row + span.count], span) for span in batch.spans)
        return torch.cat([self._attended(layer, part, span, spec, sinks) for part, span in cut], dim=1)

    def _attended(self, layer: int, query: Tensor, span: Span, spec: AttentionSpec, sinks: Tensor | None) -> Tensor:
        key = span.row, spec.window
        if key not in self._masks:
            self._masks[key] = visible(span.start, span.count, spec.window, query.device)
        stored = self._cache.read(layer, span.blocks, span.length)
        return ATTENTION(query, *stored, self._masks[key], spec.window, spec.scale, spec.softcap, sinks)
