"""Writes a model as the GGUF file that llama.cpp's converter would write: metadata, tokenizer and tensors in one file.

Without a variant every tensor keeps its values: packed integers become Q4_0, Q4_1 or Q8_0 blocks, dense matrices keep
their dtype, norms and biases become F32. Names, keys and orders of rows are those of the architecture's declaration
(runtime/checkpoint/gguf/architectures).
"""

import math
from collections import Counter
from typing import Any

import torch
from torch import Tensor

from mycli.quant.export import Exported, ExportRequest, Rounded, without_mtp_head, would_round
from mycli.quant.export import _ggml_blocks as blocks
from mycli.quant.export._gguf_tokenizer import tokenizer_metadata
from mycli.quant.export._weights import Weights, exact_values, squared_error
from mycli.quant.progress import ReportProgress
from mycli.runtime.checkpoint.gguf.architecture import Architecture, Place, ValueChange
from mycli.runtime.checkpoint.gguf.architectures import written_architecture
from mycli.runtime.checkpoint.gguf.blocks import dequantize_blocks
from mycli.runtime.checkpoint.gguf.checkpoint import file_order
from mycli.runtime.checkpoint.gguf.parts import SUFFIX
from mycli.runtime.checkpoint.gguf.rope import ROPE_FREQS, rope_factors
from mycli.runtime.checkpoint.gguf.types import TYPES_BY_NAME
from mycli.runtime.checkpoint.gguf.writer import GgufWriter
from mycli.runtime.device.placement import dtype_info, torch_dtype
from mycli.runtime.errors import ModelError, UsageError
from mycli.runtime.models.config import ModelConfig
from mycli.runtime.models.part_spec import Shape

VARIANTS = ("f32", "f16", "bf16", "q8_0", "q4_0", "q4_k")
_FILE_TYPES = {"F32": 0, "F16": 1, "Q4_0": 2, "Q4_1": 3, "Q8_0": 7, "Q4_K": 14, "BF16": 32}  # general.file_type
_ROUNDING = {"Q4_0": blocks.round_q4_0, "Q8_0": blocks.round_q8_0, "Q4_K": blocks.round_q4_k}
_VALUES = 1 << 22  # rounded at a time: 16 MB of fp32


def export(request: ExportRequest, progress: ReportProgress) -> Exported:
    """Write the file; a target without the suffix .gguf gets it.

    Raises ModelError naming the tensor that has no GGUF form or would be rounded, UsageError for a target that is not
    a file name.
    """
    if request.target.name in ("", ".."):
        raise UsageError(f"{request.target}: a folder, but GGUF is one file", "name the file to write")
    config, weights = request.folder.config, Weights(request.folder)
    architecture = written_architecture(config.model_type)
    kinds = {tensor: _kind(request, weights, tensor, shape) for tensor, shape in config.tensors()}
    places = {tensor: _place(architecture, tensor) for tensor in kinds}
    factors = rope_factors(config)
    metadata = _metadata(request, architecture, _most(kinds, config))
    plan: list[tuple[str, str, Shape]] = [(ROPE_FREQS, "F32", (len(factors),))] if factors else []
    plan += _plan(config, places, kinds)
    rounded: list[Rounded] = []
    target = request.target
    if target.suffix != SUFFIX:  # a model's path is taken for a file only by its suffix
        target = target.with_name(target.name + SUFFIX)
    with GgufWriter(target, metadata, plan, overwrite=request.overwrite) as writer:
        if factors:
            writer.write(ROPE_FREQS, torch.tensor(factors).numpy().data)
        for done, (tensor, place) in enumerate(places.items(), 1):
            data, error = _encode(request, weights, tensor, kinds[tensor], place.rule.change)
            if error:
                rounded.append(Rounded(tensor, kinds[tensor], error))
            if place.rule.row_order is not None:
                data = data[file_order(place.rule.row_order, config, len(data))]
            writer.write(place.name, data.contiguous().numpy().reshape(-1).data, (place.expert or 0) * data.nbytes)
            progress("exporting", done, len(kinds))
        writer.finish()
    return Exported(writer.target, writer.nbytes, Counter(kinds.values()), rounded, without_mtp_head(request.folder))


def _place(architecture: Architecture, name: str) -> Place:
    place = architecture.place(name)
    if place is None:
        raise ModelError(f"{name}: GGUF has no tensor for it in the architecture {architecture.name}", "")
    return place


def _plan(config: ModelConfig, places: dict[str, Place], kinds: dict[str, str]) -> list[tuple[str, str, Shape]]:
    stacks = Counter(place.name for place in places.values() if place.expert is not None)
    plan: dict[str, tuple[str, str, Shape]] = {}
    for tensor, shape in config.tensors():
        name, kind = places[tensor].name, kinds[tensor]
        planned = (name, kind, (stacks[name], *shape) if name in stacks else shape)
        if plan.setdefault(name, planned) != planned:
            raise ModelError(f"{tensor}: {kind} and {list(shape)}, but GGUF stacks experts of one type and shape", "")
    return list(plan.values())


