"""A GGUF file as a model folder: metadata become config.json and tokenizer, tensors get Hugging Face names."""

import json
import re
import shlex
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from ctypes import c_float
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING

from mycli.runtime.checkpoint.gguf.architecture import Architecture, Config
from mycli.runtime.checkpoint.gguf.architectures import read_architecture
from mycli.runtime.checkpoint.gguf.architectures.gemma_embedding import DENSE
from mycli.runtime.checkpoint.gguf.files import MAX_SMALL_TENSOR, GgufFiles, unpack_floats
from mycli.runtime.checkpoint.gguf.header import GgufHeader, GgufModel
from mycli.runtime.checkpoint.gguf.ollama import as_llama_cpp
from mycli.runtime.checkpoint.gguf.types import LAYOUT, READABLE_NAMES, TYPES_BY_NAME
from mycli.runtime.checkpoint.manifest import Manifest
from mycli.runtime.checkpoint.model_folder import ModelFolder
from mycli.runtime.checkpoint.safetensors_header import TensorEntry, damaged
from mycli.runtime.checkpoint.stable_file import RegularFile
from mycli.runtime.errors import ModelError
from mycli.runtime.models.generation_config import GenerationDefaults, parse_generation_config
from mycli.runtime.models.registry import parse_config
from mycli.runtime.tokenizer.chat_template import ChatTemplate
from mycli.runtime.tokenizer.gguf_tokenizer import eos_token_ids, tokenizer_json, tokenizer_settings
from mycli.runtime.utils.dtypes import Dtype
from mycli.runtime.utils.json_fields import Fields

if TYPE_CHECKING:  # describing a model needs no torch
    import torch

    from mycli.runtime.checkpoint.reader import Checkpoint
    from mycli.runtime.checkpoint.sentence_transformers import (
        CrossEncoderSpec,
        DenseSpec,
        EmbeddingSpec,
        PoolingMode,
    )
    from mycli.runtime.tokenizer.tokenizer import Tokenizer

_POOLING: Mapping[int, "PoolingMode"] = {1: "mean", 2: "cls", 3: "last"}  # by pooling_type; others compute no vectors
# field of generation_config.json by key of general.sampling
_SAMPLING = {
    "temp": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "penalty_repeat": "repetition_penalty",
}


def _shortest(value: object) -> object:
    # Keys are fp32: 0.7 is stored as 0.699999988. The decimal of fewest digits with the same fp32 value was meant.
    if not isinstance(value, float) or c_float(value).value != value:
        return value
    return next(short for digits in range(1, 18) if c_float(short := float(f"{value:.{digits}g}")).value == value)


def _long_axes(shape: Sequence[int]) -> list[int]:
    return [size for size in shape if size != 1]


def _dtype(matrices: Iterable[TensorEntry]) -> Dtype:
    # Of activations: bfloat16 for a quantized model, else the dtype of most values.
    nbytes: Counter[Dtype] = Counter()
    for entry in matrices:
        dtype = TYPES_BY_NAME[entry.dtype].dtype
        if dtype is None:
            return "bfloat16"
        nbytes[dtype] += entry.nbytes
    return nbytes.most_common(1)[0][0]


