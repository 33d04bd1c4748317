"""AWQ in the layout of AutoAWQ's GEMM kernel: 4 bits, eight outputs per word in an interleaved order.

The tensors tell which linears are quantized, and their groups.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from mycli.runtime.checkpoint.formats import EMBEDDING, ExpectedTensor, Headers, Scales, _parts, quantizable
from mycli.runtime.models.config import ModelConfig
from mycli.runtime.models.part_spec import LinearSpec
from mycli.runtime.quantization.scheme import Packing
from mycli.runtime.utils.dtypes import SAFETENSORS_FLOATS
from mycli.runtime.utils.json_fields import Fields

if TYPE_CHECKING:
    import torch

    from mycli.runtime.checkpoint.reader import Checkpoint

READABLE = "AWQ of version gemm, 4 bits"
IGNORED = ()
UNEXPECTED = ()
_BITS, _COLUMNS = 4, 8  # columns: outputs in a word
_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)  # nibble of a word that holds column j


def read_quantization(section: Fields, config: ModelConfig, headers: Headers | None) -> dict[str, Packing]:
    version = section.text("version", "gemm").lower()
    if version != "gemm":
        raise section.fail("version", f"{version!r} is not supported", f"readable: {READABLE}")
    bits = section.integer("bits" if section.has("bits") else "w_bit", _BITS, high=16)
    if bits != _BITS:
        raise section.fail("bits", f"= {bits} is not supported", f"readable: {READABLE}")
    group = section.integer("group_size" if section.has("group_size") else "q_group_size", -1, low=-1)
    unquantized = section.array("modules_to_not_convert", str)
    result: dict[str, Packing] = {}
    for linear in quantizable(config):
        if headers is None and (
            linear.name in (EMBEDDING, "lm_head") or _parts.name_contains(linear.name, unquantized)
        ):
            continue
        if headers is not None and f"{linear.name}.qweight" not in headers:
            continue
        size = group if group > 0 else None
        scales = (headers or {}).get(f"{linear.name}.scales")
        if scales is not None and scales.shape and scales.shape[0] and linear.in_features % scales.shape[0] == 0:
            size = linear.in_features // scales.shape[0] if scales.shape[0] > 1 else None
        dtype = _parts.scale_dtype(headers, f"{linear.name}.scales", config.dtype)
        result[linear.name] = Packing(_BITS, size, layout="awq", offsets=True, scale_dtype=dtype)
    return result


def tensors(linear: LinearSpec, packing: Packing, headers: Headers) -> Iterator[ExpectedTensor]:
    rows, columns, groups = linear.out_features, linear.in_features, packing.groups(linear.in_features)
    yield f"{linear.name}.qweight", (columns, -(-rows // _COLUMNS)), ("I32",)
    yield f"{linear.name}.qzeros", (groups, -(-rows // _COLUMNS)), ("I32",)
    yield f"{linear.name}.scales", (groups, rows), SAFETENSORS_FLOATS


check = _parts.no_check


def _columns(words: "torch.Tensor", rows: int) -> "torch.Tensor":
    import torch

    from mycli.runtime.quantization.packed_weight import unpack

    stored = unpack(words, _BITS, words.shape[1] * _COLUMNS).view(words.shape[0], -1, _COLUMNS)
    return stored[:, :, torch.tensor(_PLACES)].flatten(1)[:, :rows]


def read_linear(checkpoint: "Checkpoint", linear: LinearSpec, packing: Packing, out: "torch.Tensor") -> Scales:
    from mycli.runtime.quantization.packed_weight import pack

    codes = _columns(checkpoint.read(f"{linear.name}.qweight"), linear.out_features)
    out.copy_(pack(codes.t().contiguous(), _BITS))
    scales = checkpoint.read(f"{linear.name}.scales").t().contiguous()
    zeros = _columns(checkpoint.read(f"{linear.name}.qzeros"), linear.out_features).t()
    return Scales(scales, _parts.zero_offsets(scales, zeros, _BITS))
