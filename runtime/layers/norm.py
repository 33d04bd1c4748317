"""Root-mean-square norm (arXiv 1910.07467) and layer norm (1607.06450)."""

import torch
from torch import Tensor, nn

from mycli.runtime.kernels.registry import LAYER_NORM, RMS_NORM
from mycli.runtime.layers.weights import CheckpointWeights
from mycli.runtime.models.part_spec import NormSpec


class RMSNorm(nn.Module):
    """The norm over the last dimension; `weight` [size] is the gain that `spec` derives from the stored tensor.

    A derived gain (1 + w) stays in fp32: bf16 would round a small w away. `bias` [size] has the dtype of the gain.
    """

    def __init__(self, spec: NormSpec) -> None:
        super().__init__()
        self.spec = spec
        self.eps = spec.eps
        self.weight = torch.empty((spec.heads, spec.size) if spec.heads else spec.size, device="meta")
        self.bias: Tensor | None = None

    @property
    def nbytes(self) -> int:
        return self.weight.nbytes + (0 if self.bias is None else self.bias.nbytes)

    @property
    def tensor(self) -> str:
        """The name of its tensor in the checkpoint; only for norms that have one."""
        return self.spec.tensor

    def load(self, weights: CheckpointWeights) -> None:
        if self.spec.head_tensors:
            self.weight = torch.stack([weights.read(name) for name in self.spec.head_tensors])
            return
        if self.spec.name is None:
            gain_dtype = torch.float32 if self.spec.fp32_gain else weights.dtype
            self.weight = torch.full((self.spec.size,), self.spec.factor, device=weights.device, dtype=gain_dtype)
            return
        self.weight = self.gain(weights.read(self.tensor, torch.float32 if self.spec.fp32_gain else None))
        if self.spec.bias:
            self.bias = weights.read(self.spec.bias_tensor, self.weight.dtype)

    def gain(self, stored: Tensor) -> Tensor:
        """Return the gain, in the dtype of `stored`, that the tensor of a checkpoint stands for."""
        stored = stored.view(-1, 2).T.flatten() if self.spec.pairs else stored
        return (stored + self.spec.offset) * self.spec.factor if self.spec.fp32_gain else stored

    def stored(self, gain: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the tensor that a checkpoint of `dtype` stores for `gain`."""
        gain = gain.view(2, -1).T.flatten() if self.spec.pairs else gain
        return (gain / self.spec.factor - self.spec.offset if self.spec.fp32_gain else gain).to(dtype)

    def replace(self, stored: Tensor) -> None:
        """Set the gain from a tensor as a checkpoint stores it."""
        self.weight = self.gain(stored.to(self.weight))

    def forward(self, x: Tensor) -> Tensor:
        if self.spec.heads:  # a norm of each head: a gain by value has no kernel
            assert self.spec.layer_norm
            heads = zip(x.unbind(-2), self.weight, strict=True)
            return torch.stack([LAYER_NORM(head, gain, self.eps, None) for head, gain in heads], dim=-2)
        if self.spec.layer_norm:
            return LAYER_NORM(x, self.weight, self.eps, self.bias)
        return RMS_NORM(x, self.weight, self.eps)


def make_norm(spec: NormSpec | None) -> RMSNorm | None:
    """Return the norm of `spec`, which takes no memory until it is loaded; None for no norm."""
    return None if spec is None else RMSNorm(spec)


def normed(norm: RMSNorm | None, x: Tensor) -> Tensor:
    """Apply `norm`, if there is one, to x."""
    if norm is None:
        return x
    y: Tensor = norm(x)
    return y
