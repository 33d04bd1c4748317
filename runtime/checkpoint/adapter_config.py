"""Reads adapter_config.json of a LoRA adapter, in PEFT's layout or mlx-lm's.

The scale of B A is lora_alpha / r, or lora_alpha / sqrt(r) if rank-stabilized (Hu et al. 2021, arXiv:2106.09685;
Kalajdzievski 2023, arXiv:2312.03732); mlx-lm stores the scale itself. DoRA also scales rows (`LowRank`). Fields that
would give other weights are refused by name. Imports little: `list` uses it.
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from mycli.runtime.checkpoint.safetensors_header import INDEX, SINGLE
from mycli.runtime.errors import ModelError
from mycli.runtime.utils.json_fields import Fields, read_object

ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"
MLX_WEIGHTS = "adapters.safetensors"
MAX_RANK = 1 << 16
_MAX_ALPHA = 1e6
_MAX_PATTERNS = 10_000
# Fields that give other weights than W + s B A, or weights of other shapes.
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
    "use_qalora",
)
_USES = ("use_dora", "use_rslora")
_HARMLESS_STARTS = ("gaussian", "eva", "orthogonal")  # initial values of A and B; other kinds change W before training
# A module name or its end, as nearly all of PEFT's patterns are: no other expression of an untrusted file is run.
_NAME = re.compile(r"\^?(?:\w|\\?\.)+\$?", re.ASCII)

_Value = TypeVar("_Value", int, float)


@dataclass(frozen=True)
class AdapterConfig:
    """The scales of an adapter's matrices; `base` is the model it was trained on, or ""; dora: rows are rescaled."""

    base: str
    rank: int
    alpha: float
    rank_stabilized: bool
    ranks: Mapping[str, int]
    alphas: Mapping[str, float]
    dora: bool = False

    @classmethod
    def parse(cls, raw: Fields) -> "AdapterConfig":
        """Parse adapter_config.json. Raises ModelError naming the field that is damaged or not supported."""
        if raw.has("lora_parameters") and not raw.has("peft_type"):
            return cls._parse_mlx(raw)
        kind = raw.text("peft_type")
        if kind != "LORA":
            raise raw.fail("peft_type", f"is {kind:.40}: only LORA adapters can be merged")
        refused = next((name for name in _REFUSED if raw.values.get(name)), None)
        uses = [name for name, value in raw.values.items() if name.startswith("use_") and value is True]
        refused = refused or next((name for name in uses if name not in _USES), None)
        if refused is not None:
            raise raw.fail(refused, "is not supported: only low-rank updates and DoRA are")
        start = raw.values.get("init_lora_weights")
        if isinstance(start, str) and start not in _HARMLESS_STARTS:
            raise ModelError(
                f"{raw.source}: init_lora_weights {start!r:.40} is not supported: it changes the base weights",
                "PEFT converts it to an ordinary adapter: save_pretrained(path_initial_model_for_weight_conversion)",
            )
        ranks, alphas = raw.object("rank_pattern"), raw.object("alpha_pattern")
        return cls(
            base=raw.text("base_model_name_or_path", ""),
            rank=raw.integer("r", high=MAX_RANK),
            alpha=_alpha(raw, "lora_alpha"),
            rank_stabilized=raw.boolean("use_rslora", False),
            ranks={_pattern(ranks, key): ranks.integer(key, high=MAX_RANK) for key in _keys(ranks)},
            alphas={_pattern(alphas, key): _alpha(alphas, key) for key in _keys(alphas)},
            dora=raw.boolean("use_dora", False),
        )

    @classmethod
    def _parse_mlx(cls, raw: Fields) -> "AdapterConfig":
        kind, parameters = raw.text("fine_tune_type", "lora"), raw.object("lora_parameters")
        if kind not in ("lora", "dora"):
            raise raw.fail("fine_tune_type", f"is {kind:.40}: only lora and dora can be merged", "use mlx_lm.fuse")
        rank = parameters.integer("rank", high=MAX_RANK)
        return cls(raw.text("model", ""), rank, _alpha(parameters, "scale") * rank, False, {}, {}, dora=kind == "dora")

    def rank_of(self, module: str) -> int:
        return _matching(self.ranks, module, self.rank)

    def scale(self, module: str) -> float:
        """Return the factor of the product B A of `module`."""
        rank = self.rank_of(module)
        return _matching(self.alphas, module, self.alpha) / (math.sqrt(rank) if self.rank_stabilized else rank)


def _alpha(fields: Fields, key: str) -> float:
    return fields.number(key, low=-_MAX_ALPHA, high=_MAX_ALPHA)


def _keys(patterns: Fields) -> Sequence[str]:
    if len(patterns.values) > _MAX_PATTERNS:
        raise ModelError(f"{patterns.source}: more than {_MAX_PATTERNS} patterns", "the file may be damaged")
    return list(patterns.values)


def _pattern(patterns: Fields, key: str) -> str:
    if not _NAME.fullmatch(key):
        raise ModelError(
            f"{patterns.source}: {key!r:.80} is a regular expression; only module names are supported",
            "write one entry for each module",
        )
    return key.replace("\\", "").removesuffix("$")


def _matching(patterns: Mapping[str, _Value], module: str, default: _Value) -> _Value:
    # The first match wins, as in PEFT.
    for pattern, value in patterns.items():
        if pattern.removeprefix("^") == module or module.endswith(f".{pattern}"):
            return value
    return default


def is_adapter(folder: Path) -> bool:
    """Return whether a folder holds a LoRA adapter and no model; training programs add the model's config.json."""
    if not (folder / ADAPTER_CONFIG).is_file():
        return False
    weights = any((folder / name).exists() for name in (SINGLE, INDEX))
    return not (folder / "config.json").exists() or ((folder / ADAPTER_WEIGHTS).is_file() and not weights)


def adapter_base(folder: Path) -> str:
    """Return the model that the adapter in `folder` was trained on; "" if it is not stated or not readable."""
    try:
        return read_object(folder / ADAPTER_CONFIG).text("base_model_name_or_path", "")
    except ModelError:
        return ""
