"""Which linears of a checkpoint are quantized, and how: `Packing`, and the `quantization_config` of config.json.

Reads and writes the compressed-tensors `pack-quantized` dialect described in docs/format.md. Knows sizes, not bits: the
byte layout itself is in `runtime.quantization.packed_weight`. Does not import torch.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mycli.runtime.errors import ModelError, UsageError
from mycli.runtime.models.config import ModelConfig, parse_config
from mycli.runtime.utils.json_fields import Fields, read_object

BITS = (8, 4, 3, 2)
GROUP_SIZES = (32, 64, 128)
READABLE = "readable: compressed-tensors pack-quantized, symmetric, 2/3/4/8 bits, groups of 32/64/128 or per channel"


@dataclass(frozen=True)
class Packing:
    """A symmetric integer grid of `bits` bits with one signed scale per `group_size` inputs (None: per output row)."""

    bits: int
    group_size: int | None

    def groups(self, in_features: int) -> int:
        """Scales per output row. Raises ModelError where the group size does not divide `in_features`."""
        if self.group_size is None:
            return 1
        if in_features % self.group_size:
            raise ModelError(
                f"group size {self.group_size} does not divide {in_features} input features",
                "choose another group size, or channel",
            )
        return in_features // self.group_size

    def words(self, in_features: int) -> int:
        """int32 words per output row of `weight_packed`."""
        return (in_features * self.bits + 31) // 32

    def bytes(self, out_features: int, in_features: int, scale_bytes: int = 2) -> int:
        """Bytes of `weight_packed` and `weight_scale` together, without the 16 of `weight_shape`."""
        return out_features * (4 * self.words(in_features) + scale_bytes * self.groups(in_features))

    @property
    def name(self) -> str:
        """As in model names: int4-g128, int8-channel."""
        return f"int{self.bits}-" + ("channel" if self.group_size is None else f"g{self.group_size}")


def parse_packing(name: str) -> Packing:
    """The inverse of `Packing.name`; the method in front of a model's name (gptq-int4-g128) is allowed.

    Raises UsageError listing what exists.
    """
    match = re.fullmatch(r"(?:[a-z]+-)?int([2348])(?:-(?:g(32|64|128)|channel))?", name)
    if not match:
        raise UsageError(
            f"{name}: not a quantization scheme",
            "bits 8, 4, 3 or 2, and a group of 32, 64, 128 or channel: int4-g128, int8-channel",
        )
    bits, group, channel = int(match[1]), match[2], name.endswith("-channel")
    return Packing(bits, None if channel else int(group or 128))


def linear_names(config: ModelConfig) -> list[str]:
    """Names of all linears that a checkpoint of `config` may hold quantized, the head included."""
    blocks = (config.block_linears(layer) for layer in range(config.layers))
    names = [linear.name for block in blocks for group in block.values() for linear in group]
    return names if config.tie_embeddings else [*names, config.head().name]


def describe(folder: Path) -> tuple[ModelConfig, dict[str, Packing]]:
    """What the model in `folder` is, and which of its linears are packed how, from config.json alone."""
    return describe_config(read_object(folder / "config.json"))


def describe_config(raw: Fields) -> tuple[ModelConfig, dict[str, Packing]]:
    """`describe` of a parsed config.json."""
    config = parse_config(raw)
    return config, read_quantization(raw, linear_names(config))


def _read_weights(weights: Fields) -> Packing:
    bits = weights.integer("num_bits", high=16)
    strategy = weights.text("strategy", "tensor")
    expected = (
        (weights.text("type", "int") == "int", "type"),
        (bits in BITS, "num_bits"),
        (weights.boolean("symmetric", True), "symmetric"),
        (strategy in ("group", "channel"), "strategy"),
        (not weights.boolean("dynamic", False), "dynamic"),
        (weights.values.get("actorder") in (None, "weight", "static", False), "actorder"),
        (not weights.has("block_structure"), "block_structure"),
    )
    for good, key in expected:
        if not good:
            raise weights.fail(key, f"= {weights.values.get(key)!r:.40} is not supported", READABLE)
    size = weights.integer("group_size", -1, low=-1, high=1 << 20)
    if strategy == "channel" or size == -1:
        return Packing(bits, None)
    if size not in GROUP_SIZES:
        raise weights.fail("group_size", f"= {size} is not supported", READABLE)
    return Packing(bits, size)


def _matches(name: str, pattern: str) -> bool:
    if not pattern.startswith("re:"):
        return pattern == name
    body = pattern[3:]
    # A regex from a stranger's file may take forever: no quantifier may follow a group or another quantifier.
    if len(body) > 200 or not re.fullmatch(r"[\w.\\^$*|()\[\]\-+?]*", body) or re.search(r"[*+?)][*+]", body):
        raise ModelError(f"config.json: quantization_config: target {pattern[:80]!r} is too complex", READABLE)
    try:
        return re.match(body, name) is not None
    except re.error:
        raise ModelError(f"config.json: quantization_config: {pattern[:80]!r} is no regex", READABLE) from None


_NO_MATCH = 3


def _rank(name: str, target: str) -> int:
    if target == "Linear":
        return 2
    if not _matches(name, target):
        return _NO_MATCH
    return 1 if target.startswith("re:") else 0


def read_quantization(raw: Fields, linears: Iterable[str]) -> dict[str, Packing]:
    """The packing of each quantized linear among `linears` (exact module names, `lm_head` included).

    Empty when config.json has no `quantization_config`. An exact name wins over a regex, a regex over the class
    "Linear"; nothing covers what `ignore` lists. Raises ModelError naming any method or option not read.
    """
    section = raw.object("quantization_config")
    if not section.values:
        return {}
    method, layout = section.text("quant_method"), section.text("format", "pack-quantized")
    if method != "compressed-tensors":
        raise section.fail("quant_method", f"{method!r} is not supported", READABLE)
    if layout != "pack-quantized":
        raise section.fail("format", f"{layout!r} is not supported", READABLE)
    if section.has("kv_cache_scheme"):
        raise section.fail("kv_cache_scheme", "is not supported", READABLE)
    groups: list[tuple[list[str], Packing]] = []
    for name in section.object("config_groups").values:
        group = section.object("config_groups").object(name)
        if group.has("input_activations") or group.has("output_activations"):
            raise group.fail("input_activations", "are not supported: only weights may be quantized", READABLE)
        if group.has("format") and group.text("format") != "pack-quantized":
            raise group.fail("format", f"{group.text('format')!r} is not supported", READABLE)
        groups.append((group.array("targets", str), _read_weights(group.object("weights"))))
    if not groups:
        raise section.fail("config_groups", "is empty", READABLE)
    ignore = section.array("ignore", str)
    result: dict[str, Packing] = {}
    for linear in linears:
        if any(_matches(linear, pattern) for pattern in ignore):
            continue
        ranked = (min((_rank(linear, target) for target in targets), default=_NO_MATCH) for targets, _ in groups)
        rank, index = min((rank, index) for index, rank in enumerate(ranked))
        if rank < _NO_MATCH:
            result[linear] = groups[index][1]
    return result


def write_quantization(packings: Mapping[str, Packing], ignore: Iterable[str]) -> dict[str, Any]:
    """The `quantization_config` for `packings`.

    One packing for all: the class target "Linear", which engines that fuse layers match at once. Several: disjoint
    exact names under sorted group names, because readers differ in which of two matching groups wins.
    """

    def scheme(packing: Packing, targets: list[str]) -> dict[str, Any]:
        return {
            "targets": targets,
            "input_activations": None,
            "output_activations": None,
            "weights": {
                "num_bits": packing.bits,
                "type": "int",
                "symmetric": True,
                "strategy": "channel" if packing.group_size is None else "group",
                "group_size": packing.group_size,
                "dynamic": False,
                "actorder": None if packing.group_size is None else "weight",
                "block_structure": None,
                "observer": "minmax",
                "observer_kwargs": {},
            },
        }

    distinct = sorted(set(packings.values()), key=lambda p: (p.bits, p.group_size or 0))
    if len(distinct) == 1 and "lm_head" not in packings:
        groups = {"group_0": scheme(distinct[0], ["Linear"])}
    else:
        groups = {
            f"group_{index:03d}": scheme(packing, sorted(n for n, p in packings.items() if p == packing))
            for index, packing in enumerate(distinct)
        }
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "kv_cache_scheme": None,
        "global_compression_ratio": None,
        "ignore": sorted(ignore),
        "config_groups": groups,
    }
