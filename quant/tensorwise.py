"""Writes the tensors of a quantized model, and quantizes tensor by tensor where the solver uses no data."""

from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol

import torch

from mycli.quant.linear_solver import LinearSolver
from mycli.quant.model_card import Layer
from mycli.quant.progress import ReportProgress
from mycli.quant.rounding.grid import Quantized
from mycli.quant.source_weights import SourceWeights
from mycli.quant.work_folder import Solved
from mycli.runtime.checkpoint import formats
from mycli.runtime.checkpoint.model_folder import ModelFolder
from mycli.runtime.checkpoint.writer import CheckpointWriter
from mycli.runtime.kernels.cpu.rounding import pack_codes
from mycli.runtime.models.multimodal import MTP_PART
from mycli.runtime.quantization.scheme import Packing
from mycli.runtime.utils.dtypes import Dtype


class TensorWriter:
    """Writes quantized linears in the layout of their packings, and other tensors as they are."""

    def __init__(self, writer: CheckpointWriter, packings: Mapping[str, Packing], dtype: Dtype) -> None:
        """`dtype`: the model's."""
        self._writer = writer
        self.packings = packings
        self._dtype = dtype
        self._layout = formats.writable(packings)

    def is_quantized(self, tensor: str) -> bool:
        return tensor.removesuffix(".weight") in self.packings

    def copy(self, source: SourceWeights, tensor: str) -> None:
        self._writer.write(tensor, source.read(tensor))

    def write_linear(self, name: str, solved: Quantized) -> None:
        packing = self.packings[name]
        codes, scales = solved.codes, solved.stored_scales
        self._layout.write_weight(self._writer, name, packing, codes, scales, self._dtype, pack_codes)

    def write_block(self, solved: Solved) -> None:
        for name, quantized in solved.linears.items():
            self.write_linear(name, quantized)
        for name, tensor in solved.changed.items():
            self._writer.write(name, tensor)


class Journal(Protocol):
    """Records the tensors that are written, so that a later run continues."""

    def finished(self, tensor: str) -> bool: ...

    def layer(self, tensor: str) -> Layer | None: ...

    def copy(self, source: SourceWeights, tensor: str) -> None: ...

    def write_linear(self, layer: Layer, solved: Quantized) -> None: ...


def quantize_tensors(
    source: SourceWeights,
    names: Sequence[str],
    solver: LinearSolver,
    output: TensorWriter,
    device: torch.device,
    progress: ReportProgress,
    journal: "Journal | None" = None,
) -> tuple[Layer, ...]:
    """Write the tensors `names`, quantizing those that `output` has a packing for, except those that `journal` has."""
    # While a linear is solved, the one before it is written and the tensor after it is read ahead.
    layers: list[Layer] = []
    progress("quantizing", 0, len(output.packings))
    with ThreadPoolExecutor(1) as background:
        written: Future[None] | None = None
        for name, following in zip(names, [*names[1:], ""], strict=True):
            if journal is not None and journal.finished(name):
                layers += [done] if (done := journal.layer(name)) is not None else []
                continue
            source.checkpoint.prefetch(following)
            if not output.is_quantized(name):
                # Not in the background: embeddings are large, and one at a time is enough.
                (journal or output).copy(source, name)
                continue
            linear = name.removesuffix(".weight")
            weight = source.read(name).to(device)
            solved, layer = solver.solve_without_data(linear, weight, output.packings[linear])
            del weight
            if written is not None:
                written.result()
            if journal is None:
                written = background.submit(output.write_linear, linear, solved)
            else:
                written = background.submit(journal.write_linear, layer, solved)
            del solved
            layers.append(layer)
            progress("quantizing", len(layers), len(output.packings))
        if written is not None:
            written.result()
    return tuple(layers)


def write_mtp_head(head: ModelFolder, writer: CheckpointWriter) -> None:
    """Copy the tensors of the MTP head unquantized."""
    # Calibration does not reach the head, and drafts lose more acceptance by rounding than its bytes save.
    source = SourceWeights(head)
    for name, _ in head.config.tensors():
        writer.write(MTP_PART.stored_name(name), source.read(name))
