"""Several residual streams (AltUp, arXiv 2301.13310): from the embedding to the streams, and from these to one output.

Each stream but the first is a projection, scaled to the length of the first. `runtime.layers.block` runs the layers.
"""

import torch
from torch import Tensor, nn

from mycli.runtime.layers.linear import Linear
from mycli.runtime.layers.weights import CheckpointWeights
from mycli.runtime.models.config import ModelConfig

_LEAST = 1e-5  # of the mean square of a projection


class Streams(nn.Module):
    """The projections around the layers, dense; streams are side by side, [..., count * hidden]."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        enter, leave = config.stream_linears()
        self._enter = nn.ModuleList(Linear((linear,)) for linear in enter)
        self._leave = nn.ModuleList(Linear((linear,)) for linear in leave)

    @property
    def nbytes(self) -> int:
        return sum(module.nbytes for module in self.modules() if isinstance(module, Linear))

    def load(self, weights: CheckpointWeights) -> None:
        for linear in self.modules():
            if isinstance(linear, Linear):
                linear.load(weights)

    def enter(self, x: Tensor) -> Tensor:
        """Return all streams for embeddings x [..., hidden]."""
        return torch.cat((x, *(_as_long(linear(x), x) for linear in self._enter)), dim=-1)

    def leave(self, x: Tensor) -> Tensor:
        """Return the mean [..., hidden] of all streams x."""
        first, *others = x.chunk(len(self._leave) + 1, dim=-1)
        projected = [_as_long(linear(other), first) for linear, other in zip(self._leave, others, strict=True)]
        return torch.stack((first, *projected)).mean(0)


def _as_long(x: Tensor, target: Tensor) -> Tensor:
    """Scale each vector of x to the length of that of `target`."""
    length = target.float().square().mean(-1, keepdim=True).sqrt()
    before = x.float().square().mean(-1, keepdim=True).clamp(min=_LEAST).sqrt()
    return (x.float() * (length / before)).to(x.dtype)
