"""A work folder that stores finished parts of a run in the unfinished output itself, with a journal.

Nothing is on disk twice, so a model can be quantized with little more disk than the result needs.
"""

import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from mycli.quant.output.model_card import Layer
from mycli.quant.output.tensor_writer import TensorWriter
from mycli.quant.output.work_folder import Solved, WorkFolder
from mycli.quant.planning.target import SOURCE
from mycli.quant.rounding.grid import Quantized
from mycli.quant.source_weights import SourceWeights
from mycli.runtime.checkpoint import formats
from mycli.runtime.checkpoint.manifest import Manifest
from mycli.runtime.checkpoint.reader import Checkpoint
from mycli.runtime.checkpoint.writer import CheckpointWriter
from mycli.runtime.models.config import ModelConfig
from mycli.runtime.quantization.packed_weight import unpack
from mycli.runtime.utils.files import disk_errors

_JOURNAL = "finished.jsonl"
OUTPUT = "output"


class OutputWork(WorkFolder):
    """A work folder that contains the unfinished output. Call `attach` before anything else.

    A run that is killed at any moment loses only the tensor or block it worked on.
    """

    def __init__(self, folder: Path, run: Mapping[str, Any], *, restart: bool = False) -> None:
        super().__init__(folder, run, restart=restart)
        self.output = folder / OUTPUT
        self._tensors: dict[str, Layer | None] = {}
        self._blocks: dict[int, dict[str, Any]] = {}
        self._solved_here = False

    def _leftovers(self) -> list[Path]:
        return [*super()._leftovers(), self.folder / _JOURNAL]

    def clear(self) -> None:
        for inner in (self.output, self.folder / SOURCE):
            shutil.rmtree(inner, ignore_errors=True)
        super().clear()

    def attach(self, writer: CheckpointWriter, output: TensorWriter, config: ModelConfig) -> None:
        self._writer, self._target = writer, output
        self._linears = {linear.name: linear for linear in config.linears()}
        # A journal without its output is worthless: the plan may have changed, and with it the place of every tensor.
        if not writer.continues:
            (self.folder / _JOURNAL).unlink(missing_ok=True)
        for record in self._records():
            if "tensor" in record:
                layer = record["layer"]
                self._tensors[record["tensor"]] = None if layer is None else Layer(**layer)
                writer.mark_written(record["tensor"].removesuffix(".weight") if layer else record["tensor"])
            else:
                self._blocks[record["block"]] = record

    def _records(self) -> list[dict[str, Any]]:
        path = self.folder / _JOURNAL
        if not path.exists():
            return []
        lines = path.read_bytes().splitlines(keepends=True)
        if lines and not lines[-1].endswith(b"\n"):  # the run was killed while it wrote this line
            os.truncate(path, sum(map(len, lines[:-1])))
            lines.pop()
        return [json.loads(line) for line in lines]

    def _record(self, **record: Any) -> None:
        # Tensors reach the disk before the line that names them; the other order would record what a power cut loses.
        self._writer.flush()
        with disk_errors(self.folder), (self.folder / _JOURNAL).open("ab") as file:
            file.write(json.dumps(record).encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())

    # Tensors of methods without data, and tensors that are copied

    def finished(self, tensor: str) -> bool:
        return tensor in self._tensors

    def layer(self, tensor: str) -> Layer | None:
        """Return the record of a finished tensor; None for a copied one."""
        return self._tensors[tensor]

    def copy(self, source: SourceWeights, tensor: str) -> None:
        if not self.finished(tensor):
            self._target.copy(source, tensor)
            self._record(tensor=tensor, layer=None)

    def write_linear(self, layer: Layer, solved: Quantized) -> None:
        self._target.write_linear(layer.name, solved)
        self._record(tensor=f"{layer.name}.weight", layer=asdict(layer))

    # Blocks

    def load(self, block: int) -> Solved | None:
        record = self._blocks.get(block)
        # Finished blocks precede the first new one, so reading them ends before anything is added to the output.
        if record is None or self._solved_here:
            return None
        layers = tuple(Layer(**layer) for layer in record["layers"])
        checkpoint = Checkpoint(Manifest.open(self._writer.folder))
        linears = {layer.name: self._quantized(checkpoint, layer.name) for layer in layers}
        for name in (*linears, *record["changed"]):
            self._writer.mark_written(name)
        return Solved(linears, {name: checkpoint.read(name) for name in record["changed"]}, layers)

    def _quantized(self, checkpoint: Checkpoint, name: str) -> Quantized:
        linear, packing = self._linears[name], self._target.packings[name]
        weight = formats.read_weight(checkpoint, [linear], packing, torch.device("cpu"))
        return Quantized(unpack(weight.packed, packing.bits, linear.in_features), weight.scales)

    def save(self, block: int, solved: Solved) -> None:
        self._solved_here = True
        self._target.write_block(solved)
        self._record(block=block, layers=[asdict(layer) for layer in solved.layers], changed=[*solved.changed])
