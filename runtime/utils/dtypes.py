"""Tensor dtypes by name: in torch and config.json, in a safetensors header, and on the command line. No torch."""

from dataclasses import dataclass
from typing import Literal, get_args

Dtype = Literal["bfloat16", "float16", "float32"]  # of activations and dense weights
PromptCopy = Literal["none", "16bit", "fp8"]  # what is stored of packed weights besides, for passes of many rows
FP8_PIECE = 1 << 22  # activations are rounded to 8 bits in pieces of this many numbers, at 8 bytes each
_FP8_MULTIPLE = 16  # tensor cores multiply 8-bit weights whose sizes are both multiples of this


@dataclass(frozen=True)
class DtypeInfo:
    """The names and size of a dtype. name: torch's and config.json's; short: the command line's."""

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
    DtypeInfo("bool", "BOOL", "bool", 1),  # of causal masks, which old checkpoints hold and nothing reads
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
    """Return the dtype that config.json names, with or without "torch.", or None if it is not supported."""
    name = text.removeprefix("torch.")
    return next((dtype for dtype in FLOATS.values() if dtype == name), _TORCH_ALIASES.get(text))


def has_prompt_copy(kind: PromptCopy, outputs: int, inputs: int) -> bool:
    """Return whether a packed weight [outputs, inputs] is also stored as `kind`."""
    return kind == "16bit" or (kind == "fp8" and not outputs % _FP8_MULTIPLE and not inputs % _FP8_MULTIPLE)
