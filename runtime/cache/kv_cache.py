"""The key-value cache: memory taken once, in blocks that sequences share and exchange.

It holds values as they are computed, as int8 codes with one scale per token and head (x = code * scale, where scale is
the largest magnitude of the head's values / 127), or as the int4 vectors of `runtime.cache.int4`, which lie as bytes. A
token is rounded by itself, so that how a text came in (at once, in pieces, written over) leaves no trace.

Does not know attention, tokens, or whose a block is. A sequence is cut back by writing over its tail, so nothing has to
be undone.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mycli.runtime.cache.batch import Batch
from mycli.runtime.cache.int4 import pack_int4, unpack_int4
from mycli.runtime.cache.state_store import StateStore
from mycli.runtime.models.config import KvDtype, ModelConfig
from mycli.runtime.quantization.int4_vectors import int4_bytes

PACKED = torch.uint8  # of a cache of int4 vectors


def cache_dtype(kv: KvDtype, dtype: torch.dtype) -> torch.dtype:
    """What a cache of kind `kv` holds beside activations of `dtype`."""
    return {"auto": dtype, "bf16": torch.bfloat16, "int8": torch.int8, "int4": PACKED}[kv]


@dataclass(frozen=True)
class Stored:
    """Keys or values [sequences, kv_heads, length, head_dim]; int8 codes come with `scales` fp32, one per vector.

    Of int4 vectors the last axis is bytes. scales: [sequences, kv_heads, length], None for all but int8.
    """

    data: Tensor
    scales: Tensor | None = None

    @classmethod
    def of(cls, values: Tensor, dtype: torch.dtype) -> "Stored":
        """values [..., head_dim] as a cache of `dtype` holds them; vectors that are packed already stay as they are."""
        if dtype == torch.int8:
            return cls(*quantize_vectors(values))
        return cls(pack_int4(values) if dtype == PACKED != values.dtype else values.to(dtype))

    def dense(self, dtype: torch.dtype) -> Tensor:
        """The values in `dtype`: a copy, except where they lie there as such."""
        if self.data.dtype == PACKED:
            return unpack_int4(self.data, dtype)
        if self.scales is None:
            return self.data.to(dtype)
        return self.data.to(dtype).mul_(self.scales.unsqueeze(-1).to(dtype))

    def last(self, count: int) -> "Stored":
        """The last `count` positions."""
        return Stored(self.data[:, :, -count:], None if self.scales is None else self.scales[:, :, -count:])


def quantize_vectors(values: Tensor) -> tuple[Tensor, Tensor]:
    """values [..., head_dim] as int8 codes and scales fp32 [...]. What is not finite makes its whole vector NaN."""
    exact = values.float()
    scales = exact.abs().amax(-1) / 127
    codes = (exact / scales.clamp(min=torch.finfo(torch.float32).tiny).unsqueeze(-1)).round_()
    finite = scales.isfinite()
    return codes.nan_to_num_(0).clamp_(-127, 127).to(torch.int8), scales.where(finite, torch.nan)


@dataclass(frozen=True)
class Run:
    """`count` positions of one block, from `offset` on."""

    block: int
    offset: int
    count: int


class KVCache:
    """Keys and values in blocks, [2, blocks, kv_heads, block_size, head_dim] a layer, in a floating `dtype` or int8.

    Of `PACKED` the last axis is the bytes of a vector; ModelError for heads that cannot be packed. Beside them
    `states`, in `slots`, of the layers that keep those instead.

    Tensors only: who has which block, and how much of it is filled, is the business of `BlockTable`. One block as long
    as the context for each sequence is a contiguous cache, which is read without being gathered.
    """

    def __init__(
        self,
        config: ModelConfig,
        blocks: int,
        block_size: int,
        device: torch.device,
        dtype: torch.dtype,
        slots: int = 1,
    ) -> None:
        self.states = StateStore(config, slots, device)
        data: list[Tensor] = []
        scales: list[Tensor] = []  # none, where the data are the values themselves
        for heads, head_dim in (config.kv_shape(layer) for layer in range(config.layers)):
            shape = (2, blocks, heads, block_size, int4_bytes(head_dim) if dtype == PACKED else head_dim)
            data.append(torch.zeros(shape, dtype=dtype, device=device))
            if dtype == torch.int8:
                scales.append(torch.zeros(shape[:-1], dtype=torch.float32, device=device))
        self._set_tensors(data, scales)

    def _set_tensors(self, data: list[Tensor], scales: list[Tensor]) -> None:
        self._data, self._scales = data, scales
        self._views: dict[tuple[int, int], KVCache] = {}
        self.blocks, self.block_size = data[0].shape[1], data[0].shape[3]
        # Keys and values of each layer apart: making such a view takes as long as storing a token.
        self._parts = [self._apart(layer) for layer in range(len(data))]

    def _apart(self, layer: int) -> tuple[Stored, Stored]:
        scales = self._scales[layer] if self._scales else (None, None)
        return Stored(self._data[layer][0], scales[0]), Stored(self._data[layer][1], scales[1])

    @property
    def dtype(self) -> torch.dtype:
        """Of what is held; see `cache_dtype`."""
        return self._data[0].dtype

    @property
    def nbytes(self) -> int:
        """Bytes of memory held."""
        return sum(tensor.nbytes for tensor in (*self._data, *self._scales)) + self.states.nbytes

    def view_blocks(self, first: int, count: int) -> "KVCache":
        """Return blocks `first` .. `first + count` as a cache over the same memory: the same object every time."""
        if count == self.blocks:
            return self
        view = self._views.get((first, count))
        if view is None:
            view = self._views[first, count] = KVCache.__new__(KVCache)
            view.states = self.states
            blocks = slice(first, first + count)
            view._set_tensors([data[:, blocks] for data in self._data], [scales[:, blocks] for scales in self._scales])
        return view

    def write(self, layer: int, batch: Batch, keys: Tensor, values: Tensor) -> None:
        """Store keys and values [T, kv_heads, head_dim], or packed [T, kv_heads, bytes], of the tokens of `batch`."""
        chunks = batch.chunks
        for kind, new in enumerate((keys, values)):
            data, scales = self._parts[layer][kind].data, self._parts[layer][kind].scales
            stored = Stored.of(new, data.dtype)
            if len(chunks) == 1 and len(chunks[0].blocks) == 1:
                (chunk,) = chunks
                place = chunk.blocks[0], slice(None), slice(chunk.start, chunk.length)
                data[place] = stored.data.transpose(0, 1)
                if scales is not None and stored.scales is not None:
                    scales[place] = stored.scales.T
                continue
            block, offset = batch.slot_mapping // self.block_size, batch.slot_mapping % self.block_size
            data[block, :, offset] = stored.data
            if scales is not None and stored.scales is not None:
                scales[block, :, offset] = stored.scales

    def read(self, layer: int, blocks: Sequence[int], length: int) -> tuple[Stored, Stored]:
        """Keys and values [1, kv_heads, length, head_dim] of the sequence in `blocks`; views where it is one block."""
        return self._read(layer, 0, blocks, length), self._read(layer, 1, blocks, length)

    def _read(self, layer: int, kind: int, blocks: Sequence[int], length: int) -> Stored:
        data, scales = self._parts[layer][kind].data, self._parts[layer][kind].scales
        if len(blocks) == 1:
            one = slice(blocks[0], blocks[0] + 1)
            return Stored(data[one, :, :length], None if scales is None else scales[one, :, :length])
        used = torch.tensor(blocks[: -(-length // self.block_size)], dtype=torch.int64, device=data.device)
        gathered = data[used].transpose(0, 1).flatten(1, 2)[None, :, :length]
        if scales is None:
            return Stored(gathered)
        return Stored(gathered, scales[used].transpose(0, 1).flatten(1, 2)[None, :, :length])

    def all(self, layer: int) -> tuple[Stored, Stored]:
        """Keys and values of every block, filled or not, as views [blocks, kv_heads, block_size, head_dim]."""
        return self._parts[layer]

    def copy(self, source: int, target: int) -> None:
        """Make block `target` what `source` is."""
        for tensor in (*self._data, *self._scales):
            tensor[:, target] = tensor[:, source]

    def nbytes_of(self, count: int) -> int:
        """Bytes of the keys and values of `count` positions, as `take` gives them."""
        return sum(tensor[:, 0, :, 0].nbytes for tensor in (*self._data, *self._scales)) * count

    def take(self, runs: Sequence[Run]) -> bytes:
        """Keys and values, and their scales, of consecutive positions: of each layer [2, kv_heads, positions, ...]."""
        parts = (
            torch.cat([tensor[:, run.block, :, run.offset : run.offset + run.count] for run in runs], dim=2)
            for tensor in (*self._data, *self._scales)
        )
        return b"".join(part.cpu().contiguous().view(torch.uint8).numpy().tobytes() for part in parts)

    def put(self, values: bytearray, count: int, skip: int, runs: Sequence[Run]) -> None:
        """What `take` gave of `count` positions: after the first `skip` of them those that `runs` have room for."""
        at = 0
        for tensor in (*self._data, *self._scales):
            shape = (2, tensor.shape[2], count, *tensor.shape[4:])
            size = math.prod(shape)
            if not size:  # of a layer that keeps a state instead
                continue
            part = torch.frombuffer(values, dtype=tensor.dtype, count=size, offset=at).view(shape).to(tensor.device)
            at += size * tensor.element_size()
            start = skip
            for run in runs:
                chosen = part[:, :, start : start + run.count]
                tensor[:, run.block, :, run.offset : run.offset + run.count] = chosen
                start += run.count
