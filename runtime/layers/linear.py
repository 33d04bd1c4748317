"""Linear layers, dense or packed according to the tensors of the checkpoint.

Linears that share their input (q, k, v; gate, up) are one product if their packings agree. A routed product multiplies
each token by the weights of its experts.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor, nn

from mycli.runtime.checkpoint import formats
from mycli.runtime.device.system import release_free_memory
from mycli.runtime.kernels.cpu.matmul import CpuMatmul, gather_codes
from mycli.runtime.kernels.reference import DenseMatmul
from mycli.runtime.kernels.registry import DENSE_PRODUCT, ROUTED_PRODUCT, prepare_product
from mycli.runtime.kernels.routed import ExpertWeights, Route
from mycli.runtime.layers.weights import CheckpointWeights
from mycli.runtime.models.part_spec import LinearSpec
from mycli.runtime.quantization.low_rank import LowRankMatmul, stored_product
from mycli.runtime.quantization.packed_weight import Matmul, stack
from mycli.runtime.quantization.scheme import Packing, stacked_packing
from mycli.runtime.utils.dtypes import PromptCopy, has_prompt_copy
from mycli.runtime.utils.memory import huge_empty

# Small packed weights are moved into one allocation when they add up to this many bytes; larger batches would hold
# more weights in memory twice while they are copied.
GATHER_BYTES = 1 << 24
PACKED_ROWS = 64  # up to this many rows packed products are faster than a dense copy: they read a quarter of the bytes


def dense_matmul(weight: Tensor) -> DenseMatmul:
    return DenseMatmul(weight, DENSE_PRODUCT)


def _prompt_copy(weight: Tensor, kind: PromptCopy, dtype: torch.dtype) -> Matmul:
    if kind == "16bit":
        return DenseMatmul(weight.to(dtype))
    from mycli.runtime.kernels.fp8 import Fp8Weight  # an option of some GPUs

    return Fp8Weight(weight)


def _read_dense(weights: CheckpointWeights, linears: Sequence[LinearSpec], into: Matmul | None = None) -> Tensor:
    rows = sum(linear.out_features for linear in linears)
    shape = (rows, linears[0].in_features)
    out = into.dequantize() if isinstance(into, DenseMatmul) else None
    if out is None or out.shape != shape or out.dtype != weights.dtype or not out.is_cpu:
        out = huge_empty(shape, weights.dtype)
    start = 0
    for linear in linears:
        weights.checkpoint.read_into(f"{linear.name}.weight", out[start : start + linear.out_features])
        start += linear.out_features
    return out.to(weights.device)


def _adapted(matmul: Matmul, weights: CheckpointWeights, linears: Sequence[LinearSpec]) -> Matmul:
    """Return the product of packed `linears` with an adapter next to it, or as it is without one."""
    updates, start = [], 0
    for linear in linears:
        rows = slice(start, start + linear.out_features)
        if (update := weights.checkpoint.update(f"{linear.name}.weight")) is not None:
            updates.append((rows, update.to(weights.device)))
        start = rows.stop
    return LowRankMatmul(matmul, updates, dense_matmul, weights.dtype) if updates else matmul


# Latent attention joins a query's projection, which may have no bias, with one that has.
def _read_bias(weights: CheckpointWeights, spec: LinearSpec) -> Tensor:
    if spec.bias:
        return weights.read(f"{spec.name}.bias")
    return torch.zeros(spec.out_features, device=weights.device, dtype=weights.dtype)


class Linear(nn.Module):
    """Linears that share an input: x [..., in_features] to the outputs of `specs`, concatenated.

    `matmuls`: the products that compute them, in order; empty before the weights are loaded.
    """

    def __init__(self, specs: Sequence[LinearSpec], *, stacked_on_gpu: bool = False) -> None:
        """stacked_on_gpu: packings that differ become one where integers hold all: the fused pass takes one product."""
        super().__init__()
        self.specs, self._stacked_on_gpu = tuple(specs), stacked_on_gpu
        self.in_features = specs[0].in_features
        self.out_features = sum(spec.out_features for spec in specs)
        self.bias: Tensor | None = None
        self.matmuls: tuple[Matmul, ...] = ()
        self.prompt_copy: Matmul | None = None  # multiplies more than `PACKED_ROWS` rows
        self.portable = False  # whether products have the same bits on every CPU

    def load(self, weights: CheckpointWeights, into: Sequence[Matmul] = (), *, dense: bool = False) -> None:
        """Read the weights; neighbours with the same packing become one product, unless their columns are permuted.

        into: products whose memory may be reused. dense: a packed weight is dequantized.
        """

        checkpoint, packings, device = weights.checkpoint, weights.packings, weights.device

        def packing_key(spec: LinearSpec) -> tuple[Packing | None, str]:
            packing = packings.get(spec.name)
            return packing, spec.name if packing is not None and packing.permuted else ""

        matmuls: list[Matmul] = []
        runs = [(packing, list(run)) for (packing, _), run in groupby(self.specs, key=packing_key)]
        stacked = None
        if self._stacked_on_gpu and device.type != "cpu" and not dense:
            stacked = stacked_packing([packing for packing, _ in runs])
        if stacked is not None:
            stored = [formats.read_weight(checkpoint, run, packing, device) for packing, run in runs if packing]
            matmul = prepare_product(stack(stored, stacked), weights.dtype)
            matmuls.append(_adapted(matmul, weights, self.specs))
            runs = []
        for packing, linears in runs:
            old = stored_product(into[len(matmuls)]) if len(matmuls) < len(into) else None
            if packing is None:
                matmuls.append(dense_matmul(_read_dense(weights, linears, old)))
                continue
            if dense:
                decoded = [formats.read_dense(checkpoint, spec, packings, device, weights.dtype) for spec in linears]
                matmuls.append(dense_matmul(torch.cat(decoded)))
                continue
            matmul = prepare_product(formats.read_weight(checkpoint, linears, packing, device), weights.dtype, old)
            matmuls.append(_adapted(matmul, weights, linears))
        if any(spec.bias for spec in self.specs):
            self.bias = torch.cat([_read_bias(weights, spec) for spec in self.specs])
        self._keep(matmuls)

    def weight(self) -> Tensor:
        """Return the dense weight [out_features, in_features]; a view if it is one dense tensor already."""
        parts = [matmul.dequantize() for matmul in self.matmuls]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def replace(self, weight: Tensor | Matmul | None) -> None:
        """Replace the weight by a dense one [out_features, in_features] or a prepared product; None frees it.

        The bias stays. Passes compiled before keep the old weight.
        """
        self.prompt_copy = None
        matmul = dense_matmul(weight) if isinstance(weight, Tensor) else weight
        self._keep(() if matmul is None else (matmul,))

    def _keep(self, matmuls: Iterable[Matmul]) -> None:
        if self.portable:
            from mycli.runtime.kernels.cpu.portable import portable_product  # an option

            matmuls = map(portable_product, matmuls)
        self.matmuls = tuple(matmuls)

    @property
    def matmul(self) -> Matmul | None:
        return self.matmuls[0] if len(self.matmuls) == 1 else None

    @property
    def nbytes(self) -> int:
        others = (self.bias, self.prompt_copy)
        return sum(part.nbytes for part in (*self.matmuls, *others) if part is not None)

    def keep_prompt_copy(self, kind: PromptCopy, dtype: torch.dtype) -> bool:
        """Keep a copy of packed weights that multiplies more than `PACKED_ROWS` rows; return whether there is one."""
        # It would hold dense parts twice, and round an adapter to 8 bits.
        uncopied = DenseMatmul if kind == "16bit" else DenseMatmul | LowRankMatmul
        if any(isinstance(matmul, uncopied) for matmul in self.matmuls) or not has_prompt_copy(
            kind, self.out_features, self.in_features
        ):
            return False
        self.prompt_copy = _prompt_copy(self.weight(), kind, dtype)
        return True

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, self.in_features)
        if self.prompt_copy is not None and len(rows) > PACKED_ROWS:
            parts = [self.prompt_copy(rows)]
        else:
            parts = [matmul(rows) for matmul in self.matmuls]
        y = parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)
        if self.bias is not None:
            y = y + self.bias
        return y.view(*x.shape[:-1], self.out_features)


def load_linears(linears: Iterable[Linear], weights: CheckpointWeights) -> None:
    """Read the weights of `linears`. On the CPU small ones are moved into one allocation: each is less than a page."""
    small: list[CpuMatmul] = []
    held = 0
    for linear in linears:
        linear.load(weights)
        new = [matmul for matmul in linear.matmuls if isinstance(matmul, CpuMatmul) and matmul.small]
        small, held = small + new, held + sum(matmul.nbytes for matmul in new)
        if held >= GATHER_BYTES:
            gather_codes(small)
            release_free_memory()  # the freed read buffers; otherwise the next weights are read into other fragments
            small, held = [], 0
    gather_codes(small)


class ExpertLinears(tuple[Linear, ...]):
    """One linear of each expert of a layer, all of one shape."""

    _operands: "tuple[ExpertWeights | None, Tensor | None] | None" = None

    def freeze(self) -> None:
        """Keep the operands of all experts, whose weights do not change from now on."""
        self._operands = _operands(self)

    def operands(self, hit: Sequence[int]) -> tuple[Sequence[Matmul | Tensor] | None, Tensor | None]:
        """Return the weights of the experts `hit`, and their biases [hit, out_features] if they have any.

        The weights are None if an expert is several products, or has a copy for prompts or an adapter.
        """
        if self._operands is None:
            return _operands([self[expert] for expert in hit])
        weights, biases = self._operands
        if len(hit) == len(self):
            return weights, biases
        chosen = None if weights is None else [weights[expert] for expert in hit]
        return chosen, None if biases is None else biases[hit]


@dataclass(frozen=True)
class RoutedProduct:
    """The product of each token with the linears of its experts.

    `gathers`: the input is the tokens [tokens, K]; otherwise it is rows of (token, expert) pairs [pairs, K] in the
    order of the route.
    """

    linears: ExpertLinears
    route: Route
    gathers: bool

    def __call__(self, x: Tensor) -> Tensor:
        route, (weights, biases) = self.route, self.linears.operands(self.route.hit)
        if weights is None:
            return torch.cat([self.linears[expert](self.rows(x, expert)) for expert in route.hit])
        y = ROUTED_PRODUCT(weights, x, route.starts, route.tokens if self.gathers else None)
        if biases is not None:
            y = y + biases.repeat_interleave(route.starts.diff(), dim=0, output_size=len(y))
        return y

    def rows(self, x: Tensor, expert: int) -> Tensor:
        """Return the rows [n, K] of x that are routed to `expert`."""
        if self.gathers:
            return x.index_select(0, self.route.of(expert))
        return x[self.route.slices.get(expert, slice(0, 0))]


def _operand(linear: Linear) -> Matmul | Tensor | None:
    if linear.prompt_copy is not None or isinstance(linear.matmul, LowRankMatmul):
        return None
    dense = isinstance(linear.matmul, DenseMatmul) and not linear.portable
    return linear.matmul.dequantize() if dense and linear.matmul is not None else linear.matmul


def _operands(linears: Sequence[Linear]) -> tuple[ExpertWeights | None, Tensor | None]:
    matmuls = [operand for operand in map(_operand, linears) if operand is not None]
    biases = [linear.bias for linear in linears if linear.bias is not None]
    weights = ExpertWeights(matmuls) if len(matmuls) == len(linears) else None
    return weights, torch.stack(biases) if biases else None
