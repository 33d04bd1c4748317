"""The tensors of recurrent states, preallocated in slots; `StatePool` assigns the slots.

A pass over draft tokens does not change the states: updates are queued until the number of accepted tokens is known.
"""

from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor

from mycli.runtime.models.config import ModelConfig

CommitTokens = Callable[[int], None]  # advances one layer's state by the first n tokens of a pass
CommitPass = Callable[[Mapping[int, int]], None]  # advances all layers' states, by slot by the first n tokens


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
        self._commit_pass: CommitPass | None = None
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
        at = 0
        for tensor in (tensor for states in self._layers.values() for tensor in states):
            part = torch.frombuffer(values, dtype=tensor.dtype, count=tensor[slot].numel(), offset=at)
            tensor[slot].copy_(part.view(tensor.shape[1:]))
            at += part.nbytes

    # A recurrent state cannot be rolled back, so draft passes defer their update instead of copying the state before.
    def defer(self, slot: int, commit: CommitTokens) -> None:
        """Queue the update of one layer's state in `slot`, which the last pass left unchanged."""
        self._deferred.setdefault(slot, []).append(commit)

    def defer_pass(self, slots: Iterable[int], commit: CommitPass) -> None:
        """Queue the update of all layers' states in `slots`, which the last pass left unchanged.

        `commit` runs once all these slots are committed, or earlier for some slots if a state is read.
        """
        self._commit_pass, self._undecided, self._accepted = commit, set(slots), {}

    def commit_drafts(self, slot: int, count: int) -> None:
        """Advance the slot's states by the first `count` tokens of the last draft pass; discard the rest."""
        for commit in self._deferred.pop(slot, ()):
            commit(count)
        if slot in self._undecided:
            self._undecided.remove(slot)
            self._accepted[slot] = count
            if not self._undecided:
                self._commit_accepted()
                self._commit_pass = None

    def discard_drafts(self) -> None:
        """Drop updates that were queued and never committed, as after a pass that was interrupted."""
        self._commit_accepted()
        self._deferred.clear()
        self._commit_pass, self._undecided, self._accepted = None, set(), {}

    def _commit_accepted(self) -> None:
        accepted, self._accepted = self._accepted, {}
        if self._commit_pass is not None and any(accepted.values()):
            self._commit_pass(accepted)
