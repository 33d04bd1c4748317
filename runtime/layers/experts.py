"""One product of all experts of a layer: each multiplies the tokens that were routed to it.

The experts' weights are linears like any other, which whoever quantizes them reads and replaces one by one. Knows
linears and routes; who is routed where, and what lies between the products, is `runtime.layers.block`'s.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mycli.runtime.kernels.reference import DenseMatmul
from mycli.runtime.kernels.registry import ROUTED_PRODUCT
from mycli.runtime.kernels.routed import Route
from mycli.runtime.layers.linear import Linear
from mycli.runtime.quantization.packed_weight import Matmul


@dataclass(frozen=True)
class RoutedProduct:
    """A product of each of `linears`, one for every expert, along a route.

    `gathers`: its input is the tokens [tokens, K]; else rows of pairs [pairs, K] in the order of the route.
    """

    linears: Sequence[Linear]
    route: Route
    gathers: bool

    def __call__(self, x: Tensor) -> Tensor:
        """x [tokens, K] or [pairs, K] to [pairs, N], sorted by expert, in the dtype of x."""
        route = self.route
        linears = [self.linears[expert] for expert in route.hit]
        weights = [_operand(linear) for linear in linears]
        found = [weight for weight in weights if weight is not None]
        if len(found) < len(weights):
            return torch.cat([linear(self.rows(x, expert)) for linear, expert in zip(linears, route.hit, strict=True)])
        y = ROUTED_PRODUCT(found, x, route.starts, route.tokens if self.gathers else None)
        if linears[0].bias is not None:
            biases = torch.stack([linear.bias for linear in linears if linear.bias is not None])
            y = y + biases.repeat_interleave(route.starts.diff(), dim=0)
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
