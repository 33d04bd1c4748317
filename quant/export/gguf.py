"""Writes a model as the GGUF file that llama.cpp's converter would write: metadata, tokenizer and tensors in one file.

Without a variant every tensor keeps its values: packed integers become Q4_0, Q4_1 or Q8_0 blocks, dense matrices keep
their dtype, norms and biases become F32. Names, keys and orders of rows are those of the architecture's declaration
(runtime/checkpoint/gguf/architectures).
"""

import dataclasses
import math
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mycli.quant.export import Exported, ExportRequest, Rounded, without_mtp_head, would_round
from mycli.quant.export import _ggml_blocks as blocks
from mycli.quant.export._gguf_tokenizer import tokenizer_metadata
from mycli.quant.export._weights import Weights, exact_values, squared_error
from mycli.quant.progress import ReportProgress
from mycli.runtime.checkpoint.gguf.architecture import Architecture, Place, TensorRule
from mycli.runtime.checkpoint.gguf.architectures import written_architecture
from mycli.runtime.checkpoint.gguf.blocks import dequantize_blocks, reorder_columns
from mycli.runtime.checkpoint.gguf.checkpoint import file_order
from mycli.runtime.checkpoint.gguf.folder import GgufFolder
from mycli.runtime.checkpoint.gguf.header import parse_gguf_header
from mycli.runtime.checkpoint.gguf.parts import SUFFIX
from mycli.runtime.checkpoint.gguf.rope import ROPE_FREQS, rope_factors
from mycli.runtime.checkpoint.gguf.types import TYPES_BY_NAME
from mycli.runtime.checkpoint.gguf.writer import GgufWriter, make_gguf_header
from mycli.runtime.device.placement import dtype_info, torch_dtype
from mycli.runtime.errors import ModelError, UsageError
from mycli.runtime.models.config import ModelConfig
from mycli.runtime.models.part_spec import Shape

VARIANTS = ("f32", "f16", "bf16", "q8_0", "q4_0", "q4_k")
_FILE_TYPES = {
    "F32": 0,
    "F16": 1,
    "Q4_0": 2,
    "Q4_1": 3,
    "Q8_0": 7,
    "Q4_K": 14,
    "BF16": 32,
    "MXFP4": 38,
}  # general.file_type
_FLOATS = ("F32", "F16", "BF16")
_FLOAT_OF = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}
_ROUNDING = {"Q4_0": blocks.round_q4_0, "Q8_0": blocks.round_q8_0, "Q4_K": blocks.round_q4_k}
# The fields of a config that are not in its layers and shapes.
_COMPARED = (
    *("max_context", "layer_norm", "rms_norm_eps", "embedding_scale", "round_embedding_scale"),
    *("logit_scale", "logit_softcap", "tie_embeddings", "per_layer_width"),
)
_LACKING = "cannot be written as GGUF, which has no key for"
_HINT = "llama.cpp would compute other logits; export to safetensors"
_VALUES = 1 << 22  # rounded at a time: 16 MB of fp32


