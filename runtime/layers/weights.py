"""The weights that layers load."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from mycli.runtime.checkpoint.reader import Checkpoint
from mycli.runtime.quantization.scheme import Packing


@dataclass(frozen=True)
class CheckpointWeights:
    """A checkpoint, the packings of its linears by name, and the device and dtype of weights in memory."""

    checkpoint: Checkpoint
    packings: Mapping[str, Packing]
    device: torch.device
    dtype: torch.dtype

    def read(self, name: str, dtype: torch.dtype | None = None) -> Tensor:
        """Read a tensor onto the device, in `dtype` or that of the weights."""
        out = torch.empty(self.checkpoint.entry(name).shape, dtype=dtype or self.dtype)
        self.checkpoint.read_into(name, out)
        return out.to(self.device)
