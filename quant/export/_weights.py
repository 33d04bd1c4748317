"""Reads the weights of a model for export, packed or dense, one at a time."""

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from mycli.runtime.checkpoint.formats import quantizable, read_dense, read_weight
from mycli.runtime.checkpoint.gguf.architecture import Architecture
from mycli.runtime.checkpoint.gguf.checkpoint import GgufCheckpoint
from mycli.runtime.checkpoint.gguf.types import TYPES_BY_NAME
from mycli.runtime.checkpoint.model_folder import ModelFolder
from mycli.runtime.device.placement import torch_dtype
from mycli.runtime.models.part_spec import LinearSpec
from mycli.runtime.quantization.packed_weight import PackedWeight, as_integers, dequantize_rows
from mycli.runtime.quantization.scheme import Packing

_CPU = torch.device("cpu")


class Weights:
    """Reads the tensors of a folder by name. Raises ModelError if files and config disagree."""

    def __init__(self, folder: ModelFolder) -> None:
        folder.require_merged()
        self.checkpoint = folder.checkpoint()
        self._config, self._dtype = folder.config, folder.config.dtype
        self._stored: Mapping[str, Packing] = folder.packings
        # No written layout has the tables of integers.
        self.packings = {name: packing.as_integers() for name, packing in self._stored.items()}
        self.linears: Mapping[str, LinearSpec] = {f"{spec.name}.weight": spec for spec in folder.config.linears()}
        self._specs = {f"{spec.name}.weight": spec for spec in quantizable(folder.config)}

    def packing(self, name: str) -> Packing | None:
        return self.packings.get(name.removesuffix(".weight"))

    def blocks(self, architecture: Architecture) -> dict[str, str]:
        """Return the ggml type of each quantized tensor of a GGUF file with the rows and columns of `architecture`."""
        checkpoint = self.checkpoint
        if not isinstance(checkpoint, GgufCheckpoint) or checkpoint.architecture.name != architecture.name:
            return {}
        names = [name for name, _ in self._config.tensors() if self._is_in_blocks(name)]
        return {name: checkpoint.entry(name).dtype for name in names if name not in checkpoint.factors}

    def block_rows(self, name: str) -> Tensor:
        """Return the blocks of a tensor of a GGUF file, uint8 [rows, bytes], in Hugging Face's order of rows."""
        assert isinstance(self.checkpoint, GgufCheckpoint)
        return torch.cat([data.clone() for _, data in self.checkpoint.row_bytes(name)])

    def packed(self, name: str) -> PackedWeight:
        spec = self.linears[name]
        return as_integers(read_weight(self.checkpoint, [spec], self._stored[spec.name], _CPU))

    def dense(self, name: str) -> Tensor:
        """Read a dense tensor as stored, or the exact fp32 values of a packed one."""
        if self._is_in_blocks(name):  # not as packed groups, whose offsets are rounded to fp32
            values = torch.empty(self.checkpoint.entry(name).shape)
            self.checkpoint.read_into(name, values)
            return values
        packing = self.packing(name)
        if packing is None:
            return self.checkpoint.read(name)
        if name not in self.linears:  # an embedding, a router or a gate
            return read_dense(self.checkpoint, self._specs[name], self._stored, _CPU)
        return exact_values(self.packed(name))

    def stored_dtype(self, name: str) -> torch.dtype:
        packing = self.packing(name)
        if packing is None and self._is_in_blocks(name):
            return torch.float32
        return self.checkpoint.dtype(name) if packing is None else torch_dtype(packing.scale_dtype or self._dtype)

    def _is_in_blocks(self, name: str) -> bool:
        # Of a GGUF file, whose checkpoint rounds such a tensor to the dtype of the model.
        return isinstance(self.checkpoint, GgufCheckpoint) and TYPES_BY_NAME[self.checkpoint.entry(name).dtype].bits > 0

    def defined_values(self, name: str) -> Tensor:
        """Read a tensor's values by the definition of its layout."""
        # compressed-tensors alone defines values as products rounded to the dtype of the scales.
        packing = self.packing(name)
        if packing is None or packing.layout != "compressed_tensors" or name not in self.linears:
            return self.dense(name)
        return read_dense(self.checkpoint, self.linears[name], self._stored, _CPU)


def fp16_scale_error(weight: PackedWeight) -> float:
    """Return the relative squared error of rounding a weight's scales to fp16."""
    halves = weight.scales.to(torch.float16).to(torch.float32)
    if torch.equal(halves, weight.scales.float()):
        return 0.0
    return squared_error(exact_values(weight), exact_values(replace(weight, scales=halves)))


def exact_values(weight: PackedWeight) -> Tensor:
    """Return the values of a packed weight, fp32 [out_features, in_features], not rounded to the scales' dtype."""
    out = torch.empty(weight.out_features, weight.in_features)
    for rows, values in dequantize_rows(replace(weight, scales=weight.scales.float())):
        out[rows] = values
    return out


def squared_error(before: Tensor, after: Tensor) -> float:
    """Return the squared error relative to the squared norm of `before`; 0 for a zero tensor."""
    total = before.double().square().sum().item()
    return (before.double() - after.double()).square().sum().item() / total if total else 0.0
