"""compressed-tensors: its `quantization_config`, read and written.

Read are pack-quantized (docs/format.md; also asymmetric, with `weight_g_idx`, and 3-bit words from before 0.18),
int-quantized, float-quantized, nvfp4-pack, mxfp4-pack and mxfp8; symmetric pack-quantized is written. Activations are
not quantized, whatever the config says: weights do not depend on it.
"""

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from mycli.runtime.checkpoint.formats import Headers, _parts, quantizable
from mycli.runtime.checkpoint.formats._compressed_weights import (
    FLOAT,
    INT,
    MXFP4,
    MXFP8,
    NVFP4,
    PACK,
    Dialect,
    check,
    planned_tensors,
    read_linear,
    tensors,
    write_weight,
)
from mycli.runtime.models.config import ModelConfig
from mycli.runtime.models.part_spec import LinearSpec
from mycli.runtime.quantization.scheme import ByteScales, Codes, Packing
from mycli.runtime.utils.dtypes import Dtype
from mycli.runtime.utils.json_fields import Fields

# The members of the layout; those about tensors are in _compressed_weights.
__all__ = [
    "IGNORED",
    "READABLE",
    "UNEXPECTED",
    "check",
    "planned_packing",
    "planned_tensors",
    "read_linear",
    "read_quantization",
    "tensors",
    "write_quantization",
    "write_weight",
]

_DIALECTS = (PACK, INT, FLOAT, NVFP4, MXFP4, MXFP8)
# Strategies of each dialect; float dialects of 4 bits have one group size each.
_STRATEGIES = {
    PACK: ("group", "channel"),
    INT: ("tensor", "channel", "group"),
    FLOAT: ("tensor", "channel", "group", "block"),
    NVFP4: ("tensor_group",),
    MXFP4: ("group",),
    MXFP8: ("group",),
}
_GROUPS = {NVFP4: 16, MXFP4: 32, MXFP8: 32}
_NVFP4_WEIGHTS = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}
_INT8_WEIGHTS = {"num_bits": 8, "strategy": "channel"}
_FP8_WEIGHTS = {"num_bits": 8, "type": "float"}
_PRESETS: dict[str, dict[str, Any]] = {
    "W8A8": _INT8_WEIGHTS,
    "INT8": _INT8_WEIGHTS,
    "FP8": {**_FP8_WEIGHTS, "strategy": "tensor"},
    "FP8_DYNAMIC": {**_FP8_WEIGHTS, "strategy": "channel"},
    "FP8_BLOCK": {**_FP8_WEIGHTS, "strategy": "block", "block_structure": [128, 128]},
    **dict.fromkeys(("NVFP4", "NVFP4A16"), _NVFP4_WEIGHTS),
    **dict.fromkeys(
        ("MXFP4", "MXFP4A16", "MXFP4XFP8"), {**_FP8_WEIGHTS, "num_bits": 4, "strategy": "group", "group_size": 32}
    ),
    **dict.fromkeys(("MXFP8", "MXFP8A16"), {**_FP8_WEIGHTS, "strategy": "group", "group_size": 32}),
}
READABLE = f"compressed-tensors of {', '.join(_DIALECTS)}, 2 to 8 bits"
# Parameters of activations and of the cache: neither is quantized here. A cache's scale was first called that of the
# output of k_proj and v_proj.
IGNORED = (
    *(".input_scale", ".input_zero_point", ".input_global_scale"),
    *(".q_scale", ".k_scale", ".v_scale", ".output_scale"),
)
UNEXPECTED = (
    ("weight_zero_point", "zero points, but config.json calls the weights symmetric", "it must say symmetric: false"),
    ("weight_g_idx", "an order of inputs, but config.json does not say so", "actorder must be group"),
    ("weight_packed", "quantized, but config.json does not say so", "its quantization_config must cover these layers"),
)


def _dialect(section: Fields, group: Fields, weights: Fields) -> str:
    # A group may state a format of its own. Two values of the section say nothing: the type of the weights decides.
    name = group.text("format", "") or section.text("format", PACK)
    if name in ("naive-quantized", "mixed-precision"):
        name = FLOAT if weights.text("type", "int") == "float" else INT
    if name not in _DIALECTS:
        where = group if group.has("format") else section
        raise where.fail("format", f"{name!r} is not supported", f"readable: {READABLE}")
    return name


def _check_weights(weights: Fields, dialect: str, bits: int, strategy: str) -> None:
    # Any other option would need another arithmetic.
    floating, four = dialect not in (PACK, INT), dialect in (NVFP4, MXFP4)
    widths = ((4,) if four else (8,)) if floating else range(2, 9)
    orders = ("weight", "static", "group", "dynamic", True, False, None)
    expected = (
        (weights.text("type", "int") == ("float" if floating else "int"), "type"),
        (bits in widths, "num_bits"),
        (weights.boolean("symmetric", True) or not floating, "symmetric"),
        (strategy in _STRATEGIES[dialect], "strategy"),
        (not weights.boolean("dynamic", False), "dynamic"),
        (weights.values.get("actorder") in orders, "actorder"),
        (strategy == "block" or not weights.has("block_structure"), "block_structure"),
    )
    for good, key in expected:
        if not good:
            raise weights.fail(key, f"= {weights.values.get(key)!r:.40} is not supported", f"readable: {READABLE}")


