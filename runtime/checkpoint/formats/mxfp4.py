"""MXFP4 as gpt-oss publishes it: experts in E2M1 codes with a power-of-two scale per 32 (OCP Microscaling).

Blocks are uint8 [rows, inputs / 32, 16], the first code of a byte in the low half; exponents are uint8
[rows, inputs / 32] with a bias of 127. All other tensors are dense.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from mycli.runtime.checkpoint.formats import ExpectedTensor, Headers, Scales, _parts
from mycli.runtime.models.config import ModelConfig
from mycli.runtime.models.experts_spec import ExpertsSpec
from mycli.runtime.models.part_spec import LinearSpec
from mycli.runtime.quantization.scheme import Packing
from mycli.runtime.utils.json_fields import Fields

if TYPE_CHECKING:
    import torch

    from mycli.runtime.checkpoint.reader import Checkpoint

READABLE = "MXFP4 of experts"
IGNORED: tuple[str, ...] = ()
UNEXPECTED = (
    (".blocks", "blocks of MXFP4, but config.json does not say so", "its quant_method must be mxfp4"),
    (".gate_up_proj_blocks", "blocks of MXFP4 in a model of another shape", "config.json and the weights must match"),
)
_GROUP, _BYTES = 32, 16


def read_quantization(section: Fields, config: ModelConfig, headers: Headers | None) -> dict[str, Packing]:
    scales = _parts.unless(config.dtype, "bfloat16")
    packing = Packing(4, _GROUP, layout="mxfp4", codes="e2m1", scale_dtype=scales, byte_scales="e8m0")
    mixtures = (spec.mlp for spec in config.layer_specs if isinstance(spec.mlp, ExpertsSpec))
    linears = (linear for mixture in mixtures for expert in mixture.experts for linear in expert.linears)
    return {linear.name: packing for linear in linears if headers is None or f"{linear.name}.blocks" in headers}


def tensors(linear: LinearSpec, packing: Packing, headers: Headers) -> Iterator[ExpectedTensor]:
    groups = linear.in_features // _GROUP
    yield f"{linear.name}.blocks", (linear.out_features, groups, _BYTES), ("U8",)
    yield f"{linear.name}.scales", (linear.out_features, groups), ("U8",)


check = _parts.no_check


def read_linear(checkpoint: "Checkpoint", linear: LinearSpec, packing: Packing, out: "torch.Tensor") -> Scales:
    _parts.put_bytes(checkpoint.read(f"{linear.name}.blocks").flatten(1), out)
    name = f"{linear.name}.scales"
    return Scales(_parts.powers_of_two(checkpoint.read(name), name))
