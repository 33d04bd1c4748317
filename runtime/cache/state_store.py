"""The tensors of recurrent states, preallocated in slots; `StatePool` assigns the slots.

A pass over draft tokens does not change the states: updates are queued until the number of accepted tokens is known.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from mycli.runtime.models.config import ModelConfig

CommitTokens = Callable[[int], None]  # advances one layer's state by the first n tokens of a pass


class StateStore:
    """The tensors fp32 [slots, ...] of each recurrent layer, in the shapes that its spec declares."""

    def __init__(self, config: ModelConfig, slots: int, device: torch.device) -> None:
        self.slots = slots
        self._layers = {
            spec.index: tuple(torch.zeros(slots, *shape, device=device) for shape in spec.recurrent.state_shapes())
            for spec in config.layer_specs
            if spec.recurrent is not None
        }
        self.recurrent = bool(self._layers)  # whether any layer has a state
        self._deferred: dict[int, list[CommitTokens]] = {}  # by slot

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for states in self._layers.values() for tensor in states)

    def layer(self, index: int) -> tuple[Tensor, ...]:
        return self._layers[index]

    def clear(self, slot: int) -> None:
        for states in self._layers.values():
            for tensor in states:
                tensor[slot].zero_()

    def copy(self, source: int, target: int) -> None:
        for states in self._layers.values():
            for tensor in states:
                tensor[target] = tensor[source]

    @property
    def slot_bytes(self) -> int:
        return self.nbytes // max(self.slots, 1)

    def read_bytes(self, slot: int) -> bytes:
        parts = (tensor[slot] for states in self._layers.values() for tensor in states)
        return b"".join(part.cpu().contiguous().view(torch.uint8).numpy().tobytes() for part in parts)

    def write_bytes(self, slot: int, values: bytearray) -> None:
        at = 0
        for tensor in (tensor for states in self._layers.values() for tensor in states):
            part = torch.frombuffer(values, dtype=tensor.dtype, count=tensor[slot].numel(), offset=at)
            tensor[slot].copy_(part.view(tensor.shape[1:]))
            at += part.nbytes

    # A recurrent state cannot be rolled back, so draft passes defer their update instead of copying the state before.
    def defer(self, slot: int, commit: CommitTokens) -> None:
        """Queue the update of one layer's state in `slot`, which the last pass left unchanged."""
        self._deferred.setdefault(slot, []).append(commit)

    def commit_drafts(self, slot: int, count: int) -> None:
        """Advance the slot's states by the first `count` tokens of the last draft pass; discard the rest."""
        for commit in self._deferred.pop(slot, ()):
            commit(count)
