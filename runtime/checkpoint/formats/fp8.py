"""8-bit floats as DeepSeek, Qwen and others publish them: w = fp8 * scale, one scale per block, row or tensor.

Blocks at the edges are cropped. The tensors, not a list of names, tell which linears are quantized.
"""

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

from mycli.runtime.checkpoint.formats import EMBEDDING, ExpectedTensor, Headers, Scales, _parts, quantizable
from mycli.runtime.models.config import ModelConfig
from mycli.runtime.models.part_spec import LinearSpec
from mycli.runtime.quantization.scheme import Packing
from mycli.runtime.utils.dtypes import SAFETENSORS_FLOATS, Dtype
from mycli.runtime.utils.json_fields import Fields

if TYPE_CHECKING:
    import torch

    from mycli.runtime.checkpoint.reader import Checkpoint

READABLE = "FP8 (E4M3 and E5M2), per block, row or tensor"
# Scales of activations and of the cache: neither is quantized here.
IGNORED = (
    *(".input_scale", ".activation_scale", ".input_scale_ub", ".output_scale"),
    *(".q_scale", ".k_scale", ".v_scale", ".kv_scale", ".prob_output_scale"),
)
UNEXPECTED = (
    ("weight_scale_inv", "a scale of FP8, but config.json does not say so", "its quant_method must be fp8"),
    ("weight_scale", "a scale, but config.json names no quantization", "its quantization_config must name the method"),
)
_NAMES = ("weight_scale_inv", "weight_scale")
_POWERS = ("U8", "F8_E8M0")


def read_quantization(section: Fields, config: ModelConfig, headers: Headers | None) -> dict[str, Packing]:
    block = tuple(section.array("weight_block_size", int, limit=2))
    if len(block) not in (0, 2) or not all(0 < side <= 1 << 20 for side in block):
        raise section.fail("weight_block_size", "must be two sizes, or null")
    unquantized = [*section.array("modules_to_not_convert", str), *section.array("ignored_layers", str)]
    result: dict[str, Packing] = {}
    for linear in quantizable(config):
        quantized = linear.name not in (EMBEDDING, "lm_head") and not _parts.name_contains(linear.name, unquantized)
        weight = None
        if headers is not None:
            weight = headers.get(f"{linear.name}.weight")
            quantized = weight is not None and (
                weight.dtype.startswith("F8_E") or any(f"{linear.name}.{name}" in headers for name in _NAMES)
            )
        if quantized:
            size = math.gcd(linear.in_features, block[1]) if block and linear.in_features > block[1] else None
            result[linear.name] = Packing(
                8,
                size,
                layout="fp8",
                codes="e5m2" if weight is not None and weight.dtype == "F8_E5M2" else "e4m3",
                scale_dtype=_scale_dtype(headers, linear.name, config.dtype),
                dialect=block,
            )
    return result


def _scale_name(headers: Headers, linear: str) -> str:
    return next((name for part in _NAMES if (name := f"{linear}.{part}") in headers), f"{linear}.{_NAMES[0]}")


def _scale_dtype(headers: Headers | None, linear: str, model: Dtype) -> Dtype | None:
    if headers is None:
        return _parts.unless(model, "float32")  # as nearly all published models have them
    name = _scale_name(headers, linear)
    if name in headers and headers[name].dtype in _POWERS:
        return _parts.unless(model, "bfloat16")
    return _parts.scale_dtype(headers, name, model)


def tensors(linear: LinearSpec, packing: Packing, headers: Headers) -> Iterator[ExpectedTensor]:
    rows, columns = linear.out_features, linear.in_features
    yield f"{linear.name}.weight", (rows, columns), ("F8_E5M2",) if packing.codes == "e5m2" else ("F8_E4M3",)
    shapes = (*_parts.SCALAR, (rows, 1), (rows,))
    if packing.dialect:
        down, along = (int(side) for side in packing.dialect)
        shapes = ((-(-rows // down), -(-columns // along)),)
    yield _parts.either(headers, _scale_name(headers, linear.name), shapes, (*SAFETENSORS_FLOATS, *_POWERS))


check = _parts.no_check


def read_linear(checkpoint: "Checkpoint", linear: LinearSpec, packing: Packing, out: "torch.Tensor") -> Scales:
    import torch

    rows, columns = linear.out_features, linear.in_features
    _parts.put_bytes(checkpoint.read(f"{linear.name}.weight").view(torch.uint8), out)
    name = _scale_name(checkpoint.manifest.tensors, linear.name)
    scales = checkpoint.read(name)
    if scales.element_size() == 1:
        scales = _parts.powers_of_two(scales, name)
    if packing.dialect:
        down, along = (int(side) for side in packing.dialect)
        return Scales(_parts.block_scales(scales, (down, along), rows, columns, packing.group_size or columns))
    return Scales(scales.reshape(-1, 1).expand(rows, 1))
