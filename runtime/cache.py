"""The key-value cache: one block of memory, taken once, for sequences that advance in step.

Does not know attention or tokens. A sequence is cut back by writing over its tail, so nothing has to be undone.
"""

import torch
from torch import Tensor

from mycli.runtime.config import ModelConfig
from mycli.runtime.errors import UsageError


class StaticCache:
    """Keys and values, [layers, 2, sequences, kv_heads, capacity, head_dim].

    `length` positions are filled. A pass writes at `length`; the owner of the loop then says `advance` (or `truncate`).
    """

    def __init__(
        self, config: ModelConfig, capacity: int, device: torch.device, dtype: torch.dtype, sequences: int = 1
    ) -> None:
        shape = (config.layers, 2, sequences, config.kv_heads, capacity, config.head_dim)
        self._data = torch.zeros(shape, dtype=dtype, device=device)
        self.capacity = capacity
        self.sequences = sequences
        self.length = 0

    @property
    def nbytes(self) -> int:
        """Bytes of memory held."""
        return self._data.nbytes

    def write(self, layer: int, start: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Store keys and values [sequences, kv_heads, new, head_dim] at `start`; all of both up to there, as views."""
        end = start + keys.shape[2]
        if end > self.capacity:
            raise UsageError(f"the context is full: {end} tokens, room for {self.capacity}", "ask for more with --ctx")
        stored_keys, stored_values = self._data[layer, 0], self._data[layer, 1]
        stored_keys[:, :, start:end] = keys
        stored_values[:, :, start:end] = values
        return stored_keys[:, :, :end], stored_values[:, :, :end]

    def advance(self, count: int) -> None:
        """`count` more positions are valid."""
        self.length += count

    def copy_from(self, other: "StaticCache") -> None:
        """Take over what `other`, a cache of one sequence, holds: for every sequence of this one."""
        self._data[:, :, :, :, : other.length] = other._data[:, :, :, :, : other.length]
        self.length = other.length

    def truncate(self, length: int) -> None:
        """Forget what lies at and after position `length`."""
        if not 0 <= length <= self.length:
            raise ValueError(f"cannot cut a cache of length {self.length} to {length}")
        self.length = length
