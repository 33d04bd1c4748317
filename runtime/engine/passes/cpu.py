"""The CPU pass: few bf16 rows through native code, consecutive layer parts in one call.

A pass over few tokens spends its time between small steps, so all steps that have native code run in one call, with the
same bits as one by one. Greedy decoding stays in native code for several passes.
"""

import time
from collections.abc import Iterable, Iterator, Sequence
from ctypes import addressof, c_int32, c_int64, c_uint8
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from mycli.runtime.cache.batch import Batch, Chunk, table_rows, token_positions
from mycli.runtime.cache.kv_cache import PACKED, KVCache, cache_dtype
from mycli.runtime.device.placement import decline_dtype, dtype_name
from mycli.runtime.engine.passes.base import OnDecline, PassInput, TokenSteps
from mycli.runtime.engine.passes.cpu_parts import native_head, native_part
from mycli.runtime.errors import Declined
from mycli.runtime.kernels.cpu.attention import CACHE_TYPES
from mycli.runtime.kernels.cpu.layer import (
    CChain,
    CHead,
    CLayerCache,
    CLayerStates,
    CLoop,
    CMixerCaches,
    CPart,
    CPassRows,
    CPlace,
    CRotation,
    run_head,
    run_passes,
)
from mycli.runtime.kernels.cpu.library import build
from mycli.runtime.kernels.cpu.library.build import Native, pointer
from mycli.runtime.layers.block import Attention, Block, BlockPart, Parallel, Recurrent
from mycli.runtime.layers.latent import LatentAttention
from mycli.runtime.layers.layer_part import complete
from mycli.runtime.layers.recurrent import clear_new_states, defer_advance
from mycli.runtime.layers.rope import Rope
from mycli.runtime.layers.transformer import Transformer, pass_context
from mycli.runtime.layers.vocabulary import embedding_scale, finish_logits
from mycli.runtime.models.config import KvDtype
from mycli.runtime.models.part_spec import RopeSpec

NATIVE_ROWS = 64  # with more rows the products take longer than the steps between them
# A call makes as many tokens as fit this time: other requests wait as long, and a stream gets them together.
CALL_SECONDS = 0.005


class _PassRows:
    """The sequences of one pass as native code reads them; owns the memory that `rows` points to."""

    def __init__(self, chunks: Sequence[Chunk], rope: Rope, per_layer_inputs: Tensor | None) -> None:
        starts, lengths, states, drafts = [0], list[int](), list[int](), list[int]()
        self.drafted: list[tuple[Chunk, int]] = []
        width = max([len(chunk.blocks) for chunk in chunks])
        blocks = list(chain(*table_rows(chunks, width, windowed=False)))
        windows = blocks if chunks[0].window_blocks is None else list(chain(*table_rows(chunks, width, windowed=True)))
        for chunk in chunks:
            if chunk.drafted:
                self.drafted.append((chunk, starts[-1]))
            starts.append(starts[-1] + len(chunk.tokens))
            lengths.append(chunk.start + len(chunk.tokens))
            states.append(chunk.state)
            drafts.append(chunk.drafted > 0)
        all_positions = rope.every(max(lengths))
        self.tables = rope.rows(chunks) if all_positions is None else all_positions
        rotations = (CRotation * len(self.tables))()
        for rotation, table in zip(rotations, self.tables.values(), strict=True):
            rotation.cos, rotation.sin, rotation.scale = map(pointer, (table.cos, table.sin, table.query_scale))
        arrays = [(c_int32 * len(values))(*values) for values in (starts, lengths, blocks, windows, states)]
        draft_flags = (c_uint8 * len(drafts))(*drafts)
        self._owned = arrays, draft_flags, per_layer_inputs, self.tables
        self.rows = CPassRows(
            *map(addressof, arrays),
            drafts=addressof(draft_flags),
            rotations=rotations,
            per_layer_inputs=pointer(per_layer_inputs),
            rows=starts[-1],
            sequences=len(chunks),
            table_width=width,
            per_layer_stride=0 if per_layer_inputs is None else per_layer_inputs.stride(1),
            by_position=all_positions is not None,
        )


