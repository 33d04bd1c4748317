"""LoRA adapters in PEFT's layout: which weights of a model one changes, by what, and whether that can be done exactly.

A folder holds `adapter_config.json` and `adapter_model.safetensors`; its matrices A [r, in] and B [out, r] make of a
weight W the weight W + s B A, with s = lora_alpha / r, or lora_alpha / sqrt(r) where it is rank-stabilized (Hu et al.
2021, arXiv:2106.09685; Kalajdzievski 2023, arXiv:2312.03732). Reads the config and the header, and refuses by name
whatever would make other weights than these. Does not import torch; the sum is `runtime.checkpoint.merging`'s.
"""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TypeVar

from mycli.runtime.checkpoint.manifest import Manifest, read_file_header
from mycli.runtime.checkpoint.safetensors_header import TensorEntry, damaged
from mycli.runtime.checkpoint.stable_file import RegularFile
from mycli.runtime.errors import ModelError
from mycli.runtime.models.config import ModelConfig
from mycli.runtime.models.layer_spec import Shape
from mycli.runtime.utils.dtypes import STORED_FLOATS
from mycli.runtime.utils.json_fields import Fields, read_object

ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"
MAX_RANK = 1 << 16
_MAX_ALPHA = 1e6
_MAX_PATTERNS = 10_000
_PREFIX = "base_model.model."
_PARTS = {".lora_A.weight": "a", ".lora_B.weight": "b"}
_TOKENS = ("model.embed_tokens", "lm_head")
# What would make other weights than W + s B A, or weights of other shapes.
_REFUSED = (
    "alora_invocation_tokens",
    "arrow_config",
    "kasa_config",
    "layer_replication",
    "lora_bias",
    "monteclora_config",
    "target_parameters",
    "trainable_token_indices",
    "use_bdlora",
    "use_dora",
    "use_qalora",
)
_HARMLESS_STARTS = ("gaussian", "eva", "orthogonal")  # of A and B: others take something from W before training
# A name of a module or its end, as PEFT's patterns mostly are; whatever else an expression can say is not tried.
_NAME = re.compile(r"\^?(?:\w|\\?\.)+\$?", re.ASCII)

Rename = Callable[[str], str | None]
_Value = TypeVar("_Value", int, float)


@dataclass(frozen=True)
class LowRank:
    """What is added to one weight [out, in]: `scale` times B [out, r] times A [r, in], the tensors of those names."""

    a: str
    b: str
    scale: float


@dataclass(frozen=True)
class AdapterConfig:
    """What adapter_config.json says of how A and B are scaled; `base` is the model that it was trained on, or ""."""

    base: str
    rank: int
    alpha: float
    rank_stabilized: bool
    ranks: Mapping[str, int]
    alphas: Mapping[str, float]

    @classmethod
    def parse(cls, raw: Fields) -> "AdapterConfig":
        """Raises ModelError naming the field that is damaged, or asks for what is not done."""
        kind = raw.text("peft_type")
        if kind != "LORA":
            raise raw.fail("peft_type", f"is {kind:.40}: only LORA adapters can be merged")
        refused = next((name for name in _REFUSED if raw.values.get(name)), None)
        unknown = next((name for name, value in raw.values.items() if name.startswith("use_") and value is True), None)
        if refused is not None or unknown not in (None, "use_rslora"):
            raise raw.fail(refused or str(unknown), "asks for more than a sum of low rank, which is not done")
        start = raw.values.get("init_lora_weights")
        if isinstance(start, str) and start not in _HARMLESS_STARTS:
            raise ModelError(
                f"{raw.source}: init_lora_weights {start!r:.40}: made for weights from which a part was taken before",
                "PEFT makes an ordinary one of it: save_pretrained(path_initial_model_for_weight_conversion)",
            )
        ranks, alphas = raw.object("rank_pattern"), raw.object("alpha_pattern")
        return cls(
            base=raw.text("base_model_name_or_path", ""),
            rank=raw.integer("r", high=MAX_RANK),
            alpha=_alpha(raw, "lora_alpha"),
            rank_stabilized=raw.boolean("use_rslora", False),
            ranks={_pattern(ranks, key): ranks.integer(key, high=MAX_RANK) for key in _keys(ranks)},
            alphas={
                _pattern(alphas, key): alphas.number(key, low=-_MAX_ALPHA, high=_MAX_ALPHA) for key in _keys(alphas)
            },
        )

    def rank_of(self, module: str) -> int:
        """The rank that A and B of `module` have."""
        return _matching(self.ranks, module, self.rank)

    def scale(self, module: str) -> float:
        """What the product of B and A of `module` is multiplied by."""
        rank = self.rank_of(module)
        return _matching(self.alphas, module, self.alpha) / (math.sqrt(rank) if self.rank_stabilized else rank)


