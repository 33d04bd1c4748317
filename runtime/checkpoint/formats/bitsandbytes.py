"""bitsandbytes: NF4 and FP4 with their scales quantized once more or not, and LLM.int8's rows of bytes.

A 4-bit weight is flat: two codes a byte, the first in the high half, and a scale for every `blocksize` of them, rows
or not. Groups are then the largest that lie within both a row and a block. What the codes stand for is stored too, and
must be the published table. Imports torch only to read.
"""

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

from mycli.runtime.checkpoint.formats import EMBEDDING, Headers, Promise, Scales, _parts, _targets, quantizable
from mycli.runtime.checkpoint.safetensors_header import damaged
from mycli.runtime.errors import ModelError
from mycli.runtime.models.config import ModelConfig
from mycli.runtime.models.layer_spec import LinearSpec, Shape
from mycli.runtime.quantization.scheme import Codes, Packing
from mycli.runtime.utils.json_fields import Fields, parse_object

if TYPE_CHECKING:
    import torch

    from mycli.runtime.checkpoint.manifest import Manifest
    from mycli.runtime.checkpoint.reader import Checkpoint

READABLE = "bitsandbytes NF4, FP4 and int8"
IGNORED = ()
TELLING = ((".absmax", "scales of bitsandbytes, but config.json does not say so", "quant_method must be bitsandbytes"),)
_KINDS: tuple[Codes, ...] = ("nf4", "fp4")
_BLOCKS = (64, 128, 256, 512, 1024, 2048, 4096)
_NESTED = 256  # scales that share one of theirs
_MAX_STATE = 4096  # bytes of the description of a weight


def read_quantization(section: Fields, config: ModelConfig, headers: Headers | None) -> dict[str, Packing]:
    """The packing of each linear that has scales; of those not excepted where the tensors are not known."""
    eight = section.boolean("load_in_8bit", False)
    kind = section.text("bnb_4bit_quant_type", "fp4")
    if not eight and kind not in _KINDS:
        raise section.fail("bnb_4bit_quant_type", f"{kind!r} is not supported", f"readable: {READABLE}")
    kept = section.array("llm_int8_skip_modules", str)
    nested = section.boolean("bnb_4bit_use_double_quant", False)
    scales = _parts.unless(config.dtype, "float32")
    result: dict[str, Packing] = {}
    for linear in quantizable(config):
        if headers is None:
            if linear.name in (EMBEDDING, "lm_head") or _targets.named(linear.name, kept):
                continue
        elif f"{linear.name}.{'SCB' if eight else 'weight.absmax'}" not in headers:
            continue
        if eight:
            result[linear.name] = Packing(8, None, layout="bitsandbytes", scale_dtype=scales, dialect=("int8",))
            continue
        block = _block(headers, linear)
        nested = nested if headers is None else f"{linear.name}.weight.nested_absmax" in headers
        group: int | None = math.gcd(linear.in_features, block)
        result[linear.name] = Packing(
            4,
            None if group == linear.in_features else group,
            layout="bitsandbytes",
            codes="nf4" if kind == "nf4" else "fp4",
            scale_dtype=scales,
            dialect=(kind, block, int(nested)),
        )
    return result


