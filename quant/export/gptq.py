"""Exports GPTQ version 1, as AutoGPTQ and GPTQModel write it: `qweight`, `qzeros`, `scales` and `g_idx` per linear.

Codes stay; scales must be fp16. Codes are packed along the inputs (docs/format.md), and zero points stored less one.
"""

import re
from collections.abc import Iterator

import torch
from torch import Tensor

from mycli.quant.export import Exported, ExportRequest
from mycli.quant.export._folder import dense_modules, only_packing, write_symmetric
from mycli.quant.progress import ReportProgress
from mycli.runtime.checkpoint.model_folder import ModelFolder
from mycli.runtime.errors import ModelError
from mycli.runtime.models.part_spec import LinearSpec, Shape
from mycli.runtime.quantization.packed_weight import PackedWeight, pack
from mycli.runtime.quantization.scheme import Packing

VARIANTS = ()
_WORD = 32
_LAYER = re.compile(r"(?<=\\\.)\d+(?=\\\.)")  # a number between two escaped dots


def export(request: ExportRequest, progress: ReportProgress) -> Exported:
    packing = only_packing(request, "GPTQ")
    head = request.folder.packings.get("lm_head")
    # One width applies to all linears, so a head of another one is dequantized.
    packed_head = head is not None and head.as_integers() == packing
    # Without a rule for routers and gates, readers expect every linear packed.
    dense = _dense_patterns(request.folder)
    settings = {
        "quant_method": "gptq",
        "checkpoint_format": "gptq",
        "bits": packing.bits,
        "group_size": packing.group_size or -1,
        "desc_act": False,
        "sym": True,
        "lm_head": packed_head,
        "pack_dtype": "int32",
        **({"dynamic": {f"-:^{pattern}$": {} for pattern in dense}} if dense else {}),
    }
    return write_symmetric(request, "GPTQ", _planned, _parts, settings, progress, dense_head=not packed_head)


def _dense_patterns(folder: ModelFolder) -> list[str]:
    # One expression for all layers, unless layers of another kind have a packed linear of that name.
    packed = {_in_all_layers(name) for linear in folder.packings for name in folder.config.module_names(linear)}
    patterns = {name: _in_all_layers(name) for name in dense_modules(folder.config)}
    return sorted({re.escape(name) if pattern in packed else pattern for name, pattern in patterns.items()})


def _in_all_layers(name: str) -> str:
    return _LAYER.sub(r"\\d+", re.escape(name))


def _planned(linear: LinearSpec, packing: Packing) -> Iterator[tuple[str, torch.dtype, Shape]]:
    rows, columns, bits = linear.out_features, linear.in_features, packing.bits
    if rows * bits % _WORD or columns * bits % _WORD:
        raise ModelError(f"{linear.name}: {rows} x {columns} codes of {bits} bits do not fill whole words", "")
    groups = packing.groups(columns)
    yield f"{linear.name}.qweight", torch.int32, (columns * bits // _WORD, rows)
    yield f"{linear.name}.qzeros", torch.int32, (groups, rows * bits // _WORD)
    yield f"{linear.name}.scales", torch.float16, (groups, rows)
    yield f"{linear.name}.g_idx", torch.int32, (columns,)


def _parts(weight: PackedWeight) -> dict[str, Tensor]:
    packing, columns = weight.packing, weight.in_features
    groups = packing.groups(columns)
    zero = (1 << (packing.bits - 1)) - 1
    zeros = torch.full((groups, weight.out_features), zero, dtype=torch.uint8)
    return {
        "qweight": weight.packed.t().contiguous(),
        "qzeros": pack(zeros, packing.bits),
        "scales": weight.scales.to(torch.float16).t().contiguous(),
        "g_idx": torch.arange(columns, dtype=torch.int32) // (columns // groups),
    }
