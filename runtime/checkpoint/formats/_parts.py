"""Helpers that layouts share: module lists of a config, expected tensors, and exact repacking of stored tensors.

Light commands import the layouts, so torch is imported only inside functions.
"""

import re
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from mycli.runtime.checkpoint.formats import ExpectedTensor, Headers
from mycli.runtime.checkpoint.safetensors_header import damaged
from mycli.runtime.errors import ModelError
from mycli.runtime.models.part_spec import LinearSpec, Shape
from mycli.runtime.quantization.scheme import Packing
from mycli.runtime.utils.dtypes import BY_SAFETENSORS_NAME, SAFETENSORS_FLOATS, Dtype, float_dtype

if TYPE_CHECKING:
    from torch import Tensor

    from mycli.runtime.checkpoint.manifest import Manifest

NO_MATCH = 3  # of target_rank
_MAX_QUANTIFIERS = 4
SCALAR: tuple[Shape, ...] = ((), (1,), (1, 1))


def no_check(linear: LinearSpec, packing: Packing, manifest: "Manifest") -> None:
    """Accept any weight: `Format.check` of a layout whose headers describe weights completely."""


def matches_target(name: str, pattern: str) -> bool:
    """Return whether an exact name or a `re:` pattern, anchored at the start, matches `name`.

    Raises ModelError for a pattern that may take long.
    """
    if not pattern.startswith("re:"):
        return pattern == name
    body = pattern[3:]
    # A pattern of an untrusted file may take exponential time: no quantifier may follow a group or another quantifier,
    # and four in all are enough for published models (.* ten times takes 10 s on a name of 31 characters).
    plain = len(body) <= 200 and re.fullmatch(r"[\w.\\^$*|()\[\]\-+?:!=]*", body) and not re.search(r"[*+?)][*+]", body)
    if not plain or len(re.findall(r"(?<!\()[*+?]", body)) > _MAX_QUANTIFIERS:
        raise ModelError(
            f"config.json: quantization_config: target {pattern[:80]!r} is too complex", "list the modules by name"
        )
    try:
        return re.match(body, name) is not None
    except re.error:
        raise ModelError(
            f"config.json: quantization_config: {pattern[:80]!r} is not a regular expression",
            "list the modules by name",
        ) from None


def target_rank(name: str, targets: Iterable[str]) -> int:
    """Return how closely targets match a linear: 0 by name, 1 by regex, 2 as the class "Linear", or NO_MATCH."""

    def rank(target: str) -> int:
        if target == "Linear":
            return 2
        if not matches_target(name, target):
            return NO_MATCH
        return 1 if target.startswith("re:") else 0

    return min(map(rank, targets), default=NO_MATCH)


def name_contains(name: str, parts: Sequence[str]) -> bool:
    """Return whether a module's name contains any of `parts`: how AWQ and FP8 configs list unquantized modules."""
    return any(part in name for part in parts)


def either(headers: Headers, name: str, shapes: tuple[Shape, ...], dtypes: tuple[str, ...]) -> ExpectedTensor:
    """Expect the tensor `name` with its stored shape if that is one of `shapes`, else with the first."""
    entry = headers.get(name)
    return name, entry.shape if entry is not None and entry.shape in shapes else shapes[0], dtypes


def unless(model: Dtype, dtype: Dtype) -> Dtype | None:
    return None if dtype == model else dtype


def scale_dtype(headers: Headers | None, name: str, model: Dtype) -> Dtype | None:
    """Return the stored dtype of the scales `name`; None for the model's own dtype or an unknown one."""
    entry = None if headers is None else headers.get(name)
    if entry is None or entry.dtype not in SAFETENSORS_FLOATS:
        return None
    dtype = float_dtype(BY_SAFETENSORS_NAME[entry.dtype].name)
    return None if dtype == model else dtype


def zero_offsets(scales: "Tensor", zeros: "Tensor", bits: int) -> "Tensor":
    """Return fp32 offsets so that (u - zero) * scale = (u - 2^(bits-1)) * scale + offset; exact for 16-bit scales."""
    return ((1 << (bits - 1)) - zeros.float()) * scales.float()


def block_scales(scales: "Tensor", block: tuple[int, int], rows: int, columns: int, group: int) -> "Tensor":
    """Expand scales of blocks [ceil(rows / block[0]), ceil(columns / block[1])] to groups of rows [rows, groups].

    `group` divides `columns`, and the columns of a block if there are several: no group lies in two blocks.
    """
    import torch

    spread = scales.repeat_interleave(block[0], 0)[:rows]
    blocks = torch.arange(0, columns, group, dtype=torch.int64) // block[1]
    return spread.index_select(1, blocks)


def row_factors(factor: "Tensor", rows: int) -> "Tensor":
    """Return the factor of the E4M3 scales of a weight, a scalar in fp64, as fp32 pairs of its rows [rows, 1, 2]."""
    import torch

    high = factor.reshape(()).float()
    return torch.stack((high, (factor.reshape(()) - high).float())).expand(rows, 1, 2)


def powers_of_two(exponents: "Tensor", name: str) -> "Tensor":
    """Convert E8M0 scales to bf16, which is exact. Raises ModelError for NaN."""
    import torch

    stored = exponents.view(torch.uint8)
    if bool((stored == 255).any()):
        raise damaged(f"{name}: an E8M0 scale is 255, which means NaN")
    return torch.exp2(stored.float() - 127).to(torch.bfloat16)


def column_order(groups: "Tensor", group: int, name: str) -> "Tensor":
    """Sort the inputs by their group (`groups`: the group of each input); returns int32 [K].

    Raises ModelError unless each of the groups 0, 1, ... has exactly `group` inputs.
    """
    import torch

    count = groups.numel() // group
    inside = bool(((groups >= 0) & (groups < count)).all())
    if not inside or bool((torch.bincount(groups.long(), minlength=count) != group).any()):
        raise damaged(f"{name}: does not put {group} inputs into each of {count} groups")
    return torch.sort(groups, stable=True).indices.to(torch.int32)


def sort_columns(packed: "Tensor", bits: int, columns: int, inputs: "Tensor") -> "Tensor":
    from mycli.runtime.quantization.packed_weight import pack, unpack

    return pack(unpack(packed, bits, columns).index_select(1, inputs), bits)


def put_bytes(stored: "Tensor", out: "Tensor") -> None:
    """Copy rows of bytes, uint8 [N, bytes], to words, int32 [N, words], and fill up the last word with zeros."""
    import torch

    words = out.view(torch.uint8)
    words[:, : stored.shape[1]] = stored
    words[:, stored.shape[1] :] = 0
