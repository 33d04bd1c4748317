"""Reads the tensors of a model that is to be quantized; weights of an 8-bit checkpoint are dequantized."""

import torch
from torch import Tensor

from mycli.runtime.checkpoint.formats import quantizable, read_dense
from mycli.runtime.checkpoint.model_folder import ModelFolder
from mycli.runtime.device.placement import torch_dtype
from mycli.runtime.errors import ModelError

SOURCE_BITS = 8  # with fewer, too much is lost already to quantize again


class SourceWeights:
    """Reads a folder's tensors dense. Raises ModelError if the files and the config disagree."""

    def __init__(self, folder: ModelFolder, dtype: torch.dtype | None = None) -> None:
        folder.require_merged()
        # dtype: of tensors stored in blocks that are not products, such as an embedding; None: the config's.
        self.checkpoint = folder.checkpoint(dtype=dtype)
        self._packings, self._dtype = folder.packings, torch_dtype(folder.config.dtype)
        packed = (spec for spec in quantizable(folder.config) if spec.name in self._packings)
        self._packed = {f"{spec.name}.weight": spec for spec in packed}

    def dtype(self, name: str) -> torch.dtype:
        return self._dtype if name in self._packed else self.checkpoint.dtype(name)

    def read(self, name: str) -> Tensor:
        """Read a tensor on the CPU; a packed weight is rounded once, to the model's dtype."""
        spec = self._packed.get(name)
        if spec is None:
            return self.checkpoint.read(name)
        return read_dense(self.checkpoint, spec, self._packings, torch.device("cpu")).to(self._dtype)


def source_scheme(folder: ModelFolder, name: str) -> str | None:
    """The number formats of a packed source, such as e4m3-g128; raises ModelError for fewer than 8 bits."""
    schemes = "+".join(sorted({packing.name for packing in folder.packings.values()}))
    if any(packing.bits < SOURCE_BITS for packing in folder.packings.values()):
        method = folder.raw.object("quantization_config").text("quant_method", "mlx")
        raise ModelError(
            f"{name} is already quantized ({method}, {schemes})", "quantize the model that it was made from"
        )
    return schemes or None
