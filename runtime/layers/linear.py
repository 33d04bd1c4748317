"""A product of activations and weights, dense or packed by the tensors that the checkpoint holds.

Linears that share their input (q, k, v; gate, up) are one product where their packings agree; so are those of many
experts, each for the tokens that were routed to it. Does not know where in a block it stands, who is routed where, how
a folder stores weights, nor which kernels exist.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor, nn
from torch.nn import functional

from mycli.runtime.checkpoint import formats
from mycli.runtime.checkpoint.reader import Checkpoint
from mycli.runtime.device.system import release_free_memory
from mycli.runtime.kernels.cpu.matmul import CpuMatmul, gather_codes
from mycli.runtime.kernels.reference import DenseMatmul
from mycli.runtime.kernels.registry import DENSE_PRODUCT, ROUTED_PRODUCT, prepare_product
from mycli.runtime.kernels.routed import ExpertWeights, Route
from mycli.runtime.models.part_spec import LinearSpec
from mycli.runtime.quantization.packed_weight import Matmul
from mycli.runtime.quantization.scheme import Packing
from mycli.runtime.utils.memory import huge_empty

GATHERED = 1 << 24  # bytes: small weights are gathered when there are as many, so that few lie in memory twice
PACKED_ROWS = 64  # up to here packed products are faster than a dense copy: they read a quarter of the bytes


class Changes:
    """Shared by many linears: `last` is another object whenever one of them has come to multiply by other weights.

    It holds what has been made of all their weights.
    """

    def __init__(self) -> None:
        self.last: dict[object, object] = {}

    def changed(self) -> None:
        """One of them has; what was made of what it had is let go, whoever still looks at it."""
        self.last.clear()
        self.last = {}


def dense_matmul(weight: Tensor) -> DenseMatmul:
    """An unquantized weight [N, K], multiplied by the first kernel for dense products that takes it."""
    return DenseMatmul(weight, DENSE_PRODUCT)


def _read_dense(
    checkpoint: Checkpoint,
    linears: Sequence[LinearSpec],
    device: torch.device,
    dtype: torch.dtype,
    into: Matmul | None = None,
) -> Tensor:
    rows, name = sum(linear.out_features for linear in linears), f"{linears[0].name}.weight"
    shape, stored = (rows, linears[0].in_features), checkpoint.dtype(name)
    out = into.dequantize() if isinstance(into, DenseMatmul) else None
    if out is None or out.shape != shape or out.dtype != stored or not out.is_cpu:
        out = huge_empty(shape, stored)
    start = 0
    for linear in linears:
        checkpoint.read_into(f"{linear.name}.weight", out[start : start + linear.out_features])
        start += linear.out_features
    return out.to(device, dtype)


class Linear(nn.Module):
    """Linears that share an input: x [..., in_features] to the outputs of `specs`, side by side.

    Of many, `changes` spares whoever made something of their weights to look at each. `matmuls`: the products that do
    it, their outputs side by side; another tuple whenever they are others.
    """

    def __init__(self, specs: Sequence[LinearSpec], changes: Changes | None = None) -> None:
        super().__init__()
        self._changes = changes
        self.specs = tuple(specs)
        self.in_features = specs[0].in_features
        self.out_features = sum(spec.out_features for spec in specs)
        self.bias: Tensor | None = None
        self.matmuls: tuple[Matmul, ...] = ()
        self.dense_copy: Tensor | None = None

    def load(
        self,
        checkpoint: Checkpoint,
        packings: Mapping[str, Packing],
        device: torch.device,
        dtype: torch.dtype,
        into: Sequence[Matmul] = (),
    ) -> None:
        """Read the weights; neighbours of one packing become one product, unless their columns have an order.

        `into`: products of another linear that are of no more use, in whose memory these may come to lie.
        """

        def product(spec: LinearSpec) -> tuple[Packing | None, str]:
            packing = packings.get(spec.name)
            return packing, spec.name if packing is not None and packing.permuted else ""

        matmuls: list[Matmul] = []
        for (packing, _), run in groupby(self.specs, key=product):
            linears = list(run)
            old = into[len(matmuls)] if len(matmuls) < len(into) else None
            if packing is None:
                matmuls.append(dense_matmul(_read_dense(checkpoint, linears, device, dtype, old)))
                continue
            matmuls.append(prepare_product(formats.read_weight(checkpoint, linears, packing, device), dtype, old))
        if self.specs[0].bias:
            self.bias = torch.cat([checkpoint.read(f"{spec.name}.bias") for spec in self.specs]).to(device, dtype)
        self._multiply_by(tuple(matmuls))

    def _multiply_by(self, matmuls: tuple[Matmul, ...]) -> None:
        self.matmuls = matmuls
        self._changed()

    def _changed(self) -> None:
        if self._changes is not None:
            self._changes.changed()

    def unwatch(self) -> None:
        """Tell nobody from now on that it multiplies by other weights: whoever changes them does."""
        self._changes = None

    def weight(self) -> Tensor:
        """The weights of all linears, stacked, [out_features, in_features]; not a copy where they are dense already."""
        parts = [matmul.dequantize() for matmul in self.matmuls]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def replace(self, weight: Tensor | Matmul | None) -> None:
        """Multiply by another weight: dense [out_features, in_features], or one that a kernel has prepared.

        None lets go of what is held. The bias stays.
        """
        self.dense_copy = None
        matmul = dense_matmul(weight) if isinstance(weight, Tensor) else weight
        self._multiply_by(() if matmul is None else (matmul,))

    @property
    def matmul(self) -> Matmul | None:
        """The one product that does it all, None where packings differ or nothing is loaded."""
        return self.matmuls[0] if len(self.matmuls) == 1 else None

    @property
    def nbytes(self) -> int:
        """Bytes of memory held."""
        others = sum(0 if tensor is None else tensor.nbytes for tensor in (self.bias, self.dense_copy))
        return sum(matmul.nbytes for matmul in self.matmuls) + others

    def keep_dense_copy(self, dtype: torch.dtype) -> None:
        """Keep packed weights densely too, in `dtype`, for passes of many rows: prompts."""
        if any(isinstance(matmul, DenseMatmul) for matmul in self.matmuls):
            return  # of mixed linears the dense ones would be held twice
        self.dense_copy = self.weight().to(dtype)
        self._changed()

    def forward(self, x: Tensor) -> Tensor:
        """x [..., in_features] to [..., out_features] in the dtype of x."""
        rows = x.reshape(-1, self.in_features)
        if self.dense_copy is not None and len(rows) > PACKED_ROWS:
            parts = [functional.linear(rows, self.dense_copy)]
        else:
            parts = [matmul(rows) for matmul in self.matmuls]
        y = parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)
        if self.bias is not None:
            y = y + self.bias
        return y.view(*x.shape[:-1], self.out_features)


def load_linears(
    linears: Iterable[Linear],
    checkpoint: Checkpoint,
    packings: Mapping[str, Packing],
    device: torch.device,
    dtype: torch.dtype,
) -> None:
    """Read the weights of all of `linears`. On the CPU small ones come to lie together: pages are larger than they."""
    small: list[CpuMatmul] = []
    held = 0
    for linear in linears:
        linear.load(checkpoint, packings, device, dtype)
        found = [matmul for matmul in linear.matmuls if isinstance(matmul, CpuMatmul) and matmul.small]
        small, held = small + found, held + sum(matmul.nbytes for matmul in found)
        if held >= GATHERED:
            gather_codes(small)
            release_free_memory()  # what they were read into: the next ones would be read into other pieces
            small, held = [], 0
    gather_codes(small)


class ExpertLinears(tuple[Linear, ...]):
    """A linear of each expert of a layer, alike in shape."""

    _changes: Changes | None

    @classmethod
    def of(cls, linears: Iterable[Linear], changes: Changes | None) -> "ExpertLinears":
        """`changes`: those that the linears were made with, None where some of them have no weights now and then."""
        made = cls(linears)
        made._changes = changes
        return made

    def come_and_go(self) -> "ExpertLinears":
        """The same, for weights that are replaced all the time: looked up whenever they are multiplied by."""
        for linear in self:
            linear.unwatch()
        return ExpertLinears.of(self, None)

    def operands(self, hit: Sequence[int]) -> tuple[Sequence[Matmul | Tensor] | None, Tensor | None]:
        """What the experts of `hit` multiply by, and their biases [hit, out_features] if there are.

        No weights where one is several products, or has a dense copy.
        """
        if self._changes is None:
            return _operands([self[expert] for expert in hit])
        known, key = self._changes.last, id(self)
        if key not in known:
            known[key] = _operands(self)
        held: tuple[ExpertWeights | None, Tensor | None] = known[key]  # type: ignore[assignment]  # stored above
        weights, biases = held
        if len(hit) == len(self):
            return held
        chosen = None if weights is None else [weights[expert] for expert in hit]
        return chosen, None if biases is None else biases[hit]


@dataclass(frozen=True)
class RoutedProduct:
    """A product of each of `linears`, one for every expert, along a route.

    `gathers`: its input is the tokens [tokens, K]; else rows of pairs [pairs, K] in the order of the route.
    """

    linears: ExpertLinears
    route: Route
    gathers: bool

    def __call__(self, x: Tensor) -> Tensor:
        """x [tokens, K] or [pairs, K] to [pairs, N], sorted by expert, in the dtype of x."""
        route, (weights, biases) = self.route, self.linears.operands(self.route.hit)
        if weights is None:
            return torch.cat([self.linears[expert](self.rows(x, expert)) for expert in route.hit])
        y = ROUTED_PRODUCT(weights, x, route.starts, route.tokens if self.gathers else None)
        if biases is not None:
            y = y + biases.repeat_interleave(route.starts.diff(), dim=0, output_size=len(y))
        return y

    def rows(self, x: Tensor, expert: int) -> Tensor:
        """Of x the rows [n, K] that go to one expert, maybe none."""
        if self.gathers:
            return x.index_select(0, self.route.of(expert))
        return x[self.route.slices.get(expert, slice(0, 0))]


def _operand(linear: Linear) -> Matmul | Tensor | None:
    """What a linear multiplies by, a dense weight as it is; None where it is several products, or has a dense copy."""
    if linear.dense_copy is not None:
        return None
    return linear.matmul.dequantize() if isinstance(linear.matmul, DenseMatmul) else linear.matmul


def _operands(linears: Sequence[Linear]) -> tuple[ExpertWeights | None, Tensor | None]:
    found = [weight for weight in map(_operand, linears) if weight is not None]
    biases = [linear.bias for linear in linears if linear.bias is not None]
    weights = ExpertWeights(found) if len(found) == len(linears) else None
    return weights, torch.stack(biases) if biases else None
