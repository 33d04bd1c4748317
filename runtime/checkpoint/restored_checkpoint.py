"""Computes the weights of a family's own files where a folder has others; see `restored_weights`."""

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn.functional import normalize

from mycli.runtime.checkpoint.formats import read_dense
from mycli.runtime.checkpoint.manifest import Manifest
from mycli.runtime.checkpoint.reader import Checkpoint, tensor_bytes
from mycli.runtime.checkpoint.restored_weights import half_packing, halves, latent_specs
from mycli.runtime.checkpoint.safetensors_header import TensorEntry
from mycli.runtime.models.config import ModelConfig
from mycli.runtime.utils.json_fields import Fields

_COLUMNS = 256
_ROWS = 4096


class RestoredCheckpoint(Checkpoint):
    """A `Checkpoint` that computes gains, heads, kv_b and joined groups; `settings`: config.json's `quantization`."""

    def __init__(
        self, manifest: Manifest, config: ModelConfig, settings: Fields, *, allow_nonfinite: bool = False
    ) -> None:
        super().__init__(manifest, allow_nonfinite=allow_nonfinite)
        self._config, self._settings = config, settings
        self._specs = {f"{spec.kv_b.name}.weight": spec for spec in latent_specs(config)}

    def prefetch(self, name: str) -> None:
        entry = self.manifest.tensors.get(name)
        if entry is not None and entry.parts:
            for part in entry.parts:
                self.manifest.files[part.file].prefetch(part.offset, part.nbytes)
        else:
            super().prefetch(name)

    def read_into(self, name: str, out: Tensor) -> None:
        entry = self.entry(name)
        if out.dtype != self.dtype(name) and (entry.parts or entry.added or entry.divided):
            self._convert(name, out)
            return
        if entry.parts and name in self._specs:
            out.copy_(self._joined(entry))
        elif entry.parts:
            stored = self._stored(entry)
            for rows, part in zip(out.chunk(len(entry.parts)), entry.parts, strict=True):
                stored.read_into(part.name, rows)
        else:
            super().read_into(name, out)
        if entry.added:
            out.sub_(entry.added)
        # In parts, as whole heads in fp32 take gigabytes.
        if entry.divided == "rows":
            for rows in torch.split(out, _ROWS):
                rows.copy_(normalize(rows.float()))
        elif entry.divided == "columns":
            for columns in torch.split(out, _COLUMNS, dim=1):
                values = columns.float()
                columns.copy_(values / (values.norm(dim=0, keepdim=True) + 1e-7))  # Ling's own constant

    def chunks(self, name: str) -> Iterator[memoryview]:
        entry = self.entry(name)
        changed = entry.parts or entry.added or entry.divided
        return iter([tensor_bytes(self.read(name))]) if changed else super().chunks(name)

    def _stored(self, entry: TensorEntry) -> Checkpoint:
        manifest = Manifest(self.manifest.folder, {part.name: part for part in entry.parts}, self.manifest.files)
        return Checkpoint(manifest, allow_nonfinite=self._allow_nonfinite, cancelled=self._cancelled)

    def _joined(self, entry: TensorEntry) -> Tensor:
        stored = self._stored(entry)
        spec = self._specs[entry.name]
        weights = []
        for half in halves(spec):
            packing = half_packing(half, self._config, self._settings, stored.manifest.tensors)
            packings = {} if packing is None else {half.name: packing}
            weights.append(read_dense(stored, half, packings, torch.device("cpu")))
        keys = weights[0].view(spec.heads, spec.rank, spec.nope_dim).transpose(1, 2)
        return torch.cat((keys, weights[1].view(spec.heads, spec.value_dim, spec.rank)), dim=1).flatten(0, 1)
