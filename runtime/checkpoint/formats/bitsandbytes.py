"""bitsandbytes: NF4 and FP4, with or without double quantization, and LLM.int8; NF4 is also written.

A 4-bit weight is flat: two codes per byte, the first in the high half, and a scale per `blocksize` codes, across rows.
A group is the largest run within both a row and a block. The stored code table must be the published one.
"""

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from mycli.runtime.checkpoint.formats import EMBEDDING, ExpectedTensor, Headers, Pack, Scales, _parts, quantizable
from mycli.runtime.checkpoint.safetensors_header import damaged
from mycli.runtime.errors import ModelError
from mycli.runtime.models.config import ModelConfig
from mycli.runtime.models.part_spec import LinearSpec, Shape
from mycli.runtime.quantization.scheme import NF4_LAYOUT, Codes, Packing
from mycli.runtime.utils.dtypes import BY_SAFETENSORS_NAME, SAFETENSORS_FLOATS, Dtype
from mycli.runtime.utils.json_fields import Fields, parse_object

if TYPE_CHECKING:
    import torch

    from mycli.runtime.checkpoint.manifest import Manifest
    from mycli.runtime.checkpoint.reader import Checkpoint
    from mycli.runtime.checkpoint.writer import CheckpointWriter
    from mycli.runtime.quantization.nested_scales import NestedScales

READABLE = "bitsandbytes NF4, FP4 and int8"
IGNORED = ()
UNEXPECTED = (
    (".absmax", "scales of bitsandbytes, but config.json does not say so", "quant_method must be bitsandbytes"),
)
_KINDS: tuple[Codes, ...] = ("nf4", "fp4")
_BLOCKS = (32, 64, 128, 256, 512, 1024, 2048, 4096)
_USUAL_BLOCK = 64
_NESTED = 256  # scales that share a scale in double quantization
_MAX_STATE = 4096  # bytes of a quant_state
_WRITTEN_STATE = 256  # bytes of a written quant_state, padded with spaces: the plan needs a fixed size


def read_quantization(section: Fields, config: ModelConfig, headers: Headers | None) -> dict[str, Packing]:
    eight = section.boolean("load_in_8bit", False)
    kind = section.text("bnb_4bit_quant_type", "fp4")
    if not eight and kind not in _KINDS:
        raise section.fail("bnb_4bit_quant_type", f"{kind!r} is not supported", f"readable: {READABLE}")
    unquantized = section.array("llm_int8_skip_modules", str)
    nested = section.boolean("bnb_4bit_use_double_quant", False)
    scales = _parts.unless(config.dtype, "float32")
    result: dict[str, Packing] = {}
    for linear in quantizable(config):
        if headers is None:
            if linear.name in (EMBEDDING, "lm_head") or _parts.name_contains(linear.name, unquantized):
                continue
        elif f"{linear.name}.{'SCB' if eight else 'weight.absmax'}" not in headers:
            continue
        if eight:
            result[linear.name] = Packing(8, None, layout=NF4_LAYOUT, scale_dtype=scales, dialect=("int8",))
            continue
        nested = nested if headers is None else f"{linear.name}.weight.nested_absmax" in headers
        result[linear.name] = _packing(kind, _block(headers, linear), nested, linear.in_features, config.dtype)
    return result


def _packing(kind: str, block: int, nested: bool, columns: int, dtype: Dtype) -> Packing:
    group = math.gcd(columns, block)
    return Packing(
        4,
        None if group == columns else group,
        layout=NF4_LAYOUT,
        codes="nf4" if kind == "nf4" else "fp4",
        scale_dtype=_parts.unless(dtype, "float32"),
        dialect=(kind, block, int(nested)),
    )


def planned_packing(linear: LinearSpec, bits: int, group: int | None, dtype: Dtype) -> Packing:
    assert bits == 4 and group is not None
    return _packing("nf4", group, True, linear.in_features, dtype)


