"""ggml blocks of a GGUF file, repacked as groups with equal values.

`checkpoint/gguf/folder.py` makes the `quantization_config`, with the ggml type of each quantized linear.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from mycli.runtime.checkpoint.formats import ExpectedTensor, Headers, Scales, _parts
from mycli.runtime.checkpoint.gguf.types import QUANTIZED, TYPES_BY_NAME
from mycli.runtime.errors import ModelError
from mycli.runtime.models.config import ModelConfig
from mycli.runtime.models.part_spec import LinearSpec
from mycli.runtime.quantization.scheme import Packing
from mycli.runtime.utils.json_fields import Fields

if TYPE_CHECKING:
    import torch

    from mycli.runtime.checkpoint.reader import Checkpoint

READABLE = f"GGUF files with {', '.join(kind.name for kind in QUANTIZED)}"
IGNORED = ()
UNEXPECTED = ()


def read_quantization(section: Fields, config: ModelConfig, headers: Headers | None) -> dict[str, Packing]:
    types = section.object("types")
    names = [linear.name for linear in config.linears() if types.has(linear.name)]
    # Super-blocks do not survive a change of columns, their groups do.
    reordered = set(section.array("reordered", str, len(names)))
    packings = {name: TYPES_BY_NAME[types.text(name)].packing for name in names}
    for name in reordered & packings.keys():
        if packings[name].byte_scales == "super_blocks":
            packings[name] = replace(packings[name], byte_scales=None)
    return packings


def tensors(linear: LinearSpec, packing: Packing, headers: Headers) -> Iterator[ExpectedTensor]:
    types = tuple(kind.name for kind in QUANTIZED if packing in (kind.packing, replace(kind.packing, byte_scales=None)))
    yield f"{linear.name}.weight", (linear.out_features, linear.in_features), types


check = _parts.no_check


def read_linear(checkpoint: "Checkpoint", linear: LinearSpec, packing: Packing, out: "torch.Tensor") -> Scales:
    import torch

    from mycli.runtime.checkpoint.gguf.blocks import pack_rows
    from mycli.runtime.checkpoint.gguf.checkpoint import GgufCheckpoint

    assert isinstance(checkpoint, GgufCheckpoint) and packing.scale_dtype is not None
    name, shape = f"{linear.name}.weight", (linear.out_features, packing.groups(linear.in_features))
    kind = TYPES_BY_NAME[checkpoint.entry(name).dtype]
    scales = torch.empty(shape, dtype=getattr(torch, packing.scale_dtype))
    offsets = torch.empty(shape, dtype=torch.float32) if packing.offsets else None
    factors: list[torch.Tensor] = []
    columns, factor = checkpoint.column_order(name), checkpoint.factors.get(name)
    if factor is not None and packing.byte_scales != "e4m3":
        raise ModelError(f"{checkpoint.entry(name).name}: a scale of {kind.name} weights is not supported", "")
    for start, data in checkpoint.row_bytes(name):
        rows, part = slice(start, start + len(data)), pack_rows(data, kind, columns)
        out[rows], scales[rows] = part.packed, part.scales if factor is None else part.scales * factor
        if offsets is not None and part.offsets is not None:
            offsets[rows] = part.offsets
        if part.factors is not None:
            factors.append(part.factors)
    if packing.byte_scales == "e4m3":
        factors.append(_parts.row_factors(torch.tensor(factor or 1.0, dtype=torch.float64), linear.out_features))
    return Scales(scales, offsets, factors=torch.cat(factors) if factors else None)
