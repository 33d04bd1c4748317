"""Exports MLX's affine quantization: `weight`, `scales` and `biases` per linear, w = scale * code + bias.

Widths and groups may differ by linear; a group size that MLX lacks becomes several equal groups. Scales and biases have
the model's dtype.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from mycli.quant.export import Exported, ExportRequest, Rounded, without_mtp_head, would_round
from mycli.quant.export._folder import require_separate_linears, write_folder
from mycli.quant.export._weights import Weights, squared_error
from mycli.quant.progress import ReportProgress
from mycli.runtime.checkpoint.formats.mlx import expert_stacks
from mycli.runtime.checkpoint.model_folder import ModelFolder
from mycli.runtime.checkpoint.writer import CheckpointWriter
from mycli.runtime.device.placement import torch_dtype
from mycli.runtime.errors import ModelError
from mycli.runtime.models.config import ModelConfig
from mycli.runtime.models.experts_spec import ExpertsSpec
from mycli.runtime.models.part_spec import MlpSpec, Shape
from mycli.runtime.quantization.packed_weight import PackedWeight, unpack

VARIANTS = ()
_BITS = (2, 3, 4, 5, 6, 8)
_GROUPS = (128, 64, 32)
_WORD = 32
_EXPERTS = {"afmoe": "experts", "dots1": "experts", "gpt_oss": "experts"}  # mlx-lm's other name of `switch_mlp`


def export(request: ExportRequest, progress: ReportProgress) -> Exported:
    folder, weights = request.folder, Weights(request.folder)
    _check_model(folder)
    dtype = torch_dtype(folder.config.dtype)
    groups = {name: _group(weights, name) for name in weights.linears if weights.packing(name) is not None}
    written = _written(folder.config)
    plan = list(_planned(weights, written, groups, dtype, dict(folder.config.tensors())))
    rounded: list[Rounded] = []

    def values(name: str) -> dict[str, Tensor]:
        if name not in groups:
            return {"": weights.defined_values(name).to(weights.stored_dtype(name))}
        tensors, error = _converted(weights.packed(name), name, groups[name], dtype, request.requantize)
        if error:
            rounded.append(Rounded(name, "mlx", error))
        return tensors

    def fill(writer: CheckpointWriter) -> None:
        for done, (name, parts) in enumerate(written.items(), 1):
            tensors = [values(part) for part in parts]
            for suffix in tensors[0]:
                stored = f"{name.removesuffix('weight')}{suffix}" if suffix else name
                stack = [tensor[suffix] for tensor in tensors]
                writer.write(stored, stack[0] if parts == (name,) else torch.stack(stack))
            progress("exporting", done, len(written))

    config = {"quantization": _settings(folder, groups, written)}
    nbytes = write_folder(request, plan, {**config, "quantization_config": config["quantization"]}, fill)
    kinds = Counter(weights.packings[name.removesuffix(".weight")].name for name in groups)
    return Exported(request.target, nbytes, kinds, rounded, without_mtp_head(request.folder))


def _check_model(folder: ModelFolder) -> None:
    config, kind = folder.config, folder.config.model_type
    if not folder.packings:
        raise ModelError("the model is not quantized, which MLX needs", code="quantize-first")
    require_separate_linears(config, "MLX")
    if kind == "baichuan":
        raise ModelError("baichuan: mlx-lm has no such model", "")
    if config.has_recurrent:
        raise ModelError(f"{kind}: MLX stores its convolutions differently", "")
    if any(expert.gated and len(expert.gate_up) == 1 for expert in _first_experts(config)):
        raise ModelError(f"{kind}: MLX stores gate and up of its experts apart", "")
    if kind == "llama4_text" and any(_first_experts(config)):
        raise ModelError("llama4_text: mlx-lm loads it without experts only", "")


def _planned(
    weights: Weights,
    written: Mapping[str, Sequence[str]],
    groups: Mapping[str, int],
    dtype: torch.dtype,
    shapes: Mapping[str, Shape],
) -> Iterator[tuple[str, torch.dtype, Shape]]:
    # Name, dtype and shape of every tensor in the file. Raises ModelError for experts that differ.
    for name, parts in written.items():
        _check_alike(weights, parts, groups)
        first, stack = parts[0], () if tuple(parts) == (name,) else (len(parts),)
        if first not in groups:
            yield name, weights.stored_dtype(first), (*stack, *shapes[first])
            continue
        rows, columns = shapes[first]
        bits = weights.packings[first.removesuffix(".weight")].bits
        yield name, torch.uint32, (*stack, rows, columns * bits // _WORD)
        for part in ("scales", "biases"):
            yield f"{name.removesuffix('weight')}{part}", dtype, (*stack, rows, columns // groups[first])


def _first_experts(config: ModelConfig) -> Iterator[MlpSpec]:
    return (layer.mlp.experts[0] for layer in config.layer_specs if isinstance(layer.mlp, ExpertsSpec))


def _written(config: ModelConfig) -> dict[str, tuple[str, ...]]:
    """Return the parts of each written tensor by its name: one tensor of the model, or those of a layer's experts."""
    # mlx-lm stacks experts when it loads dense weights, but for some families not their scales and biases.
    stack = f".{_EXPERTS.get(config.model_type, 'switch_mlp')}."
    stacks = {name: spec for name, spec in expert_stacks(config).items() if stack in name}
    members = {part: name for name, spec in stacks.items() for part in spec.parts}
    names = dict.fromkeys(members.get(name, name) for name, _ in config.tensors())
    return {name: stacks[name].parts if name in stacks else (name,) for name in names}


