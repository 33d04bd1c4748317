"""Layouts of quantized checkpoints: one file each, found by the `quant_method` of config.json. The file is the
registry.

A layout is a module with the members of `Format`. It says which linears of a folder are packed and how, which tensors
hold them, and reads them into a `PackedWeight`. Knows no layout by name. Imports no torch before a weight is read.
"""

import importlib
import pkgutil
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol, cast

from mycli.runtime.errors import ModelError
from mycli.runtime.models.config import ModelConfig
from mycli.runtime.models.layer_spec import LinearSpec, Shape
from mycli.runtime.quantization.scheme import Packing
from mycli.runtime.utils.dtypes import STORED_FLOATS
from mycli.runtime.utils.json_fields import Fields

if TYPE_CHECKING:  # a light command reads configurations only
    import torch

    from mycli.runtime.checkpoint.reader import Checkpoint
    from mycli.runtime.quantization.packed_weight import PackedWeight


class Format(Protocol):
    """What a module of this package offers."""

    READABLE: str  # what of the layout is read, for a person

    def read_quantization(self, section: Fields, linears: Sequence[str]) -> dict[str, Packing]:
        """The packing of each quantized linear of `linears` by `quantization_config`. Raises ModelError."""
        ...

    def tensors(self, linear: LinearSpec, packing: Packing) -> Iterator[tuple[str, Shape, Collection[str]]]:
        """Name, shape and allowed safetensors dtypes of what stands in place of the linear's weight."""
        ...

    def read_weight(
        self, checkpoint: "Checkpoint", linears: Sequence[LinearSpec], packing: Packing, device: "torch.device"
    ) -> "PackedWeight":
        """The weights of linears that share an input and a packing, stacked."""
        ...


def names() -> list[str]:
    """The layouts there are."""
    return sorted(module.name for module in pkgutil.iter_modules(__path__))


def load(name: str) -> Format:
    """The layout of that name."""
    return cast(Format, importlib.import_module(f"{__name__}.{name}"))


def read_quantization(raw: Fields, linears: Sequence[str]) -> dict[str, Packing]:
    """How each quantized linear of `linears` is packed, by a parsed config.json; empty for an unquantized model.

    Raises ModelError naming a `quant_method` or an option that is not read.
    """
    section = raw.object("quantization_config")
    if not section.values:
        return {}
    method = section.text("quant_method")
    name = method.replace("-", "_")
    if name not in names():
        readable = "; ".join(load(each).READABLE for each in names())
        raise section.fail("quant_method", f"{method!r} is not supported", readable)
    return load(name).read_quantization(section, linears)


def stored_tensors(
    config: ModelConfig, packings: Mapping[str, Packing]
) -> Iterator[tuple[str, Shape, Collection[str]]]:
    """Name, shape and allowed dtypes of every tensor that a folder must hold.

    Raises ModelError where a packing does not fit the shape of its linear.
    """
    linears = {f"{linear.name}.weight": linear for linear in config.linears() if linear.name in packings}
    for name, shape in config.tensors():
        linear = linears.get(name)
        if linear is None:
            yield name, shape, STORED_FLOATS
            continue
        packing = packings[linear.name]
        try:
            packing.groups(linear.in_features)
        except ModelError as error:
            raise error.reworded(f"config.json: {linear.name}: {error.message}") from None
        yield from load(packing.layout).tensors(linear, packing)