@dataclass(frozen=True)
class _NativePart:
    """A part as native code has it, and the module it was built from."""

    part: CPart
    module: BlockPart

    @property
    def recurrent(self) -> Recurrent | None:
        module = self.module.other if isinstance(self.module, Parallel) else self.module
        return module if isinstance(module, Recurrent) else None

    def place(self, cache: KVCache, rotations: Sequence[RopeSpec], state_offset: int) -> CPlace | None:
        """Return where the part finds its keys and values, or its states, in `cache`."""
        module = self.module.attention if isinstance(self.module, Parallel) else self.module
        states = None if self.recurrent is None else _layer_states(self.recurrent, cache, state_offset)
        if not isinstance(module, Attention | LatentAttention):
            return states
        keys_and_values = _layer_cache(module, cache, rotations)
        return keys_and_values if states is None else CMixerCaches(keys_and_values, states)


def _layer_cache(module: Attention | LatentAttention, cache: KVCache, rotations: Sequence[RopeSpec]) -> CLayerCache:
    keys, values = cache.all(module.kv_layer)
    blocks, _, block_size, size = keys.data.shape
    rope = module.spec.rope
    return CLayerCache(
        *map(pointer, (keys.data, values.data, keys.scales, values.scales)),
        blocks=blocks,
        block_size=block_size,
        block_stride=keys.data.stride(0) // size,
        head_stride=keys.data.stride(1) // size,
        cache_type=CACHE_TYPES[keys.data.dtype],
        rotation=-1 if rope is None else rotations.index(rope),
        windowed=cache.windowed(module.kv_layer),
    )


def _layer_states(module: Recurrent, cache: KVCache, offset: int) -> CLayerStates:
    states = cache.states.layer(module.layer)
    return CLayerStates(*map(pointer, (*states, None)[:2]), cache.states.slots, offset)


@dataclass(eq=False)
class _NativeRun:
    """Consecutive native parts that run in one call; its structures hold addresses, so each cache has its own chain."""

    library: Native
    parts: tuple[_NativePart, ...]
    # Weak, so that the structures do not keep a cache alive that nothing else uses.
    chains: WeakKeyDictionary[KVCache, CChain] = field(default_factory=WeakKeyDictionary)

    def __post_init__(self) -> None:
        self.recurrent = [part.recurrent for part in self.parts if part.recurrent is not None]
        self._row_width = sum(sum(module.mixer.widths) for module in self.recurrent)

    def chain(self, cache: KVCache, rows: _PassRows) -> CChain:
        chain = self.chains.get(cache)
        if chain is None:
            places, offset = [], 0
            for part in self.parts:
                places.append(part.place(cache, list(rows.tables), offset))
                offset += 0 if part.recurrent is None else sum(part.recurrent.mixer.widths)
            chain = self.chains[cache] = CChain([part.part for part in self.parts], places)
        return chain

    def __call__(self, x: Tensor, cache: KVCache, rows: _PassRows) -> Tensor:
        chain = self.chain(cache, rows)
        if not (rows.drafted and self.recurrent):
            rows.rows.draft_inputs = None
            return chain(self.library, rows.rows, x)
        # States do not advance over drafted tokens: native code writes the rows that would advance them, and they are
        # replayed for the accepted tokens.
        count = rows.rows.rows
        state_rows = torch.empty(count * self._row_width, dtype=torch.bfloat16)
        rows.rows.draft_inputs = pointer(state_rows)
        x = chain(self.library, rows.rows, x)
        offset = 0
        for module in self.recurrent:
            parts = []
            for width in module.mixer.widths:
                parts.append(state_rows[offset * count : (offset + width) * count].view(1, count, width))
                offset += width
            states = cache.states.layer(module.layer)
            for chunk, first in rows.drafted:
                defer_advance(cache.states, chunk, first, tuple(parts), states, module.mixer.advance)
        return x


