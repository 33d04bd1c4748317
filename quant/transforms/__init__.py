"""Changes to a model that leave its function as it is and make it easier to round: one file each, found by its name.

A transform is a module with the members of `Transform`. It scales the inputs of a product and what makes them; what
rounds the weights afterwards is not its business. Imports no torch before one is used.
"""

import importlib
import pkgutil
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol, cast

if TYPE_CHECKING:  # a recipe asks for names only
    import torch
    from torch import Tensor

    from mycli.quant.rounding.grid import Grid
    from mycli.runtime.layers.block import Block
    from mycli.runtime.models.part_spec import NormSpec, OutputRows


class Transform(Protocol):
    """What a module of this package offers."""

    def choose_scale(
        self, weight: "Tensor", grid: "Grid", hessian: "Tensor", source: "NormSpec | OutputRows"
    ) -> "Tensor | None":
        """The scale fp32 [K] of a product's inputs, which `source` makes; None to leave them.

        weight [N, K]: all linears of the product; hessian fp32 [K, K] of their input.
        """
        ...

    def fold(
        self, block: "Block", product: str, scale: "Tensor", stored: "Callable[[str], torch.dtype]"
    ) -> "dict[str, Tensor]":
        """Scale a product's columns and unscale what makes its inputs; the other tensors that changed, by name."""
        ...


def names() -> list[str]:
    """The transforms there are."""
    return sorted(module.name for module in pkgutil.iter_modules(__path__))


def load(name: str) -> Transform:
    """The transform of that name."""
    return cast(Transform, importlib.import_module(f"{__name__}.{name}"))
