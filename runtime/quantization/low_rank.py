"""A LoRA adapter next to a packed weight, which stays as it is stored: y = W x + s B (A x), in the dtype of x."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from mycli.runtime.quantization.packed_weight import Matmul


@dataclass(frozen=True)
class LowRankUpdate:
    """The update scale * b a of a weight [out, in]."""

    a: Tensor  # fp32 [rank, in]
    b: Tensor  # fp32 [out, rank]
    scale: float
    norms: Tensor | None = None  # fp32 [out]: DoRA scales the rows of the sum to them

    def to(self, device: torch.device) -> "LowRankUpdate":
        norms = None if self.norms is None else self.norms.to(device)
        return replace(self, a=self.a.to(device), b=self.b.to(device), norms=norms)

    def part(self, rows: slice) -> "LowRankUpdate":
        return replace(self, b=self.b[rows], norms=None if self.norms is None else self.norms[rows])

    def gains(self, weight: Tensor) -> Tensor:
        """Return the factors [out] of the sum's rows: DoRA's, or ones."""
        return self._gains(self._sum(weight))

    def apply(self, weight: Tensor) -> Tensor:
        total = self._sum(weight)
        return total if self.norms is None else total.mul_(self._gains(total).unsqueeze(1))

    def _sum(self, weight: Tensor) -> Tensor:
        return (self.b @ self.a).mul_(self.scale).add_(weight)

    def _gains(self, total: Tensor) -> Tensor:
        sizes: Tensor = torch.linalg.vector_norm(total, dim=1)
        return torch.ones_like(sizes) if self.norms is None else self.norms / sizes


class LowRankMatmul:
    """The product `base` of linears stacked by rows, with the updates of some."""

    def __init__(
        self,
        base: Matmul,
        updates: Sequence[tuple[slice, LowRankUpdate]],
        dense: Callable[[Tensor], Matmul],
        dtype: torch.dtype,
    ) -> None:
        """updates: on the device of `base`, with the rows that each changes; dense: makes the products of A and B."""
        self.base = base
        self._products = [
            (rows, dense(update.a.to(dtype)), dense((update.b * update.scale).to(dtype))) for rows, update in updates
        ]
        self._gains: Tensor | None = None  # of all rows, 1 where nothing is scaled
        if any(update.norms is not None for _, update in updates):
            weight = base.dequantize()
            self._gains = torch.ones(len(weight), device=weight.device)
            for rows, update in updates:
                self._gains[rows] = update.gains(weight[rows])

    @property
    def nbytes(self) -> int:
        products = sum(a.nbytes + b.nbytes for _, a, b in self._products)
        return self.base.nbytes + products + (0 if self._gains is None else self._gains.nbytes)

    def __call__(self, x: Tensor) -> Tensor:
        y = self.base(x)
        for rows, a, b in self._products:
            y[:, rows] += b(a(x))
        return y if self._gains is None else (y * self._gains).to(y.dtype)

    def dequantize(self) -> Tensor:
        weight = self.base.dequantize().clone()
        for rows, a, b in self._products:
            weight[rows] = (b.dequantize().float() @ a.dequantize().float() + weight[rows]).to(weight.dtype)
        return weight if self._gains is None else (weight * self._gains.unsqueeze(1)).to(weight.dtype)


def stored_product(matmul: Matmul) -> Matmul:
    """Return the product of the stored weight, without an adapter."""
    return matmul.base if isinstance(matmul, LowRankMatmul) else matmul
