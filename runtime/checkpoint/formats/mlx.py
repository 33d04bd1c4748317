"""MLX's checkpoints: affine codes in a stream of bits with scales and biases, or MXFP4, NVFP4 and MXFP8.

config.json describes them by `quantization` instead of a `quant_method`, for each linear and the embedding separately;
the tensors tell which are quantized.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from mycli.runtime.checkpoint.formats import ExpectedTensor, Headers, Scales, _parts, quantizable
from mycli.runtime.models.config import ModelConfig
from mycli.runtime.models.part_spec import LinearSpec
from mycli.runtime.quantization.scheme import Codes, Packing
from mycli.runtime.utils.dtypes import SAFETENSORS_FLOATS
from mycli.runtime.utils.json_fields import Fields

if TYPE_CHECKING:
    import torch

    from mycli.runtime.checkpoint.reader import Checkpoint

READABLE = "MLX affine of 2 to 8 bits, mxfp4, nvfp4, mxfp8"
IGNORED = ()
UNEXPECTED = ((".scales", "scales of a quantized weight, but config.json does not say so", "add its quantization"),)
_MODES: dict[str, tuple[int, int, Codes]] = {  # bits, group and codes of the float kinds
    "mxfp4": (4, 32, "e2m1"),
    "nvfp4": (4, 16, "e2m1"),
    "mxfp8": (8, 32, "e4m3"),
}


def read_quantization(section: Fields, config: ModelConfig, headers: Headers | None) -> dict[str, Packing]:
    result: dict[str, Packing] = {}
    for linear in quantizable(config):
        settings = section.values.get(linear.name)
        chosen = section.object(linear.name) if isinstance(settings, dict) else section
        if (headers is None and settings is False) or (headers is not None and f"{linear.name}.scales" not in headers):
            continue
        mode = chosen.text("mode", "affine")
        if mode != "affine" and mode not in _MODES:
            raise chosen.fail("mode", f"{mode!r} is not supported", f"readable: {READABLE}")
        bits, group, codes = _MODES.get(mode, (0, 0, "int"))
        bits = bits or chosen.integer("bits", 4, low=2, high=8)
        group = group or chosen.integer("group_size", 64, low=1, high=1 << 20)
        dtype = _parts.scale_dtype(headers, f"{linear.name}.scales", config.dtype)
        if mode != "affine":
            dtype = _parts.unless(config.dtype, "bfloat16" if mode.startswith("mx") else "float32")
        result[linear.name] = Packing(
            bits, group, layout="mlx", offsets=mode == "affine", codes=codes, scale_dtype=dtype, dialect=(mode,)
        )
    return result


def tensors(linear: LinearSpec, packing: Packing, headers: Headers) -> Iterator[ExpectedTensor]:
    rows, columns, groups = linear.out_features, linear.in_features, packing.groups(linear.in_features)
    yield f"{linear.name}.weight", (rows, packing.words(columns)), ("U32",)
    yield f"{linear.name}.scales", (rows, groups), SAFETENSORS_FLOATS if packing.offsets else ("U8",)
    if packing.offsets:
        yield f"{linear.name}.biases", (rows, groups), SAFETENSORS_FLOATS


check = _parts.no_check


def read_linear(checkpoint: "Checkpoint", linear: LinearSpec, packing: Packing, out: "torch.Tensor") -> Scales:
    # w = u * scale + bias becomes (u - half) * scale + offset, in fp32.
    import torch

    out.copy_(checkpoint.read(f"{linear.name}.weight").view(torch.int32))
    name, mode = f"{linear.name}.scales", packing.dialect[0]
    scales = checkpoint.read(name)
    if mode == "nvfp4":
        scales = scales.view(torch.float8_e4m3fn)
        checkpoint.check(scales, name)
        return Scales(scales.float())
    if mode != "affine":
        return Scales(_parts.powers_of_two(scales, name))
    biases = checkpoint.read(f"{linear.name}.biases")
    return Scales(scales, biases.float() + (1 << (packing.bits - 1)) * scales.float())
