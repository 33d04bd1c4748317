"""The tensors of compressed-tensors: their names and shapes, how they are read, and how pack-quantized is written."""

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mycli.runtime.checkpoint.formats import ExpectedTensor, Headers, Pack, Scales, _parts
from mycli.runtime.checkpoint.safetensors_header import damaged
from mycli.runtime.models.part_spec import LinearSpec, Shape
from mycli.runtime.quantization.scheme import Packing
from mycli.runtime.utils.dtypes import SAFETENSORS_FLOATS, Dtype

if TYPE_CHECKING:
    import torch

    from mycli.runtime.checkpoint.manifest import Manifest
    from mycli.runtime.checkpoint.reader import Checkpoint
    from mycli.runtime.checkpoint.writer import CheckpointWriter
    from mycli.runtime.quantization.nested_scales import NestedScales

PACK, INT, FLOAT = "pack-quantized", "int-quantized", "float-quantized"
NVFP4, MXFP4, MXFP8 = "nvfp4-pack-quantized", "mxfp4-pack-quantized", "mxfp8-quantized"
_PACK_WEIGHTS = 1 << 22  # packed at a time: bounds the memory of the copy


@dataclass(frozen=True)
class Dialect:
    """A parsed `Packing.dialect`: the format, the strategy of its scales, and the sides of a block."""

    name: str = PACK
    strategy: str = "group"
    block: tuple[int, int] | None = None

    @classmethod
    def of(cls, packing: Packing) -> "Dialect":
        """Parse the dialect of a packing of this layout; an empty one is pack-quantized."""
        if not packing.dialect:
            return cls()
        name, strategy, *block = packing.dialect
        sides = (int(block[0]), int(block[1])) if block else None
        return cls(str(name), str(strategy), sides)


