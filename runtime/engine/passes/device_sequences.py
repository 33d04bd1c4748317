"""The sequences of a captured pass: positions, cache blocks and slots of states as tensors on the device."""

import torch
from torch import Tensor

from mycli.runtime.cache.kv_cache import KVCache
from mycli.runtime.cache.state_store import StateStore
from mycli.runtime.engine.passes.graphs import StepInput
from mycli.runtime.kernels.paged import Ragged
from mycli.runtime.kernels.recurrent import DeviceRuns
from mycli.runtime.kernels.registry import CACHE_VECTORS, LATENT_ATTENTION, PAGED_ATTENTION, PROMPT_ATTENTION
from mycli.runtime.layers.attention import KeyValue, attention_scoring
from mycli.runtime.layers.recurrent import Advance, Rows
from mycli.runtime.memory.graphs import MOST_ROWS
from mycli.runtime.models.latent_spec import LatentAttentionSpec
from mycli.runtime.models.part_spec import AttentionSpec
from mycli.runtime.models.recurrent_spec import RecurrentSpec


class DeviceSequences:
    """The sequences of a pass as tensors, with their attention (`AttentionContext`) and states (`RecurrentStates`)."""

    def __init__(self, inputs: StepInput, cache: KVCache) -> None:
        # Padding repeats the first sequence: it writes the same values to the same places, and no kernel needs a case
        # for it.
        (count, new), present = inputs.tokens.shape, inputs.lengths > 0
        lengths = torch.where(present, inputs.lengths, inputs.lengths[:1])
        self.tokens = torch.where(present[:, None], inputs.tokens, inputs.tokens[:1])
        positions = lengths.long()[:, None] + torch.arange(-new, 0, device=lengths.device)
        counts, self._rows = inputs.counts, None
        if counts is not None:
            # A row of padding stores the keys and values of the last token before it, at the same place.
            counts = torch.where(present, counts, counts[:1])
            row = torch.arange(new, device=lengths.device)[None].minimum(counts.long()[:, None] - 1)
            positions = positions.gather(1, row)
            self._rows = (row + new * torch.arange(count, device=lengths.device)[:, None]).flatten()
        self.positions = positions.flatten()
        self._cache, self._drafts = cache, inputs.drafts
        if self._drafts is not None:
            self._drafts.layers.clear()
        self._offsets = self.positions % cache.block_size
        starts = torch.arange(0, (count + 1) * new, new, dtype=torch.int32, device=lengths.device)

        def places(table: Tensor) -> tuple[Ragged, Tensor]:
            table = torch.where(present[:, None], table, table[:1])
            blocks = table.long().gather(1, positions // cache.block_size).flatten()
            return Ragged(starts, lengths, table, new, counts=counts), blocks

        # The block tables of the layers, and the block of each token; of layers with a window: those of True.
        others = places(inputs.block_table)
        self._places = {False: others, True: others if inputs.window_table is None else places(inputs.window_table)}
        if inputs.states is not None and inputs.advances is not None:
            real = (torch.full_like(lengths, new) if counts is None else counts) * present
            self._runs = DeviceRuns(new, lengths - new, inputs.states, real.int(), inputs.advances)
            # The state of a sequence advances once: its padding, and padding sequences, repeat rows of the result.
            first = torch.where(present, torch.arange(count, device=lengths.device), 0) * new
            within = torch.arange(new, device=lengths.device).expand(count, new) if counts is None else row
            self._advanced = None if count == 1 and counts is None else (first[:, None] + within).flatten()

    def advance(self, layer: int, spec: RecurrentSpec, rows: Rows, step: Advance) -> Tensor:
        rows = tuple(tensor[0] for tensor in rows)
        result = _advance(self._runs, rows, self._cache.states.layer(layer), step)
        assert result is not None, "a pass has a sequence"
        if self._drafts is not None:
            self._drafts.layers.append((layer, rows, step))
        return (result if self._advanced is None else result.index_select(0, self._advanced))[None]

    def _store(self, layer: int, new: KeyValue) -> None:
        """Write keys and values [rows, kv_heads, size] of a layer to the cache."""
        rows = new if self._rows is None else tuple(part.index_select(0, self._rows) for part in new)
        key, value = (CACHE_VECTORS(part, self._cache.dtype) for part in rows)
        _, blocks = self._places[self._cache.windowed(layer)]
        self._cache.write_at(layer, blocks, self._offsets, key, value)

    def attend_latent(self, layer: int, spec: LatentAttentionSpec, query: KeyValue, new: KeyValue) -> Tensor:
        self._store(layer, (new[0].unsqueeze(1), new[1].unsqueeze(1)))
        ragged, _ = self._places[False]
        return LATENT_ATTENTION(*query, *self._cache.all(layer), ragged, spec.scale)

    def attend(
        self, layer: int, query: Tensor, new: KeyValue | None, spec: AttentionSpec, sinks: Tensor | None = None
    ) -> Tensor:
        if new is not None:
            self._store(layer, (new[0][0], new[1][0]))
        layer = layer if spec.kv_source is None else spec.kv_source
        scoring, (ragged, _) = attention_scoring(spec, sinks), self._places[self._cache.windowed(layer)]
        if query.shape[1] > MOST_ROWS:
            attended = PROMPT_ATTENTION.attempt(query[0], *self._cache.all(layer), ragged, scoring)
            if attended is not None:
                return attended[None]
        return PAGED_ATTENTION(query[0], *self._cache.all(layer), ragged, scoring)[None]


def _advance(runs: DeviceRuns, rows: Rows, states: tuple[Tensor, ...], step: Advance) -> Tensor | None:
    return runs.run(step, rows, states) if rows[0].device.type == "cpu" else step(rows, states, runs)


def advance_by_drafts(inputs: StepInput, states: StateStore) -> Tensor:
    """Advance the states of a step over drafted tokens by `inputs.drafts.accepted` tokens, and return these numbers."""
    assert inputs.drafts is not None and inputs.states is not None
    accepted = inputs.drafts.accepted
    runs = DeviceRuns(inputs.new, inputs.lengths - inputs.new, inputs.states, accepted, torch.ones_like(accepted))
    for layer, rows, step in inputs.drafts.layers:
        _advance(runs, rows, states.layer(layer), step)
    return accepted