def export(request: ExportRequest, progress: ReportProgress) -> Exported:
    """Write the file; a target without the suffix .gguf gets it.

    Raises ModelError naming the tensor that has no GGUF form or would be rounded, UsageError for a target that is not
    a file name.
    """
    if request.target.name in ("", ".."):
        raise UsageError(f"{request.target}: a folder, but GGUF is one file", "name the file to write")
    config, weights = request.folder.config, Weights(request.folder)
    architecture = written_architecture(config)
    exact = {f"{linear.name}.weight" for layer in config.layer_specs for linear in layer.unquantized}
    places = {tensor: _place(architecture, tensor) for tensor, _ in config.tensors()}
    kinds = {
        tensor: "F32" if tensor in exact else _kind(request, weights, tensor, shape)
        for tensor, shape in config.tensors()
    }
    for tensor in (tensor for tensor, place in places.items() if place.rule.by_head and kinds[tensor] not in _FLOATS):
        # Half of it is transposed, and blocks lie along rows.
        kinds[tensor] = _FLOAT_OF[config.dtype]
    factors = rope_factors(config)
    metadata = _metadata(request, architecture, _most(kinds, config))
    plan: list[tuple[str, str, Shape]] = [(ROPE_FREQS, "F32", (len(factors),))] if factors else []
    plan += _plan(config, places, kinds)
    _require_keys(config, metadata, plan, factors)
    rounded: list[Rounded] = []
    target = request.target
    if target.suffix != SUFFIX:  # a model's path is taken for a file only by its suffix
        target = target.with_name(target.name + SUFFIX)
    with GgufWriter(target, metadata, plan, overwrite=request.overwrite) as writer:
        if factors:
            writer.write(ROPE_FREQS, torch.tensor(factors).numpy().data)
        for done, (tensor, place) in enumerate(places.items(), 1):
            data, error = _encode(request, weights, tensor, kinds[tensor], place.rule)
            if error:
                rounded.append(Rounded(tensor, kinds[tensor], error))
            if place.rule.row_order is not None:
                data = data[file_order(place.rule.row_order, config, len(data))]
            parts = data.split_with_sizes(_rows(config, place, len(data)))
            if place.rule.by_head:
                parts = _by_head(config, data, kinds[tensor])
            for name, part in zip(place.names, parts, strict=True):
                writer.write(name, part.contiguous().numpy().reshape(-1).data, (place.expert or 0) * part.nbytes)
            progress("exporting", done, len(kinds))
        writer.finish()
    return Exported(writer.target, writer.nbytes, Counter(kinds.values()), rounded, without_mtp_head(request.folder))


def _place(architecture: Architecture, name: str) -> Place:
    place = architecture.place(name)
    if place is None:
        raise ModelError(f"{name}: GGUF has no tensor for it in the architecture {architecture.name}", "")
    return place


def _rows(config: ModelConfig, place: Place, rows: int) -> list[int]:
    # Of the tensors that store it.
    first = rows if place.rule.first_rows is None else place.rule.first_rows(config)
    return [first] if first == rows else [first, rows - first]


def _halves(config: ModelConfig) -> tuple[Shape, Shape]:
    # The shapes of the two tensors of latent attention's kv_b.
    spec = next(layer.latent for layer in config.layer_specs if layer.latent is not None)
    return (spec.heads, spec.rank, spec.nope_dim), (spec.heads, spec.value_dim, spec.rank)


def _by_head(config: ModelConfig, data: Tensor, kind: str) -> tuple[Tensor, ...]:
    plain = TYPES_BY_NAME[kind].dtype
    assert plain is not None
    (heads, rank, nope), (_, value, _) = _halves(config)
    values = data.view(torch_dtype(plain)).view(heads, nope + value, rank)
    parts = values[:, :nope].transpose(1, 2).contiguous(), values[:, nope:].contiguous()
    return tuple(part.view(torch.uint8) for part in parts)