def _alpha(fields: Fields, key: str) -> float:
    return fields.number(key, low=-_MAX_ALPHA, high=_MAX_ALPHA)


def _keys(patterns: Fields) -> Sequence[str]:
    if len(patterns.values) > _MAX_PATTERNS:
        raise ModelError(f"{patterns.source}: more than {_MAX_PATTERNS} patterns", "the file may be damaged")
    return list(patterns.values)


def _pattern(patterns: Fields, key: str) -> str:
    """The name that `key` stands for, with ^ in front where it is a whole name."""
    if not _NAME.fullmatch(key):
        raise ModelError(
            f"{patterns.source}: {key!r:.80} is an expression, and only names of modules are understood",
            "write one entry for each module",
        )
    return key.replace("\\", "").removesuffix("$")


def _matching(patterns: Mapping[str, _Value], module: str, default: _Value) -> _Value:
    """Of the first pattern that names `module` or its end, as PEFT looks them up."""
    for pattern, value in patterns.items():
        if pattern.removeprefix("^") == module or module.endswith(f".{pattern}"):
            return value
    return default


@dataclass(frozen=True)
class Adapter:
    """`added` to weights of a model, and tensors stored whole that stand `instead` of its own, by its names for them.

    `name` is short, and does not say where it lies.
    `manifest` has the tensors by the adapter's names. `unused`: modules that are not of the text part.
    """

    name: str
    path: Path
    config: AdapterConfig
    added: Mapping[str, LowRank]
    instead: Mapping[str, str]
    manifest: Manifest
    unused: tuple[str, ...] = ()

    @classmethod
    def open(cls, name: str, path: Path, model: ModelConfig, rename: Rename = lambda stored: stored) -> "Adapter":
        """Read the config and the header in `path`, and hold them against `model`, whose tensors `rename` calls so.

        Raises ModelError naming the field or tensor that is damaged, does not fit, or asks for what is not done.
        """
        config = AdapterConfig.parse(read_object(path / ADAPTER_CONFIG))
        manifest = _manifest(path)
        added, instead, unused = _sorted_out(manifest.tensors, config, rename)
        shapes = dict(model.tensors())
        for weight, low in added.items():
            _check_added(weight, low, manifest.tensors, shapes, config)
        for weight, stored in instead.items():
            _check_instead(weight, manifest.tensors[stored], shapes, model.tie_embeddings)
        if both := sorted(added.keys() & instead.keys()):
            raise damaged(f"{ADAPTER_WEIGHTS}: {both[0]:.80} is both added to and stored whole")
        return cls(name, path, config, added, instead, manifest, tuple(unused))

    @cached_property
    def nbytes(self) -> int:
        """Bytes of its tensors."""
        return self.manifest.nbytes

    def source_files(self) -> list[Path]:
        """Every file that the weights depend on."""
        return [self.path / ADAPTER_CONFIG, self.path / ADAPTER_WEIGHTS]


def is_adapter(folder: Path) -> bool:
    """Whether `folder` holds an adapter, and no model."""
    return (folder / ADAPTER_CONFIG).is_file() and not (folder / "config.json").exists()


def adapter_base(folder: Path) -> str:
    """The model that the adapter in `folder` says it was trained on; "" where it does not say, or cannot be read."""
    try:
        return read_object(folder / ADAPTER_CONFIG).text("base_model_name_or_path", "")
    except ModelError:
        return ""


