"""Solves the linears of one product for their ggml types with calibration data."""

from collections.abc import Mapping

import torch
from torch import Tensor

from mycli.quant.ggml import types
from mycli.quant.ggml.block_type import BlockType
from mycli.quant.ggml.file import GgufLayout
from mycli.quant.ggml.solve import factor_for, round_blocks, solve
from mycli.quant.output.model_card import Layer
from mycli.quant.rounding.error_compensation import Moments, refit
from mycli.quant.rounding.grid import Quantized
from mycli.quant.solvers import SOLVER_WEIGHTS
from mycli.quant.solvers.gptq import Factor
from mycli.quant.solving.linear_solver import TOO_FEW_TOKENS, LinearSolver, SolvedProduct
from mycli.runtime.checkpoint.gguf.blocks import dequantize_blocks
from mycli.runtime.device.placement import torch_dtype
from mycli.runtime.errors import ModelError
from mycli.runtime.quantization.scheme import Packing


class BlockTypeSolver(LinearSolver):
    """Solves each linear for the type that a layout gives it; codes are the rows of its blocks, uint8 [N, bytes].

    Blocks contain their scales, so `Quantized.scales` is empty. Columns are in the order of the file.
    """

    def __init__(self, layout: GgufLayout) -> None:
        # The file's norms are written before the blocks are solved.
        super().__init__("rtn", torch_dtype(layout.config.dtype), balances=False)
        self._layout = layout

    def kind(self, name: str) -> BlockType:
        return types.load(self._layout.kinds[f"{name}.weight"])

    def restore(self, name: str, quantized: Quantized, packing: Packing) -> Tensor:
        values = dequantize_blocks(quantized.codes, self.kind(name).name)
        order = self._columns(name, values.shape[1])
        return values if order is None else values[:, order.argsort()]

    def solve(
        self,
        weights: Mapping[str, Tensor],
        packing: Packing,
        fitted: Moments,
        held_out: Moments,
        outputs: Tensor | None = None,
    ) -> SolvedProduct:
        target, share = refit(torch.cat(list(weights.values())), fitted, held_out)
        hessian = fitted.hessian + held_out.hessian
        columns = self._columns(next(iter(weights)), len(hessian))
        if columns is not None:
            target, hessian = target[:, columns], hessian[columns][:, columns]
        result = SolvedProduct({}, [], {})
        factors: dict[int, Factor | None] = {}
        dead = int((hessian.diagonal() == 0).sum())
        for (name, weight), part in zip(
            weights.items(), torch.split(target, [len(weight) for weight in weights.values()]), strict=True
        ):
            kind = self.kind(name)
            unit = kind.levels().unit
            if unit not in factors:
                factors[unit] = factor_for(hessian, kind)
            factor, original = factors[unit], (weight if columns is None else weight[:, columns]).float()
            try:
                blocks = solve(part, kind, hessian, factor)
            except ModelError as error:
                raise error.with_message(f"{name}.weight: {error.message}") from error
            result.linears[name] = Quantized(blocks, torch.empty(0))
            rounded = round_blocks(original, kind)
            layer = Layer(
                name,
                kind.name,
                _error(original, blocks, kind),
                output_error=_error(part, blocks, kind, hessian),
                rounding_output_error=_error(original, rounded, kind, hessian),
                refit=share,
                damping=None if factor is None else factor.damping,
                dead_columns=dead,
                fallback="Hessian not positive definite" if factor is None else None,
            )
            result.layers.append(layer)
        return result

    def round(self, weights: Mapping[str, Tensor], packing: Packing) -> SolvedProduct:
        result = SolvedProduct({}, [], {})
        for name, weight in weights.items():
            blocks, error = self.round_tensor(name, weight)
            result.linears[name] = Quantized(blocks, torch.empty(0))
            result.layers.append(Layer(name, self.kind(name).name, error, fallback=TOO_FEW_TOKENS))
        return result

    def round_tensor(self, name: str, weight: Tensor) -> tuple[Tensor, float]:
        """Return blocks uint8 [N, bytes] of a weight [N, K] without data, and their relative squared error."""
        columns, kind = self._columns(name, weight.shape[1]), self.kind(name)
        parts, lost, total = [], 0.0, 0.0
        # A table of per-layer inputs may be larger than the rest of the model, so few rows are in fp32 at a time.
        for rows in torch.split(weight, max(1, SOLVER_WEIGHTS // weight.shape[1])):
            original = (rows if columns is None else rows[:, columns]).float()
            try:
                blocks = round_blocks(original, kind)
            except ModelError as error:
                raise error.with_message(f"{name}.weight: {error.message}") from error
            size = float(original.square().sum(dtype=torch.float64))
            lost, total = lost + size * _error(original, blocks, kind), total + size
            parts.append(blocks)
        return torch.cat(parts), lost / total if total else 0.0

    def _columns(self, name: str, count: int) -> Tensor | None:
        return self._layout.column_order(f"{name}.weight", count)


def _error(weight: Tensor, blocks: Tensor, kind: BlockType, hessian: Tensor | None = None) -> float:
    """Return the relative squared error of the weight, or with `hessian` of its outputs."""
    lost = dequantize_blocks(blocks, kind.name).sub_(weight)

    def size(values: Tensor) -> float:
        product = values if hessian is None else values @ hessian
        return float((product * values).sum(dtype=torch.float64))

    total = size(weight)
    return size(lost) / total if total > 0 else 0.0
