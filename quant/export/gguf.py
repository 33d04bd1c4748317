"""Writes a model as the GGUF file that llama.cpp's converter would write: metadata, tokenizer and tensors in one file.

Without a variant every tensor keeps its values: blocks of a GGUF file are copied, packed integers become Q4_0, Q4_1 or
Q8_0 blocks, or F32 where rows do not fill blocks, dense matrices keep their dtype, norms and biases become F32. Names,
keys and orders of rows are those of the architecture's declaration (runtime/checkpoint/gguf/architectures).
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from mycli.quant.export import Exported, ExportRequest, Rounded, require_in_range, without_mtp_head, would_round
from mycli.quant.export import _ggml_blocks as blocks
from mycli.quant.export._weights import Weights, exact_values, squared_error
from mycli.quant.ggml import types
from mycli.quant.ggml.file import GgufLayout, fp32_matrices, gguf_path, gguf_place, most_common_kind
from mycli.quant.ggml.solve import round_blocks
from mycli.quant.progress import ReportProgress
from mycli.runtime.checkpoint.gguf.architectures import written_architecture
from mycli.runtime.checkpoint.gguf.blocks import dequantize_blocks, reorder_columns
from mycli.runtime.checkpoint.gguf.checkpoint import file_order
from mycli.runtime.checkpoint.gguf.tensor_rules import TensorRule
from mycli.runtime.checkpoint.gguf.types import TYPES_BY_NAME
from mycli.runtime.device.placement import dtype_info, torch_dtype
from mycli.runtime.errors import ModelError
from mycli.runtime.models.part_spec import Shape

VARIANTS = ("f32", "f16", "bf16", "q8_0", "q4_0", "q4_k")
# The type of most values -> general.file_type; of K-quants the number of the mix that has no other types.
_FILE_TYPES = {
    **{"F32": 0, "F16": 1, "Q4_0": 2, "Q4_1": 3, "Q8_0": 7, "Q5_0": 8, "Q5_1": 9, "BF16": 32},
    **{"Q2_K": 10, "Q3_K": 11, "Q4_K": 14, "Q5_K": 16, "Q6_K": 18},
    **{"IQ2_XXS": 19, "IQ2_XS": 20, "IQ3_XXS": 23, "IQ1_S": 24, "IQ4_NL": 25, "IQ3_S": 26, "IQ2_S": 28, "IQ4_XS": 30},
    **{"IQ1_M": 31, "TQ1_0": 36, "TQ2_0": 37, "MXFP4": 38, "NVFP4": 39, "Q1_0": 40, "Q2_0": 41},
}
_FLOATS = ("F32", "F16", "BF16")
_FLOAT_OF = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}
_REFERENCE = {"Q4_0": blocks.round_q4_0, "Q8_0": blocks.round_q8_0}
_VALUES = 1 << 22  # rounded at a time: 16 MB of fp32


def export(request: ExportRequest, progress: ReportProgress) -> Exported:
    """Write the file. Raises ModelError naming a tensor without a GGUF form or that would be rounded."""
    # A target without the suffix .gguf gets it.
    target = gguf_path(request.target)
    config, weights = request.folder.config, Weights(request.folder)
    exact = fp32_matrices(config)
    architecture = written_architecture(config)
    folder = replace(request.folder, config=architecture.folded(config))
    copied = {} if request.variant else weights.blocks(architecture)
    kinds = {
        tensor: copied.get(tensor) or ("F32" if tensor in exact else _kind(request, weights, tensor, shape))
        for tensor, shape in config.tensors()
    }
    for tensor in (tensor for tensor in kinds if gguf_place(architecture, tensor).rule.by_head):
        if kinds[tensor] not in _FLOATS:  # half of it is transposed, and blocks lie along rows
            kinds[tensor] = "F32" if tensor in copied else _FLOAT_OF[config.dtype]
    file_type = _FILE_TYPES[most_common_kind(kinds, config)]
    layout = GgufLayout(folder, request.source.label, kinds, file_type)
    rounded: list[Rounded] = []
    with layout.writer(target, request.overwrite) as writer:
        for done, (tensor, place) in enumerate(layout.places.items(), 1):
            if copied.get(tensor) == kinds[tensor]:
                data, error = weights.block_rows(tensor), 0.0
            else:
                factors = architecture.factors(config, tensor)
                data, error = _encode(request, weights, tensor, kinds[tensor], place.rule, factors)
            if error:
                require_in_range(tensor, kinds[tensor], error)
                rounded.append(Rounded(tensor, kinds[tensor], error))
            writer.write(tensor, data)
            progress("exporting", done, len(kinds))
        writer.file.finish()
    file = writer.file
    return Exported(target, file.nbytes, Counter(kinds.values()), rounded, without_mtp_head(request.folder))


def _kind(request: ExportRequest, weights: Weights, name: str, shape: Shape) -> str:
    if len([size for size in shape if size != 1]) < 2 or len(shape) > 2:
        return "F32"
    variant, packing = request.variant.upper(), weights.packing(name)
    if variant in _FLOATS:
        return variant
    linear = name in weights.linears and name != "lm_head.weight"
    if packing is None and not (variant and (linear or request.requantize)):
        return dtype_info(weights.checkpoint.dtype(name)).safetensors_name
    if packing is not None and not variant:
        if shape[1] % blocks.GROUP:
            return "F32"
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


def _encode(
    request: ExportRequest, weights: Weights, name: str, kind: str, rule: TensorRule, factors: Sequence[float]
) -> tuple[Tensor, float]:
    # Returns uint8 [rows, bytes], and the relative squared error of an inexact type. factors: of the rows, or none.
    plain, order = TYPES_BY_NAME[kind].dtype, None
    if rule.column_order is not None:
        order = file_order(rule.column_order, request.folder.config, weights.linears[name].in_features)
    if plain is None and weights.packing(name) is not None and name in weights.linears and not factors:
        packed = weights.packed(name)
        if order is not None:
            packed = reorder_columns(packed, order)
        if (encoded := blocks.from_packed(packed, kind)) is not None:
            data, exact = encoded
            if exact:
                return data, 0.0
            if not request.requantize:
                raise would_round(name, f"its scales are not float16 values, which {kind} needs")
            return data, squared_error(exact_values(packed), dequantize_blocks(data, kind))
    values = weights.dense(name)
    values = values.reshape(values.shape or (1,))
    if order is not None:
        values = values[:, order]
    if factors:
        values = values.float() * torch.tensor(factors).unsqueeze(1)
    if rule.change is not None:
        values = rule.change.store(values.float())
    if plain is not None:
        return _cast(request, name, kind, values, torch_dtype(plain))
    if not request.requantize:
        packing = weights.packing(name)
        stored = packing.name if packing is not None else dtype_info(values.dtype).short
        raise would_round(name, f"{stored} weights, which {kind} does not hold exactly")
    try:
        return _round(values, kind)
    except ModelError as error:
        raise error.with_message(f"{name}: {error.message}") from error


def _cast(request: ExportRequest, name: str, kind: str, values: Tensor, dtype: torch.dtype) -> tuple[Tensor, float]:
    cast = values.to(dtype)
    data = cast.contiguous().view(len(cast), -1).view(torch.uint8)
    if bool((cast.float() == values.float()).all()):
        return data, 0.0
    if not request.requantize:
        raise would_round(name, f"{dtype_info(values.dtype).short} values that {kind} does not hold exactly")
    return data, squared_error(values, cast)


def _round(values: Tensor, kind: str) -> tuple[Tensor, float]:
    # Q4_0 and Q8_0 as ggml's reference, bit for bit; K-quants by the search of `quantize`.
    step = max(1, _VALUES // values.shape[1])
    parts, lost, total = [], 0.0, 0.0
    for start in range(0, len(values), step):
        part = values[start : start + step].float()
        if kind in _REFERENCE:
            data = _REFERENCE[kind](part.reshape(-1, blocks.GROUP)).view(len(part), -1)
        else:
            data = round_blocks(part, types.load(kind))
        lost += (part.double() - dequantize_blocks(data, kind).double()).square().sum().item()
        total += part.double().square().sum().item()
        parts.append(data)
    return torch.cat(parts), lost / total if total else 0.0
