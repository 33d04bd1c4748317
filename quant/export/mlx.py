"""Exports MLX's affine quantization: `weight`, `scales` and `biases` per linear, w = scale * code + bias.

Widths and groups may differ by linear; a group size that MLX lacks becomes several equal groups. Scales and biases have
the model's dtype.
"""

from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from mycli.quant.export import Exported, ExportRequest, Rounded, without_mtp_head, would_round
from mycli.quant.export._folder import write_folder
from mycli.quant.export._weights import Weights, squared_error
from mycli.quant.progress import ReportProgress
from mycli.runtime.checkpoint.writer import CheckpointWriter
from mycli.runtime.device.placement import torch_dtype
from mycli.runtime.errors import ModelError
from mycli.runtime.models.part_spec import Shape
from mycli.runtime.quantization.packed_weight import PackedWeight, unpack
from mycli.runtime.quantization.scheme import Packing

VARIANTS = ()
_BITS = (2, 3, 4, 5, 6, 8)
_GROUPS = (128, 64, 32)
_WORD = 32


def export(request: ExportRequest, progress: ReportProgress) -> Exported:
    folder, weights = request.folder, Weights(request.folder)
    if not folder.packings:
        raise ModelError("the model is not quantized, which MLX needs", code="quantize-first")
    if folder.config.has_recurrent:
        raise ModelError(f"{folder.config.model_type}: MLX stores its convolutions differently", "")
    dtype = torch_dtype(folder.config.dtype)
    groups = {name: _group(weights, name) for name in weights.linears if weights.packing(name) is not None}
    plan: list[tuple[str, torch.dtype, Shape]] = []
    for name, shape in folder.config.tensors():
        if name not in groups:
            plan.append((name, weights.stored_dtype(name), shape))
            continue
        bits = weights.packings[name.removesuffix(".weight")].bits
        plan.append((name, torch.uint32, (shape[0], shape[1] * bits // _WORD)))
        side = (shape[0], shape[1] // groups[name])
        plan += [(f"{name.removesuffix('weight')}{part}", dtype, side) for part in ("scales", "biases")]
    rounded: list[Rounded] = []

    def fill(writer: CheckpointWriter) -> None:
        for done, (name, _) in enumerate(folder.config.tensors(), 1):
            if name in groups:
                error = _write(writer, weights.packed(name), name, groups[name], dtype, request.requantize)
                if error:
                    rounded.append(Rounded(name, "mlx", error))
            else:
                writer.write(name, weights.defined_values(name).to(weights.stored_dtype(name)))
            progress("exporting", done, len(dict(folder.config.tensors())))

    config = {"quantization": _settings(folder.packings, groups)}
    nbytes = write_folder(request, plan, {**config, "quantization_config": config["quantization"]}, fill)
    kinds = Counter(weights.packings[name.removesuffix(".weight")].name for name in groups)
    return Exported(request.target, nbytes, kinds, rounded, without_mtp_head(request.folder))


def _group(weights: Weights, name: str) -> int:
    packing, linear = weights.packings[name.removesuffix(".weight")], weights.linears[name]
    size = linear.in_features // packing.groups(linear.in_features)
    group = next((group for group in _GROUPS if size % group == 0), None)
    if packing.codes != "int" or packing.permuted or packing.bits not in _BITS or group is None:
        raise ModelError(f"{name}: {packing.name} weights, which MLX does not hold", "")
    return group


def _write(
    writer: CheckpointWriter, weight: PackedWeight, name: str, group: int, dtype: torch.dtype, rounding: bool
) -> float:
    # Returns the relative squared error of rounded scales and biases.
    half = 1 << (weight.packing.bits - 1)
    exact = -half * weight.scales.double()
    if weight.offsets is not None:
        exact = exact + weight.offsets.double()
    scales, biases = weight.scales.to(dtype), exact.to(dtype)
    lossless = bool((scales.double() == weight.scales.double()).all() and (biases.double() == exact).all())
    if not lossless and not rounding:
        raise would_round(name, f"scales that {str(dtype).removeprefix('torch.')} does not hold, which MLX needs")
    repeat = weight.in_features // weight.scales.shape[1] // group
    base = name.removesuffix("weight")
    writer.write(name, weight.packed.contiguous().view(torch.uint32))
    for part, values in (("scales", scales), ("biases", biases)):
        writer.write(f"{base}{part}", values.repeat_interleave(repeat, dim=1))
    return 0.0 if lossless else _error(weight, exact, scales, biases)


def _error(weight: PackedWeight, exact: Tensor, scales: Tensor, biases: Tensor) -> float:
    codes = unpack(weight.packed, weight.packing.bits, weight.in_features).view(*weight.scales.shape, -1).double()

    def values(scale: Tensor, bias: Tensor) -> Tensor:
        return codes * scale.double().unsqueeze(-1) + bias.double().unsqueeze(-1)

    return squared_error(values(weight.scales, exact), values(scales, biases))


def _settings(packings: Mapping[str, Packing], groups: Mapping[str, int]) -> dict[str, Any]:
    # The commonest width and group, and every linear with another.
    linears = {name.removesuffix(".weight"): {"group_size": group} for name, group in groups.items()}
    linears = {name: {**value, "bits": packings[name].bits} for name, value in linears.items()}
    counts = Counter((value["group_size"], value["bits"]) for value in linears.values())
    group, bits = counts.most_common(1)[0][0]
    others = {name: value for name, value in linears.items() if value != {"group_size": group, "bits": bits}}
    return {"group_size": group, "bits": bits, "mode": "affine", **others}
