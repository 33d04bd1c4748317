"""Writes a model folder in another layout: planned tensors, config.json, companions and a record of its source."""

import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mycli.quant.export import Exported, ExportRequest, Rounded, require_in_range, without_mtp_head, would_round
from mycli.quant.export._weights import Weights, fp16_scale_error
from mycli.quant.output import model_card
from mycli.quant.planning.target import check_target
from mycli.quant.progress import ReportProgress
from mycli.runtime.checkpoint.open_folder import open_model_folder
from mycli.runtime.checkpoint.restored_weights import joined_linears
from mycli.runtime.checkpoint.writer import CheckpointWriter
from mycli.runtime.errors import ModelError
from mycli.runtime.models.config import ModelConfig
from mycli.runtime.models.part_spec import LinearSpec, Shape
from mycli.runtime.quantization.packed_weight import PackedWeight
from mycli.runtime.quantization.scheme import Packing

_HEAD = "lm_head"
_QUANTIZED = ("quantization_config", "quantization")


def write_folder(
    request: ExportRequest,
    tensors: Sequence[tuple[str, torch.dtype, Shape]],
    config: Mapping[str, Any],
    fill: Callable[[CheckpointWriter], None],
) -> int:
    """Write the planned `tensors` by `fill`, with `config` instead of the source's quantization; returns the bytes.

    The folder appears after our own reader has checked it. Raises what writing raises, and UsageError for a target
    folder with other files.
    """
    check_target(request.target, request.overwrite)
    folder = request.folder
    # transformers before 4.56 reads `torch_dtype`, whatever `dtype` says.
    replaced = (*_QUANTIZED, *(("torch_dtype",) if "dtype" in config else ()))
    fields = {name: value for name, value in folder.raw.values.items() if name not in replaced}
    source = folder.path if folder.path.is_dir() else None
    stored_name, overwrite = request.folder.config.stored_name, request.overwrite
    writing = CheckpointWriter(request.target, tensors, overwrite=overwrite, source=source, stored_name=stored_name)
    with writing as writer:
        fill(writer)
        for name, data in folder.companions().items():
            writer.add_file(name, data)
        writer.add_file("config.json", _json({**fields, **config}))
        open_model_folder(writer.folder).checked_manifest()
        written = model_card.digests(filter(Path.is_file, writer.folder.rglob("*")), writer.folder)
        origin = {"name": request.source.label, "revision": request.source.revision}
        if folder.adapter is not None:
            origin["adapter"] = folder.adapter.name
        writer.add_file(model_card.CARD_FILE, _json({"source": origin, "files": written}))
        writer.finish()
    return sum(entry["bytes"] for entry in written.values())


def _json(values: Mapping[str, Any]) -> bytes:
    return (json.dumps(values, indent=2, ensure_ascii=False) + "\n").encode()


def write_symmetric(
    request: ExportRequest,
    layout: str,
    planned: Callable[[LinearSpec, Packing], Iterator[tuple[str, torch.dtype, Shape]]],
    parts: Callable[[PackedWeight], Mapping[str, Tensor]],
    settings: Mapping[str, Any],
    progress: ReportProgress,
    *,
    dense_head: bool,
) -> Exported:
    """Write a layout with fp16 scales: `parts` makes the `planned` tensors of each packed linear.

    `settings` become `quantization_config`; `dense_head`: a packed head is written dequantized. Raises ModelError for
    scales that fp16 would round, unless `requantize`.
    """
    config, weights = request.folder.config, Weights(request.folder)
    packings = {name: packing for name, packing in weights.packings.items() if not (dense_head and name == _HEAD)}
    rounded: list[Rounded] = []
    tensors: list[tuple[str, torch.dtype, Shape]] = []
    for name, shape in config.tensors():
        packing = packings.get(name.removesuffix(".weight"))
        if packing is None:
            tensors.append((name, weights.stored_dtype(name), shape))
        else:
            tensors += planned(weights.linears[name], packing)
    names = [name for name, _ in config.tensors()]

    def fill(writer: CheckpointWriter) -> None:
        for done, name in enumerate(names, 1):
            if name.removesuffix(".weight") not in packings:
                writer.write(name, weights.defined_values(name).to(weights.stored_dtype(name)))
            else:
                weight = weights.packed(name)
                error = fp16_scale_error(weight)
                if error and not request.requantize:
                    raise would_round(name, f"its scales are not float16 values, which {layout} needs")
                if error:
                    require_in_range(name, "float16 scales", error)
                    rounded.append(Rounded(name, layout, error))
                for part, tensor in parts(weight).items():
                    writer.write(f"{name.removesuffix('weight')}{part}", tensor)
            progress("exporting", done, len(names))

    nbytes = write_folder(request, tensors, {"quantization_config": settings}, fill)
    return Exported(
        request.target,
        nbytes,
        Counter(packing.name for packing in packings.values()),
        rounded,
        without_mtp_head(request.folder),
        separate_experts=config.active_parameters() < config.parameters(),
    )


def dense_modules(config: ModelConfig) -> list[str]:
    """Return the linears that are never packed, such as routers, by the declaration's and by the checkpoints' names."""
    return [name for linear in config.unquantized_linears() for name in config.module_names(linear.name)]


def require_separate_linears(config: ModelConfig, layout: str) -> None:
    """Raise ModelError for a family whose files join linears, which are packed apart and no other program reads so."""
    joined = next(joined_linears(config), None)
    if joined is not None:
        kind = "the transpose of a weight" if joined.transposed else "one tensor for several linears"
        cause = f"{config.stored_name(joined.name)}: files of {config.model_type} have {kind}"
        raise ModelError(f"{cause}, which {layout} exports do not write", "choose gguf or safetensors")


def only_packing(request: ExportRequest, layout: str) -> Packing:
    """Return the packing that all linears of the layers share: symmetric integers, not permuted; the head may differ.

    Raises ModelError for any other model.
    """
    require_separate_linears(request.folder.config, layout)
    packings = {name: packing.as_integers() for name, packing in request.folder.packings.items()}
    if not packings:
        raise ModelError(f"the model is not quantized, which {layout} needs", code="quantize-first")
    linears = [spec.name for spec in request.folder.config.linears() if spec.name != _HEAD]
    differing = {*linears} ^ (packings.keys() - {_HEAD})
    if differing:
        raise ModelError(f"{min(differing)}: {layout} needs all linears quantized, and nothing else", "")
    layers = [packing for name, packing in packings.items() if name != _HEAD]
    widths = {(packing.bits, packing.group_size) for packing in layers}
    if len(widths) > 1:
        raise ModelError(f"linears have {len(widths)} different widths or groups; {layout} needs the same for all", "")
    unfit = next((packing for packing in layers if packing.offsets or packing.permuted or packing.codes != "int"), None)
    if unfit is not None:
        raise ModelError(f"{unfit.name} weights: {layout} holds symmetric integers only", "")
    return layers[0]
