"""Transforms rescale a model without changing its function: one file each, with the members of `TransformModule`."""

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, cast

from mycli.quant.declarations import declared, file_names

if TYPE_CHECKING:  # the help reads declarations only
    import torch
    from torch import Tensor

    from mycli.quant.rounding.grid import Grid
    from mycli.runtime.layers.block import Block
    from mycli.runtime.models.part_spec import NormSpec, OutputRows


@dataclass(frozen=True)
class TransformSpec:
    """The declaration of a transform; its values must be literals (see `declarations`)."""

    help: str  # a phrase for `--method`


class TransformModule(Protocol):
    TRANSFORM: TransformSpec

    def choose_scale(
        self, weight: "Tensor", grid: "Grid", hessian: "Tensor", source: "NormSpec | OutputRows"
    ) -> "Tensor | None":
        """Return the scale fp32 [K] for the inputs of a product, which `source` computes; None for no scale."""
        # weight [N, K]: all linears of the product, stacked; hessian fp32 [K, K] of their input
        ...

    def fold(
        self, block: "Block", product: str, scale: "Tensor", stored: "Callable[[str], torch.dtype]"
    ) -> "tuple[dict[str, Tensor], Tensor]":
        """Multiply a product's columns by `scale`, divide their source by it.

        Returns changed unquantized tensors, and the scale as it was used: a stored gain is rounded first.
        """
        # `stored` returns the dtype of a tensor in the file
        ...


def names() -> list[str]:
    return file_names(__path__)


def spec(name: str) -> TransformSpec:
    """The declaration of a transform, read without importing it."""
    return TransformSpec(**declared(__path__, name, "TRANSFORM"))


def load(name: str) -> TransformModule:
    return cast(TransformModule, importlib.import_module(f"{__name__}.{name}"))
