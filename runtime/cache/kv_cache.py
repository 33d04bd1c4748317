"""The KV cache: memory allocated once, in blocks that sequences share and exchange.

Values are stored as computed, as int8 codes with one scale for each token and head (x = code * scale, scale = largest
magnitude / 127), or as packed int4 vectors (`runtime.cache.int4`). Each token is rounded by itself, so the contents do
not depend on how a prompt was split. A sequence is truncated by overwriting its tail.
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
    """Return the dtype in which a cache of kind `kv` stores keys and values for activations of `dtype`."""
    return {"auto": dtype, "bf16": torch.bfloat16, "int8": torch.int8, "int4": PACKED}[kv]


@dataclass(frozen=True)
class Stored:
    """Keys or values [sequences, kv_heads, length, head_dim]; packed int4 vectors are bytes in the last axis.

    scales: fp32 [sequences, kv_heads, length] of int8 codes, else None.
    """

    data: Tensor
    scales: Tensor | None = None

    @classmethod
    def of(cls, values: Tensor, dtype: torch.dtype) -> "Stored":
        """Convert values [..., head_dim] to the form of a cache of `dtype`; packed vectors stay as they are."""
        if dtype == torch.int8:
            return cls(*quantize_vectors(values))
        return cls(pack_int4(values) if dtype == PACKED != values.dtype else values.to(dtype))

    def dense(self, dtype: torch.dtype) -> Tensor:
        """Return the values in `dtype`: a copy unless they are stored so."""
        if self.data.dtype == PACKED:
            return unpack_int4(self.data, dtype)
        if self.scales is None:
            return self.data.to(dtype)
        return self.data.to(dtype).mul_(self.scales.unsqueeze(-1).to(dtype))

    def last(self, count: int) -> "Stored":
        """Return the last `count` positions."""
        return Stored(self.data[:, :, -count:], None if self.scales is None else self.scales[:, :, -count:])


def quantize_vectors(values: Tensor) -> tuple[Tensor, Tensor]:
    """Return values [..., head_dim] as int8 codes and scales fp32 [...]; a non-finite value makes its vector NaN."""
    exact = values.float()
    scales = exact.abs().amax(-1) / 127
    codes = (exact / scales.clamp(min=torch.finfo(torch.float32).tiny).unsqueeze(-1)).round_()
    finite = scales.isfinite()
    return codes.nan_to_num_(0).clamp_(-127, 127).to(torch.int8), scales.where(finite, torch.nan)


@dataclass(frozen=True)
class Run:
    """`count` positions of one block, from `offset`."""

    block: int
    offset: int
    count: int


class KVCache:
    """Keys and values [2, blocks, kv_heads, block_size, head_dim] of each layer, and the states of recurrent layers.

    One block of the length of the context for each sequence makes a contiguous cache, which is read without gathering.
    Raises ModelError for heads that cannot be packed.
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
        """The dtype in which keys and values are stored."""
        return self._data[0].dtype

    @property
    def nbytes(self) -> int:
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
        """Return keys and values [1, kv_heads, length, head_dim] of a sequence; views if it is one block."""
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
        """Return keys and values of all blocks as views [blocks, kv_heads, block_size, head_dim]."""
        return self._parts[layer]

    def copy(self, source: int, target: int) -> None:
        for tensor in (*self._data, *self._scales):
            tensor[:, target] = tensor[:, source]

    def nbytes_of(self, count: int) -> int:
        """Return the bytes that `take` returns for `count` positions."""
        return sum(tensor[:, 0, :, 0].nbytes for tensor in (*self._data, *self._scales)) * count

    def take(self, runs: Sequence[Run]) -> bytes:
        """Return the bytes of keys, values and scales of consecutive positions, layer by layer."""
        parts = (
            torch.cat([tensor[:, run.block, :, run.offset : run.offset + run.count] for run in runs], dim=2)
            for tensor in (*self._data, *self._scales)
        )
        return b"".join(part.cpu().contiguous().view(torch.uint8).numpy().tobytes() for part in parts)

    def put(self, values: bytearray, count: int, skip: int, runs: Sequence[Run]) -> None:
        """Write bytes returned by `take` for `count` positions to `runs`, without the first `skip` positions."""
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