def _check_alike(weights: Weights, parts: Sequence[str], groups: Mapping[str, int]) -> None:
    if len({(weights.packing(part), groups.get(part)) for part in parts}) > 1:
        raise ModelError(f"{parts[0]}: the experts of its layer are quantized differently, which MLX does not hold", "")


def _group(weights: Weights, name: str) -> int:
    packing, linear = weights.packings[name.removesuffix(".weight")], weights.linears[name]
    size = linear.in_features // packing.groups(linear.in_features)
    group = next((group for group in _GROUPS if size % group == 0), None)
    if packing.codes != "int" or packing.permuted or packing.bits not in _BITS or group is None:
        raise ModelError(f"{name}: {packing.name} weights, which MLX does not hold", "")
    return group


def _converted(
    weight: PackedWeight, name: str, group: int, dtype: torch.dtype, rounding: bool
) -> tuple[dict[str, Tensor], float]:
    # Also returns the relative squared error of rounded scales and biases.
    half = 1 << (weight.packing.bits - 1)
    exact = -half * weight.scales.double()
    if weight.offsets is not None:
        exact = exact + weight.offsets.double()
    scales, biases = weight.scales.to(dtype), exact.to(dtype)
    lossless = bool((scales.double() == weight.scales.double()).all() and (biases.double() == exact).all())
    if not lossless and not rounding:
        raise would_round(name, f"scales that {str(dtype).removeprefix('torch.')} does not hold, which MLX needs")
    repeat = weight.in_features // weight.scales.shape[1] // group
    tensors = {"weight": weight.packed.contiguous().view(torch.uint32)}
    tensors |= {"scales": scales.repeat_interleave(repeat, dim=1), "biases": biases.repeat_interleave(repeat, dim=1)}
    return tensors, 0.0 if lossless else _error(weight, exact, scales, biases)


def _error(weight: PackedWeight, exact: Tensor, scales: Tensor, biases: Tensor) -> float:
    codes = unpack(weight.packed, weight.packing.bits, weight.in_features).view(*weight.scales.shape, -1).double()

    def values(scale: Tensor, bias: Tensor) -> Tensor:
        return codes * scale.double().unsqueeze(-1) + bias.double().unsqueeze(-1)

    return squared_error(values(weight.scales, exact), values(scales, biases))


def _settings(folder: ModelFolder, groups: Mapping[str, int], written: Mapping[str, Sequence[str]]) -> dict[str, Any]:
    # The commonest width and group, and every linear with another, by the names in the files.
    linears = {
        folder.config.stored_name(name).removesuffix(".weight"): {
            "group_size": groups[parts[0]],
            "bits": folder.packings[parts[0].removesuffix(".weight")].bits,
        }
        for name, parts in written.items()
        if parts[0] in groups
    }
    counts = Counter((value["group_size"], value["bits"]) for value in linears.values())
    group, bits = counts.most_common(1)[0][0]
    others = {name: value for name, value in linears.items() if value != {"group_size": group, "bits": bits}}
    return {"group_size": group, "bits": bits, "mode": "affine", **others}
