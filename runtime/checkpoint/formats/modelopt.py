"""NVFP4 and FP8 as NVIDIA's ModelOpt writes them, mixed or alone: the tensors of each linear tell which it is.

An NVFP4 weight has E2M1 codes, two per byte, the first in the low half; an E4M3 scale per 16 codes times an fp32 scale
of the whole weight. FP8 weights have the layout `fp8`.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from mycli.runtime.checkpoint.formats import EMBEDDING, ExpectedTensor, Headers, Scales, _parts, fp8, quantizable
from mycli.runtime.models.config import ModelConfig
from mycli.runtime.models.part_spec import LinearSpec
from mycli.runtime.quantization.scheme import Packing
from mycli.runtime.utils.dtypes import Dtype
from mycli.runtime.utils.json_fields import Fields

if TYPE_CHECKING:
    import torch

    from mycli.runtime.checkpoint.reader import Checkpoint

READABLE = "ModelOpt's NVFP4 and FP8"
IGNORED = (".input_scale", ".k_scale", ".v_scale")  # scales of activations and of the cache: neither is quantized here
UNEXPECTED = (("weight_scale_2", "a scale of NVFP4, but config.json does not say so", "quant_method must be modelopt"),)
_GROUP = 16


def read_quantization(section: Fields, config: ModelConfig, headers: Headers | None) -> dict[str, Packing]:
    if headers is not None:
        result = fp8.read_quantization(Fields({}, section.source), config, headers)
        for linear in quantizable(config):
            if f"{linear.name}.weight_scale_2" in headers:
                result[linear.name] = _packing(config.dtype)
        return result
    unquantized = [name.replace("*", "") for name in section.array("ignore", str)]
    if not section.text("quant_algo").upper().endswith("NVFP4"):
        return fp8.read_quantization(Fields({"modules_to_not_convert": unquantized}, section.source), config, None)
    linears = [linear.name for linear in quantizable(config) if linear.name not in (EMBEDDING, "lm_head")]
    return {name: _packing(config.dtype) for name in linears if not _parts.name_contains(name, unquantized)}


def _packing(dtype: Dtype) -> Packing:
    scales = _parts.unless(dtype, "float32")
    return Packing(4, _GROUP, layout="modelopt", codes="e2m1", scale_dtype=scales, byte_scales="e4m3")


def tensors(linear: LinearSpec, packing: Packing, headers: Headers) -> Iterator[ExpectedTensor]:
    name, rows, columns = f"{linear.name}.weight", linear.out_features, linear.in_features
    yield name, (rows, columns // 2), ("U8",)
    yield f"{name}_scale", (rows, packing.groups(columns)), ("F8_E4M3",)
    yield _parts.either(headers, f"{name}_scale_2", _parts.SCALAR, ("F32",))


check = _parts.no_check


def read_linear(checkpoint: "Checkpoint", linear: LinearSpec, packing: Packing, out: "torch.Tensor") -> Scales:
    name = f"{linear.name}.weight"
    _parts.put_bytes(checkpoint.read(name), out)
    factor = checkpoint.read(f"{name}_scale_2").float()
    scales = checkpoint.read(f"{name}_scale").float() * factor
    return Scales(scales, factors=_parts.row_factors(factor.double(), linear.out_features))
