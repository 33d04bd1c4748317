"""Quantizes tensor by tensor where the solver uses no data."""

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol

import torch

from mycli.quant.output.model_card import Layer
from mycli.quant.output.tensor_writer import TensorWriter
from mycli.quant.progress import ReportProgress
from mycli.quant.rounding.grid import Quantized
from mycli.quant.solving.linear_solver import LinearSolver
from mycli.quant.source_weights import SourceWeights


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
