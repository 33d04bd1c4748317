"""Quantizing tensor by tensor, without data: each is read, solved, packed and written, one or two in memory at a time.

Knows no solver by name, and nothing of what becomes of the folder.
"""

from concurrent.futures import Future, ThreadPoolExecutor

import torch

from mycli.quant import solvers
from mycli.quant.model_card import Layer
from mycli.quant.planning.plan import QuantizationPlan
from mycli.quant.progress import ReportProgress
from mycli.quant.rounding.grid import Grid, Quantized, relative_error
from mycli.quant.source_weights import SourceWeights
from mycli.runtime.checkpoint import formats
from mycli.runtime.checkpoint.formats import WritableFormat
from mycli.runtime.checkpoint.model_folder import ModelFolder
from mycli.runtime.checkpoint.reader import CheckpointWriter
from mycli.runtime.device.placement import torch_dtype
from mycli.runtime.errors import ModelError
from mycli.runtime.kernels.cpu.rounding import pack_codes
from mycli.runtime.models.multimodal import MTP_PART


def write_tensors(
    work: QuantizationPlan, writer: CheckpointWriter, device: torch.device, progress: ReportProgress
) -> tuple[Layer, ...]:
    """All tensors. While a linear is solved, the one before is written, and the system reads the tensor after it."""
    source, layout = SourceWeights(work.folder), formats.writable(work.packings)
    layers: list[Layer] = []
    names = [name for name, _ in work.config.tensors()]
    with ThreadPoolExecutor(1) as aside:
        written: Future[None] | None = None
        for name, following in zip(names, [*names[1:], ""], strict=True):
            source.checkpoint.prefetch(following)
            linear = name.removesuffix(".weight")
            if linear not in work.packings:  # they may be large: none is kept until the one before it is written
                writer.write(name, source.read(name))
                continue
            solved, layer = quantize_linear(work, source, linear, device)
            if written is not None:
                written.result()
            written = aside.submit(write_linear, layout, writer, work, linear, solved)
            del solved
            layers.append(layer)
            progress("quantizing", len(layers), len(work.packings))
        if written is not None:
            written.result()
    return tuple(layers)


def write_predictor(head: ModelFolder, writer: CheckpointWriter) -> None:
    """The tensors of the head that predicts further tokens, as they are: calibration does not reach it, and what a
    draft loses by rounding costs more than the bytes that it would save."""
    source = SourceWeights(head)
    for name, _ in head.config.tensors():
        writer.write(MTP_PART.stored_name(name), source.read(name))


def write_linear(
    layout: WritableFormat, writer: CheckpointWriter, work: QuantizationPlan, linear: str, solved: Quantized
) -> None:
    """The tensors that stand in place of a linear's weight, in the layout of all of `work`."""
    packing = work.packings[linear]
    layout.write_weight(writer, linear, packing, solved.codes, solved.stored_scales, work.config.dtype, pack_codes)


def quantize_linear(
    work: QuantizationPlan, source: SourceWeights, linear: str, device: torch.device
) -> tuple[Quantized, Layer]:
    """A linear solved, and what is to be said of it. Raises ModelError that names it for weights that cannot be."""
    packing = work.packings[linear]
    grid = Grid(packing, torch_dtype(work.config.dtype), work.recipe.scales)
    weight = source.read(f"{linear}.weight").to(device)
    try:
        solution = solvers.load(work.recipe.solver).solve(weight, grid, None)
    except ModelError as error:
        raise error.with_message(f"{linear}.weight: {error.message}") from error
    solved, measured = solution.quantized, solution.error
    return solved, Layer(linear, packing.name, relative_error(weight, solved, grid) if measured is None else measured)
