"""Exports a plain Hugging Face folder with dense weights. An MTP head is dense in every folder and copied."""

from collections import Counter
from math import prod

import torch
from torch import Tensor

from mycli.quant.export import Exported, ExportRequest, Rounded, require_in_range, would_round
from mycli.quant.export._folder import write_folder
from mycli.quant.export._weights import Weights, squared_error
from mycli.quant.output.tensor_writer import write_mtp_head
from mycli.quant.progress import ReportProgress
from mycli.quant.source_weights import SourceWeights
from mycli.runtime.checkpoint.writer import CheckpointWriter
from mycli.runtime.device.placement import dtype_info, torch_dtype
from mycli.runtime.models.multimodal import MTP_PART
from mycli.runtime.utils.dtypes import FLOATS

VARIANTS = tuple(FLOATS)


def export(request: ExportRequest, progress: ReportProgress) -> Exported:
    config, weights = request.folder.config, Weights(request.folder)
    variant = FLOATS.get(request.variant)
    dtypes = {
        name: torch_dtype(variant)
        if variant
        else torch_dtype(config.dtype)
        if weights.packing(name) is not None
        else weights.checkpoint.dtype(name)
        for name, _ in config.tensors()
    }
    rounded: list[Rounded] = []

    def fill(writer: CheckpointWriter) -> None:
        for done, (name, dtype) in enumerate(dtypes.items(), 1):
            values = weights.dense(name) if variant else weights.defined_values(name)
            cast = values.to(dtype)
            kind = dtype_info(dtype).short
            if not bool((cast.to(torch.float32) == values.to(torch.float32)).all()):
                if not request.requantize:
                    what = f"{_stored(weights, name, values)} weights, which {kind} does not hold exactly"
                    narrow = dtype != torch.float32
                    raise would_round(name, what, code="fp32-or-requantize" if narrow else "requantize")
                error = squared_error(values, cast)
                require_in_range(name, kind, error)
                rounded.append(Rounded(name, kind, error))
            writer.write(name, cast)
            progress("exporting", done, len(dtypes))
        if head is not None:
            write_mtp_head(head, writer)

    shapes = dict(config.tensors())
    plan = [(name, dtype, shapes[name]) for name, dtype in dtypes.items()]
    head = request.folder.mtp_head
    if head is not None:
        head_weights = SourceWeights(head)
        plan += [(MTP_PART.stored_name(name), head_weights.dtype(name), shape) for name, shape in head.config.tensors()]
    write_folder(request, plan, {"dtype": variant or config.dtype}, fill)
    nbytes = sum(prod(shape) * dtype.itemsize for _, dtype, shape in plan)
    return Exported(request.target, nbytes, Counter(dtype_info(dtype).short for dtype in dtypes.values()), rounded)


def _stored(weights: Weights, name: str, values: Tensor) -> str:
    packing = weights.packing(name)
    return dtype_info(values.dtype).short if packing is None else packing.name