def _scale_shapes(packing: Packing, rows: int, columns: int) -> tuple[Shape, ...]:
    dialect = Dialect.of(packing)
    if dialect.strategy == "tensor":
        return _parts.SCALAR
    if dialect.block is not None:
        return ((-(-rows // dialect.block[0]), -(-columns // dialect.block[1])),)
    return ((rows, packing.groups(columns)),)


def tensors(linear: LinearSpec, packing: Packing, headers: Headers) -> Iterator[ExpectedTensor]:
    rows, columns, name = linear.out_features, linear.in_features, linear.name
    dialect = Dialect.of(packing).name
    scales = _scale_shapes(packing, rows, columns)
    kinds: tuple[str, ...] = SAFETENSORS_FLOATS
    if dialect == PACK:
        words: tuple[Shape, ...] = ((rows, packing.words(columns)),)
        if 32 % packing.bits:
            words += ((rows, -(-columns // (32 // packing.bits))),)  # before 0.18: only whole codes in a word
        yield _parts.either(headers, f"{name}.weight_packed", words, ("I32",))
        yield f"{name}.weight_shape", (2,), ("I64", "I32")
        if packing.offsets:
            yield f"{name}.weight_zero_point", (-(-rows * packing.bits // 32), scales[0][1]), ("I32",)
    elif packing.codes == "e2m1":
        yield f"{name}.weight_packed", (rows, columns // 2), ("U8",)
        kinds = ("F8_E4M3",) if dialect == NVFP4 else ("U8", "F8_E8M0")
        if dialect == NVFP4:
            yield _parts.either(headers, f"{name}.weight_global_scale", ((1,), ()), ("F32",))
    else:
        yield f"{name}.weight", (rows, columns), ("I8",) if dialect == INT else ("F8_E4M3",)
        kinds = ("U8", "F8_E8M0") if dialect == MXFP8 else kinds
        if packing.offsets:
            yield _parts.either(headers, f"{name}.weight_zero_point", scales, ("I8",))
    yield _parts.either(headers, f"{name}.weight_scale", scales, kinds)
    if packing.permuted:
        yield f"{name}.weight_g_idx", (columns,), ("I32",)


def check(linear: LinearSpec, packing: Packing, manifest: "Manifest") -> None:
    """Raise ModelError unless `weight_shape` holds [out_features, in_features]: the packed width is not exact."""
    if packing.dialect:
        return
    name, shape = f"{linear.name}.weight_shape", (linear.out_features, linear.in_features)
    stored = struct.unpack("<2q" if manifest.tensors[name].dtype == "I64" else "<2i", manifest.content(name))
    if stored != shape:
        raise damaged(f"{manifest.tensors[name].file}: {name} holds {list(stored)}, expected {list(shape)}")


def _read_words(checkpoint: "Checkpoint", linear: LinearSpec, packing: Packing, out: "torch.Tensor") -> None:
    import torch

    from mycli.runtime.quantization.packed_weight import pack

    name, bits = f"{linear.name}.weight_packed", packing.bits
    if checkpoint.entry(name).shape == tuple(out.shape):
        checkpoint.read_into(name, out)
        return
    # Before 0.18, words held whole codes only: ten of 3 bits.
    shifts = torch.arange(0, 32 // bits * bits, bits, dtype=torch.int32)
    codes = (checkpoint.read(name).unsqueeze(-1) >> shifts & (1 << bits) - 1).flatten(1)
    out.copy_(pack(codes[:, : linear.in_features].to(torch.uint8), bits))


def _read_codes(checkpoint: "Checkpoint", linear: LinearSpec, packing: Packing, out: "torch.Tensor") -> None:
    import torch

    dialect = Dialect.of(packing).name
    if dialect == PACK:
        _read_words(checkpoint, linear, packing, out)
    elif packing.codes == "e2m1":
        _parts.put_bytes(checkpoint.read(f"{linear.name}.weight_packed"), out)  # the low half of a byte first, as ours
    else:
        stored = checkpoint.read(f"{linear.name}.weight").view(torch.uint8)
        _parts.put_bytes(stored ^ 0x80 if dialect == INT else stored, out)  # q + 128


def _read_scales(
    checkpoint: "Checkpoint", linear: LinearSpec, packing: Packing
) -> "tuple[torch.Tensor, torch.Tensor | None]":
    # Also the factors of E4M3 scales.
    name, dialect = f"{linear.name}.weight_scale", Dialect.of(packing)
    rows, columns = linear.out_features, linear.in_features
    scales = checkpoint.read(name)
    if dialect.name in (MXFP4, MXFP8):
        return _parts.powers_of_two(scales, name), None
    if dialect.name == NVFP4:
        # The stored number is what the weights were multiplied by before they were rounded.
        divisor = checkpoint.read(f"{linear.name}.weight_global_scale")
        return scales.float() / divisor, _parts.row_factors(1 / divisor.double(), rows)
    if dialect.block is not None:
        return _parts.block_scales(scales, dialect.block, rows, columns, packing.group_size or columns), None
    return scales.reshape(1, 1).expand(rows, 1) if dialect.strategy == "tensor" else scales, None


def _read_zeros(checkpoint: "Checkpoint", linear: LinearSpec, packing: Packing, groups: int) -> "torch.Tensor":
    # Unsigned codes [N, groups]: stored packed down the rows, or as signed bytes.
    from mycli.runtime.quantization.packed_weight import unpack

    stored = checkpoint.read(f"{linear.name}.weight_zero_point")
    if Dialect.of(packing).name == PACK:
        return unpack(stored.t().contiguous(), packing.bits, linear.out_features).t()
    zeros = stored.float() + 128
    return zeros if stored.ndim == 2 and stored.numel() > 1 else zeros.reshape(1, 1).expand(linear.out_features, groups)


def read_linear(checkpoint: "Checkpoint", linear: LinearSpec, packing: Packing, out: "torch.Tensor") -> Scales:
    _read_codes(checkpoint, linear, packing, out)
    scales, factors = _read_scales(checkpoint, linear, packing)
    offsets, inputs = None, None
    if packing.offsets:
        zeros = _read_zeros(checkpoint, linear, packing, scales.shape[1])
        offsets = _parts.zero_offsets(scales, zeros, packing.bits)
    if packing.permuted:
        name, group = f"{linear.name}.weight_g_idx", packing.group_size or linear.in_features
        inputs = _parts.column_order(checkpoint.read(name), group, name)
        out.copy_(_parts.sort_columns(out, packing.bits, linear.in_features, inputs))
    return Scales(scales, offsets, inputs, factors)


def planned_tensors(
    linear: LinearSpec, packing: Packing, scale_dtype: "torch.dtype"
) -> list[tuple[str, "torch.dtype", Shape]]:
    import torch

    rows, columns = linear.out_features, linear.in_features
    return [
        (f"{linear.name}.weight_packed", torch.int32, (rows, packing.words(columns))),
        (f"{linear.name}.weight_scale", scale_dtype, (rows, packing.groups(columns))),
        (f"{linear.name}.weight_shape", torch.int64, (2,)),
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

    assert isinstance(scales, torch.Tensor) and scales.dtype == getattr(torch, dtype)

    rows, columns = codes.shape
    packed = torch.empty(rows, packing.words(columns), dtype=torch.int32)
    part_rows = max(1, _PACK_WEIGHTS // columns)
    for start in range(0, rows, part_rows):
        packed[start : start + part_rows] = pack(codes[start : start + part_rows].cpu(), packing.bits)
    writer.write(f"{linear}.weight_packed", packed)
    writer.write(f"{linear}.weight_scale", scales.cpu())
    writer.write(f"{linear}.weight_shape", torch.tensor([rows, columns]))
