"""Exports AWQ in the layout of AutoAWQ's GEMM kernel: 4 bits, eight outputs per word in an interleaved order.

Codes stay, with a zero point of 8; scales must be fp16.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from mycli.quant.export import Exported, ExportRequest
from mycli.quant.export._folder import dense_modules, only_packing, write_symmetric
from mycli.quant.progress import ReportProgress
from mycli.runtime.errors import ModelError
from mycli.runtime.models.part_spec import LinearSpec, Shape
from mycli.runtime.quantization.packed_weight import PackedWeight, pack, unpack
from mycli.runtime.quantization.scheme import Packing

VARIANTS = ()
_BITS, _WORD = 4, 8  # word: outputs in 32 bits
_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # the output in each nibble of a word


def export(request: ExportRequest, progress: ReportProgress) -> Exported:
    packing = only_packing(request, "AWQ")
    if packing.bits != _BITS:
        raise ModelError(f"{packing.name} weights: AWQ holds only 4-bit weights", "")
    # Without a list of routers and gates, readers expect every linear packed.
    dense = dense_modules(request.folder.config)
    settings = {
        "quant_method": "awq",
        "version": "gemm",
        "bits": _BITS,
        "group_size": packing.group_size or -1,
        "zero_point": True,
        "modules_to_not_convert": dense or None,
    }
    return write_symmetric(request, "AWQ", _planned, _parts, settings, progress, dense_head=True)


def _planned(linear: LinearSpec, packing: Packing) -> Iterator[tuple[str, torch.dtype, Shape]]:
    rows, columns = linear.out_features, linear.in_features
    if rows % _WORD:
        raise ModelError(f"{linear.name}: {rows} outputs do not fill whole words of AWQ", "")
    groups = packing.groups(columns)
    yield f"{linear.name}.qweight", torch.int32, (columns, rows // _WORD)
    yield f"{linear.name}.qzeros", torch.int32, (groups, rows // _WORD)
    yield f"{linear.name}.scales", torch.float16, (groups, rows)


def _words(codes: Tensor) -> Tensor:
    return pack(codes.view(len(codes), -1, _WORD)[:, :, _ORDER].flatten(1), _BITS)


def _parts(weight: PackedWeight) -> dict[str, Tensor]:
    codes = unpack(weight.packed, _BITS, weight.in_features).t().contiguous()
    zeros = torch.full((weight.scales.shape[1], weight.out_features), 1 << (_BITS - 1), dtype=torch.uint8)
    scales = weight.scales.to(torch.float16).t().contiguous()
    return {"qweight": _words(codes), "qzeros": _words(zeros), "scales": scales}
