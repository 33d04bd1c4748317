"""The states of recurrent layers: memory taken once, in slots that sequences own and snapshots keep.

Tensors only: whose a slot is, and after which text its state stands, is the business of `StatePool`. Does not know what
a state means or how it goes on. What a pass over drafted tokens would make of a state waits here until it is known how
many of them stand.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from mycli.runtime.models.config import ModelConfig

TakeOn = Callable[[int], None]  # takes a state on by the first so many tokens of a pass


class StateStore:
    """Tensors fp32 [slots, ...] by layer, in the shapes that the layer declares; none for layers that attend."""

    def __init__(self, config: ModelConfig, slots: int, device: torch.device) -> None:
        self.slots = slots
        self._layers = {
            spec.index: tuple(torch.zeros(slots, *shape, device=device) for shape in spec.recurrent.state_shapes())
            for spec in config.layer_specs
            if spec.recurrent is not None
        }
        self._waiting: dict[int, list[TakeOn]] = {}  # by slot

    @property
    def nbytes(self) -> int:
        """Bytes of memory held."""
        return sum(tensor.nbytes for states in self._layers.values() for tensor in states)

    def layer(self, index: int) -> tuple[Tensor, ...]:
        """The states of one layer, of all slots."""
        return self._layers[index]

    def clear(self, slot: int) -> None:
        """A text begins there."""
        for states in self._layers.values():
            for tensor in states:
                tensor[slot].zero_()

    def copy(self, source: int, target: int) -> None:
        """Make slot `target` what `source` is."""
        for states in self._layers.values():
            for tensor in states:
                tensor[target] = tensor[source]

    @property
    def slot_bytes(self) -> int:
        """Bytes of what a slot holds, as `take` gives them."""
        return self.nbytes // max(self.slots, 1)

    def take(self, slot: int) -> bytes:
        """What a slot holds, layer after layer."""
        parts = (tensor[slot] for states in self._layers.values() for tensor in states)
        return b"".join(part.cpu().contiguous().view(torch.uint8).numpy().tobytes() for part in parts)

    def put(self, slot: int, values: bytearray) -> None:
        """What `take` gave."""
        at = 0
        for tensor in (tensor for states in self._layers.values() for tensor in states):
            part = torch.frombuffer(values, dtype=tensor.dtype, count=tensor[slot].numel(), offset=at)
            tensor[slot].copy_(part.view(tensor.shape[1:]))
            at += part.nbytes

    def wait(self, slot: int, replay: TakeOn) -> None:
        """A pass over a slot left one layer's state as it was; `replay` makes it what it is to be."""
        self._waiting.setdefault(slot, []).append(replay)

    def settle(self, slot: int, count: int) -> None:
        """Of the tokens that the last pass over a slot read and left waiting the first `count` stand, maybe none."""
        for replay in self._waiting.pop(slot, ()):
            replay(count)
