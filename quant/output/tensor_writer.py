"""Writes the tensors of a quantized model into its checkpoint."""

from collections.abc import Mapping

from mycli.quant.output.work_folder import Solved
from mycli.quant.rounding.grid import Quantized
from mycli.quant.source_weights import SourceWeights
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


def write_mtp_head(head: ModelFolder, writer: CheckpointWriter) -> None:
    # Unquantized: calibration does not reach the head, and drafts lose more acceptance by rounding than its bytes save.
    source = SourceWeights(head)
    for name, _ in head.config.tensors():
        writer.write(MTP_PART.stored_name(name), source.read(name))