def _preset_weights(name: str) -> dict[str, Any] | None:
    # As compressed-tensors 0.18; what activations are is not read.
    name = name.upper()
    if name in _PRESETS:
        return _PRESETS[name]
    match = re.fullmatch(r"W([2-8])A(4|8|16|FP8|16_ASYM)", name)
    if match is None:
        return None
    return {"num_bits": int(match[1]), "strategy": "group", "group_size": 128, "symmetric": match[2] != "16_ASYM"}


def _group(groups: Fields, name: str) -> Fields:
    # A group may be the name of a preset and the list of its targets.
    weights = _preset_weights(name) if isinstance(groups.values[name], list) else None
    if weights is None:
        return groups.object(name)
    return Fields({"targets": groups.values[name], "weights": weights}, groups.source)


def _packing(section: Fields, group: Fields) -> Packing:
    weights = group.object("weights")
    # compressed-tensors reads the names of its enumerations in any case.
    lowered = {key: value.lower() for key, value in weights.values.items() if isinstance(value, str)}
    weights = Fields({**weights.values, **lowered}, weights.source)
    dialect = _dialect(section, group, weights)
    bits, size = weights.integer("num_bits", 8, high=16), weights.integer("group_size", -1, low=-1)
    default = ("tensor_group" if dialect == NVFP4 else "group") if size > 0 else "tensor"
    strategy = weights.text("strategy", "channel" if weights.values.get("group_size") == -1 else default)
    _check_weights(weights, dialect, bits, strategy)
    if size == 0 or _GROUPS.get(dialect, size) != size:
        raise weights.fail("group_size", f"= {size} is not supported", f"readable: {READABLE}")
    block: tuple[int, ...] = ()
    if strategy == "block":
        stored = weights.values.get("block_structure")
        if isinstance(stored, str):  # "128x128" in old files
            weights = Fields({**weights.values, "block_structure": _sides(stored)}, weights.source)
        block = tuple(weights.array("block_structure", int))
        if len(block) != 2 or not all(0 < side <= 1 << 20 for side in block):
            raise weights.fail("block_structure", "must be two sizes")
    codes: Codes = "int" if dialect in (PACK, INT) else "e4m3" if bits == 8 else "e2m1"
    grouped = strategy in ("group", "tensor_group") and size != -1
    # int-quantized spends a byte on every code, whatever the grid.
    return Packing(
        8 if dialect == INT else bits,
        size if grouped else None,
        offsets=not weights.boolean("symmetric", True),
        codes=codes,
        permuted=grouped and weights.values.get("actorder") in ("group", "dynamic", True),
        dialect=() if dialect == PACK else (dialect, strategy, *block),
    )


def _sides(text: str) -> list[int]:
    return [int(side) for side in re.findall(r"[0-9]{1,7}", text)]


def _fitted(packing: Packing, linear: LinearSpec, config: ModelConfig, headers: Headers | None) -> Packing:
    # Per linear, blocks become groups of its inputs, and scales have their stored dtype.
    dialect = Dialect.of(packing)
    dtype = _parts.scale_dtype(headers, f"{linear.name}.weight_scale", config.dtype)
    byte_scales: ByteScales | None = None
    if dialect.name in (MXFP4, MXFP8):
        dtype = _parts.unless(config.dtype, "bfloat16")
        byte_scales = "e8m0" if dialect.name == MXFP4 else None
    elif dialect.name == NVFP4:
        dtype, byte_scales = _parts.unless(config.dtype, "float32"), "e4m3"
    size = packing.group_size
    if dialect.block is not None and linear.in_features > dialect.block[1]:
        size = math.gcd(linear.in_features, dialect.block[1])
    return replace(packing, scale_dtype=dtype, group_size=size, byte_scales=byte_scales)


def read_quantization(section: Fields, config: ModelConfig, headers: Headers | None) -> dict[str, Packing]:
    # An exact name wins over a regex, a regex over the class "Linear"; `ignore` wins over all.
    for key in ("sparsity_config", "transform_config"):
        # A sparsity of the format "dense" is only measured: no zeros are left out.
        if section.has(key) and section.object(key).values and section.object(key).values.get("format") != "dense":
            raise section.fail(key, "is not supported", f"readable: {READABLE}")
    groups: list[tuple[list[str], Packing]] = []
    for name in section.object("config_groups").values:
        group = _group(section.object("config_groups"), name)
        if group.has("weights"):  # else it is about activations or the cache of an attention
            groups.append((group.array("targets", str), _packing(section, group)))
    if not groups:
        raise section.fail("config_groups", "is empty", f"readable: {READABLE}")
    ignore = section.array("ignore", str)
    result: dict[str, Packing] = {}
    for linear in quantizable(config)[:-1]:  # without the embedding
        names = config.module_names(linear.name)  # the section may have either
        if any(_parts.matches_target(name, pattern) for name in names for pattern in ignore):
            continue
        ranked = [(_parts.target_rank(name, group[0]), index) for name in names for index, group in enumerate(groups)]
        rank, index = min(ranked)
        if rank < _parts.NO_MATCH:
            result[linear.name] = _fitted(groups[index][1], linear, config, headers)
    return result


def planned_packing(linear: LinearSpec, bits: int, group: int | None, dtype: Dtype) -> Packing:
    """Symmetric integers, in the packed form."""
    return Packing(bits, group)


def write_quantization(packings: Mapping[str, Packing], ignore: Iterable[str], dtype: Dtype) -> dict[str, Any]:
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

    # One packing for all linears: the class target "Linear", which engines that fuse layers match in one step. Several:
    # disjoint exact names under sorted group names, because readers differ in which of two matching groups wins.
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
