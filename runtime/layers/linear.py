"""A product of activations and weights, dense or packed by the tensors that the checkpoint holds.

Linears that share their input (q, k, v; gate, up) are one product where their packings agree. Does not know where in a
block it stands, nor which kernels exist.
"""

from collections.abc import Mapping, Sequence
from itertools import groupby

import torch
from torch import Tensor, nn
from torch.nn import functional

from mycli.runtime.checkpoint.reader import Checkpoint
from mycli.runtime.kernels.cpu.matmul import dense_rows, huge_empty
from mycli.runtime.kernels.registry import choose
from mycli.runtime.models.config import LinearSpec
from mycli.runtime.quantization.packed_weight import Matmul, PackedWeight
from mycli.runtime.quantization.scheme import Packing

SHADOW_ROWS = 64  # up to here packed products are faster: they read a quarter of the bytes


class DenseMatmul:
    """An unquantized weight [N, K]: torch multiplies, except few rows on the CPU, where our own code reads faster."""

    def __init__(self, weight: Tensor) -> None:
        self._weight = weight

    @property
    def nbytes(self) -> int:
        """Bytes of memory held."""
        return self._weight.nbytes

    def __call__(self, x: Tensor) -> Tensor:
        """x [rows, K] to [rows, N]."""
        y = dense_rows(x, self._weight)
        return functional.linear(x, self._weight) if y is None else y

    def dequantize(self) -> Tensor:
        """The weight itself."""
        return self._weight


def _read_dense(
    checkpoint: Checkpoint, specs: Sequence[LinearSpec], device: torch.device, dtype: torch.dtype
) -> Tensor:
    rows, name = sum(spec.out_features for spec in specs), f"{specs[0].name}.weight"
    out = huge_empty((rows, specs[0].in_features), checkpoint.dtype(name))
    start = 0
    for spec in specs:
        checkpoint.read_into(f"{spec.name}.weight", out[start : start + spec.out_features])
        start += spec.out_features
    return out.to(device, dtype)


def _read_packed(
    checkpoint: Checkpoint, specs: Sequence[LinearSpec], packing: Packing, device: torch.device
) -> PackedWeight:
    rows, columns = sum(spec.out_features for spec in specs), specs[0].in_features
    packed = huge_empty((rows, packing.words(columns)), torch.int32)
    scales = torch.empty(rows, packing.groups(columns), dtype=checkpoint.dtype(f"{specs[0].name}.weight_scale"))
    start = 0
    for spec in specs:
        end = start + spec.out_features
        checkpoint.read_into(f"{spec.name}.weight_packed", packed[start:end])
        checkpoint.read_into(f"{spec.name}.weight_scale", scales[start:end])
        start = end
    return PackedWeight(packed.to(device), scales.to(device), packing, columns)


class Linear(nn.Module):
    """Linears that share an input: x [..., in_features] to the outputs of `specs`, side by side."""

    def __init__(self, specs: Sequence[LinearSpec]) -> None:
        super().__init__()
        self.specs = tuple(specs)
        self.in_features = specs[0].in_features
        self.out_features = sum(spec.out_features for spec in specs)
        self.bias: Tensor | None = None
        self.matmuls: tuple[Matmul, ...] = ()
        self.shadow: Tensor | None = None

    def load(
        self, checkpoint: Checkpoint, packings: Mapping[str, Packing], device: torch.device, dtype: torch.dtype
    ) -> None:
        """Read the weights; neighbours of one packing become one product."""
        matmuls: list[Matmul] = []
        for packing, run in groupby(self.specs, key=lambda spec: packings.get(spec.name)):
            specs = list(run)
            if packing is None:
                matmuls.append(DenseMatmul(_read_dense(checkpoint, specs, device, dtype)))
                continue
            weight = _read_packed(checkpoint, specs, packing, device)
            kernel = choose(packing, weight.out_features, self.in_features, device, dtype)
            matmuls.append(kernel.prepare(weight, dtype))
        self.matmuls = tuple(matmuls)
        if self.specs[0].bias:
            self.bias = torch.cat([checkpoint.read(f"{spec.name}.bias") for spec in self.specs]).to(device, dtype)

    @property
    def nbytes(self) -> int:
        """Bytes of memory held."""
        others = sum(0 if tensor is None else tensor.nbytes for tensor in (self.bias, self.shadow))
        return sum(matmul.nbytes for matmul in self.matmuls) + others

    def keep_shadow(self, dtype: torch.dtype) -> None:
        """Keep the packed weights densely too, in `dtype`, for passes of many rows."""
        if any(isinstance(matmul, DenseMatmul) for matmul in self.matmuls):
            return  # of mixed linears the dense ones would be held twice
        self.shadow = torch.cat([matmul.dequantize().to(dtype) for matmul in self.matmuls])

    def forward(self, x: Tensor) -> Tensor:
        """x [..., in_features] to [..., out_features] in the dtype of x."""
        rows = x.reshape(-1, self.in_features)
        if self.shadow is not None and len(rows) > SHADOW_ROWS:
            parts = [functional.linear(rows, self.shadow)]
        else:
            parts = [matmul(rows) for matmul in self.matmuls]
        y = parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)
        if self.bias is not None:
            y = y + self.bias
        return y.view(*x.shape[:-1], self.out_features)
