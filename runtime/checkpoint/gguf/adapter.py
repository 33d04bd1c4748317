"""A LoRA adapter in a GGUF file, as llama.cpp's convert_lora_to_gguf.py writes it."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from mycli.runtime.checkpoint.adapter import Adapter, LowRank, check_low_rank, no_place
from mycli.runtime.checkpoint.adapter_config import MAX_RANK, AdapterConfig
from mycli.runtime.checkpoint.gguf.architecture import Architecture
from mycli.runtime.checkpoint.gguf.architectures import written_architecture
from mycli.runtime.checkpoint.gguf.files import GgufFiles
from mycli.runtime.checkpoint.gguf.header import GgufHeader
from mycli.runtime.checkpoint.gguf.types import READABLE_NAMES
from mycli.runtime.checkpoint.manifest import Manifest
from mycli.runtime.checkpoint.safetensors_header import TensorEntry, damaged
from mycli.runtime.errors import ModelError
from mycli.runtime.models.config import ModelConfig

if TYPE_CHECKING:  # describing an adapter needs no torch
    from mycli.runtime.checkpoint.reader import Checkpoint

_HALVES = (".lora_a", ".lora_b")


@dataclass(frozen=True)
class GgufAdapter(Adapter):
    """An adapter whose matrices have the rows and columns of `architecture`."""

    model: ModelConfig | None = None
    architecture: Architecture | None = None

    @classmethod
    def open_file(cls, name: str, path: Path, model: ModelConfig) -> "GgufAdapter":
        """Read the header of the file `path` and check it against `model`.

        Raises ModelError naming the key or tensor that is damaged, does not fit or is not supported.
        """
        opened = GgufFiles.open(path)
        alpha, architecture = _alpha(opened.header), written_architecture(model)
        stated = opened.header.metadata.text("general.architecture")
        if stated != architecture.name:
            raise ModelError(
                f"{path.name}: general.architecture is {stated:.40}, but the model's is {architecture.name}",
                "the adapter was made for another model",
            )
        tensors, unused = _tensors(opened.header, architecture)
        shapes, added = dict(model.tensors()), dict[str, LowRank]()
        for half in tensors:
            weight = half.rpartition(".")[0]
            a, b = (tensors.get(f"{weight}{ending}") for ending in _HALVES)
            if a is None or b is None:
                raise damaged(f"{path.name}: {weight:.80} has {_HALVES[a is not None][1:]} missing")
            if weight not in shapes:
                raise no_place(weight, path.name)
            rank = a.shape[0] if a.shape else 0
            check_low_rank(weight, a, b, shapes[weight], rank)
            added[weight] = LowRank(a.name, b.name, alpha / rank if alpha else 1.0)
        config = AdapterConfig("", MAX_RANK, alpha, False, {}, {})
        manifest = Manifest(path.parent, tensors, opened.files)
        return cls(name, path.parent, config, added, {}, manifest, unused, model, architecture)

    def checkpoint(self, *, allow_nonfinite: bool) -> "Checkpoint":
        from mycli.runtime.checkpoint.gguf.checkpoint import GgufAdapterCheckpoint

        assert self.model is not None and self.architecture is not None
        manifest, architecture = self.manifest, self.architecture
        return GgufAdapterCheckpoint(manifest, self.model, architecture, allow_nonfinite=allow_nonfinite)

    def source_files(self) -> list[Path]:
        return [self.path / name for name in self.manifest.files]


def _alpha(header: GgufHeader) -> float:
    metadata = header.metadata
    if metadata.text("general.type", "model") != "adapter":
        raise ModelError(f"{metadata.source}: a model, not a LoRA adapter", "")
    if (kind := metadata.text("adapter.type", "")) != "lora":
        raise metadata.fail("adapter.type", f"is {kind:.40}: only lora is supported")
    if metadata.has("adapter.alora.invocation_tokens"):
        raise metadata.fail("adapter.alora.invocation_tokens", "is not supported: only low-rank updates are")
    return metadata.number("adapter.lora.alpha", low=-1e6, high=1e6)


def _tensors(header: GgufHeader, architecture: Architecture) -> tuple[dict[str, TensorEntry], tuple[str, ...]]:
    """Return A and B by the model's name of the weight, with .lora_a or .lora_b, and the names that are not used."""
    tensors: dict[str, TensorEntry] = {}
    unused: list[str] = []
    for stored, entry in header.tensors.items():
        weight, _, half = stored.rpartition(".")
        if f".{half}" not in _HALVES:
            if "_norm." in stored:  # llama.cpp skips them too
                unused.append(stored)
                continue
            raise ModelError(f"{entry.file}: {stored:.100}: not part of a low-rank update", "")
        name = architecture.hf_name(weight)
        place = None if name is None else architecture.place(name)
        if name is None or place is None:
            raise no_place(weight, entry.file)
        rule = place.rule
        if "{expert}" in name or rule.more_names or rule.followed_by or rule.by_head or rule.change is not None:
            raise ModelError(f"{entry.file}: {stored:.100}: adapters of such a tensor are not supported", "")
        if weight == "token_embd.weight":
            raise ModelError(f"{entry.file}: {stored}: adapters of the embedding are not supported in GGUF", "")
        if entry.dtype not in READABLE_NAMES:
            raise ModelError(f"{entry.file}: {stored:.100} is {entry.dtype}, which is not supported", "")
        tensors[f"{name}.{half}"] = replace(entry, name=f"{name}.{half}")
    return tensors, tuple(unused)
