"""MXFP4 as gpt-oss publishes it: experts in codes of E2M1, 32 to a scale that is a power of two (OCP Microscaling).

A tensor of blocks, uint8 [rows, inputs / 32, 16] with the first code of a byte in its low half, and one of exponents,
uint8 [rows, inputs / 32], 127 being 1. Everything but the experts is dense. Imports torch only to read.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from mycli.runtime.checkpoint.formats import Headers, Promise, Scales, _parts
from mycli.runtime.models.config import ModelConfig
from mycli.runtime.models.experts_spec import ExpertsSpec
from mycli.runtime.models.part_spec import LinearSpec
from mycli.runtime.quantization.scheme import Packing
from mycli.runtime.utils.json_fields import Fields

if TYPE_CHECKING:
    import torch

    from mycli.runtime.checkpoint.manifest import Manifest
    from mycli.runtime.checkpoint.reader import Checkpoint

READABLE = "MXFP4 of experts"
IGNORED: tuple[str, ...] = ()
TELLING = (
    (".blocks", "blocks of MXFP4, but config.json does not say so", "its quant_method must be mxfp4"),
    (".gate_up_proj_blocks", "blocks of MXFP4 in a model of another shape", "config.json and the weights must match"),
)
_GROUP, _BYTES = 32, 16


def read_quantization(section: Fields, config: ModelConfig, headers: Headers | None) -> dict[str, Packing]:
    """The packing of each linear of an expert; where the tensors are known, of those that have blocks."""
    packing = Packing(4, _GROUP, layout="mxfp4", codes="e2m1", scale_dtype=_parts.unless(config.dtype, "bfloat16"))
    mixtures = (spec.mlp for spec in config.layer_specs if isinstance(spec.mlp, ExpertsSpec))
    linears = (linear for mixture in mixtures for expert in mixture.experts for linear in expert.linears)
    return {each.name: packing for each in linears if headers is None or f"{each.name}.blocks" in headers}


def tensors(linear: LinearSpec, packing: Packing, headers: Headers) -> Iterator[Promise]:
    """Blocks and exponents."""
    groups = linear.in_features // _GROUP
    yield f"{linear.name}.blocks", (linear.out_features, groups, _BYTES), ("U8",)
    yield f"{linear.name}.scales", (linear.out_features, groups), ("U8",)


def check(linear: LinearSpec, packing: Packing, manifest: "Manifest") -> None:
    """The headers say it all."""


def read_linear(checkpoint: "Checkpoint", linear: LinearSpec, packing: Packing, out: "torch.Tensor") -> Scales:
    """The codes into `out`, as they are; the powers of two. Raises ModelError for an exponent that is no number."""
    _parts.put_bytes(checkpoint.read(f"{linear.name}.blocks").flatten(1), out)
    name = f"{linear.name}.scales"
    return Scales(_parts.powers_of_two(checkpoint.read(name), name))
