"""Root-mean-square norm (arXiv 1910.07467). Knows one vector at a time; not where in a layer it stands."""

import torch
from torch import Tensor, nn

from mycli.runtime.checkpoint.reader import Checkpoint
from mycli.runtime.kernels.registry import RMS_NORM
from mycli.runtime.models.layer_spec import NormSpec


class RMSNorm(nn.Module):
    """The norm over the last dimension, with a gain [size]."""

    def __init__(self, spec: NormSpec) -> None:
        super().__init__()
        self.name = spec.name
        self.eps = spec.eps
        self.weight = torch.empty(spec.size, device="meta")

    def load(self, checkpoint: Checkpoint, device: torch.device, dtype: torch.dtype) -> None:
        """Read the gain."""
        self.weight = checkpoint.read(f"{self.name}.weight").to(device, dtype)

    def forward(self, x: Tensor) -> Tensor:
        """Same shape and dtype as x."""
        return RMS_NORM(x, self.weight, self.eps)


def make_norm(spec: NormSpec | None) -> RMSNorm | None:
    """The norm of `spec`, without memory until it is loaded; None for none."""
    return None if spec is None else RMSNorm(spec)
