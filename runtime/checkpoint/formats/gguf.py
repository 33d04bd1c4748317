"""Linears in the blocks of ggml, from a GGUF file: every type becomes packed groups, value for value.

What `checkpoint/gguf/folder.py` writes as `quantization_config` names the type of each quantized linear. Knows which
packing a type becomes; the blocks are `checkpoint/gguf/blocks.py`'s. Imports torch only to read.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from mycli.runtime.checkpoint.formats import Headers, Promise, Scales
from mycli.runtime.checkpoint.gguf.types import QUANTIZED, TYPES_BY_NAME
from mycli.runtime.models.config import ModelConfig
from mycli.runtime.models.part_spec import LinearSpec
from mycli.runtime.quantization.scheme import Packing
from mycli.runtime.utils.json_fields import Fields

if TYPE_CHECKING:
    import torch

    from mycli.runtime.checkpoint.manifest import Manifest
    from mycli.runtime.checkpoint.reader import Checkpoint

READABLE = f"GGUF files with {', '.join(kind.name for kind in QUANTIZED)}"
IGNORED = ()
TELLING = ()


def read_quantization(section: Fields, config: ModelConfig, headers: Headers | None) -> dict[str, Packing]:
    """The packing of each quantized linear by the type of its blocks."""
    types = section.object("types")
    names = [linear.name for linear in config.linears()]
    return {name: TYPES_BY_NAME[types.text(name)].packing for name in names if types.has(name)}


def tensors(linear: LinearSpec, packing: Packing, headers: Headers) -> Iterator[Promise]:
    """One tensor, of any type that becomes this packing."""
    types = tuple(kind.name for kind in QUANTIZED if kind.packing == packing)
    yield f"{linear.name}.weight", (linear.out_features, linear.in_features), types


def check(linear: LinearSpec, packing: Packing, manifest: "Manifest") -> None:
    """The header says it all."""


def read_linear(checkpoint: "Checkpoint", linear: LinearSpec, packing: Packing, out: "torch.Tensor") -> Scales:
    """The codes into `out`, a part of the rows at a time. Raises what reading does, and for damaged blocks."""
    import torch

    from mycli.runtime.checkpoint.gguf.blocks import pack_rows
    from mycli.runtime.checkpoint.gguf.checkpoint import GgufCheckpoint

    assert isinstance(checkpoint, GgufCheckpoint) and packing.scale_dtype is not None
    name, shape = f"{linear.name}.weight", (linear.out_features, packing.groups(linear.in_features))
    kind = TYPES_BY_NAME[checkpoint.entry(name).dtype]
    scales = torch.empty(shape, dtype=getattr(torch, packing.scale_dtype))
    offsets = torch.empty(shape, dtype=torch.float32) if packing.offsets else None
    factors: list[torch.Tensor] = []
    for start, data in checkpoint.row_bytes(name):
        rows, made = slice(start, start + len(data)), pack_rows(data, kind)
        out[rows], scales[rows] = made.packed, made.scales
        if offsets is not None and made.offsets is not None:
            offsets[rows] = made.offsets
        if made.factors is not None:
            factors.append(made.factors)
    return Scales(scales, offsets, factors=torch.cat(factors) if factors else None)
