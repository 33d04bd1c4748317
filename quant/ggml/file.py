"""The layout of a model's GGUF file: names, types and places of its tensors, metadata and tokenizer."""

import dataclasses
import math
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from mycli.quant.export._gguf_tokenizer import tokenizer_metadata
from mycli.runtime.checkpoint.gguf.architecture import Architecture
from mycli.runtime.checkpoint.gguf.architectures import written_architecture
from mycli.runtime.checkpoint.gguf.checkpoint import file_order
from mycli.runtime.checkpoint.gguf.folder import GgufFolder
from mycli.runtime.checkpoint.gguf.header import parse_gguf_header
from mycli.runtime.checkpoint.gguf.rope import rope_factors
from mycli.runtime.checkpoint.gguf.tensor_rules import Place, TensorRule
from mycli.runtime.checkpoint.gguf.types import TYPES_BY_NAME
from mycli.runtime.checkpoint.gguf.writer import GgufWriter, Unwritten, make_gguf_header
from mycli.runtime.checkpoint.gguf_parts import SUFFIX
from mycli.runtime.checkpoint.model_folder import ModelFolder
from mycli.runtime.device.placement import torch_dtype
from mycli.runtime.errors import ModelError, UsageError
from mycli.runtime.models.config import ModelConfig
from mycli.runtime.models.multimodal import MULTIMODAL
from mycli.runtime.models.part_spec import Shape
from mycli.runtime.tokenizer.gguf_vocabulary import ggml_key
from mycli.runtime.utils.json_fields import Fields

# Fields of a config that are compared besides its layers and shapes.
_COMPARED = (
    *("max_context", "layer_norm", "rms_norm_eps", "embedding_scale", "round_embedding_scale"),
    *("logit_scale", "logit_softcap", "tie_embeddings", "per_layer_width", "streams"),
)
_PHI3_NAMES, _PHI3_TOKENS = ("phi-3", "phi3"), {"</s>", "<unk>", "<s>", "<|endoftext|>"}
EMBEDDING_TENSOR, HEAD = "model.embed_tokens.weight", "output.weight"
_LACKING = "cannot be written as GGUF, which has no key for"
_NEEDS = "cannot be written as GGUF: in the architecture {}, llama.cpp needs {}"
_SAFETENSORS = "export to safetensors"
_HINT = f"llama.cpp would compute other logits; {_SAFETENSORS}"


def gguf_path(target: Path) -> Path:
    """Return the path with the suffix .gguf, by which a model's path is taken for a file.

    Raises UsageError for a target that is not a file name.
    """
    if target.name in ("", ".."):
        raise UsageError(f"{target}: a folder, but GGUF is one file", "name the file to write")
    return target if target.suffix == SUFFIX else target.with_name(target.name + SUFFIX)


def fp32_matrices(config: ModelConfig) -> set[str]:
    """Return the matrices that llama.cpp reads in fp32: routers and gates, and the gains of head norms."""
    linears = {f"{linear.name}.weight" for layer in config.layer_specs for linear in layer.unquantized}
    return linears | {norm.tensor for layer in config.layer_specs for norm in layer.norms() if norm.stacked}


