"""The paged KV cache: preallocated tensors, in the model's dtype, bf16, int8 or int4.

int8: one scale per token and head, its largest magnitude / 127. int4: the codes and scales of `runtime.cache.int4`.
Each token is quantized by itself, so the contents do not depend on how a prompt was split into passes.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mycli.runtime.cache.batch import Batch
from mycli.runtime.cache.state_store import StateStore
from mycli.runtime.models.config import KvDtype, ModelConfig
from mycli.runtime.quantization.int4_vectors import int4_groups

PACKED = torch.uint8  # dtype of an int4 cache


def cache_dtype(kv: KvDtype, dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of the cache tensors for the option `kv` and activations of `dtype`."""
    return {"auto": dtype, "bf16": torch.bfloat16, "int8": torch.int8, "int4": PACKED}[kv]


@dataclass(frozen=True)
class Stored:
    """Keys or values [sequences, kv_heads, length, head_dim] in a cache dtype; for int4 bytes of two codes."""

    data: Tensor
    # int8: fp32 [sequences, kv_heads, length]; int4: bf16 [sequences, kv_heads, length, groups]
    scales: Tensor | None = None

    @classmethod
    def of(cls, values: Tensor, dtype: torch.dtype) -> "Stored":
        if dtype == torch.int8:
            return cls(*quantize_vectors(values))
        if dtype == PACKED:
            from mycli.runtime.cache.int4 import pack_int4

            return cls(*pack_int4(values))
        return cls(values.to(dtype))

    def dense(self, dtype: torch.dtype) -> Tensor:
        if self.scales is None:
            return self.data.to(dtype)
        if self.data.dtype == PACKED:
            from mycli.runtime.cache.int4 import unpack_int4

            return unpack_int4(self.data, self.scales, dtype)
        return self.data.to(dtype).mul_(self.scales.unsqueeze(-1).to(dtype))

    def contiguous(self) -> "Stored":
        return Stored(self.data.contiguous(), None if self.scales is None else self.scales.contiguous())

    def last(self, count: int) -> "Stored":
        return Stored(self.data[:, :, -count:], None if self.scales is None else self.scales[:, :, -count:])


