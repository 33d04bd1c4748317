"""A model's folder, opened once: what its small files say, each of them read at most once.

Whoever needs the shape, the number formats, the tensors or the sampling defaults of a model is handed this and reads no
file of its own. Knows config.json, generation_config.json and the headers of the weights; does not import torch, reads
no tensor, and does not know where models come from.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from mycli.runtime.checkpoint.formats import Headers, described, read_quantization
from mycli.runtime.checkpoint.manifest import Manifest
from mycli.runtime.checkpoint.safetensors_header import INDEX, SINGLE
from mycli.runtime.models.config import ModelConfig, parse_config
from mycli.runtime.models.generation_config import GenerationDefaults, read_generation_config
from mycli.runtime.models.multimodal import TextPart
from mycli.runtime.quantization.scheme import Packing
from mycli.runtime.utils.json_fields import Fields, read_object
from mycli.runtime.utils.units import gib


@dataclass(frozen=True)
class ModelFolder:
    """`raw` is config.json as it stands, or what it says of the text model where the folder holds more than that.

    `headers`: of tensors that lie elsewhere, where they are known; `bare`: config.json is all that there is; `part`:
    which part of the folder is read.
    """

    path: Path
    raw: Fields
    config: ModelConfig
    headers: Headers | None = None
    bare: bool = False
    part: TextPart | None = None

    @classmethod
    def open(cls, path: Path) -> "ModelFolder":
        """Read config.json of `path`. Raises ModelError naming the field at fault."""
        return cls.of(read_object(path / "config.json"), path)

    @classmethod
    def of(cls, raw: Fields, path: Path | None = None) -> "ModelFolder":
        """Of a config.json that is read already; without a folder, no more than that can be asked for."""
        part = TextPart.find(raw)
        return cls(path or Path(), part.config, parse_config(part.config), bare=path is None, part=part)

    @cached_property
    def packings(self) -> Mapping[str, Packing]:
        """Which linears are quantized, and how, by their names. Raises ModelError for a format that is not read."""
        return read_quantization(self.raw, self.config, self._headers())

    def _headers(self) -> Headers | None:
        """Of the tensors, where they may decide what is quantized and are there."""
        if self.headers is not None or self.bare or not described(self.raw):
            return self.headers
        present = any((self.path / name).exists() for name in (SINGLE, INDEX))
        return self.manifest.tensors if present else None

    @cached_property
    def manifest(self) -> Manifest:
        """The tensors of its files, not yet compared with the config. Raises what `Manifest.open` raises."""
        found = Manifest.open(self.path)
        tensors = self.used(found.tensors)
        return replace(found, tensors=tensors, warnings=(*found.warnings, *self._skipped(found.tensors)))

    def used(self, tensors: Headers) -> Headers:
        """Of all tensors in the files those of the text model, by the names that it alone has for them."""
        names = {stored: stored if self.part is None else self.part.name(stored) for stored in tensors}
        return {
            name: replace(tensors[stored], name=name)
            for stored, name in names.items()
            if name is not None and not name.startswith(self.config.unread)
        }

    def _skipped(self, tensors: Headers) -> Iterator[str]:
        """What a person should know of the rest."""
        if self.part is None or self.part.whole is None:
            return
        others = [entry for name, entry in tensors.items() if self.part.name(name) is None]
        kinds = sorted({entry.name.removeprefix("model.").split(".")[0] for entry in others})
        if others:
            size = gib(sum(entry.nbytes for entry in others))
            yield f"{self.part.whole}: only its text part is used, not {', '.join(kinds)} ({size})"

    def checked_manifest(self) -> Manifest:
        """`manifest`, its tensors being those that the config promises. Raises ModelError where they are not."""
        self.manifest.check(self.config, self.packings)
        return self.manifest

    @cached_property
    def generation(self) -> tuple[GenerationDefaults, tuple[str, ...]]:
        """What generation_config.json recommends, and a warning for every field dropped as unusable."""
        return read_generation_config(self.path, self.config.vocab_size)
