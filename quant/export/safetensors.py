"""Exports a plain Hugging Face folder with dense weights. An MTP head is dense in every folder and copied."""

from collections import Counter
from collections.abc import Iterator, Sequence
from functools import reduce

import torch
from torch import Tensor

from mycli.quant.export import Exported, ExportRequest, Rounded, require_in_range, would_round
from mycli.quant.export._folder import write_folder
from mycli.quant.export._weights import Weights, squared_error
from mycli.quant.output.tensor_writer import write_mtp_head
from mycli.quant.progress import ReportProgress
from mycli.quant.source_weights import SourceWeights
from mycli.runtime.checkpoint.restored_weights import JoinedTensor, joined_tensors
from mycli.runtime.checkpoint.writer import CheckpointWriter
from mycli.runtime.device.placement import dtype_info, torch_dtype
from mycli.runtime.models.config import ModelConfig
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

    def read(name: str, dtype: torch.dtype) -> Tensor:
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
        return cast

    def fill(writer: CheckpointWriter) -> None:
        for done, (tensor, dtype) in enumerate(written, 1):
            writer.write(tensor.name, _join(tensor, [read(name, dtype) for name in tensor.parts]))
            progress("exporting", done, len(written))
        if head is not None:
            write_mtp_head(head, writer)

    written = [
        (tensor, reduce(torch.promote_types, (dtypes[name] for name in tensor.parts))) for tensor in _tensors(config)
    ]
    plan = [(tensor.name, dtype, tensor.shape) for tensor, dtype in written]
    head = request.folder.mtp_head
    if head is not None:
        head_weights = SourceWeights(head)
        plan += [(MTP_PART.stored_name(name), head_weights.dtype(name), shape) for name, shape in head.config.tensors()]
    nbytes = write_folder(request, plan, {"dtype": variant or config.dtype}, fill)
    return Exported(request.target, nbytes, Counter(dtype_info(dtype).short for _, dtype in written), rounded)


def _tensors(config: ModelConfig) -> Iterator[JoinedTensor]:
    # Other programs read the names of the family's files, and give random values to a tensor that is not there.
    joined = {part: tensor for tensor in joined_tensors(config) for part in tensor.parts}
    for name, shape in config.tensors():
        tensor = joined.get(name) or JoinedTensor(name, shape, (name,))
        if name == tensor.parts[0]:
            yield tensor


def _join(tensor: JoinedTensor, values: Sequence[Tensor]) -> Tensor:
    if tensor.name in tensor.parts:  # not joined; a stack of one expert is
        return values[0]
    rows = torch.cat([part.view(tensor.groups, -1) for part in values], dim=1)
    shape = (*tensor.shape[:-2], *tensor.shape[:-3:-1]) if tensor.transposed else tensor.shape
    whole = rows.view(shape)
    return whole.mT.contiguous() if tensor.transposed else whole


def _stored(weights: Weights, name: str, values: Tensor) -> str:
    packing = weights.packing(name)
    return dtype_info(values.dtype).short if packing is None else packing.name
