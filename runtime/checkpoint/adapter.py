"""A LoRA adapter in PEFT's layout or mlx-lm's: which weights it changes, from the headers of its files.

Matrices A [r, in] and B [out, r] change a weight W to W + s B A (Hu et al. 2021, arXiv:2106.09685); DoRA scales each
row of the sum to a trained norm (Liu et al. 2024, arXiv:2402.09353). Anything that does not fit the model is refused by
name. Imports no torch.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from mycli.runtime.checkpoint.adapter_config import ADAPTER_CONFIG, ADAPTER_WEIGHTS, MLX_WEIGHTS, AdapterConfig
from mycli.runtime.checkpoint.manifest import Manifest, read_file_header
from mycli.runtime.checkpoint.safetensors_header import TensorEntry, damaged
from mycli.runtime.checkpoint.stable_file import RegularFile
from mycli.runtime.errors import ModelError
from mycli.runtime.models.config import ModelConfig
from mycli.runtime.models.part_spec import Shape
from mycli.runtime.utils.dtypes import SAFETENSORS_FLOATS
from mycli.runtime.utils.json_fields import read_object

_PREFIX = "base_model.model."
_PARTS = {".lora_A.weight": "a", ".lora_B.weight": "b"}
_EMBEDDING_PARTS = {".lora_embedding_A": ".lora_B.weight", ".lora_embedding_B": ".lora_A.weight"}
_BASE = ".base_layer.weight"  # PEFT saves embedding and head, if they have an update, as they were below it
_TRAINED_BIAS = ".base_layer.bias"  # of an updated linear, with bias="lora_only" or "all"
_MAGNITUDE = ".lora_magnitude_vector"
_MLX_PARTS = {".lora_a": ".lora_A.weight", ".lora_b": ".lora_B.weight", ".m": _MAGNITUDE}
_TOKENS = ("model.embed_tokens", "lm_head")
Rename = Callable[[str], str | None]


@dataclass(frozen=True)
class LowRank:
    """The update `scale` * B [out, r] * A [r, in] of one weight; `a` and `b` are names of tensors.

    magnitude: the tensor [out] of the norms to which DoRA scales the rows of the sum.
    """

    a: str
    b: str
    scale: float
    magnitude: str | None = None

    @property
    def parts(self) -> tuple[str, ...]:
        return (self.a, self.b) if self.magnitude is None else (self.a, self.b, self.magnitude)


@dataclass(frozen=True)
class Adapter:
    """A checked adapter; `name` is for messages."""

    name: str
    path: Path
    config: AdapterConfig
    added: Mapping[str, LowRank]  # by the model's names of weights
    replaced: Mapping[str, str]  # the adapter's name of a whole tensor by the model's
    manifest: Manifest  # by the adapter's names
    unused: tuple[str, ...] = ()  # modules outside the text part

    @classmethod
    def open(cls, name: str, path: Path, model: ModelConfig, rename: Rename = lambda stored: stored) -> "Adapter":
        """Read config and header in `path` and check them against `model`; `rename` returns its name of a tensor.

        Raises ModelError naming the field or tensor that is damaged, does not fit or is not supported.
        """
        config = AdapterConfig.parse(read_object(path / ADAPTER_CONFIG))
        manifest = _manifest(path)
        added, replaced, unused = _match_tensors(manifest.tensors, config, rename)
        added = _weights_by_name(added, model)
        shapes = dict(model.tensors())
        for weight, low in added.items():
            _check_added(weight, low, manifest.tensors, shapes, config)
        for weight, stored in replaced.items():
            _check_replaced(weight, manifest.tensors[stored], shapes, model.tie_embeddings)
        both = sorted(name for name in added.keys() & replaced.keys() if not replaced[name].endswith(_BASE))
        if both:
            raise damaged(f"{ADAPTER_WEIGHTS}: {both[0]:.80} has both a low-rank update and a replacement")
        return cls(name, path, config, added, replaced, manifest, tuple(unused))

    @cached_property
    def nbytes(self) -> int:
        return self.manifest.nbytes

    def source_files(self) -> list[Path]:
        return [self.path / ADAPTER_CONFIG, *(self.path / name for name in self.manifest.files)]


def _manifest(path: Path) -> Manifest:
    if not (path / ADAPTER_WEIGHTS).exists():
        if (path / MLX_WEIGHTS).exists():
            file = RegularFile.find(path / MLX_WEIGHTS)
            return Manifest(path, _peft_names(read_file_header(file)), {file.name: file})
        pickled = "adapter_model.bin"
        if (path / pickled).exists():
            raise ModelError(
                f"{path}: its weights are a pickle ({pickled}), without {ADAPTER_WEIGHTS}",
                "pickles can run code; have PEFT save it as safetensors",
            )
    file = RegularFile.find(path / ADAPTER_WEIGHTS)
    return Manifest(path, _linear_names(read_file_header(file)), {file.name: file})


def _linear_names(tensors: Mapping[str, TensorEntry]) -> dict[str, TensorEntry]:
    """Return PEFT's tensors with those of an embedding by the names of a linear's: W [vocab, hidden] + s A^T B^T."""
    renamed = {}
    for stored, entry in tensors.items():
        suffix = next((suffix for suffix in _EMBEDDING_PARTS if stored.endswith(suffix)), None)
        if suffix is None or len(entry.shape) != 2:
            renamed[stored] = entry
            continue
        name = stored.removesuffix(suffix) + _EMBEDDING_PARTS[suffix]
        renamed[name] = replace(entry, name=name, shape=entry.shape[::-1], transposed=True)
    return renamed


def _peft_names(tensors: Mapping[str, TensorEntry]) -> dict[str, TensorEntry]:
    """Return the tensors of an adapter of mlx-lm, whose matrices are stored as their transposes, by PEFT's names."""
    renamed = {}
    for name, entry in tensors.items():
        suffix = next((suffix for suffix in _MLX_PARTS if name.endswith(suffix)), None)
        if suffix is None or len(entry.shape) > 2:
            raise ModelError(
                f"{entry.file}: {name:.100}: not part of a low-rank update of a linear layer, which alone is supported",
                "merge it with mlx_lm.fuse",
            )
        stored = f"{_PREFIX}{name.removesuffix(suffix)}{_MLX_PARTS[suffix]}"
        matrix = len(entry.shape) == 2
        renamed[stored] = replace(entry, name=stored, shape=entry.shape[::-1], transposed=matrix)
    return renamed