def _block(headers: Headers | None, linear: LinearSpec) -> int:
    """The block size by the number of scales; the usual one where it does not come out."""
    values = linear.out_features * linear.in_features
    found = (headers or {}).get(f"{linear.name}.weight.absmax")
    count = found.shape[0] if found is not None and len(found.shape) == 1 else 0
    return next((block for block in _BLOCKS if -(-values // block) == count), _BLOCKS[0])


def _state(linear: LinearSpec, packing: Packing) -> str:
    return f"{linear.name}.weight.quant_state.bitsandbytes__{packing.dialect[0]}"


def tensors(linear: LinearSpec, packing: Packing, headers: Headers) -> Iterator[Promise]:
    """Bytes of codes, scales, the table, and a description in JSON; for int8 bytes and a scale for each row."""
    name, rows, columns = f"{linear.name}.weight", linear.out_features, linear.in_features
    if packing.codes == "int":
        yield name, (rows, columns), ("I8",)
        yield f"{linear.name}.SCB", (rows,), ("F32",)
        if f"{linear.name}.weight_format" in headers:
            yield _parts.either(headers, f"{linear.name}.weight_format", _parts.SCALAR, ("U8",))
        return
    _, block, nested = packing.dialect
    blocks = -(-rows * columns // int(block))
    yield _parts.either(headers, name, ((-(-rows * columns // 2), 1), (1, -(-rows * columns // 2))), ("U8",))
    yield f"{name}.absmax", (blocks,), ("U8",) if nested else ("F32",)
    yield f"{name}.quant_map", (16,), ("F32",)
    if nested:
        yield f"{name}.nested_absmax", (-(-blocks // _NESTED),), ("F32",)
        yield f"{name}.nested_quant_map", (256,), ("F32",)
    sizes: tuple[Shape, ...] = tuple((size,) for size in range(2, _MAX_STATE))
    yield _parts.either(headers, _state(linear, packing), sizes, ("U8",))


def _description(linear: LinearSpec, packing: Packing, manifest: "Manifest") -> Fields:
    name = _state(linear, packing)
    return parse_object(manifest.content(name), f"{manifest.tensors[name].file}: {name}", _MAX_STATE)


def check(linear: LinearSpec, packing: Packing, manifest: "Manifest") -> None:
    """The description is of this weight, and of the arithmetic that its tensors tell."""
    if packing.codes == "int":
        name = f"{linear.name}.weight_format"
        if name in manifest.tensors and any(manifest.content(name)):
            raise ModelError(f"{name}: rows in another order than they are multiplied", f"readable: {READABLE}")
        return
    found, (kind, block, nested) = _description(linear, packing, manifest), packing.dialect
    expected: dict[str, object] = {"quant_type": kind, "blocksize": block}
    if nested:
        expected["nested_blocksize"] = _NESTED
        found.number("nested_offset", low=-1e12)
    for key, value in expected.items():
        if found.values.get(key) != value:
            raise found.fail(key, f"must be {value!r}, not {found.values.get(key)!r:.40}")
    if found.array("shape", int) != [linear.out_features, linear.in_features]:
        raise found.fail("shape", f"must be {[linear.out_features, linear.in_features]}")


def _absmax(checkpoint: "Checkpoint", linear: LinearSpec, packing: Packing) -> "torch.Tensor":
    """The scale of each block, fp32 [blocks]."""
    name = f"{linear.name}.weight"
    stored = checkpoint.read(f"{name}.absmax")
    if not packing.dialect[2]:
        return stored
    outer = checkpoint.read(f"{name}.nested_absmax").repeat_interleave(_NESTED)[: stored.shape[0]]
    offset = _description(linear, packing, checkpoint.manifest).number("nested_offset", low=-1e12)
    return checkpoint.read(f"{name}.nested_quant_map")[stored.int()] * outer + offset


def read_linear(checkpoint: "Checkpoint", linear: LinearSpec, packing: Packing, out: "torch.Tensor") -> Scales:
    """The codes into `out`; the scales of each row's groups. Raises what reading does."""
    import torch

    from mycli.runtime.quantization.codes import code_table
    from mycli.runtime.quantization.packed_weight import pack

    name, rows, columns = f"{linear.name}.weight", linear.out_features, linear.in_features
    if packing.codes == "int":
        _parts.put_bytes(checkpoint.read(name).view(torch.uint8) ^ 0x80, out)
        return Scales((checkpoint.read(f"{linear.name}.SCB") / 127).unsqueeze(1))
    if not torch.equal(checkpoint.read(f"{name}.quant_map"), code_table(packing)):
        raise damaged(f"{name}.quant_map: not the values of {packing.codes}")
    codes = _parts.nibbles(checkpoint.read(name).flatten(), high_first=True)
    out.copy_(pack(codes[: rows * columns].view(rows, columns), packing.bits))
    places = torch.arange(0, rows * columns, packing.group_size or columns) // int(packing.dialect[1])
    return Scales(_absmax(checkpoint, linear, packing)[places].view(rows, -1))