class GgufLayout:
    """The place and type of each tensor of a model in its GGUF file. kinds: the type by tensor.

    Raises ModelError for a model that GGUF cannot describe completely, because llama.cpp would compute other logits.
    """

    def __init__(self, folder: ModelFolder, label: str, kinds: Mapping[str, str], file_type: int) -> None:
        """`file_type`: general.file_type."""
        self.config, self.kinds = folder.config, kinds
        images = folder.raw.object(MULTIMODAL) if folder.raw.has(MULTIMODAL) else None
        architecture = written_architecture(self.config, "" if images is None else images.text("model_type", ""))
        self.places = {tensor: gguf_place(architecture, tensor) for tensor in kinds}
        require_loadable(self.config, architecture, self.places.values())
        self._factors = rope_factors(self.config)
        self.metadata = _metadata(folder, label, architecture, file_type, images)
        self.tensors: list[tuple[str, str, Shape]] = []
        self.tensors += [(name, "F32", (len(factors),)) for name, factors in self._factors.items()]
        self.metadata |= {key: Unwritten(self.config.layers) for key in architecture.key_tensors}
        self.tensors += _plan(self.config, self.places, kinds)
        stored = {name: (kind, shape) for name, kind, shape in self.tensors}
        self._zeros = architecture.unread(self.config)
        self.tensors += [(name, *stored[other]) for name, other in self._zeros.items()]
        # The embedding once more, for a tied model of an architecture in which llama.cpp requires a head.
        self.head = HEAD if architecture.own_head and self.config.tie_embeddings else None
        if self.head is not None:
            self.tensors.append((self.head, *stored[self.places[EMBEDDING_TENSOR].name]))
        _require_keys(self.config, self.metadata, self.tensors, self._factors)

    @property
    def nbytes(self) -> int:
        """The size of the file before padding."""
        header, places = make_gguf_header(self.metadata, self.tensors, "the file to write")
        return max((entry.offset + entry.nbytes for entry in places.values()), default=len(header))

    def writer(self, target: Path, overwrite: bool) -> "GgufTensors":
        return GgufTensors(self, GgufWriter(target, self.metadata, self.tensors, overwrite=overwrite))

    def column_order(self, tensor: str, columns: int) -> Tensor | None:
        """Return the column of Hugging Face's order for each column of the file; None where they are the same."""
        order = self.places[tensor].rule.column_order
        return None if order is None else file_order(order, self.config, columns)

    def write(self, writer: GgufWriter, tensor: str, data: Tensor) -> None:
        """Write rows uint8 [rows, bytes] in Hugging Face's order."""
        place = self.places[tensor]
        if place.rule.row_order is not None:
            data = data[file_order(place.rule.row_order, self.config, len(data))]
        parts = data.split_with_sizes(_rows(self.config, place, len(data)))
        if place.rule.by_head:
            plain = TYPES_BY_NAME[self.kinds[tensor]].dtype
            assert plain is not None, "half of it is transposed, and blocks lie along rows"
            halves = split_by_head(self.config, data.view(torch_dtype(plain)))
            parts = tuple(half.contiguous().view(torch.uint8) for half in halves)
        for name, part in zip(place.names, parts, strict=True):
            writer.write(name, part.contiguous().numpy().reshape(-1).data, (place.expert or 0) * part.nbytes)
        if len(missing := padding(self.config, place.rule, data)):
            writer.write(place.name, missing.contiguous().numpy().reshape(-1).data, data.nbytes)
        if self.head is not None and tensor == EMBEDDING_TENSOR:
            writer.write(self.head, data.contiguous().numpy().reshape(-1).data)

    def begin(self, writer: GgufWriter) -> None:
        """Write what does not depend on weights."""
        for name, factors in self._factors.items():
            writer.write(name, torch.tensor(factors).numpy().data)
        for name in self._zeros:
            writer.leave_zero(name)


class GgufTensors:
    """Writes the tensors of a layout; a context manager that leaves a complete file after `finish`, otherwise none."""

    def __init__(self, layout: GgufLayout, writer: GgufWriter) -> None:
        self._layout, self.file = layout, writer

    def __enter__(self) -> Self:
        self.file.__enter__()
        self._layout.begin(self.file)
        return self

    def __exit__(self, *error: object) -> None:
        self.file.__exit__(*error)

    def write(self, tensor: str, data: Tensor) -> None:
        """Write rows uint8 [rows, bytes] in Hugging Face's order."""
        self._layout.write(self.file, tensor, data)


def most_common_kind(kinds: Mapping[str, str], config: ModelConfig) -> str:
    """Return the type of most values, which general.file_type names."""
    sizes: Counter[str] = Counter()
    for name, shape in config.tensors():
        sizes[kinds[name]] += math.prod(shape)
    return sizes.most_common(1)[0][0]