class CpuLayers:
    """Layers in order: consecutive native parts as one call, other parts product by product."""

    def __init__(self, library: Native, blocks: Iterable[Block]) -> None:
        self.declined: dict[str, Declined] = {}  # parts that run product by product, by name of the module's class
        self._pieces: list[_NativeRun | Block | BlockPart] = []
        run: list[_NativePart] = []
        for piece in self._parts(blocks):
            if isinstance(piece, _NativePart):
                run.append(piece)
                continue
            self._pieces += [_NativeRun(library, tuple(run)), piece] if run else [piece]
            run = []
        self._pieces += [_NativeRun(library, tuple(run))] if run else []

    def _parts(self, blocks: Iterable[Block]) -> Iterator[_NativePart | Block | BlockPart]:
        """Yield the parts of all layers; a layer whose router reads its input comes before its parts."""
        for block in blocks:
            if block.early_router:
                yield block
            for part in block.parts:
                native = native_part(part)
                if isinstance(native, Declined):
                    self.declined.setdefault(type(part).__name__, native)
                yield part if isinstance(native, Declined) else _NativePart(native, part)

    def takes(self, rows: int) -> bool:
        """Return whether native code is faster for a pass of `rows` rows."""
        return rows <= NATIVE_ROWS and any(isinstance(piece, _NativeRun) for piece in self._pieces)

    @property
    def whole(self) -> _NativeRun | None:
        """The single call that runs all layers; None if a part is not native or has a recurrent state."""
        piece = self._pieces[0]
        return piece if len(self._pieces) == 1 and isinstance(piece, _NativeRun) and not piece.recurrent else None

    def run(
        self, x: Tensor, chunks: Sequence[Chunk], rope: Rope, cache: KVCache, per_layer_inputs: Tensor | None = None
    ) -> Tensor:
        """Run the residual stream x [1, T, hidden] through all layers; the cache takes keys, values and states."""
        if cache.states.recurrent:
            clear_new_states(chunks, cache.states)
        rows, context = _PassRows(chunks, rope, per_layer_inputs), None
        for piece in self._pieces:
            if isinstance(piece, _NativeRun):
                x = piece(x, cache, rows)
                continue
            if context is None:
                batch = Batch.of(chunks, cache.block_size, x.device)
                context = pass_context(batch, rope, cache, per_layer_inputs)
            if isinstance(piece, Block):
                context = piece.routed(x, context)
            else:
                x = complete(piece.steps(x, context))
        return x