def _manifest(path: Path) -> Manifest:
    if not (path / ADAPTER_WEIGHTS).exists():
        others = {
            "adapter_model.bin": ("its weights are a pickle", "pickles can run code; have PEFT save it as safetensors"),
            "adapters.safetensors": ("an adapter of MLX", "adapters are read in PEFT's layout"),
        }
        for name, (problem, hint) in others.items():
            if (path / name).exists():
                raise ModelError(f"{path}: {problem} ({name}), without {ADAPTER_WEIGHTS}", hint)
    file = RegularFile.find(path / ADAPTER_WEIGHTS)
    return Manifest(path, read_file_header(file), {file.name: file})


def _sorted_out(
    tensors: Mapping[str, TensorEntry], config: AdapterConfig, rename: Rename
) -> tuple[dict[str, LowRank], dict[str, str], list[str]]:
    """What the tensors of an adapter are to the model's, by the model's names; and modules that are not of it."""
    halves: dict[str, dict[str, str]] = {}
    instead: dict[str, str] = {}
    unused: list[str] = []
    for stored in tensors:
        if not stored.startswith(_PREFIX):
            raise ModelError(
                f"{ADAPTER_WEIGHTS}: {stored:.80}: not a name that PEFT gives", "is it an adapter of PEFT?"
            )
        suffix = next((suffix for suffix in _PARTS if stored.endswith(suffix)), None)
        plain = stored.removeprefix(_PREFIX)
        module = plain if suffix is None else plain.removesuffix(suffix)
        if suffix is None and ("lora_" in plain or "modules_to_save" in plain):
            raise ModelError(f"{ADAPTER_WEIGHTS}: {plain:.100}: not a part of a sum of low rank", "this is not done")
        if rename(plain if suffix is None else f"{module}.weight") is None:
            unused.append(module)
        elif suffix is None:
            instead[str(rename(plain))] = stored
        else:
            halves.setdefault(module, {})[_PARTS[suffix]] = stored
    for module, parts in halves.items():
        if len(parts) != 2:
            raise damaged(f"{ADAPTER_WEIGHTS}: {module:.80} has lora_{'AB'['a' in parts]} missing")
    added = {
        str(rename(f"{module}.weight")): LowRank(parts["a"], parts["b"], config.scale(module))
        for module, parts in halves.items()
    }
    return added, instead, unused


def _check_added(
    name: str, low: LowRank, tensors: Mapping[str, TensorEntry], shapes: Mapping[str, Shape], config: AdapterConfig
) -> None:
    a, b, shape = tensors[low.a], tensors[low.b], shapes.get(name)
    if shape is None:
        raise _no_place(name)
    module = low.a.removeprefix(_PREFIX).removesuffix(".lora_A.weight")
    rank = config.rank_of(module)
    if len(shape) != 2 or a.shape != (rank, shape[1]) or b.shape != (shape[0], rank):
        raise ModelError(
            f"{ADAPTER_WEIGHTS}: {module:.80}: A {list(a.shape)} and B {list(b.shape)} of rank {rank} "
            f"make no {list(shape)}",
            "the adapter was made for another model, or its config is another adapter's",
        )
    _check_float(a)
    _check_float(b)


def _check_instead(name: str, entry: TensorEntry, shapes: Mapping[str, Shape], tied: bool) -> None:
    shape = shapes.get(name)
    if shape is None or (tied and name == "model.embed_tokens.weight"):
        raise _no_place(name)
    if entry.shape != shape:
        raise ModelError(
            f"{ADAPTER_WEIGHTS}: {name:.80} has shape {list(entry.shape)}, and the model's own {list(shape)}",
            "the adapter was made for another model, or for one with more tokens",
        )
    _check_float(entry)


def _check_float(entry: TensorEntry) -> None:
    if entry.dtype not in STORED_FLOATS:
        raise damaged(f"{entry.file}: {entry.name:.100} is {entry.dtype}, expected {' or '.join(STORED_FLOATS)}")


def _no_place(name: str) -> ModelError:
    module = name.removesuffix(".weight").removesuffix(".bias")
    if module in _TOKENS:
        return ModelError(
            f"{ADAPTER_WEIGHTS}: changes {module}, but the model has one table for both tokens and head",
            "only adapters of its layers can be merged",
        )
    return ModelError(
        f"{ADAPTER_WEIGHTS}: {name:.100}: the model has no such weight",
        "the adapter was made for another model, or for one whose linears are cut otherwise",
    )