def gguf_place(architecture: Architecture, name: str) -> Place:
    """Return the place of a tensor. Raises ModelError if the architecture has none for it."""
    place = architecture.place(name)
    if place is None:
        raise ModelError(f"{name}: GGUF has no tensor for it in the architecture {architecture.name}", "")
    return place


def _rows(config: ModelConfig, place: Place, rows: int) -> list[int]:
    # Of the tensors that store it.
    first = rows if place.rule.first_rows is None else place.rule.first_rows(config)
    return [first] if first == rows else [first, rows - first]


def padding(config: ModelConfig, rule: TensorRule, data: Tensor) -> Tensor:
    """Return the rows of the file after `data` [rows, columns], which repeat the first one; mostly none."""
    rows = len(data) if rule.padded_rows is None else rule.padded_rows(config)
    return data[:1].expand(rows - len(data), *data.shape[1:])


def _halves(config: ModelConfig) -> tuple[Shape, Shape]:
    # The shapes of the two tensors of latent attention's kv_b.
    spec = next(layer.latent for layer in config.layer_specs if layer.latent is not None)
    return (spec.heads, spec.rank, spec.nope_dim), (spec.heads, spec.value_dim, spec.rank)


def split_by_head(config: ModelConfig, values: Tensor) -> tuple[Tensor, Tensor]:
    """Split latent attention's kv_b into keys [heads, rank, nope], transposed, and values [heads, value, rank]."""
    (heads, rank, nope), (_, value, _) = _halves(config)
    values = values.reshape(heads, nope + value, rank)
    return values[:, :nope].transpose(1, 2), values[:, nope:]


