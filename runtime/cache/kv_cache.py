"""The key-value cache: one block of memory, taken once, for sequences that advance in step.

It holds values as they are computed, or as int8 codes with one scale per token and head: x = code * scale, where scale
is the largest magnitude of the head's values / 127. A token is rounded by itself, so that how a text came in (at once,
in pieces, written over) leaves no trace.

Does not know attention or tokens. A sequence is cut back by writing over its tail, so nothing has to be undone.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from mycli.runtime.errors import UsageError
from mycli.runtime.models.config import Kv, ModelConfig


def cache_dtype(kv: Kv, dtype: torch.dtype) -> torch.dtype:
    """What a cache of kind `kv` holds beside activations of `dtype`."""
    return {"auto": dtype, "bf16": torch.bfloat16, "int8": torch.int8}[kv]


@dataclass(frozen=True)
class Stored:
    """Keys or values [sequences, kv_heads, length, head_dim]; int8 codes come with `scales` fp32, one per vector.

    scales: [sequences, kv_heads, length], None where `data` are the values themselves.
    """

    data: Tensor
    scales: Tensor | None = None

    def dense(self, dtype: torch.dtype) -> Tensor:
        """The values in `dtype`: a copy, except where they lie there as such."""
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


class KeyValues(Protocol):
    """What a layer's attention reads keys and values from."""

    length: int

    def write(self, layer: int, start: int, keys: Tensor, values: Tensor) -> tuple[Stored, Stored]:
        """As `StaticCache.write`."""
        ...


class PassingCache:
    """Hands back what it is given, as a cache of `dtype` would hold it, and keeps nothing: for one pass over a text."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self.length = 0

    def write(self, layer: int, start: int, keys: Tensor, values: Tensor) -> tuple[Stored, Stored]:
        """As `StaticCache.write`, with `start` 0."""
        if self._dtype == torch.int8:
            return Stored(*quantize_vectors(keys)), Stored(*quantize_vectors(values))
        return Stored(keys.to(self._dtype)), Stored(values.to(self._dtype))


class StaticCache:
    """Keys and values, [2, sequences, kv_heads, capacity, head_dim] a layer, in `dtype`: a floating type, or int8.

    `length` positions are filled. A pass writes at `length`; the owner of the loop then says `advance` (or `truncate`).
    """

    def __init__(
        self, config: ModelConfig, capacity: int, device: torch.device, dtype: torch.dtype, sequences: int = 1
    ) -> None:
        self._data: list[Tensor] = []
        self._scales: list[Tensor] = []  # none, where the data are the values themselves
        for heads, head_dim in (config.cached(layer) for layer in range(config.layers)):
            shape = (2, sequences, heads, capacity, head_dim)
            self._data.append(torch.zeros(shape, dtype=dtype, device=device))
            if dtype == torch.int8:
                self._scales.append(torch.zeros(shape[:-1], dtype=torch.float32, device=device))
        self.capacity = capacity
        self.sequences = sequences
        self.length = 0

    @property
    def nbytes(self) -> int:
        """Bytes of memory held."""
        return sum(tensor.nbytes for tensor in (*self._data, *self._scales))

    def write(self, layer: int, start: int, keys: Tensor, values: Tensor) -> tuple[Stored, Stored]:
        """Store keys and values [sequences, kv_heads, new, head_dim] at `start`; all of both up to there, as views."""
        end = start + keys.shape[2]
        if end > self.capacity:
            raise UsageError(f"the context is full: {end} tokens, room for {self.capacity}", code="more-context")
        return self._write(layer, 0, start, end, keys), self._write(layer, 1, start, end, values)

    def _write(self, layer: int, kind: int, start: int, end: int, new: Tensor) -> Stored:
        data = self._data[layer][kind]
        if not self._scales:
            data[:, :, start:end] = new
            return Stored(data[:, :, :end])
        scales = self._scales[layer][kind]
        data[:, :, start:end], scales[:, :, start:end] = quantize_vectors(new)
        return Stored(data[:, :, :end], scales[:, :, :end])

    def all(self, layer: int) -> tuple[Stored, Stored]:
        """Keys and values of every position, filled or not, as views."""
        data, scales = self._data[layer], self._scales[layer] if self._scales else (None, None)
        return Stored(data[0], scales[0]), Stored(data[1], scales[1])

    def advance(self, count: int) -> None:
        """`count` more positions are valid."""
        self.length += count

    def copy_from(self, other: "StaticCache") -> None:
        """Take over what `other`, a cache of one sequence, holds: for every sequence of this one."""
        for mine, theirs in zip((*self._data, *self._scales), (*other._data, *other._scales), strict=True):
            mine[:, :, :, : other.length] = theirs[:, :, :, : other.length]
        self.length = other.length

    def truncate(self, length: int) -> None:
        """Forget what lies at and after position `length`."""
        if not 0 <= length <= self.length:
            raise ValueError(f"cannot cut a cache of length {self.length} to {length}")
        self.length = length
