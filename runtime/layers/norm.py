"""Root-mean-square norm (arXiv 1910.07467), and the norm that takes the mean away first (1607.06450).

Knows one vector at a time; not where in a layer it stands.
"""

import torch
from torch import Tensor, nn

from mycli.runtime.checkpoint.reader import Checkpoint
from mycli.runtime.kernels.registry import LAYER_NORM, RMS_NORM
from mycli.runtime.models.part_spec import NormSpec


class RMSNorm(nn.Module):
    """The norm over the last dimension, with a gain [size], `weight`, which `spec` makes of what a file stores.

    Where that is another number the gain is kept in fp32: a sum of one and a small number has no place for the small
    one in bf16.
    """

    def __init__(self, spec: NormSpec) -> None:
        super().__init__()
        self.spec = spec
        self.weight = torch.empty(spec.size, device="meta")

    @property
    def tensor(self) -> str:
        """The name of its tensor. Only for norms that have one."""
        return self.spec.tensor

    @property
    def eps(self) -> float:
        """What is added to the mean square."""
        return self.spec.eps

    def load(self, checkpoint: Checkpoint, device: torch.device, dtype: torch.dtype) -> None:
        """Read the gain."""
        if self.spec.name is None:
            self.weight = torch.ones(self.spec.size, device=device, dtype=dtype)
            return
        stored = checkpoint.read(self.tensor).to(device)
        self.weight = self._gain(stored.float()) if self.spec.fp32_gain else stored.to(dtype)

    def _gain(self, stored: Tensor) -> Tensor:
        return (stored + self.spec.offset) * self.spec.factor

    def stored(self, gain: Tensor, dtype: torch.dtype) -> Tensor:
        """What a file of `dtype` holds for `gain`."""
        return (gain / self.spec.factor - self.spec.offset if self.spec.fp32_gain else gain).to(dtype)

    def replace(self, stored: Tensor) -> None:
        """Take over what a file holds."""
        self.weight = self._gain(stored.to(self.weight)) if self.spec.fp32_gain else stored.to(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        """Same shape and dtype as x."""
        norm = LAYER_NORM if self.spec.layer_norm else RMS_NORM
        return norm(x, self.weight, self.spec.eps)


def make_norm(spec: NormSpec | None) -> RMSNorm | None:
    """The norm of `spec`, without memory until it is loaded; None for none."""
    return None if spec is None else RMSNorm(spec)