def _plan(config: ModelConfig, places: dict[str, Place], kinds: dict[str, str]) -> list[tuple[str, str, Shape]]:
    stacks = Counter(place.name for place in places.values() if place.expert is not None)
    plan: dict[str, tuple[str, str, Shape]] = {}
    for tensor, full in config.tensors():
        place, kind = places[tensor], kinds[tensor]
        if place.rule.by_head:
            plan |= {name: (name, kind, shape) for name, shape in zip(place.names, _halves(config), strict=True)}
            continue
        for name, rows in zip(place.names, _rows(config, place, full[0]), strict=True):
            # GGUF drops axes of length one.
            shape = tuple(size for size in (rows, *full[1:]) if size != 1) or (1,)
            if place.rule.stored_shape is not None:
                shape = place.rule.stored_shape(config)
            if place.name in stacks:
                parts = 1 + len(place.rule.more_names)
                shape = (stacks[place.name] // parts, parts * shape[0], *shape[1:])
            planned = (name, kind, shape)
            if plan.setdefault(name, planned) != planned:
                problem = f"{kind} and {list(shape)}, but GGUF stacks experts of one type and shape"
                raise ModelError(f"{tensor}: {problem}", "")
    return list(plan.values())


def _require_keys(
    config: ModelConfig, metadata: dict[str, Any], plan: list[tuple[str, str, Shape]], factors: list[float]
) -> None:
    """Raise ModelError if a reader of the file would not find the same model: llama.cpp has no key for something."""
    header, places = make_gguf_header(metadata, plan, "the file to write")
    stored = parse_gguf_header(
        lambda offset, count: header[offset : offset + count],
        max(entry.offset + entry.nbytes for entry in places.values()),
        "the file to write",
    )
    written = GgufFolder.from_header(stored, lambda name: factors, Path()).config
    for name in _COMPARED:
        if not _equal(getattr(config, name), getattr(written, name)):
            raise ModelError(f"config.json: {_LACKING} its {name}", _HINT)
    for ours, theirs in zip(config.layer_specs, written.layer_specs, strict=True):
        parts = [part for part in ("mixer", "state_space", "mlp") if getattr(ours, part) is not None]
        fields = [(part, field) for part in parts for field in _fields(getattr(ours, part))]
        for part, field in fields:
            if not _equal(getattr(getattr(ours, part), field), getattr(getattr(theirs, part), field, None)):
                raise ModelError(f"config.json: {_LACKING} {field} of layer {ours.index}", _HINT)
        if not _equal(ours, theirs):
            raise ModelError(f"config.json: {_LACKING} layer {ours.index}", _HINT)


def _fields(part: Any) -> list[str]:
    return [field.name for field in dataclasses.fields(part)]


def _equal(ours: Any, theirs: Any) -> bool:
    # Keys are fp32.
    if isinstance(ours, float) and isinstance(theirs, float | int):
        return math.isclose(ours, theirs, rel_tol=1e-5)
    if isinstance(ours, tuple) and isinstance(theirs, tuple):
        return len(ours) == len(theirs) and all(map(_equal, ours, theirs))
    if dataclasses.is_dataclass(ours) and type(ours) is type(theirs):
        return all(_equal(getattr(ours, name), getattr(theirs, name)) for name in _fields(ours))
    return bool(ours == theirs)


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
    if len([size for size in shape if size != 1]) == 1 or len(shape) > 2:
        return "F32"
    variant, packing = request.variant.upper(), weights.packing(name)
    if variant in ("F32", "F16", "BF16"):
        return variant
    linear = name in weights.linears and name != "lm_head.weight"
    if packing is None and not (variant and (linear or request.requantize)):
        return dtype_info(weights.checkpoint.dtype(name)).safetensors_name
    if packing is not None and not variant:
        if packing.codes == "e2m1" and packing.group_size == blocks.GROUP:
            return "MXFP4"
        if packing.offsets:
            return "Q4_1" if packing.bits <= 4 else "Q8_0"
        return "Q4_0" if packing.bits <= 4 else "Q8_0"
    # As llama-quantize: embedding and head in 8 bits; rows that do not fill super-blocks in the next larger type.
    kind = variant if linear else "Q8_0"
    if shape[1] % TYPES_BY_NAME[kind].block:
        kind = "Q8_0" if shape[1] % blocks.GROUP == 0 else "F16"
    return kind


def _encode(request: ExportRequest, weights: Weights, name: str, kind: str, rule: TensorRule) -> tuple[Tensor, float]:
    # Returns uint8 [rows, bytes], and the relative squared error of an inexact type.
    plain, change = TYPES_BY_NAME[kind].dtype, rule.change
    order = None
    if rule.column_order is not None:
        order = file_order(rule.column_order, request.folder.config, weights.linears[name].in_features)
    if plain is None and weights.packing(name) is not None and name in weights.linears:
        packed = weights.packed(name)
        if order is not None:
            packed = reorder_columns(packed, order)
        encoded = blocks.from_packed(packed, kind)
        if encoded is not None:
            data, exact = encoded
            if exact:
                return data, 0.0
            if not request.requantize:
                raise would_round(name, f"its scales are not float16 values, which {kind} needs")
            return data, squared_error(exact_values(packed), dequantize_blocks(data, kind))
    values = weights.dense(name)
    if order is not None:
        values = values[:, order]
    if change is not None:
        values = change.store(values.float())
    if plain is not None:
        cast = values.to(torch_dtype(plain))
        data = cast.contiguous().view(len(cast), -1).view(torch.uint8)
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
