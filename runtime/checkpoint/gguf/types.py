"""The tensor types of ggml: sizes of their blocks (ggml-common.h), and the packed groups that each becomes.

Every quantized type is scale * level + minimum in groups of 16 to 256 values: codebook entries are small integers too.
So each maps onto packed weights without loss. Imports no torch.
"""

from dataclasses import dataclass

from mycli.runtime.quantization.scheme import ByteScales, Codes, Packing
from mycli.runtime.utils.dtypes import Dtype

LAYOUT = "gguf"


@dataclass(frozen=True)
class GgmlType:
    """A tensor type; neither `dtype` nor `bits`: not supported."""

    id: int
    name: str
    block: int  # values
    nbytes: int  # of a block
    dtype: Dtype | None = None  # of an unquantized type
    bits: int = 0  # of a level
    group: int = 0  # values that share a scale
    minimum: bool = False
    scale_dtype: Dtype = "float32"  # that holds its scales exactly
    byte_scales: ByteScales | None = None
    codes: Codes = "int"

    @property
    def packing(self) -> Packing:
        group, dtype = min(self.group, 128), self.scale_dtype
        return Packing(
            self.bits, group, LAYOUT, self.minimum, self.codes, scale_dtype=dtype, byte_scales=self.byte_scales
        )


TYPES = (
    GgmlType(0, "F32", 1, 4, "float32"),
    GgmlType(1, "F16", 1, 2, "float16"),
    GgmlType(30, "BF16", 1, 2, "bfloat16"),
    GgmlType(2, "Q4_0", 32, 18, None, 4, 32, scale_dtype="float16"),
    GgmlType(3, "Q4_1", 32, 20, None, 4, 32, minimum=True, scale_dtype="float16"),
    GgmlType(6, "Q5_0", 32, 22, None, 5, 32, scale_dtype="float16"),
    GgmlType(7, "Q5_1", 32, 24, None, 5, 32, minimum=True, scale_dtype="float16"),
    GgmlType(8, "Q8_0", 32, 34, None, 8, 32, scale_dtype="float16"),
    GgmlType(10, "Q2_K", 256, 84, None, 2, 16, minimum=True, byte_scales="super_blocks"),
    GgmlType(11, "Q3_K", 256, 110, None, 3, 16, byte_scales="super_blocks"),
    GgmlType(12, "Q4_K", 256, 144, None, 4, 32, minimum=True, byte_scales="super_blocks"),
    GgmlType(13, "Q5_K", 256, 176, None, 5, 32, minimum=True, byte_scales="super_blocks"),
    GgmlType(14, "Q6_K", 256, 210, None, 6, 16, byte_scales="super_blocks"),
    GgmlType(16, "IQ2_XXS", 256, 66, None, 3, 32, byte_scales="super_blocks", codes="iq2"),
    GgmlType(17, "IQ2_XS", 256, 74, None, 3, 16, byte_scales="super_blocks", codes="iq2"),
    GgmlType(18, "IQ3_XXS", 256, 98, None, 4, 32, byte_scales="super_blocks", codes="iq3_xxs"),
    GgmlType(19, "IQ1_S", 256, 50, None, 3, 32, byte_scales="super_blocks", codes="iq1"),
    GgmlType(20, "IQ4_NL", 32, 18, None, 4, 32, scale_dtype="float16", codes="iq4"),
    GgmlType(21, "IQ3_S", 256, 110, None, 4, 32, byte_scales="super_blocks", codes="iq3_s"),
    GgmlType(22, "IQ2_S", 256, 82, None, 3, 16, byte_scales="super_blocks", codes="iq2"),
    GgmlType(23, "IQ4_XS", 256, 136, None, 4, 32, byte_scales="super_blocks", codes="iq4"),
    GgmlType(29, "IQ1_M", 256, 56, None, 3, 16, byte_scales="super_blocks", codes="iq1"),
    GgmlType(34, "TQ1_0", 256, 54, None, 2, 256, scale_dtype="float16"),
    GgmlType(35, "TQ2_0", 256, 66, None, 2, 256, scale_dtype="float16"),
    GgmlType(39, "MXFP4", 32, 17, None, 4, 32, scale_dtype="bfloat16", byte_scales="e8m0", codes="e2m1"),
    GgmlType(40, "NVFP4", 64, 36, None, 4, 16, byte_scales="e4m3", codes="e2m1"),
    GgmlType(41, "Q1_0", 128, 18, None, 2, 128, scale_dtype="float16"),
    GgmlType(42, "Q2_0", 64, 18, None, 2, 64, minimum=True, scale_dtype="float16"),
    # Not supported; listed so that an error can name the type.
    GgmlType(24, "I8", 1, 1),
    GgmlType(25, "I16", 1, 2),
    GgmlType(26, "I32", 1, 4),
    GgmlType(27, "I64", 1, 8),
    GgmlType(28, "F64", 1, 8),
)
# Orders of rows for some processors, which llama.cpp computes when it loads a file since November 2024.
REMOVED = {31: "Q4_0", 32: "Q4_0", 33: "Q4_0", 36: "IQ4_NL", 37: "IQ4_NL", 38: "IQ4_NL"}
BY_ID = {kind.id: kind for kind in TYPES}
TYPES_BY_NAME = {kind.name: kind for kind in TYPES}
QUANTIZED = tuple(kind for kind in TYPES if kind.bits)
READABLE_NAMES = tuple(kind.name for kind in TYPES if kind.bits or kind.dtype)