def _plan(config: ModelConfig, places: dict[str, Place], kinds: Mapping[str, str]) -> list[tuple[str, str, Shape]]:
    stacks = Counter(place.name for place in places.values() if place.expert is not None)
    plan: dict[str, tuple[str, str, Shape]] = {}
    for tensor, full in config.tensors():
        place, kind = places[tensor], kinds[tensor]
        if place.in_metadata:
            continue
        if place.rule.by_head:
            plan |= {name: (name, kind, shape) for name, shape in zip(place.names, _halves(config), strict=True)}
            continue
        for name, rows in zip(place.names, _rows(config, place, full[0]), strict=True):
            rows = rows if place.rule.padded_rows is None else place.rule.padded_rows(config)
            # GGUF drops axes of length one.
            shape = tuple(size for size in (rows, *full[1:]) if size != 1) or (1,)
            if place.rule.stored_shape is not None:
                shape = place.rule.stored_shape(config)
            elif place.name in stacks:
                parts = 1 + len(place.rule.more_names)
                joined = "{expert}" not in place.rule.name  # tensors of one layer, by rows
                whole = (parts * shape[0], *shape[1:])
                shape = whole if joined else (stacks[place.name] // parts, *whole)
            planned = (name, kind, shape)
            if plan.setdefault(name, planned) != planned:
                problem = f"{kind} and {list(shape)}, but GGUF stacks experts of one type and shape"
                raise ModelError(f"{tensor}: {problem}", "")
    return list(plan.values())


def require_loadable(config: ModelConfig, architecture: Architecture, places: Iterable[Place]) -> None:
    """Raise ModelError for a model whose file llama.cpp would not load."""
    for requirement in architecture.requires:
        if not requirement.holds(config):
            raise ModelError(f"config.json: {_NEEDS.format(architecture.name, requirement.text)}", _SAFETENSORS)
    for place in places:
        stem, _, ending = place.name.rpartition(".")
        tensor = stem.split(".", 2)[-1] if stem.startswith("blk.") else stem
        if ending == "bias" and place.rule.suffixes.get(".bias") == ".bias" and tensor not in architecture.biases:
            problem = f"{place.name} cannot be written as GGUF: llama.cpp's {architecture.name} has no such bias"
            raise ModelError(problem, _SAFETENSORS)


def _require_keys(
    config: ModelConfig,
    metadata: dict[str, Any],
    plan: list[tuple[str, str, Shape]],
    factors: Mapping[str, list[float]],
) -> None:
    """Raise ModelError if GGUF has no key for a property of the model."""
    # Checked by reading the header back, not by a list of unsupported properties, which would miss new ones.
    header, places = make_gguf_header(metadata, plan, "the file to write")
    stored = parse_gguf_header(
        lambda offset, count: header[offset : offset + count],
        max(entry.offset + entry.nbytes for entry in places.values()),
        "the file to write",
    )
    written = GgufFolder.from_header(stored, lambda name: factors[name], Path()).config
    for name in _COMPARED:
        if name == "tie_embeddings" and HEAD in places:
            continue  # a head of its own, equal to the embedding
        if not _equal(getattr(config, name), getattr(written, name)):
            raise ModelError(f"config.json: {_LACKING} its {name}", _HINT)
    for ours, theirs in zip(config.layer_specs, written.layer_specs, strict=True):
        parts = [part for part in ("mixer", "state_space", "mlp") if getattr(ours, part) is not None]
        fields = [(part, field) for part in parts for field in _fields(getattr(ours, part))]
        for part, field in fields:
            if not _equal(getattr(getattr(ours, part), field), getattr(getattr(theirs, part), field, None)):
                raise ModelError(f"config.json: {_LACKING} {field} of layer {ours.index}", _HINT)
        if not _equal(ours, theirs):
            raise ModelError(f"config.json: {_LACKING} layer {ours.index}", _HINT)


def _fields(part: Any) -> list[str]:
    return [field.name for field in dataclasses.fields(part)]


def _equal(ours: Any, theirs: Any) -> bool:
    # Keys are fp32, fields of a config are not.
    if isinstance(ours, float) and isinstance(theirs, float | int):
        return math.isclose(ours, theirs, rel_tol=1e-5)
    if isinstance(ours, tuple) and isinstance(theirs, tuple):
        return len(ours) == len(theirs) and all(map(_equal, ours, theirs))
    if dataclasses.is_dataclass(ours) and type(ours) is type(theirs):
        return all(_equal(getattr(ours, name), getattr(theirs, name)) for name in _fields(ours))
    return bool(ours == theirs)


def _metadata(
    folder: ModelFolder, label: str, architecture: Architecture, file_type: int, images: Fields | None
) -> dict[str, Any]:
    config = folder.config
    raw, settings = folder.tokenizer_json(), folder.tokenizer_settings()
    tokenizer = tokenizer_metadata(raw, settings, config.vocab_size, architecture.name)
    values: dict[str, Any] = {
        "general.architecture": architecture.name,
        "general.name": label,
        "general.file_type": file_type,
        "general.quantization_version": 2,
        **architecture.metadata(config, images),
        **tokenizer,
    }
    # By this name llama.cpp sets flags of Phi-3's tokens, and loads no file whose vocabulary lacks them.
    if any(name in label.lower() for name in _PHI3_NAMES) and not _PHI3_TOKENS.issubset(tokenizer[ggml_key("tokens")]):
        del values["general.name"]
    defaults, _ = folder.generation
    for key, value in (("temp", defaults.temperature), ("top_p", defaults.top_p), ("min_p", defaults.min_p)):
        if value is not None:
            values[f"general.sampling.{key}"] = float(value)
    if defaults.top_k is not None:
        values["general.sampling.top_k"] = defaults.top_k
    ends = [end for end in (*defaults.eos, *config.eos) if end != values.get("tokenizer.ggml.eos_token_id")]
    if ends:
        values["tokenizer.ggml.eot_token_id"] = ends[0]
    template = folder.chat_template()
    if template is not None:
        values["tokenizer.chat_template"] = template.source()
    return values
