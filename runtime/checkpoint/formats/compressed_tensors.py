"""compressed-tensors, the `pack-quantized` dialect of docs/format.md: what config.json says, and the tensors it
promises.

A linear is `weight_packed`, `weight_scale` and `weight_shape` in place of its weight. Knows names, shapes and the
`quantization_config`; the codes in the words are `runtime.quantization.packed_weight`'s. Imports torch only to read.
"""

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from mycli.runtime.errors import ModelError
from mycli.runtime.models.layer_spec import LinearSpec, Shape
from mycli.runtime.quantization.scheme import BITS, GROUP_SIZES, Packing
from mycli.runtime.utils.dtypes import STORED_FLOATS
from mycli.runtime.utils.json_fields import Fields

if TYPE_CHECKING:
    import torch

    from mycli.runtime.checkpoint.reader import Checkpoint
    from mycli.runtime.quantization.packed_weight import PackedWeight

READABLE = "readable: compressed-tensors pack-quantized, symmetric, 2/3/4/8 bits, groups of 32/64/128 or per channel"


def tensors(linear: LinearSpec, packing: Packing) -> Iterator[tuple[str, Shape, Collection[str]]]:
    """Name, shape and allowed dtypes of the three tensors of a packed linear."""
    rows, columns = linear.out_features, linear.in_features
    yield f"{linear.name}.weight_packed", (rows, packing.words(columns)), ("I32",)
    yield f"{linear.name}.weight_scale", (rows, packing.groups(columns)), STORED_FLOATS
    yield f"{linear.name}.weight_shape", (2,), ("I64", "I32")


def read_weight(
    checkpoint: "Checkpoint", linears: Sequence[LinearSpec], packing: Packing, device: "torch.device"
) -> "PackedWeight":
    """The packed weights of linears that share an input, stacked; scales keep their dtype. Raises what reading does."""
    import torch

    from mycli.runtime.quantization.packed_weight import PackedWeight
    from mycli.runtime.utils.huge_pages import huge_empty

    rows, columns = sum(linear.out_features for linear in linears), linears[0].in_features
    packed = huge_empty((rows, packing.words(columns)), torch.int32)
    scales = torch.empty(rows, packing.groups(columns), dtype=checkpoint.dtype(f"{linears[0].name}.weight_scale"))
    start = 0
    for linear in linears:
        end = start + linear.out_features
        checkpoint.read_into(f"{linear.name}.weight_packed", packed[start:end])
        checkpoint.read_into(f"{linear.name}.weight_scale", scales[start:end])
        start = end
    return PackedWeight(packed.to(device), scales.to(device), packing, columns)


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


def read_quantization(section: Fields, linears: Iterable[str]) -> dict[str, Packing]:
    """The packing of each quantized linear among `linears` (exact module names, `lm_head` included).

    An exact name wins over a regex, a regex over the class "Linear"; nothing covers what `ignore` lists. Raises
    ModelError naming any option not read.
    """
    layout = section.text("format", "pack-quantized")
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
