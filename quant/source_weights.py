"""The tensors of a model that is to be quantized, as if none of them were: of an 8-bit checkpoint the weights it means.

Knows a folder and its layouts' `read_dense`. Does not know what becomes of the weights.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from mycli.runtime.checkpoint.formats import quantizable, read_dense
from mycli.runtime.checkpoint.model_folder import ModelFolder
from mycli.runtime.device.placement import torch_dtype
from mycli.runtime.errors import ModelError

SOURCE_BITS = 8  # fewer have lost what another quantization would need


class SourceWeights:
    """Reads the folder's tensors dense. Raises ModelError for anything the files and the config disagree on."""

    def __init__(self, folder: ModelFolder) -> None:
        self.checkpoint = folder.checkpoint()
        self._packings, self._dtype = folder.packings, torch_dtype(folder.config.dtype)
        packed = (spec for spec in quantizable(folder.config) if spec.name in self._packings)
        self._packed = {f"{spec.name}.weight": spec for spec in packed}

    def dtype(self, name: str) -> torch.dtype:
        """Of a tensor as `read` returns it: stored as it is, or the model's where it is packed."""
        return self._dtype if name in self._packed else self.checkpoint.dtype(name)

    def read(self, name: str) -> Tensor:
        """A tensor on the CPU; a packed weight is rounded once, to the model's dtype."""
        spec = self._packed.get(name)
        if spec is None:
            return self.checkpoint.read(name)
        return read_dense(self.checkpoint, spec, self._packings, torch.device("cpu")).to(self._dtype)


def source_scheme(folder: ModelFolder, name: str) -> str | None:
    """The number formats that a model to be quantized is stored in, e4m3-g128; None for a dense one.

    Raises ModelError, calling the model `name`, where they have fewer than 8 bits.
    """
    schemes: Sequence[str] = sorted({packing.name for packing in folder.packings.values()})
    if any(packing.bits < SOURCE_BITS for packing in folder.packings.values()):
        method = folder.raw.object("quantization_config").text("quant_method", "mlx")
        raise ModelError(
            f"{name} is quantized already ({method}, {'+'.join(schemes)})", "quantize the model it was made from"
        )
    return "+".join(schemes) or None