class CpuPass:
    """The native pass of one model in bf16."""

    name = "cpu"
    samples = False

    def __init__(self, model: Transformer, library: Native) -> None:
        self._model, self._library = model, library
        self.layers = CpuLayers(library, model.layers())
        self._head = native_head(model.norm, model.head)
        self._run = self.layers.whole
        self._tokens_declined = self._decline_tokens()
        self._seconds: dict[int, float] = {}  # of the last pass, by number of sequences

    def _decline_tokens(self) -> Declined | None:
        """Return why several passes cannot run in one call; None if they can."""
        config = self._model.config
        if self.declined is not None:
            return self.declined
        if config.has_recurrent:
            return Declined("recurrent-state")
        if self._model.streams is not None:
            return Declined("several-streams")
        if self._model.per_layer is not None:
            return Declined("per-layer-inputs")
        if self._model.positions is not None:
            return Declined("position-embeddings")
        if config.embedding_norm:
            return Declined("embedding-norm")
        if config.logit_softcap is not None:
            return Declined("logit-softcap", {"cap": config.logit_softcap})
        return None if self._model.embedding.is_contiguous() else Declined("embedding-layout")

    @property
    def declined(self) -> Declined | None:
        """Return why a part of the model, or its head, runs product by product; None if all is native."""
        if isinstance(self._head, Declined):
            return self._head
        return next(iter(self.layers.declined.values()), None)

    def takes(self, work: PassInput) -> Declined | None:
        if work.rows > NATIVE_ROWS:
            return Declined("many-rows", {"rows": work.rows, "most": NATIVE_ROWS})
        if work.sampling is None:
            return None
        if self._tokens_declined is not None:
            return self._tokens_declined
        if not all([row.plain_greedy for row in work.sampling]):
            return Declined("host-random-numbers")
        if work.rope.every(work.longest + work.count - 1) is None:
            return Declined("dynamic-rope")
        return None

    @torch.inference_mode()
    def logits(self, work: PassInput) -> Tensor:
        model, chunks = self._model, work.chunks
        ids, logit_rows = list[int](), list[int]()  # tokens, and rows whose logits are returned
        for chunk in chunks:
            ids += chunk.tokens
            logit_rows += range(len(ids) - chunk.logits, len(ids))
        x, inputs = model.enter(torch.tensor([ids]), partial(token_positions, chunks))
        x = model.leave(self.layers.run(x, chunks, work.rope, work.cache, inputs)[0])
        if work.hook is not None:
            work.hook(model.norm(x))
        if not logit_rows:
            return torch.empty(0, model.config.vocab_size)
        if len(logit_rows) < len(ids):
            x = x[torch.tensor(logit_rows)]
        if isinstance(self._head, Declined):
            return finish_logits(model.head(model.norm(x)), model.config, model.portable)
        return finish_logits(run_head(self._library, self._head, x), model.config, model.portable)

    def tokens(self, work: PassInput) -> Iterator[TokenSteps]:
        """Yield one list of greedy tokens, as many as fit `CALL_SECONDS`."""
        assert self._run is not None and work.sampling is not None and isinstance(self._head, CHead)
        model, sequences, began = self._model, len(work.chunks), time.perf_counter()
        # Measured for each number of sequences; the first call with a new number makes one token.
        passes = min(work.count, int(CALL_SECONDS / self._seconds.get(sequences, CALL_SECONDS)) or 1)
        rows = _PassRows(work.chunks, work.rope, None)
        stop_ids = sorted(frozenset[int]().union(*work.stop_ids))
        stops = (c_int64 * len(stop_ids))(*stop_ids)
        loop = CLoop(
            embedding=model.embedding.data_ptr(),
            hidden=model.config.hidden_size,
            choices=work.sampling[0].vocab_size,
            stops=addressof(stops),
            stop_count=len(stop_ids),
            embedding_scale=embedding_scale(model.config, model.dtype),
            logit_scale=model.config.logit_scale,
        )
        chain = self._run.chain(work.cache, rows)
        last = [token for chunk in work.chunks for token in chunk.tokens]
        steps = run_passes(self._library, chain, self._head, loop, rows.rows, last, passes)
        seconds = time.perf_counter() - began
        self._seconds[sequences] = seconds / len(steps)
        yield steps, seconds


def compile_cpu_pass(model: Transformer, kv: KvDtype, report: OnDecline) -> CpuPass | Declined:
    """Compile the native pass of a bf16 model on the CPU, or return why it has none."""
    library = _library(model.device, model.dtype, kv)
    return library if isinstance(library, Declined) else CpuPass(model, library)


def compile_layers(blocks: Sequence[Block], device: torch.device, dtype: torch.dtype, kv: KvDtype) -> CpuLayers | None:
    """Compile loaded layers outside a model, such as those of an MTP head; None if native code does not run them."""
    library = _library(device, dtype, kv)
    return None if isinstance(library, Declined) else CpuLayers(library, blocks)


def _library(device: torch.device, dtype: torch.dtype, kv: KvDtype) -> Native | Declined:
    if device.type != "cpu":
        return Declined("not-on-cpu", {"device": str(device)})
    if dtype != torch.bfloat16:
        return decline_dtype(dtype)
    cached = cache_dtype(kv, dtype)
    if cached not in (torch.bfloat16, torch.int8, PACKED):
        return Declined("cache-dtype", {"dtype": dtype_name(cached)})
    return build.native()