def quantize_vectors(values: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize values [..., head_dim] to int8 codes and scales fp32 [...]; one NaN or infinity makes the vector NaN."""
    exact = values.float()
    scales = exact.abs().amax(-1) / 127
    codes = (exact / scales.clamp(min=torch.finfo(torch.float32).tiny).unsqueeze(-1)).round_()
    finite = scales.isfinite()
    # The rounded quotient of the largest value is 127 at most, for every fp32 number.
    return codes.nan_to_num_(0).to(torch.int8), scales.where(finite, torch.nan)


@dataclass(frozen=True)
class BlockSlice:
    block: int
    offset: int
    count: int


class KVCache:
    """Keys and values [2, blocks, kv_heads, block_size, head_dim] per layer, and `states` of recurrent layers.

    Latent attention stores two tensors [1, blocks, 1, block_size, size] in their place: latents, then rotated values.
    int4 stores bytes of two codes; raises ModelError for head dimensions that cannot be packed. A block as long as the
    context for each sequence gives contiguous slots, which are read without a gather.
    """

    # Nothing is cleared when a sequence is truncated or a block reused: positions are written before they are read.

    def __init__(
        self,
        config: ModelConfig,
        blocks: int,
        block_size: int,
        device: torch.device,
        dtype: torch.dtype,
        slots: int = 1,
        window_blocks: int = 0,
    ) -> None:
        """window_blocks: of layers with a sliding window, with numbers of their own; 0: `blocks`, as other layers."""
        self.states = StateStore(config, slots, device)
        self._windowed = [window_blocks > 0 and config.windowed(layer) for layer in range(config.layers)]
        data: list[Tensor] = []
        scales: list[Tensor] = []  # empty except for int8 and int4
        self._by_kind: dict[bool, list[Tensor]] = {False: [], True: []}  # those of layers with a window: True
        for layer, windowed in enumerate(self._windowed):
            first = len(data)
            for vectors, heads, size in config.cache_shapes(layer):
                shape = vectors, window_blocks if windowed else blocks, heads, block_size
                if dtype == PACKED:
                    scales.append(torch.zeros(*shape, int4_groups(size), dtype=torch.bfloat16, device=device))
                elif dtype == torch.int8:
                    scales.append(torch.zeros(shape, dtype=torch.float32, device=device))
                data.append(torch.zeros(*shape, size // 2 if dtype == PACKED else size, dtype=dtype, device=device))
            self._by_kind[windowed] += [*data[first:], *scales[first:]]
        self._data, self._scales = data, scales
        self.blocks, self.block_size, self.window_blocks = blocks, block_size, window_blocks
        # One view each of keys and values per layer, made once: making one takes as long as storing a token.
        views = list[Stored]()
        for index, tensor in enumerate(data):
            views += (
                Stored(tensor[vector], scales[index][vector] if scales else None) for vector in range(len(tensor))
            )
        self._parts = list(zip(views[::2], views[1::2], strict=True))

    @property
    def dtype(self) -> torch.dtype:
        return self._data[0].dtype

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in (*self._data, *self._scales)) + self.states.nbytes

    def windowed(self, layer: int) -> bool:
        """Return whether a layer has the blocks of layers with a window, instead of those of the others."""
        return self._windowed[layer]

    def write(self, layer: int, batch: Batch, keys: Stored, values: Stored) -> None:
        """Store keys and values [T, kv_heads, head_dim], in the dtype of the cache, of the tokens of `batch`."""
        if len(batch.chunks) > 1 or len(batch.chunks[0].blocks) > 1:
            slots = batch.window_slots if self._windowed[layer] else batch.slot_mapping
            self.write_at(layer, slots // self.block_size, slots % self.block_size, keys, values)
            return
        (chunk,) = batch.chunks
        place = chunk.blocks_of(self._windowed[layer])[0], slice(None), slice(chunk.start, chunk.length)
        for part, stored in zip(self._parts[layer], (keys, values), strict=True):
            part.data[place] = stored.data.transpose(0, 1)
            if part.scales is not None and stored.scales is not None:
                part.scales[place] = stored.scales.transpose(0, 1)

    def write_at(self, layer: int, block: Tensor, offset: Tensor, keys: Stored, values: Stored) -> None:
        """Store keys and values, as in `write`, at int64 [T] blocks and offsets on the device."""
        for part, stored in zip(self._parts[layer], (keys, values), strict=True):
            part.data[block, :, offset] = stored.data
            if part.scales is not None and stored.scales is not None:
                part.scales[block, :, offset] = stored.scales

    def read(self, layer: int, blocks: Sequence[int], length: int) -> tuple[Stored, Stored]:
        """Return keys and values [1, kv_heads, length, head_dim] of the sequence in `blocks`; views for one block."""
        keys, values = self._parts[layer]
        return self._read(keys, blocks, length), self._read(values, blocks, length)

    def _read(self, part: Stored, blocks: Sequence[int], length: int) -> Stored:
        data, scales = part.data, part.scales
        if len(blocks) == 1:
            block = slice(blocks[0], blocks[0] + 1)
            return Stored(data[block, :, :length], None if scales is None else scales[block, :, :length])
        used = torch.tensor(blocks[: -(-length // self.block_size)], dtype=torch.int64, device=data.device)
        gathered = data[used].transpose(0, 1).flatten(1, 2)[None, :, :length]
        if scales is None:
            return Stored(gathered)
        return Stored(gathered, scales[used].transpose(0, 1).flatten(1, 2)[None, :, :length])

    def all(self, layer: int) -> tuple[Stored, Stored]:
        """Return keys and values of all blocks as views [blocks, kv_heads, block_size, head_dim]."""
        return self._parts[layer]

    def copy(self, source: int, target: int, windowed: bool = False) -> None:
        """Copy a block of the layers with a window, or of the others; of all layers if they have the same blocks."""
        for tensor in self._by_kind[windowed]:
            tensor[:, target] = tensor[:, source]

    def nbytes_of(self, count: int) -> int:
        return sum(tensor[:, 0, :, 0].nbytes for tensor in (*self._data, *self._scales)) * count

    def read_bytes(self, slices: Sequence[BlockSlice]) -> bytes:
        """Return keys and values, then scales, of consecutive positions: per layer [2, kv_heads, positions, ...]."""
        parts = (
            torch.cat([tensor[:, piece.block, :, piece.offset : piece.offset + piece.count] for piece in slices], dim=2)
            for tensor in (*self._data, *self._scales)
        )
        return b"".join(part.cpu().contiguous().view(torch.uint8).numpy().tobytes() for part in parts)

    def write_bytes(self, values: bytearray, count: int, skip: int, slices: Sequence[BlockSlice]) -> None:
        """Write to `slices` what `read_bytes` returned for `count` positions, without the first `skip` positions."""
        at = 0
        for tensor in (*self._data, *self._scales):
            shape = (tensor.shape[0], tensor.shape[2], count, *tensor.shape[4:])
            size = math.prod(shape)
            if not size:  # a recurrent layer has no keys and values
                continue
            part = torch.frombuffer(values, dtype=tensor.dtype, count=size, offset=at).view(shape).to(tensor.device)
            at += size * tensor.element_size()
            start = skip
            for piece in slices:
                chosen = part[:, :, start : start + piece.count]
                tensor[:, piece.block, :, piece.offset : piece.offset + piece.count] = chosen
                start += piece.count
