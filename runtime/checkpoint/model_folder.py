"""A model's folder, opened once: what its small files say, each of them read at most once.

Whoever needs the shape, the number formats, the tensors or the sampling defaults of a model is handed this and reads no
file of its own. Knows config.json, generation_config.json and the headers of the weights; does not import torch, reads
no tensor, and does not know where models come from.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Self

from mycli.runtime.checkpoint.formats import Headers, described, read_quantization
from mycli.runtime.checkpoint.manifest import Manifest
from mycli.runtime.checkpoint.safetensors_header import INDEX, SINGLE, TensorEntry
from mycli.runtime.errors import ModelError
from mycli.runtime.models.config import ModelConfig
from mycli.runtime.models.generation_config import GenerationDefaults, read_generation_config
from mycli.runtime.models.multimodal import MTP_PART, MtpPart, TextPart
from mycli.runtime.models.registry import parse_config
from mycli.runtime.quantization.scheme import Packing
from mycli.runtime.utils.json_fields import Fields, read_object
from mycli.runtime.utils.units import human_bytes

if TYPE_CHECKING:  # who only looks at a model needs none of them
    from mycli.runtime.checkpoint.adapter import Adapter
    from mycli.runtime.checkpoint.reader import Checkpoint
    from mycli.runtime.tokenizer.chat_template import ChatTemplate
    from mycli.runtime.tokenizer.tokenizer import Tokenizer

# Everything beside the weights that a user of the copy needs. No README: it would describe another model.
COMPANIONS = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "chat_template.jinja",
    "chat_template.json",
    "generation_config.json",
    "LICENSE",
    "LICENSE.txt",
    "LICENSE.md",
    "NOTICE",
    "NOTICE.txt",
    "USE_POLICY.md",
)
MAX_COMPANION_BYTES = 128 << 20


@dataclass(frozen=True)
class ModelFolder:
    """`raw` is config.json as it stands, or what it says of the text model where the folder holds more than that.

    `headers`: of tensors that lie elsewhere, where they are known; `bare`: config.json is all that there is; `part`:
    which part of the folder is read; `adapter`: what is added to its weights while they are read; `opened`: of its
    files, where they are open.
    """

    path: Path
    raw: Fields
    config: ModelConfig
    headers: Headers | None = None
    bare: bool = False
    part: TextPart | MtpPart | None = None
    adapter: "Adapter | None" = None
    opened: Manifest | None = None

    @classmethod
    def from_config(cls, raw: Fields, path: Path | None = None) -> "ModelFolder":
        """Describe the model of a parsed config.json; without `path`, only what config.json says is available."""
        part = TextPart.from_config(raw)
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
        found = self._files
        tensors = self.used(found.tensors)
        return replace(found, tensors=tensors, warnings=(*found.warnings, *self._skipped(found.tensors)))

    @cached_property
    def _files(self) -> Manifest:
        return self.opened or Manifest.open(self.path)

    @cached_property
    def predictor(self) -> "ModelFolder | None":
        """The head that predicts one token further, as a folder of its own; None where there is none.

        Where config.json is all that there is, what the family's models have. Its weights are dense: what the folder
        says of number formats is of the model.
        """
        config = self.config.mtp
        if config is None:
            return None
        raw = Fields({k: v for k, v in self.raw.values.items() if k != "quantization_config"}, self.raw.source)
        opened = None if self.bare else self._files
        head = replace(self, raw=raw, config=config, part=MTP_PART, opened=opened, adapter=None)
        return head if self.bare or head.manifest.tensors else None

    def used(self, tensors: Headers) -> Headers:
        """Of all tensors in the files those of the text model, by the names that it alone has for them.

        One that holds those of all experts is as many: they lie one after the other.
        """
        names = {stored: self.name_of(stored) for stored in tensors}
        found: dict[str, TensorEntry] = {}
        for stored, name in names.items():
            if name is not None and not name.startswith(self.config.ignored_prefixes):
                entry = replace(tensors[stored], name=name)
                parts = self.config.stacked_tensors.get(name)
                found |= {each.name: each for each in ([entry] if parts is None else entry.split(parts))}
        return found

    def _skipped(self, tensors: Headers) -> Iterator[str]:
        """What a person should know of the rest."""
        if self.part is None or self.part.outer_type is None:
            return
        others = [entry for name, entry in tensors.items() if self.part.local_name(name) is None]
        kinds = sorted({entry.name.removeprefix("model.").split(".")[0] for entry in others})
        if others:
            size = human_bytes(sum(entry.nbytes for entry in others))
            yield f"{self.part.outer_type}: only its text part is used, not {', '.join(kinds)} ({size})"

    def checked_manifest(self) -> Manifest:
        """`manifest`, its tensors being those that the config promises. Raises ModelError where they are not."""
        self.manifest.check(self.config, self.packings)
        return self.manifest

    def checkpoint(self, *, allow_nonfinite: bool = False) -> "Checkpoint":
        """A reader of the tensors. Raises ModelError where they are not those that the config promises."""
        from mycli.runtime.checkpoint.reader import Checkpoint

        return self._merged(Checkpoint(self.checked_manifest(), allow_nonfinite=allow_nonfinite), allow_nonfinite)

    def _merged(self, checkpoint: "Checkpoint", allow_nonfinite: bool) -> "Checkpoint":
        """`checkpoint` with the adapter, if there is one."""
        if self.adapter is None:
            return checkpoint
        from mycli.runtime.checkpoint.merging import MergedCheckpoint

        return MergedCheckpoint(checkpoint, self.adapter, allow_nonfinite=allow_nonfinite)

    def with_adapter(self, name: str, path: Path) -> Self:
        """The same model with the LoRA adapter `name`, in the folder `path`, merged into its weights as they are read.

        Raises ModelError for a model whose weights are packed, and what `Adapter.open` raises.
        """
        if self.packings:
            schemes = "+".join(sorted({packing.name for packing in self.packings.values()}))
            raise ModelError(f"the weights are packed ({schemes}), so nothing can be added to them", code="merge-first")
        from mycli.runtime.checkpoint.adapter import Adapter

        return replace(self, adapter=Adapter.open(name, path, self.config, self.name_of))

    def name_of(self, stored: str) -> str | None:
        """What the text model calls a tensor that its folder calls `stored`; None for what is not of the text."""
        return stored if self.part is None else self.part.local_name(stored)

    def tokenizer(self) -> "Tokenizer":
        """The model's tokenizer. Raises what `Tokenizer.load` raises."""
        from mycli.runtime.tokenizer.tokenizer import Tokenizer

        return Tokenizer.load(self.path, self.config.vocab_size)

    @property
    def has_tokenizer(self) -> bool:
        """Whether there is a tokenizer to load."""
        return (self.path / "tokenizer.json").exists()

    def tokenizer_json(self) -> Fields:
        """tokenizer.json as it stands. Raises ModelError where there is none, or no JSON."""
        from mycli.runtime.tokenizer.tokenizer import MAX_FILE_BYTES

        return read_object(self.path / "tokenizer.json", MAX_FILE_BYTES)

    def tokenizer_settings(self) -> Fields:
        """tokenizer_config.json as it stands; an empty one where there is none."""
        from mycli.runtime.tokenizer.tokenizer import read_tokenizer_settings

        return read_tokenizer_settings(self.path)

    def companions(self) -> dict[str, bytes]:
        """The files beside config.json and the weights that a user of a copy needs, by name.

        Raises ModelError for one that is absurdly large.
        """
        return {path.name: path.read_bytes() for path in self._companion_paths()}

    def source_files(self) -> list[Path]:
        """Every file that a copy depends on: weights, config and companions."""
        weights = {entry.file for entry in self.manifest.tensors.values()}
        changes = [] if self.adapter is None else self.adapter.source_files()
        return [*(self.path / name for name in weights), self.path / "config.json", *self._companion_paths(), *changes]

    def _companion_paths(self) -> list[Path]:
        paths = [path for name in COMPANIONS if (path := self.path / name).is_file()]
        for path in paths:
            if path.stat().st_size > MAX_COMPANION_BYTES:
                allowed = human_bytes(MAX_COMPANION_BYTES)
                raise ModelError(f"{path.name}: more than the {allowed} allowed", "the file may be damaged")
        return paths

    def chat_template(self) -> "ChatTemplate | None":
        """The model's chat templates, without a look at its vocabulary. Raises ModelError for what is none."""
        from mycli.runtime.tokenizer.chat_template import ChatTemplate

        return ChatTemplate.load(self.path, self.tokenizer_settings())

    @cached_property
    def generation(self) -> tuple[GenerationDefaults, tuple[str, ...]]:
        """What generation_config.json recommends, and a warning for every field dropped as unusable."""
        return read_generation_config(self.path, self.config.vocab_size)
