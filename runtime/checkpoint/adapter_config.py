"""adapter_config.json of a LoRA adapter in PEFT's layout: how its matrices are scaled, and whether that is all it does.

The scale of B A is lora_alpha / r, or lora_alpha / sqrt(r) where it is rank-stabilized (Hu et al. 2021,
arXiv:2106.09685; Kalajdzievski 2023, arXiv:2312.03732). Whatever would make other weights than that sum is refused by
name. Knows no tensors, and imports next to nothing: whoever looks for models on this machine asks here too.
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from mycli.runtime.errors import ModelError
from mycli.runtime.utils.json_fields import Fields, read_object

ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"
MAX_RANK = 1 << 16
_MAX_ALPHA = 1e6
_MAX_PATTERNS = 10_000
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

_Value = TypeVar("_Value", int, float)


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
            raise raw.fail(refused or str(unknown), "asks for more than a low-rank update, which is not supported")
        start = raw.values.get("init_lora_weights")
        if isinstance(start, str) and start not in _HARMLESS_STARTS:
            raise ModelError(
                f"{raw.source}: init_lora_weights {start!r:.40}: made for weights that had a part subtracted first",
                "PEFT converts it to an ordinary adapter: save_pretrained(path_initial_model_for_weight_conversion)",
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


def is_adapter(folder: Path) -> bool:
    """Whether `folder` holds an adapter, and no model."""
    return (folder / ADAPTER_CONFIG).is_file() and not (folder / "config.json").exists()


def adapter_base(folder: Path) -> str:
    """The model that the adapter in `folder` says it was trained on; "" where it does not say, or cannot be read."""
    try:
        return read_object(folder / ADAPTER_CONFIG).text("base_model_name_or_path", "")
    except ModelError:
        return ""