@dataclass(frozen=True)
class GgufFolder(ModelFolder):
    """A `ModelFolder` whose `path` is the file or its first part; without `files`, tensors cannot be read."""

    header: GgufHeader = field(kw_only=True)
    files: Mapping[str, RegularFile] = field(kw_only=True)

    @classmethod
    def open_file(cls, path: Path) -> "GgufFolder":
        """Read the header of the file `path`. Raises NotFoundError, or ModelError naming the key or tensor at fault."""
        opened = GgufFiles.open(path)
        return cls.from_header(opened.header, opened.floats, path, opened.files)

    @classmethod
    def from_header(
        cls,
        header: GgufHeader,
        floats: Callable[[str], Sequence[float]],
        path: Path,
        files: Mapping[str, RegularFile] | None = None,
    ) -> "GgufFolder":
        """Describe the model of a parsed header; `floats` reads a small tensor."""
        if header.metadata.values.get("general.type") == "adapter":
            raise ModelError(
                f"{path.name}: a LoRA adapter, which needs its model",
                code="give-adapter",
                data={"base": "MODEL", "adapter": shlex.quote(str(path))},
            )
        header = as_llama_cpp(header)
        architecture = read_architecture(header)
        header = replace(header, tensors=architecture.separated(header.tensors))
        model = GgufModel(header.metadata, header.tensors, floats, header.arrays)
        raw = Fields(_config(architecture, model), header.metadata.source)
        return cls(path, raw, parse_config(raw), config_only=True, header=header, files=files or {})

    @cached_property
    def manifest(self) -> Manifest:
        model, expected = self._model, dict(self.config.tensors())
        # Of the layers that the model has: one beyond them is an error.
        specs = self.config.layer_specs
        unread = tuple(name for spec in specs for name in spec.ignored_prefixes if f".{spec.index}." in name)
        tensors: dict[str, TensorEntry] = {}
        for name, entry in self._architecture.tensors(model):
            if name.startswith(unread):
                continue
            parts = self._architecture.joined(model, name, entry)
            rows = sum(part.shape[0] for part in parts)
            shape, nbytes = (rows, *entry.shape[1:]), sum(part.nbytes for part in parts)
            full = expected.get(name, shape)
            if len(parts) > 1 and len(shape) == 3 and sum(prod(part.shape) for part in parts) == prod(full):
                shape = full
            # GGUF drops axes of length one; those of convolutions and decays of Kimi Linear are others.
            if len(shape) != len(full) and _long_axes(full) == _long_axes(shape):
                shape = full
            # Vectors may have a second axis: Mamba's values by head, norms by group.
            if len(full) == 1 and prod(shape) == full[0]:
                shape = full
            tensors[name] = replace(entry, shape=shape, nbytes=nbytes)
        return Manifest(self.path, tensors, self.files)

    @cached_property
    def mtp_head(self) -> None:
        """None: the blocks of a head behind the layers are not read."""

    @cached_property
    def _joined(self) -> dict[str, tuple[TensorEntry, ...]]:
        model = self._model
        parts = {
            name: self._architecture.joined(model, name, entry) for name, entry in self._architecture.tensors(model)
        }
        return {name: entries for name, entries in parts.items() if len(entries) > 1}

    def _factors(self) -> dict[str, float]:
        # The factors of tensors by Hugging Face name.
        model, architecture = self._model, self._architecture
        stored = {}
        for matrix, entry in architecture.scales(model):
            data = self.files[entry.file].read(min(entry.nbytes, MAX_SMALL_TENSOR), entry.offset)
            stored[matrix] = unpack_floats(entry, data)
        factors = {}
        for name, entry in self.manifest.tensors.items() if stored else ():
            expert = re.search(r"\.experts\.(\d+)\.", name)
            parts = {part.name for part in self._joined.get(name, (entry,))}
            values = [stored.get(part, [1.0]) for part in parts]
            index = 0 if expert is None else int(expert[1])
            if any(len(value) != 1 and (expert is None or len(value) <= index) for value in values):
                raise damaged(f"{entry.file}: {entry.name} has a wrong number of scales")
            chosen = {value[0] if len(value) == 1 else value[index] for value in values}
            if len(chosen) > 1:
                raise ModelError(f"{entry.file}: {', '.join(sorted(parts))} have different scales", "")
            if (factor := chosen.pop()) != 1.0:
                factors[name] = factor
        return factors

    def checked_manifest(self) -> Manifest:
        expected, tensors = dict(self.config.tensors()), self.manifest.tensors
        for name, entry in tensors.items():
            if name not in expected:
                raise damaged(f"{entry.file}: {entry.name} is not part of the model that the metadata describes")
            if entry.shape != expected[name]:
                raise damaged(
                    f"{entry.file}: {entry.name} has shape {list(entry.shape)}, expected {list(expected[name])}"
                )
            if len(entry.shape) == 1 and TYPES_BY_NAME[entry.dtype].bits:
                raise damaged(f"{entry.file}: {entry.name} is {entry.dtype}, but norms and biases are not quantized")
            if entry.dtype not in READABLE_NAMES:
                hint = f"readable: {', '.join(READABLE_NAMES)}"
                raise ModelError(f"{entry.file}: {entry.name} is {entry.dtype}, which is not supported", hint)
        missing = [name for name in expected if name not in tensors]
        if missing:
            raise damaged(f"{self.path.name}: {len(missing)} tensors of the model are missing, {missing[0]} first")
        return self.manifest

    @property
    def _model(self) -> GgufModel:
        return GgufModel(self.header.metadata, self.header.tensors, lambda name: (), self.header.arrays)

    @cached_property
    def _architecture(self) -> Architecture:
        return read_architecture(self.header)

    @cached_property
    def generation(self) -> tuple[GenerationDefaults, tuple[str, ...]]:
        values = self.header.metadata.values
        stored = {name: values.get(f"general.sampling.{key}") for key, name in _SAMPLING.items()}
        defaults = {name: _shortest(value) for name, value in stored.items() if value is not None}
        suppressed = values.get("tokenizer.ggml.suppress_tokens")
        if suppressed is not None:
            defaults["suppress_tokens"] = list(suppressed) if isinstance(suppressed, array) else suppressed
        return parse_generation_config(Fields(defaults, self.raw.source), self.config.vocab_size)

    def companions(self) -> dict[str, bytes]:
        files = {
            "tokenizer.json": self.tokenizer_json().values,
            "tokenizer_config.json": self.tokenizer_settings().values,
        }
        return {name: json.dumps(value, ensure_ascii=False, indent=1).encode() for name, value in files.items()}

    @cached_property
    def embedding(self) -> "EmbeddingSpec | None":
        """The pooling of an embedding model, whose vectors llama.cpp's server normalizes; None for other models."""
        from mycli.runtime.checkpoint.sentence_transformers import EmbeddingSpec

        if self.config.classifier is not None:
            return None
        pooling = _POOLING.get(self._model.integer("pooling_type", 1 if self.config.bidirectional else 0))
        return None if pooling is None else EmbeddingSpec((pooling,), tuple(self._dense_layers()), normalize=True)

    @cached_property
    def cross_encoder(self) -> "CrossEncoderSpec | None":
        """The scores of a reranker with a head of its own: files do not say its activation; None for other models."""
        from mycli.runtime.checkpoint.sentence_transformers import CrossEncoderSpec

        return None if self.config.classifier is None else CrossEncoderSpec()

    def _dense_layers(self) -> Iterator["DenseSpec"]:
        from mycli.runtime.checkpoint.sentence_transformers import DenseSpec

        width = self.config.hidden_size
        for name in DENSE if self.config.bidirectional else ():
            entry = self.header.tensors.get(name)
            if entry is None:
                continue
            if len(entry.shape) != 2 or entry.shape[1] != width or entry.dtype not in READABLE_NAMES:
                raise damaged(f"{entry.file}: {name} is {entry.dtype} {list(entry.shape)}, expected {width} columns")
            width = entry.shape[0]
            yield DenseSpec(self.path.with_name(entry.file), entry.shape[1], width, False, "Identity", entry)

    def source_files(self) -> list[Path]:
        changes = [] if self.adapter is None else self.adapter.source_files()
        return [*(file.path for file in self.files.values()), *changes]

    def tokenizer_json(self) -> Fields:
        return Fields(tokenizer_json(self.header.metadata), self.raw.source)

    def tokenizer_settings(self) -> Fields:
        return Fields(tokenizer_settings(self.header.metadata), self.raw.source)

    @property
    def has_tokenizer(self) -> bool:
        return self.header.metadata.has("tokenizer.ggml.tokens")

    def chat_template(self) -> ChatTemplate | None:
        return ChatTemplate.from_settings(self.tokenizer_settings())

    def tokenizer(self) -> "Tokenizer":
        from mycli.runtime.tokenizer.tokenizer import Tokenizer

        return Tokenizer.from_fields(self.tokenizer_json(), self.tokenizer_settings(), self.config.vocab_size)

    def checkpoint(self, *, allow_nonfinite: bool = False, dtype: "torch.dtype | None" = None) -> "Checkpoint":
        from mycli.runtime.checkpoint.gguf.checkpoint import GgufCheckpoint

        checkpoint = GgufCheckpoint(
            self.checked_manifest(),
            self.config,
            self._architecture,
            self._joined,
            self._factors(),
            dtype=dtype,
            allow_nonfinite=allow_nonfinite,
        )
        return self._with_adapter(checkpoint, allow_nonfinite)


def _config(architecture: Architecture, model: GgufModel) -> Config:
    # dtype, end tokens and the types of linears are not in the architecture's keys: tensors and vocabulary tell them.
    config = architecture.config(model)
    matrices = {name: entry for name, entry in architecture.tensors(model) if len(entry.shape) == 2}
    types = {
        name.removesuffix(".weight"): entry.dtype
        for name, entry in matrices.items()
        if TYPES_BY_NAME[entry.dtype].bits and name != "model.embed_tokens.weight"
    }
    config |= {"dtype": _dtype(matrices.values()), "eos_token_id": eos_token_ids(model.metadata)}
    if types:
        places = {name: architecture.place(f"{name}.weight") for name in types}
        reordered = [name for name, place in places.items() if place is not None and place.rule.column_order]
        config["quantization_config"] = {"quant_method": LAYOUT, "types": types, "reordered": reordered}
    return config
