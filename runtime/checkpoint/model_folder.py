"""Describes a model by its folder: config, number formats, tensors, tokenizer and sampling defaults.

A folder is opened once per model and passed on; each of its small files is read at most once. Imports no torch before a
checkpoint is opened.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Self

from mycli.runtime.checkpoint.formats import Headers, is_quantized, mlx, read_quantization
from mycli.runtime.checkpoint.manifest import Manifest, listed_tensors
from mycli.runtime.checkpoint.restored_weights import restore_entries
from mycli.runtime.checkpoint.safetensors_header import INDEX, SINGLE, TensorEntry, damaged
from mycli.runtime.checkpoint.sentence_transformers import MODULE_FILE, MODULES, TEXT_SETTINGS
from mycli.runtime.checkpoint.validation import check_tensors
from mycli.runtime.errors import ModelError
from mycli.runtime.models.config import ModelConfig
from mycli.runtime.models.generation_config import GenerationDefaults, read_generation_config
from mycli.runtime.models.multimodal import MTP_PART, MtpPart, TextPart
from mycli.runtime.models.registry import parse_config
from mycli.runtime.quantization.scheme import Packing
from mycli.runtime.utils.dtypes import SAFETENSORS_FLOATS
from mycli.runtime.utils.json_fields import Fields
from mycli.runtime.utils.units import human_bytes

if TYPE_CHECKING:  # describing a model needs none of these
    import torch

    from mycli.runtime.checkpoint.adapter import Adapter, LowRank
    from mycli.runtime.checkpoint.reader import Checkpoint
    from mycli.runtime.checkpoint.sentence_transformers import CrossEncoderSpec, EmbeddingSpec, ScoreSpec
    from mycli.runtime.tokenizer.chat_template import ChatTemplate
    from mycli.runtime.tokenizer.tokenizer import Tokenizer

# Copied with the weights: all that the model needs to run, and its terms. No README: it would describe another model.
COMPANIONS = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "tekken.json",
    "chat_template.jinja",
    "chat_template.json",
    "generation_config.json",
    MODULES,
    "config_sentence_transformers.json",
    *TEXT_SETTINGS,
    "LICENSE",
    "LICENSE.txt",
    "LICENSE.md",
    "NOTICE",
    "NOTICE.txt",
    "USE_POLICY.md",
)
_HEAD = "lm_head.weight"
BARE_EMBEDDING = "embed_tokens.weight"
MAX_COMPANION_BYTES = 128 << 20


@dataclass(frozen=True)
class ModelFolder:
    """The text model of a folder."""

    path: Path
    raw: Fields  # config.json, or the text section of a multimodal one
    config: ModelConfig
    config_only: bool  # no file but config.json is available
    headers: Headers | None = None  # tensors of a remote model, if known
    part: TextPart | MtpPart | None = None  # the part of the folder that is read
    adapter: "Adapter | None" = None  # merged into dense weights as they are read
    file_manifest: Manifest | None = None  # the tensors of the files, if they are read already

    @classmethod
    def from_config(cls, raw: Fields, path: Path | None = None, remote: Headers | None = None) -> "ModelFolder":
        """Describe the model of a parsed config.json; without `path`, only what config.json says is available.

        remote: the tensors of a model whose weights are not in `path`.
        """
        part, files, tensors = TextPart.from_config(raw), None, remote
        if part.depends_on_files and tensors is None and path is not None and _has_weights(path):
            files = Manifest.open(path)
            tensors = files.tensors
        if tensors is not None:
            part = part.with_tensors(tensors)
        config = parse_config(part.config)
        embeds = path is not None and (path / MODULES).is_file() and _reranker(path) is None
        if embeds:
            config = replace(config, tie_embeddings=True)  # stored without a head, which an embedding does not need
        folder = cls(path or Path(), part.config, config, config_only=path is None, part=part, file_manifest=files)
        if remote is not None:
            return replace(folder, headers=folder.text_tensors(remote))
        if config.tie_embeddings and not embeds and path is not None and _has_weights(path):
            return folder._with_own_head(part)
        return folder

    def _with_own_head(self, part: TextPart) -> "ModelFolder":
        # As transformers 5: a head that was trained on its own, in a folder whose config still ties it, is used.
        try:
            if _HEAD not in map(self.local_name, listed_tensors(self.path)):
                return self
            files = self._files
        except ModelError:
            return self  # raised where the weights are read
        local = {self.local_name(stored): stored for stored in files.tensors}
        head, embedding = local.get(_HEAD), local.get("model.embed_tokens.weight")
        if head is None or embedding is None or files.tensors[head].dtype not in SAFETENSORS_FLOATS:
            return self
        if files.tensors[head].shape != files.tensors[embedding].shape or files.equal(head, embedding):
            return self  # another shape is refused with the tensors
        raw = Fields({**self.raw.values, "tie_word_embeddings": False}, self.raw.source)
        warning = f"{head} differs from the embedding, to which config.json ties it: both are used"
        files = replace(files, warnings=(*files.warnings, warning))
        return replace(self, raw=raw, config=parse_config(raw), part=replace(part, config=raw), file_manifest=files)

    @cached_property
    def embedding(self) -> "EmbeddingSpec | None":
        """The modules of an embedding model's folder; None for other folders. Raises ModelError."""
        if self.config_only or self.config.classifier is not None or not (self.path / MODULES).is_file():
            return None
        from mycli.runtime.checkpoint.sentence_transformers import read_embedding_spec

        return read_embedding_spec(self.path, self.config.hidden_size)

    @cached_property
    def cross_encoder(self) -> "CrossEncoderSpec | None":
        """How a reranker with a classification head scores pairs; None for other folders. Raises ModelError."""
        if self.config_only or self.config.classifier is None:
            return None
        from mycli.runtime.checkpoint.sentence_transformers import read_cross_encoder_spec

        return read_cross_encoder_spec(self.path, self.raw, self.tokenizer_settings())

    @property
    def score(self) -> "ScoreSpec | None":
        """The tokens of a reranker's score; None for a folder that does not say them. Raises ModelError."""
        return None if self.config_only else _reranker(self.path)

    @cached_property
    def packings(self) -> Mapping[str, Packing]:
        """Return the packing of each quantized linear by name. Raises ModelError for a layout that is not supported."""
        return read_quantization(self.raw, self.config, self._headers())

    def _headers(self) -> Headers | None:
        if self.headers is not None or self.config_only or not is_quantized(self.raw):
            return self.headers
        return self.manifest.tensors if _has_weights(self.path) else None

    @cached_property
    def manifest(self) -> Manifest:
        """Return the text model's tensors, not checked against the config. Raises what `Manifest.open` raises."""
        files = self._files
        tensors = self.text_tensors(files.tensors)
        return replace(files, tensors=tensors, warnings=(*files.warnings, *self.skipped_parts(files.tensors)))

    @cached_property
    def _files(self) -> Manifest:
        return self.file_manifest or Manifest.open(self.path)

    @cached_property
    def mtp_head(self) -> "ModelFolder | None":
        """Return the MTP head as a folder of its own; None for a model without one.

        With config.json alone, the family decides. The head is dense: quantization_config is about the model.
        """
        config = self.config.mtp
        if config is None:
            return None
        raw = Fields({k: v for k, v in self.raw.values.items() if k != "quantization_config"}, self.raw.source)
        files = None if self.config_only else self._files
        head = replace(self, raw=raw, config=config, part=MTP_PART, file_manifest=files, adapter=None)
        return head if self.config_only or head.manifest.tensors else None

    def text_tensors(self, tensors: Headers) -> Headers:
        """Select the text model's tensors by its own names; a stack of experts becomes one tensor per expert."""
        selected: dict[str, TensorEntry] = {}
        origins: dict[str, str] = {}  # name in the files of each selected tensor
        shapes = dict(self.config.tensors()) if self.config.stacks else {}
        stacks = self.config.stacks
        if stacks and (self.raw.has("quantization") or any(mlx.STACK.search(name) for name in tensors)):
            stacks = {**stacks, **mlx.expert_stacks(self.config)}
        # Embedding models are stored without a head, by the class that has no prefix.
        bare = BARE_EMBEDDING in tensors and self.part is not None and self.part.outer_type is None
        for stored, entry in tensors.items():
            name = f"model.{stored}" if bare else self.local_name(stored)
            if name is not None and not name.startswith(self.config.ignored_prefixes):
                entry = replace(entry, name=name)
                stack = stacks.get(name)
                parts = [entry]
                if stack is not None:
                    part = shapes.get(stack.parts[0])
                    parts = entry.split(stack.parts, transposed=stack.transposed, part=part)
                for item in parts:
                    other = origins.setdefault(item.name, stored)
                    if other != stored:
                        raise damaged(f"{other:.80} and {stored:.80}: one tensor of the model under two names")
                    selected[item.name] = item
        head = selected.get(_HEAD)
        # In 16 or 32 bits: mlx-lm divides before it quantizes.
        if isinstance(self.part, TextPart) and self.part.norm_head and head and head.dtype in SAFETENSORS_FLOATS:
            selected[_HEAD] = replace(head, divided=self.part.norm_head)
        return restore_entries(selected, self.config, self._mlx_settings)

    @property
    def _mlx_settings(self) -> Fields:
        return mlx.local_settings(self.raw.object("quantization"), self.config)

    def skipped_parts(self, tensors: Headers) -> Iterator[str]:
        """Yield a warning naming the parts of a multimodal model that are not read."""
        if self.part is None or self.part.outer_type is None:
            return
        others = [entry for name, entry in tensors.items() if self.part.local_name(name) is None]
        kinds = sorted({entry.name.removeprefix("model.").split(".")[0] for entry in others})
        if others:
            size = human_bytes(sum(entry.nbytes for entry in others))
            yield f"{self.part.outer_type}: only its text part is used, not {', '.join(kinds)} ({size})"

    def checked_manifest(self) -> Manifest:
        """Return `manifest`. Raises ModelError unless its tensors are those of the config."""
        check_tensors(self.manifest, self.config, self.packings)
        return self.manifest

    def checkpoint(self, *, allow_nonfinite: bool = False, dtype: "torch.dtype | None" = None) -> "Checkpoint":
        """Return a reader of the tensors. `dtype`: of tensors stored in blocks and read dense; None: the config's."""
        from mycli.runtime.checkpoint.reader import Checkpoint

        manifest = self.checked_manifest()
        checkpoint = Checkpoint(manifest, allow_nonfinite=allow_nonfinite)
        if any(entry.added or entry.divided or entry.parts for entry in manifest.tensors.values()):
            from mycli.runtime.checkpoint.restored_checkpoint import RestoredCheckpoint  # few folders have such tensors

            checkpoint = RestoredCheckpoint(manifest, self.config, self._mlx_settings, allow_nonfinite=allow_nonfinite)
        return self._with_adapter(checkpoint, allow_nonfinite)

    def _with_adapter(self, checkpoint: "Checkpoint", allow_nonfinite: bool) -> "Checkpoint":
        if self.adapter is None:
            return checkpoint
        from mycli.runtime.checkpoint.gguf.adapter import GgufAdapter
        from mycli.runtime.checkpoint.reader import Checkpoint, MergedCheckpoint

        adapter, packed = self.adapter, {f"{name}.weight" for name in self.packings}
        if isinstance(adapter, GgufAdapter):
            changes = adapter.checkpoint(allow_nonfinite=allow_nonfinite)
        else:
            changes = Checkpoint(adapter.manifest, allow_nonfinite=allow_nonfinite)
        return MergedCheckpoint(checkpoint, adapter, changes, packed, allow_nonfinite=allow_nonfinite)

    def with_adapter(self, name: str, path: Path) -> Self:
        """Return this model with the LoRA adapter `path`: a folder, or a GGUF file.

        It is merged into dense weights as they are read, and computed next to packed ones. Raises ModelError for an
        adapter that replaces packed weights, and what `Adapter.open` raises.
        """
        if path.is_dir():
            from mycli.runtime.checkpoint.adapter import Adapter

            adapter = Adapter.open(name, path, self.config, self.local_name)
        else:
            from mycli.runtime.checkpoint.gguf.adapter import GgufAdapter

            adapter = GgufAdapter.open_file(name, path, self.config)
        replaced = [weight for weight in adapter.replaced if weight.removesuffix(".weight") in self.packings]
        if replaced:
            raise ModelError(
                f"{name} replaces {replaced[0]}, which is quantized here ({self._schemes})", code="merge-first"
            )
        return replace(self, adapter=adapter)

    @property
    def _schemes(self) -> str:
        return "+".join(sorted({packing.name for packing in self.packings.values()}))

    @property
    def unmerged(self) -> "list[LowRank]":
        """The updates of an adapter that are not merged, because their weights are packed."""
        added = {} if self.adapter is None else self.adapter.added
        return [low for weight, low in added.items() if weight.removesuffix(".weight") in self.packings]

    @property
    def unmerged_values(self) -> int:
        """The number of values of the adapter that are in memory next to packed weights."""
        if self.adapter is None:
            return 0
        tensors = self.adapter.manifest.tensors
        return sum(prod(tensors[part].shape) for low in self.unmerged for part in low.parts)

    def require_merged(self) -> None:
        """Raise ModelError if the adapter is next to packed weights: written files hold one weight for both."""
        if self.unmerged:
            raise ModelError(
                f"the weights are quantized ({self._schemes}), so no adapter can be merged into them",
                code="merge-first",
            )

    def local_name(self, stored: str) -> str | None:
        """Return the text model's name of a tensor in the files; None for a tensor of another part."""
        name = stored if self.part is None else self.part.local_name(stored)
        return None if name is None else self.config.local_name(name)

    def tokenizer(self) -> "Tokenizer":
        from mycli.runtime.checkpoint.sentence_transformers import lowers_texts
        from mycli.runtime.tokenizer.tokenizer import Tokenizer

        return Tokenizer.load(self.path, self.config.vocab_size, lowers_texts(self.path))

    @property
    def has_tokenizer(self) -> bool:
        from mycli.runtime.tokenizer.tekken import tokenizer_file

        return tokenizer_file(self.path).exists()

    def tokenizer_json(self) -> Fields:
        from mycli.runtime.tokenizer.tokenizer_files import read_tokenizer

        return read_tokenizer(self.path)[0]

    def tokenizer_settings(self) -> Fields:
        """Read tokenizer_config.json; empty if the file is missing."""
        from mycli.runtime.tokenizer.tokenizer_files import read_tokenizer_settings

        return read_tokenizer_settings(self.path)

    def companions(self) -> dict[str, bytes]:
        """Return the other files that a copy of the model needs, by path. Raises ModelError for one of over 128 MB."""
        return {path.relative_to(self.path).as_posix(): path.read_bytes() for path in self._companion_paths()}

    def source_files(self) -> list[Path]:
        weights = {entry.file for entry in self.manifest.tensors.values()}
        changes = [] if self.adapter is None else self.adapter.source_files()
        return [*(self.path / name for name in weights), self.path / "config.json", *self._companion_paths(), *changes]

    def _companion_paths(self) -> list[Path]:
        from mycli.runtime.tokenizer.chat_template import template_files

        paths = [path for name in COMPANIONS if (path := self.path / name).is_file()]
        if self.path / MODULES in paths:
            modules = sorted(self.path.glob("*/*"))
            paths += [path for path in modules if MODULE_FILE.fullmatch(path.relative_to(self.path).as_posix())]
        paths += template_files(self.path)
        for path in paths:
            if path.stat().st_size > MAX_COMPANION_BYTES:
                allowed = human_bytes(MAX_COMPANION_BYTES)
                raise ModelError(f"{path.name}: more than the {allowed} allowed", "the file may be damaged")
        return paths

    def chat_template(self) -> "ChatTemplate | None":
        from mycli.runtime.tokenizer.chat_template import ChatTemplate

        return ChatTemplate.load(self.path, self.tokenizer_settings())

    @cached_property
    def generation(self) -> tuple[GenerationDefaults, tuple[str, ...]]:
        """Return the defaults of generation_config.json, and a warning for every field that cannot be used."""
        return read_generation_config(self.path, self.config.vocab_size)


def _reranker(folder: Path) -> "ScoreSpec | None":
    if not (folder / MODULES).is_file():
        return None
    from mycli.runtime.checkpoint.sentence_transformers import read_score_spec

    return read_score_spec(folder)


def _has_weights(folder: Path) -> bool:
    return any((folder / name).exists() for name in (SINGLE, INDEX))
