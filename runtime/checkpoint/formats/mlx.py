"""MLX's checkpoints: affine codes in a stream of bits with scales and biases, or MXFP4, NVFP4 and MXFP8.

config.json describes them by `quantization` instead of a `quant_method`, for each linear and the embedding separately;
the tensors tell which are quantized. The experts of a layer are stacked: one tensor for each parameter of a linear.
"""

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

from mycli.runtime.checkpoint.formats import ExpectedTensor, Headers, Scales, _parts, quantizable
from mycli.runtime.models.config import ModelConfig
from mycli.runtime.models.experts_spec import ExpertsSpec, StackSpec
from mycli.runtime.models.part_spec import LinearSpec
from mycli.runtime.quantization.scheme import ByteScales, Codes, Packing
from mycli.runtime.utils.dtypes import SAFETENSORS_FLOATS, Dtype
from mycli.runtime.utils.json_fields import Fields

if TYPE_CHECKING:
    import torch

    from mycli.runtime.checkpoint.reader import Checkpoint

READABLE = "MLX affine of 2 to 8 bits, mxfp4, nvfp4, mxfp8"
IGNORED = ()
UNEXPECTED = (
    (
        ".scales",
        "scales of a quantized weight that config.json does not describe",
        "its quantization is missing, or mlx-lm changed the weights of this family: use a version in another format",
    ),
)
_AFFINE: tuple[int, int, Codes, ByteScales | None] = (0, 0, "int", None)
_MODES: dict[str, tuple[int, int, Codes, ByteScales | None]] = {  # bits, group, codes and scales of the float kinds
    "mxfp4": (4, 32, "e2m1", "e8m0"),
    "nvfp4": (4, 16, "e2m1", "e4m3"),
    "mxfp8": (8, 32, "e4m3", None),
}


_STACKS = ("switch_mlp", "experts")  # names of mlx-lm's SwitchGLU and SwitchMLP
STACK = re.compile(r"\.switch_mlp\.|\.experts\.(gate|up|down)_proj\.weight$")  # such a tensor


def expert_stacks(config: ModelConfig) -> dict[str, StackSpec]:
    """Return the tensors that stack a parameter of all experts of a layer, by name, as mlx-lm names them."""
    stacks: list[StackSpec] = []
    for mixture in (layer.mlp for layer in config.layer_specs if isinstance(layer.mlp, ExpertsSpec)):
        block = mixture.experts[0].down.name.rpartition(".experts.")[0]
        names = ("gate_proj", "up_proj", "down_proj") if mixture.gated else ("fc1", "fc2")
        if len(mixture.experts[0].linears) != len(names):  # gate and up are one linear
            continue
        for name, linears in zip(names, zip(*(expert.linears for expert in mixture.experts), strict=True), strict=True):
            for part in ("weight", "scales", "biases", "bias"):
                parts = tuple(f"{linear.name}.{part}" for linear in linears)
                stacks += [StackSpec(f"{block}.{stack}.{name}.{part}", parts) for stack in _STACKS]
    return {stack.name: stack for stack in stacks}


def _expert_settings(section: Fields, config: ModelConfig) -> dict[str, str]:
    # The key of each expert's linear in a section that has one for its stack.
    stacks = [stack for name, stack in expert_stacks(config).items() if section.has(name.removesuffix(".weight"))]
    return {
        part.removesuffix(".weight"): stack.name.removesuffix(".weight") for stack in stacks for part in stack.parts
    }


def local_settings(section: Fields, config: ModelConfig) -> Fields:
    """Return the settings with the linears named as in `config`, where the folder has other names."""
    values = {
        config.local_name(f"{key}.weight").removesuffix(".weight") if isinstance(value, dict | bool) else key: value
        for key, value in section.values.items()
    }
    return Fields(values, section.source)


def read_quantization(section: Fields, config: ModelConfig, headers: Headers | None) -> dict[str, Packing]:
    result: dict[str, Packing] = {}
    section = local_settings(section, config)
    stacked = _expert_settings(section, config)
    for linear in quantizable(config):
        key = stacked.get(linear.name, linear.name)
        settings = section.values.get(key)
        if (headers is None and settings is False) or (headers is not None and f"{linear.name}.scales" not in headers):
            continue
        chosen = section.object(key) if isinstance(settings, dict) else section
        result[linear.name] = read_packing(chosen, linear.name, config.dtype, headers)
    return result


def read_packing(chosen: Fields, name: str, model: Dtype, headers: Headers | None) -> Packing:
    """Return the packing of the linear `name` of a model in dtype `model`, from its settings and scales."""
    mode = chosen.text("mode", "affine")
    if mode != "affine" and mode not in _MODES:
        raise chosen.fail("mode", f"{mode!r} is not supported", f"readable: {READABLE}")
    bits, group, codes, byte_scales = _MODES.get(mode, _AFFINE)
    bits = bits or chosen.integer("bits", 4, low=2, high=8)
    group = group or chosen.integer("group_size", 64)
    dtype = _parts.scale_dtype(headers, f"{name}.scales", model)
    if mode != "affine":
        dtype = _parts.unless(model, "bfloat16" if mode.startswith("mx") else "float32")
    affine = mode == "affine"
    return Packing(bits, group, "mlx", affine, codes, scale_dtype=dtype, byte_scales=byte_scales, dialect=(mode,))


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
        return Scales(scales.float(), factors=_parts.row_factors(torch.ones((), dtype=torch.float64), len(scales)))
    if mode != "affine":
        return Scales(_parts.powers_of_two(scales, name))
    biases = checkpoint.read(f"{linear.name}.biases")
    return Scales(scales, biases.float() + (1 << (packing.bits - 1)) * scales.float())