def _most(kinds: dict[str, str], config: ModelConfig) -> str:
    # general.file_type names the type of most values.
    sizes: Counter[str] = Counter()
    for name, shape in config.tensors():
        sizes[kinds[name]] += math.prod(shape)
    return sizes.most_common(1)[0][0]


def _metadata(request: ExportRequest, architecture: Architecture, kind: str) -> dict[str, Any]:
    config, folder = request.folder.config, request.folder
    values: dict[str, Any] = {
        "general.architecture": architecture.name,
        "general.name": request.source.label,
        "general.file_type": _FILE_TYPES[kind],
        "general.quantization_version": 2,
        **architecture.metadata(config),
    }
    raw, settings = folder.tokenizer_json(), folder.tokenizer_settings()
    values |= tokenizer_metadata(raw, settings, config.vocab_size)
    defaults, _ = folder.generation
    for key, value in (("temp", defaults.temperature), ("top_p", defaults.top_p), ("min_p", defaults.min_p)):
        if value is not None:
            values[f"general.sampling.{key}"] = float(value)
    if defaults.top_k is not None:
        values["general.sampling.top_k"] = defaults.top_k
    ends = [end for end in (*defaults.eos, *config.eos) if end != values.get("tokenizer.ggml.eos_token_id")]
    if ends:
        values["tokenizer.ggml.eot_token_id"] = ends[0]
    template = folder.chat_template()
    if template is not None:
        values["tokenizer.chat_template"] = template.source()
    return values


def _kind(request: ExportRequest, weights: Weights, name: str, shape: Shape) -> str:
    if len(shape) == 1:
        return "F32"
    variant, packing = request.variant.upper(), weights.packing(name)
    if variant in ("F32", "F16", "BF16"):
        return variant
    linear = name in weights.linears and name != "lm_head.weight"
    if packing is None and not (variant and (linear or request.requantize)):
        return dtype_info(weights.checkpoint.dtype(name)).safetensors_name
    if packing is not None and not variant:
        if packing.offsets:
            return "Q4_1" if packing.bits <= 4 else "Q8_0"
        return "Q4_0" if packing.bits <= 4 else "Q8_0"
    # As llama-quantize: embedding and head in 8 bits; rows that do not fill super-blocks in the next larger type.
    kind = variant if linear else "Q8_0"
    if shape[1] % TYPES_BY_NAME[kind].block:
        kind = "Q8_0" if shape[1] % blocks.GROUP == 0 else "F16"
    return kind


def _encode(
    request: ExportRequest, weights: Weights, name: str, kind: str, change: ValueChange | None
) -> tuple[Tensor, float]:
    # Returns uint8 [rows, bytes], and the relative squared error of an inexact type.
    plain = TYPES_BY_NAME[kind].dtype
    if plain is None and weights.packing(name) is not None and name in weights.linears:
        packed = weights.packed(name)
        encoded = blocks.from_packed(packed, kind)
        if encoded is not None:
            data, exact = encoded
            if exact:
                return data, 0.0
            if not request.requantize:
                raise would_round(name, f"its scales are not float16 values, which {kind} needs")
            return data, squared_error(exact_values(packed), dequantize_blocks(data, kind))
    values = weights.dense(name)
    if change is not None:
        values = change.store(values.float())
    if plain is not None:
        cast = values.to(torch_dtype(plain))
        data = cast.view(len(cast), -1).view(torch.uint8)
        if bool((cast.to(torch.float32) == values.to(torch.float32)).all()):
            return data, 0.0
        if not request.requantize:
            raise would_round(name, f"{dtype_info(values.dtype).short} values that {kind} does not hold exactly")
        return data, squared_error(values, cast)
    if not request.requantize:
        packing = weights.packing(name)
        stored = packing.name if packing is not None else dtype_info(values.dtype).short
        raise would_round(name, f"{stored} weights, which {kind} does not hold exactly")
    return _round(values, kind)


def _round(values: Tensor, kind: str) -> tuple[Tensor, float]:
    block = TYPES_BY_NAME[kind].block
    step = max(1, _VALUES // values.shape[1])
    parts, lost, total = [], 0.0, 0.0
    for start in range(0, len(values), step):
        part = values[start : start + step].float()
        data = _ROUNDING[kind](part.reshape(-1, block)).view(len(part), -1)
        lost += (part.double() - dequantize_blocks(data, kind).double()).square().sum().item()
        total += part.double().square().sum().item()
        parts.append(data)
    return torch.cat(parts), lost / total if total else 0.0