def _match_tensors(
    tensors: Mapping[str, TensorEntry], config: AdapterConfig, rename: Rename
) -> tuple[dict[str, LowRank], dict[str, str], list[str]]:
    halves: dict[str, dict[str, str]] = {}
    replaced: dict[str, str] = {}
    unused: list[str] = []
    known = {**_PARTS, _MAGNITUDE: "magnitude"} if config.dora else _PARTS
    for stored in tensors:
        if not stored.startswith(_PREFIX):
            raise ModelError(
                f"{ADAPTER_WEIGHTS}: {stored:.80}: not a tensor name of PEFT", "save the adapter with PEFT"
            )
        suffix = next((suffix for suffix in known if stored.endswith(suffix)), None)
        plain = stored.removeprefix(_PREFIX)
        module = plain if suffix is None else plain.removesuffix(suffix)
        if suffix is None and ("lora_" in plain or "modules_to_save" in plain):
            raise ModelError(
                f"{ADAPTER_WEIGHTS}: {plain:.100}: not part of a low-rank update, which alone is supported", ""
            )
        if plain.endswith((_BASE, _TRAINED_BIAS)):
            module, _, part = plain.rpartition(".base_layer.")
            plain = f"{module}.{part}"
        if rename(plain if suffix is None else f"{module}.weight") is None:
            unused.append(module)
        elif suffix is None:
            replaced[str(rename(plain))] = stored
        else:
            halves.setdefault(module, {})[known[suffix]] = stored
    for module, parts in halves.items():
        file = tensors[next(iter(parts.values()))].file
        for suffix, part in known.items():
            if part not in parts:
                missing = suffix.removeprefix(".").removesuffix(".weight")
                raise damaged(f"{file}: {module:.80} has {missing} missing")
    added = {
        str(rename(f"{module}.weight")): LowRank(**parts, scale=config.scale(module))
        for module, parts in halves.items()
    }
    return added, replaced, unused


def _weights_by_name(added: Mapping[str, LowRank], model: ModelConfig) -> dict[str, LowRank]:
    # Linears stored as transposes (Conv1D) have other names here. PEFT's A has their inputs and its B their outputs, as
    # of others; a whole weight would be a transpose, and remains without a place.
    names = {linear.transposed_as: linear.name for linear in model.linears() if linear.transposed_as is not None}
    weights = {f"{stored}.weight": f"{name}.weight" for stored, name in names.items()}
    return {weights.get(name, name): low for name, low in added.items()}


def _check_added(
    name: str, low: LowRank, tensors: Mapping[str, TensorEntry], shapes: Mapping[str, Shape], config: AdapterConfig
) -> None:
    a, b, shape = tensors[low.a], tensors[low.b], shapes.get(name)
    if shape is None:
        raise no_place(name, a.file)
    module = low.a.removeprefix(_PREFIX).removesuffix(".lora_A.weight")
    check_low_rank(module, a, b, shape, config.rank_of(module))
    _check_float(a)
    _check_float(b)
    if low.magnitude is not None:
        norms = tensors[low.magnitude]
        if norms.shape != shape[:1]:
            raise damaged(f"{norms.file}: {module:.80}: {list(norms.shape)} norms for {shape[0]} rows")
        _check_float(norms)


def check_low_rank(module: str, a: TensorEntry, b: TensorEntry, shape: Shape, rank: int) -> None:
    """Raise ModelError unless A and B have this rank and fit a weight of this shape."""
    if len(shape) != 2 or a.shape != (rank, shape[1]) or b.shape != (shape[0], rank):
        raise ModelError(
            f"{a.file}: {module:.80}: A {list(a.shape)} and B {list(b.shape)} of rank {rank} "
            f"do not fit the weight {list(shape)}",
            "the adapter was made for another model, or its config is another adapter's",
        )


def _check_replaced(name: str, entry: TensorEntry, shapes: Mapping[str, Shape], tied: bool) -> None:
    shape = shapes.get(name)
    if shape is None or (tied and name == "model.embed_tokens.weight"):
        raise no_place(name, entry.file)
    if entry.shape != shape:
        raise ModelError(
            f"{entry.file}: {name:.80} has shape {list(entry.shape)}, but the model's tensor has {list(shape)}",
            "the adapter was made for another model, or for one with more tokens",
        )
    _check_float(entry)


def _check_float(entry: TensorEntry) -> None:
    if entry.dtype not in SAFETENSORS_FLOATS:
        raise damaged(f"{entry.file}: {entry.name:.100} is {entry.dtype}, expected {' or '.join(SAFETENSORS_FLOATS)}")


def no_place(name: str, file: str) -> ModelError:
    """Return the error for a weight that the model lacks."""
    module = name.removesuffix(".weight").removesuffix(".bias")
    if module in _TOKENS:
        return ModelError(
            f"{file}: changes {module}, but the model ties its embeddings: one table for tokens and head",
            "only adapters of its layers can be merged",
        )
    return ModelError(
        f"{file}: {name:.100}: the model has no such weight",
        "the adapter was made for another model, or for one that fuses its linears differently",
    )
