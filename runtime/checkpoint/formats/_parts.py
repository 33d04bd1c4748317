"""What layouts share in making the parts of a `PackedWeight` of stored tensors: zero points, blocks, powers, order.

Every function is exact: values change their form, never their size. Knows tensors, not names or files. Imports torch
when it is called, since light commands import the layouts.
"""

from typing import TYPE_CHECKING

from mycli.runtime.checkpoint.formats import Headers, Promise
from mycli.runtime.checkpoint.safetensors_header import damaged
from mycli.runtime.models.part_spec import Shape
from mycli.runtime.utils.dtypes import BY_SAFETENSORS_NAME, SAFETENSORS_FLOATS, Dtype, float_dtype

if TYPE_CHECKING:
    from torch import Tensor

SCALAR: tuple[Shape, ...] = ((), (1,), (1, 1))


def either(
    headers: Headers, name: str, shapes: tuple[Shape, ...], dtypes: tuple[str, ...] = SAFETENSORS_FLOATS
) -> Promise:
    """The tensor `name` with that of the allowed shapes which it has, or else the first."""
    found = headers.get(name)
    return name, found.shape if found is not None and found.shape in shapes else shapes[0], dtypes


def unless(model: Dtype, dtype: Dtype) -> Dtype | None:
    """`dtype` as `Packing.scale_dtype` says it: None where it is the model's."""
    return None if dtype == model else dtype


def scale_dtype(headers: Headers | None, name: str, model: Dtype) -> Dtype | None:
    """The dtype in which the scales `name` are stored, None where it is the model's or not known."""
    entry = None if headers is None else headers.get(name)
    found = (
        None
        if entry is None or entry.dtype not in SAFETENSORS_FLOATS
        else float_dtype(BY_SAFETENSORS_NAME[entry.dtype].name)
    )
    return None if found is None else unless(model, found)


def zero_offsets(scales: "Tensor", zeros: "Tensor", bits: int) -> "Tensor":
    """The fp32 offsets of (u - zero) * scale = (u - 2^(bits-1)) * scale + offset: exact for scales of 16 bits."""
    return ((1 << (bits - 1)) - zeros.float()) * scales.float()


def block_scales(scales: "Tensor", block: tuple[int, int], rows: int, columns: int, group: int) -> "Tensor":
    """Scales [ceil(rows / block rows), ceil(columns / block columns)] to those of each row's groups [rows, groups].

    `group` divides `columns`, and a block's columns where there are several: no group lies in two of them.
    """
    import torch

    spread = scales.repeat_interleave(block[0], 0)[:rows]
    places = torch.arange(0, columns, group, dtype=torch.int64) // block[1]
    return spread.index_select(1, places)


def powers_of_two(exponents: "Tensor", name: str) -> "Tensor":
    """E8M0 scales, as bytes, to bf16, which holds each of them exactly. Raises ModelError for the byte that is NaN."""
    import torch

    stored = exponents.view(torch.uint8)
    if bool((stored == 255).any()):
        raise damaged(f"{name}: an exponent of 255, which is not a number")
    return torch.exp2(stored.float() - 127).to(torch.bfloat16)


def column_order(groups: "Tensor", group: int, name: str) -> "Tensor":
    """int32 [K]: the inputs sorted by their group, for the group of each input. Raises ModelError unless each of the
    groups 0, 1, ... has exactly `group` inputs."""
    import torch

    count = groups.numel() // group
    inside = bool(((groups >= 0) & (groups < count)).all())
    if not inside or bool((torch.bincount(groups.long(), minlength=count) != group).any()):
        raise damaged(f"{name}: does not put {group} inputs into each of {count} groups")
    return torch.sort(groups, stable=True).indices.to(torch.int32)


def sort_columns(packed: "Tensor", bits: int, columns: int, inputs: "Tensor") -> "Tensor":
    """Packed codes [N, words] with the columns in the order `inputs`."""
    from mycli.runtime.quantization.packed_weight import pack, unpack

    return pack(unpack(packed, bits, columns).index_select(1, inputs), bits)


def nibbles(stored: "Tensor", high_first: bool = False) -> "Tensor":
    """Two 4-bit codes of each byte, flat: the low half first, or the high one."""
    import torch

    low, high = stored & 15, stored >> 4
    return torch.stack((high, low) if high_first else (low, high), dim=-1).flatten()


def put_bytes(stored: "Tensor", out: "Tensor") -> None:
    """Rows of bytes, uint8 [N, bytes], into the words `out` int32 [N, words]: what is left of a last word is zero."""
    import torch

    words = out.view(torch.uint8)
    words[:, : stored.shape[1]] = stored
    words[:, stored.shape[1] :] = 0
