"""GPTQ v1 and v2 as AutoGPTQ, GPTQModel and AutoRound write it: `qweight` packs inputs, `qzeros` packs outputs.

v1 ("gptq") stores zero points less one, v2 ("gptq_v2") unchanged. The tensors tell which linears are quantized, and
their bits and groups. With `desc_act`, columns are sorted by `g_idx` once, at load.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from mycli.runtime.checkpoint.formats import EMBEDDING, ExpectedTensor, Headers, Scales, _parts, quantizable
from mycli.runtime.checkpoint.safetensors_header import damaged
from mycli.runtime.errors import ModelError
from mycli.runtime.models.config import ModelConfig
from mycli.runtime.models.part_spec import LinearSpec
from mycli.runtime.quantization.scheme import Packing
from mycli.runtime.utils.dtypes import SAFETENSORS_FLOATS
from mycli.runtime.utils.json_fields import Fields

if TYPE_CHECKING:
    import torch

    from mycli.runtime.checkpoint.manifest import Manifest
    from mycli.runtime.checkpoint.reader import Checkpoint

READABLE = "GPTQ v1 and v2, 2 to 8 bits, with and without g_idx"
IGNORED = ()
UNEXPECTED = (("qweight", "a weight of GPTQ or AWQ, but config.json does not say so", "quant_method must name it"),)


def read_quantization(section: Fields, config: ModelConfig, headers: Headers | None) -> dict[str, Packing]:
    version = section.text("checkpoint_format", "gptq")
    if version not in ("gptq", "gptq_v2"):
        raise section.fail("checkpoint_format", f"{version!r} is not supported", f"readable: {READABLE}")
    if section.text("pack_dtype", "int32") != "int32":
        raise section.fail("pack_dtype", "must be int32", f"readable: {READABLE}")
    bits, group = section.integer("bits", low=2, high=8), section.integer("group_size", -1, low=-1)
    rules = _rules(section)
    result: dict[str, Packing] = {}
    for linear in quantizable(config):
        if headers is None and (linear.name == EMBEDDING or _is_dense_head(linear, section)):
            continue
        if headers is not None and f"{linear.name}.qweight" not in headers:
            continue
        width, size = _width(headers, linear, bits, group if group > 0 else None)
        indexed = headers is None or f"{linear.name}.g_idx" in headers
        rule = next((rule for pattern, rule in rules if _parts.matches_target(linear.name, pattern)), section)
        ordered = rule.boolean("desc_act", section.boolean("desc_act", False))
        result[linear.name] = Packing(
            width,
            size,
            layout="gptq",
            offsets=not rule.boolean("sym", section.boolean("sym", True)),
            scale_dtype=_parts.scale_dtype(headers, f"{linear.name}.scales", config.dtype),
            permuted=ordered and indexed and size is not None,
            dialect=(version,),
        )
    return result


def _rules(section: Fields) -> list[tuple[str, Fields]]:
    """Return the patterns and settings of GPTQModel's `dynamic`, of which the first that matches a module counts.

    Empty if none changes what the tensors do not show.
    """
    dynamic, defaults = section.object("dynamic"), {"sym": True, "desc_act": False}
    rules = [(name, dynamic.object(name)) for name in dynamic.values if not name.startswith("-:")]
    changes = (
        rule.has(key) and rule.values[key] != section.boolean(key, default)
        for _, rule in rules
        for key, default in defaults.items()
    )
    return [(f"re:{name.removeprefix('+:')}", rule) for name, rule in rules] if any(changes) else []


def _is_dense_head(linear: LinearSpec, section: Fields) -> bool:
    return linear.name == "lm_head" and not section.boolean("lm_head", False)


def _width(headers: Headers | None, linear: LinearSpec, bits: int, group: int | None) -> tuple[int, int | None]:
    # Rules for single modules may differ from the section, so shapes decide, if they are known.
    columns = linear.in_features
    words, scales = ((headers or {}).get(f"{linear.name}.{part}") for part in ("qweight", "scales"))
    if words is not None and words.shape and 32 * words.shape[0] % columns == 0:
        width = 32 * words.shape[0] // columns
        bits = width if 2 <= width <= 8 else bits
    if scales is not None and scales.shape and scales.shape[0] and columns % scales.shape[0] == 0:
        group = columns // scales.shape[0] if scales.shape[0] > 1 else None
    return bits, group


def tensors(linear: LinearSpec, packing: Packing, headers: Headers) -> Iterator[ExpectedTensor]:
    # AutoGPTQ adds a zero bias to linears without one.
    rows, columns, groups = linear.out_features, linear.in_features, packing.groups(linear.in_features)
    yield f"{linear.name}.qweight", (packing.words(columns), rows), ("I32",)
    yield f"{linear.name}.qzeros", (groups, packing.words(rows)), ("I32",)
    yield f"{linear.name}.scales", (groups, rows), SAFETENSORS_FLOATS
    if packing.permuted or f"{linear.name}.g_idx" in headers:
        yield f"{linear.name}.g_idx", (columns,), ("I32",)
    if not linear.bias and f"{linear.name}.bias" in headers:
        yield f"{linear.name}.bias", (rows,), SAFETENSORS_FLOATS


def check(linear: LinearSpec, packing: Packing, manifest: "Manifest") -> None:
    """Raise ModelError for a bias that config.json lacks, unless it is zero."""
    name = f"{linear.name}.bias"
    if not linear.bias and name in manifest.tensors and any(manifest.content(name)):
        raise ModelError(
            f"{manifest.tensors[name].file}: {name} is not zero, but config.json has no such bias",
            "config.json and the weights belong to different models",
        )


def _plus_one(words: "torch.Tensor", bits: int, rows: int) -> "torch.Tensor":
    # A zero point of 0 less one borrows from the next one in its word, as GPTQModel and AutoRound write it; codes that
    # cross words are counted down on their own.
    from mycli.runtime.quantization.packed_weight import pack, unpack

    if 32 % bits == 0:
        return words + sum(1 << shift for shift in range(0, 32, bits))
    return pack(unpack(words, bits, rows) + 1 & (1 << bits) - 1, bits)


def read_linear(checkpoint: "Checkpoint", linear: LinearSpec, packing: Packing, out: "torch.Tensor") -> Scales:
    import torch

    from mycli.runtime.quantization.packed_weight import unpack

    name, columns, bits = linear.name, linear.in_features, packing.bits
    out.copy_(checkpoint.read(f"{name}.qweight").t())
    scales = checkpoint.read(f"{name}.scales").t().contiguous()
    words = checkpoint.read(f"{name}.qzeros")
    if packing.offsets and packing.dialect == ("gptq",):
        words = _plus_one(words, bits, linear.out_features)
    zeros = unpack(words, bits, linear.out_features).t()
    offsets = None
    if packing.offsets:
        offsets = _parts.zero_offsets(scales, zeros, bits)
    elif not bool(((zeros == (1 << (bits - 1))) | (zeros == (1 << (bits - 1)) - 1)).all()):
        raise ModelError(f"{name}.qzeros: not symmetric, but config.json says sym: true", "it must say sym: false")
    index = f"{name}.g_idx"
    if index not in checkpoint.manifest.tensors:
        return Scales(scales, offsets)
    group, groups = packing.group_size or columns, checkpoint.read(index)
    if not packing.permuted:
        if not torch.equal(groups, torch.arange(columns, dtype=torch.int32) // group):
            raise damaged(f"{index}: inputs are not in order, but config.json says desc_act: false")
        return Scales(scales, offsets)
    inputs = _parts.column_order(groups, group, index)
    out.copy_(_parts.sort_columns(out, bits, columns, inputs))
    return Scales(scales, offsets, inputs)