def _block(headers: Headers | None, linear: LinearSpec) -> int:
    # No field holds the block size before the tensors are read: the number of scales tells it.
    values = linear.out_features * linear.in_features
    absmax = (headers or {}).get(f"{linear.name}.weight.absmax")
    count = absmax.shape[0] if absmax is not None and len(absmax.shape) == 1 else 0
    return next((block for block in _BLOCKS if -(-values // block) == count), _USUAL_BLOCK)


def _state_name(linear: str, packing: Packing) -> str:
    return f"{linear}.weight.quant_state.bitsandbytes__{packing.dialect[0]}"


def tensors(linear: LinearSpec, packing: Packing, headers: Headers) -> Iterator[ExpectedTensor]:
    name, rows, columns = f"{linear.name}.weight", linear.out_features, linear.in_features
    if packing.codes == "int":
        yield name, (rows, columns), ("I8",)
        yield f"{linear.name}.SCB", (rows,), ("F32",)
        if f"{linear.name}.weight_format" in headers:
            yield _parts.either(headers, f"{linear.name}.weight_format", _parts.SCALAR, ("U8",))
        return
    _, block, nested = packing.dialect
    blocks = -(-rows * columns // int(block))
    stored, weight = -(-rows * columns // 2), headers.get(name)
    if weight is not None and weight.dtype in SAFETENSORS_FLOATS:  # `bnb_4bit_quant_storage`: the same bytes as floats
        yield name, (stored // BY_SAFETENSORS_NAME[weight.dtype].nbytes, 1), SAFETENSORS_FLOATS
    else:
        yield _parts.either(headers, name, ((stored, 1), (1, stored)), ("U8",))
    yield f"{name}.absmax", (blocks,), ("U8",) if nested else ("F32",)
    yield f"{name}.quant_map", (16,), ("F32",)
    if nested:
        yield f"{name}.nested_absmax", (-(-blocks // _NESTED),), ("F32",)
        yield f"{name}.nested_quant_map", (256,), ("F32",)
    sizes: tuple[Shape, ...] = tuple((size,) for size in range(2, _MAX_STATE))
    yield _parts.either(headers, _state_name(linear.name, packing), sizes, ("U8",))


def _quant_state(linear: LinearSpec, packing: Packing, manifest: "Manifest") -> Fields:
    name = _state_name(linear.name, packing)
    return parse_object(manifest.content(name), f"{manifest.tensors[name].file}: {name}", _MAX_STATE)


def check(linear: LinearSpec, packing: Packing, manifest: "Manifest") -> None:
    """Raise ModelError unless the quant_state agrees with the shape and the other tensors of the weight."""
    if packing.codes == "int":
        name = f"{linear.name}.weight_format"
        if name in manifest.tensors and any(manifest.content(name)):
            raise ModelError(f"{name}: the rows are in a hardware-specific order", f"readable: {READABLE}")
        return
    state, (kind, block, nested) = _quant_state(linear, packing, manifest), packing.dialect
    expected: dict[str, object] = {"quant_type": kind, "blocksize": block}
    if nested:
        expected["nested_blocksize"] = _NESTED
        state.number("nested_offset", low=-1e12)
    for key, value in expected.items():
        if state.values.get(key) != value:
            raise state.fail(key, f"must be {value!r}, not {state.values.get(key)!r:.40}")
    if state.array("shape", int) != [linear.out_features, linear.in_features]:
        raise state.fail("shape", f"must be {[linear.out_features, linear.in_features]}")


def _absmax(checkpoint: "Checkpoint", linear: LinearSpec, packing: Packing) -> "torch.Tensor":
    name = f"{linear.name}.weight"
    stored = checkpoint.read(f"{name}.absmax")
    if not packing.dialect[2]:
        return stored
    from mycli.runtime.quantization.nested_scales import NestedScales

    offset = _quant_state(linear, packing, checkpoint.manifest).number("nested_offset", low=-1e12)
    nested = NestedScales(stored, checkpoint.read(f"{name}.nested_absmax"), offset)
    return nested.values(checkpoint.read(f"{name}.nested_quant_map"))


def _pairs(checkpoint: "Checkpoint", name: str) -> "torch.Tensor":
    import torch

    if checkpoint.entry(name).dtype == "U8":
        return checkpoint.read(name).flatten()
    # Codes stored as floats may look like NaN, which `read` refuses.
    return torch.frombuffer(bytearray(checkpoint.manifest.content(name)), dtype=torch.uint8)


def read_linear(checkpoint: "Checkpoint", linear: LinearSpec, packing: Packing, out: "torch.Tensor") -> Scales:
    import torch

    from mycli.runtime.quantization.codes import code_table
    from mycli.runtime.quantization.packed_weight import pack

    name, rows, columns = f"{linear.name}.weight", linear.out_features, linear.in_features
    if packing.codes == "int":
        _parts.put_bytes(checkpoint.read(name).view(torch.uint8) ^ 0x80, out)
        return Scales((checkpoint.read(f"{linear.name}.SCB") / 127).unsqueeze(1))
    if not torch.equal(checkpoint.read(f"{name}.quant_map"), code_table(packing)):
        raise damaged(f"{name}.quant_map: not the table of {packing.codes}")
    pairs = _pairs(checkpoint, name)
    codes = torch.stack((pairs >> 4, pairs & 15), dim=-1).flatten()  # the high half of a byte comes first
    out.copy_(pack(codes[: rows * columns].view(rows, columns), packing.bits))
    blocks = torch.arange(0, rows * columns, packing.group_size or columns) // int(packing.dialect[1])
    return Scales(_absmax(checkpoint, linear, packing)[blocks].view(rows, -1))


def planned_tensors(
    linear: LinearSpec, packing: Packing, scale_dtype: "torch.dtype"
) -> list[tuple[str, "torch.dtype", Shape]]:
    import torch

    name, weights = f"{linear.name}.weight", linear.out_features * linear.in_features
    blocks = weights // int(packing.dialect[1])
    return [
        (name, torch.uint8, (weights // 2, 1)),
        (f"{name}.absmax", torch.uint8, (blocks,)),
        (f"{name}.quant_map", torch.float32, (16,)),
        (f"{name}.nested_absmax", torch.float32, (-(-blocks // _NESTED),)),
        (f"{name}.nested_quant_map", torch.float32, (256,)),
        (_state_name(linear.name, packing), torch.uint8, (_WRITTEN_STATE,)),
    ]


def write_weight(
    writer: "CheckpointWriter",
    linear: str,
    packing: Packing,
    codes: "torch.Tensor",
    scales: "torch.Tensor | NestedScales",
    dtype: Dtype,
    pack: Pack,
) -> None:
    import torch

    from mycli.runtime.quantization.codes import code_table
    from mycli.runtime.quantization.nested_scales import NestedScales, dynamic_table

    assert isinstance(scales, NestedScales)
    pairs = codes.cpu().view(-1, 2)
    state = {
        "quant_type": packing.dialect[0],
        "blocksize": packing.dialect[1],
        "dtype": dtype,
        "shape": list(codes.shape),
        "nested_blocksize": _NESTED,
        "nested_dtype": "float32",
        "nested_offset": scales.offset,
    }
    state_bytes = json.dumps(state).encode().ljust(_WRITTEN_STATE)
    writer.write(f"{linear}.weight", (pairs[:, 0] << 4 | pairs[:, 1]).unsqueeze(1))
    writer.write(f"{linear}.weight.absmax", scales.codes)
    writer.write(f"{linear}.weight.quant_map", code_table(packing))
    writer.write(f"{linear}.weight.nested_absmax", scales.outer)
    writer.write(f"{linear}.weight.nested_quant_map", dynamic_table())
    writer.write(_state_name(linear, packing), torch.frombuffer(bytearray(state_bytes), dtype=torch.uint8))


def write_quantization(packings: Mapping[str, Packing], ignore: Iterable[str], dtype: Dtype) -> dict[str, Any]:
    kinds = {packing.dialect for packing in packings.values()}
    ((kind, _, nested),) = kinds
    return {
        "quant_method": "bitsandbytes",
        "load_in_4bit": True,
        "load_in_8bit": False,
        "bnb_4bit_compute_dtype": dtype,
        "bnb_4bit_quant_storage": "uint8",
        "bnb_4bit_quant_type": kind,
        "bnb_4bit_use_double_quant": bool(nested),
        "llm_int8_enable_fp32_cpu_offload": False,
        "llm_int8_has_fp16_weight": False,
        "llm_int8_skip_modules": sorted(ignore),
        "llm_int8_threshold": 6.0,
    }
