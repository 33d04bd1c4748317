"""The tensors of recurrent states, preallocated in slots; `StatePool` assigns the slots.

A pass over draft tokens does not change the states: updates are queued until the number of accepted tokens is known.
"""

from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor

from mycli.runtime.models.config import ModelConfig

StateUpdate = Callable[[Mapping[int, int]], None]  # advances the states of slots by their first n tokens of a pass


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
        self._updates: list[StateUpdate] = []  # of the last draft pass
        self._undecided: set[int] = set()  # slots of that pass whose number of accepted tokens is not known
        self._accepted: dict[int, int] = {}  # by slot, where it is

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
        self._commit_accepted()
        for states in self._layers.values():
            for tensor in states:
                tensor[target] = tensor[source]

    @property
    def slot_bytes(self) -> int:
        return self.nbytes // max(self.slots, 1)

    def read_bytes(self, slot: int) -> bytes:
        self._commit_accepted()
        parts = (tensor[slot] for states in self._layers.values() for tensor in states)
        return b"".join(part.cpu().contiguous().view(torch.uint8).numpy().tobytes() for part in parts)

    def write_bytes(self, slot: int, values: bytearray) -> None:
        self._commit_accepted()
        at = 0
        for tensor in (tensor for states in self._layers.values() for tensor in states):
            part = torch.frombuffer(values, dtype=tensor.dtype, count=tensor[slot].numel(), offset=at)
            tensor[slot].copy_(part.view(tensor.shape[1:]))
            at += part.nbytes

    # A recurrent state cannot be rolled back, so draft passes defer their update instead of copying the state before.
    def defer(self, slots: Iterable[int], update: StateUpdate) -> None:
        """Queue an update of states in `slots` that the last pass left unchanged: those of a layer, or of all layers.

        It runs once all slots of the pass are committed, or earlier for some slots if a state is read.
        """
        self._updates.append(update)
        self._undecided.update(slots)

    def commit_drafts(self, slot: int, count: int) -> None:
        """Advance the slot's states by the first `count` tokens of the last draft pass; discard the rest."""
        if slot in self._undecided:
            self._undecided.remove(slot)
            self._accepted[slot] = count
            if not self._undecided:
                self.discard_drafts()

    def discard_drafts(self) -> None:
        """Drop updates that were queued and never committed, as after a pass that was interrupted."""
        self._commit_accepted()
        self._updates, self._undecided = [], set()

    def _commit_accepted(self) -> None:
        accepted, self._accepted = self._accepted, {}
        if any(accepted.values()):
            for update in self._updates:
                update(accepted)
