"""The number types of tensors in one table: their names in config.json, in a safetensors header and on a command line.

Knows names and sizes. Does not import torch: `runtime.device.placement.torch_dtype` makes its dtypes from these names.
"""

from dataclasses import dataclass
from typing import Literal, get_args

Dtype = Literal["bfloat16", "float16", "float32"]  # of activations and dense weights


@dataclass(frozen=True)
class DtypeInfo:
    """`name` as torch and config.json spell it, `stored` as a safetensors header does, `short` as a person types it."""

    name: str
    safetensors_name: str
    short: str
    nbytes: int


DTYPES = (
    DtypeInfo("bfloat16", "BF16", "bf16", 2),
    DtypeInfo("float16", "F16", "fp16", 2),
    DtypeInfo("float32", "F32", "fp32", 4),
    DtypeInfo("int64", "I64", "int64", 8),
    DtypeInfo("int32", "I32", "int32", 4),
    DtypeInfo("int8", "I8", "int8", 1),
    DtypeInfo("uint32", "U32", "uint32", 4),
    DtypeInfo("uint8", "U8", "uint8", 1),
    DtypeInfo("float8_e4m3fn", "F8_E4M3", "e4m3", 1),
    DtypeInfo("float8_e5m2", "F8_E5M2", "e5m2", 1),
    DtypeInfo("float8_e8m0fnu", "F8_E8M0", "e8m0", 1),
)
BY_NAME = {info.name: info for info in DTYPES}
BY_SAFETENSORS_NAME = {info.safetensors_name: info for info in DTYPES}
SAFETENSORS_FLOATS = tuple(BY_NAME[name].safetensors_name for name in get_args(Dtype))
FLOATS: dict[str, Dtype] = {BY_NAME[name].short: name for name in get_args(Dtype)}
_TORCH_ALIASES: dict[str, Dtype] = {"half": "float16", "float": "float32"}


def float_dtype(text: str) -> Dtype | None:
    """The dtype that config.json means by `text`, by any of torch's names for it; None where it is not supported."""
    name = text.removeprefix("torch.")
    return next((dtype for dtype in FLOATS.values() if dtype == name), _TORCH_ALIASES.get(text))
