"""Converts codes of 8-bit floats, E2M1 and tables to fp16 in registers, as Triton device code."""

# mypy: disable-error-code="no-untyped-call, no-untyped-def, untyped-decorator"
# Reason: Triton's decorators and device functions carry no types.

import torch
import triton
import triton.language as tl

from mycli.runtime.kernels.triton.product.weight_layout import BYTE_ZERO, TABLE_UNIT
from mycli.runtime.quantization.codes import code_table
from mycli.runtime.quantization.scheme import INTEGER_TABLES, Codes, Packing

# E4M3, E5M2 and E2M1 are fp16 numbers times a power of two once their bits are in place; that power goes into the
# group's scale (`TABLE_UNIT`). NF4 and bitsandbytes' FP4 are looked up byte by byte with PRMT, whose selectors are
# the codes. The entries are the nearest fp16 numbers: exact for 12 * FP4, within 2^-12 for NF4. Integers of at most 127
# are looked up as bytes, `BYTE_ZERO` more than they are, which become 1024 and the byte as int8 codes do. Fields as in
# `product.unpack`; each conversion has inline PTX and a twin in plain operations.


def entries(codes: Codes) -> tuple[int, ...]:
    """Return the 16 fp16 entries of a table as signed 16-bit integers; of a table of 8, each twice."""
    if codes in INTEGER_TABLES:
        return tuple(0x6400 + BYTE_ZERO + value for value in INTEGER_TABLES[codes]) * (16 // len(INTEGER_TABLES[codes]))
    values = code_table(Packing(4, None, codes=codes)).double() / TABLE_UNIT[codes]
    bits: list[int] = values.half().view(torch.int16).tolist()
    return tuple(bits)


def _lookup_bytes(codes: Codes) -> str:
    """Return PTX of a table of integers, with the operands of `_lookup`."""
    table, wide = entries(codes), len(INTEGER_TABLES[codes]) > 8

    def four(first: int) -> str:
        return hex(sum((table[first + i] & 0xFF) << 8 * i for i in range(4)))

    lines = ["{", ".reg .b32 a0, a1, b0, b1, ones, x, s, m, p, q, o;"]
    lines += [f"mov.b32 {name}, {four(4 * i)};" for i, name in enumerate(("a0", "a1", "b0", "b1")) if wide or i < 2]
    # Bytes 0 and 2 of the codes come first: the entries of $0 and $1 are then alternate bytes of one word.
    lines += ["prmt.b32 x, $4, 0, 0x3120;", "and.b32 s, x, 0x77777777;"]
    # Bit 3 of a code selects the upper half. As a selector of `ones` it is bit 0, and the others do not matter.
    lines += ["mov.b32 ones, 0xff00ff00;", "shr.u32 m, x, 3;"] if wide else []
    for out in (0, 2):
        lines += [f"shr.u32 {name}, {name}, 16;" for name in ("sm" if wide else "s")] if out else []
        lines += ["prmt.b32 p, a0, a1, s;"]
        lines += ["prmt.b32 q, b0, b1, s;", "prmt.b32 o, ones, ones, m;", "lop3.b32 p, o, q, p, 0xca;"] if wide else []
        lines += [f"lop3.b32 ${out}, p, 0x00ff00ff, 0x64006400, 0xea;", f"prmt.b32 ${out + 1}, p, 0x64646464, 0x4341;"]
    return "\n".join([*lines, "}"])


def _lookup(codes: Codes) -> str:
    """Return PTX that converts $4, four codes in each of two 16-bit words, to $0..$3 ordered as by `unpack.ASM4`."""
    bits = [value & 0xFFFF for value in entries(codes)]

    def four(first: int, shift: int) -> str:
        return hex(sum((bits[first + i] >> shift & 0xFF) << 8 * i for i in range(4)))

    lines = ["{", ".reg .b32 a0, a1, a2, a3, b0, b1, b2, b3, x, s, m, p, q, low, high, u, v, w, z;"]
    for name, start in (("a", 0), ("b", 8)):
        lines += [f"mov.b32 {name}{i}, {four(start + i % 2 * 4, i // 2 * 8)};" for i in range(4)]
    for source, even, odd in (("$4", "u", "v"), ("x", "w", "z")):
        lines += ["shr.u32 x, $4, 16;"] if source == "x" else []
        lines += [f"and.b32 s, {source}, 0x7777;", f"shr.u32 m, {source}, 3;", "and.b32 m, m, 0x1111;"]
        lines += ["prmt.b32 m, 0xff00, 0, m;"]  # a byte of ones for each code above 7
        for half, into in ((0, "low"), (2, "high")):
            lines += [f"prmt.b32 p, a{half}, a{half + 1}, s;", f"prmt.b32 q, b{half}, b{half + 1}, s;"]
            lines += [f"lop3.b32 {into}, m, q, p, 0xca;"]
        lines += [f"prmt.b32 {even}, low, high, 0x5140;", f"prmt.b32 {odd}, low, high, 0x7362;"]
    for out, (first, second, order) in enumerate((("u", "w", "0x5410"), ("u", "w", "0x7632"), ("v", "z", "0x5410"))):
        lines += [f"prmt.b32 ${out}, {first}, {second}, {order};"]
    return "\n".join([*lines, "prmt.b32 $3, v, z, 0x7632;", "}"])


ASM_E2M1 = """{
.reg .b32 a, b;
shl.b32 a, $4, 12;
and.b32 a, a, 0x80008000;
shl.b32 b, $4, 9;
lop3.b32 $0, b, 0x0e000e00, a, 0xea;
shl.b32 a, $4, 8;
and.b32 a, a, 0x80008000;
shl.b32 b, $4, 5;
lop3.b32 $1, b, 0x0e000e00, a, 0xea;
shl.b32 a, $4, 4;
and.b32 a, a, 0x80008000;
shl.b32 b, $4, 1;
lop3.b32 $2, b, 0x0e000e00, a, 0xea;
and.b32 a, $4, 0x80008000;
shr.u32 b, $4, 3;
lop3.b32 $3, b, 0x0e000e00, a, 0xea;
}"""

ASM_E4M3 = """{
.reg .b32 a, b, c;
and.b32 a, $2, 0x80008000;
shr.u32 b, $2, 1;
shl.b32 c, $2, 8;
lop3.b32 $1, b, 0x3f803f80, a, 0xea;
and.b32 a, c, 0x80008000;
shr.u32 b, c, 1;
lop3.b32 $0, b, 0x3f803f80, a, 0xea;
}"""

ASM_E5M2 = """{
.reg .b32 a;
shl.b32 a, $2, 8;
and.b32 $1, $2, 0xff00ff00;
and.b32 $0, a, 0xff00ff00;
}"""

# Triton reads module constants only as constexpr. An input is read after the first output is written: "&" keeps them
# in different registers.
_TABLES: tuple[Codes, ...] = ("nf4", "fp4", "iq4", "iq3_xxs", "iq2", "iq1")
_ASM4 = tl.constexpr(
    {codes: (_lookup_bytes if codes in INTEGER_TABLES else _lookup)(codes) for codes in _TABLES} | {"e2m1": ASM_E2M1}
)
_ASM_E4M3 = tl.constexpr(ASM_E4M3)
_ASM_E5M2 = tl.constexpr(ASM_E5M2)
_ENTRIES = tl.constexpr({codes: entries(codes) for codes in _TABLES})
_OUT8 = tl.constexpr("=&r," * 2 + "r")
_OUT4 = tl.constexpr("=&r," * 4 + "r")


@triton.constexpr_function
def _assembly(codes):
    return _ASM4.value[codes]


@triton.constexpr_function
def _entries(codes):
    return _ENTRIES.value[codes]


@triton.jit
def _entry(code, TABLE: tl.constexpr):
    bits = tl.zeros(code.shape, tl.int16)
    for index in tl.static_range(16):
        bits = tl.where(code == index, TABLE[index], bits).to(tl.int16)
    return bits.to(tl.float16, bitcast=True)


@triton.jit
def _small_float(word, SHIFT: tl.constexpr):
    field = word >> SHIFT
    return (((field & 8) << 12) | ((field & 7) << 9)).to(tl.int16).to(tl.float16, bitcast=True)


@triton.jit
def table4(word, CODES: tl.constexpr, ASM: tl.constexpr):
    """Convert int16 [...] to fp16 [..., row, k half]: values divided by TABLE_UNIT; integers as by `unpack8`."""
    if ASM:
        TEXT: tl.constexpr = _assembly(CODES)
        r0, r1, h0, h1 = tl.inline_asm_elementwise(TEXT, _OUT4, [word], dtype=(tl.float16,) * 4, is_pure=True, pack=2)
    elif CODES == "e2m1":
        r0, r1, h0, h1 = _small_float(word, 0), _small_float(word, 4), _small_float(word, 8), _small_float(word, 12)
    else:
        TABLE: tl.constexpr = _entries(CODES)
        r0, r1 = _entry(word & 15, TABLE), _entry((word >> 4) & 15, TABLE)
        h0, h1 = _entry((word >> 8) & 15, TABLE), _entry((word >> 12) & 15, TABLE)
    return tl.join(tl.join(r0, r1), tl.join(h0, h1))


@triton.jit
def table8(word, CODES: tl.constexpr, ASM: tl.constexpr):
    """Convert int16 [...] to fp16 [..., row]: values of E4M3 or E5M2 divided by TABLE_UNIT."""
    if ASM:
        TEXT: tl.constexpr = _ASM_E4M3 if CODES == "e4m3" else _ASM_E5M2
        r0, r1 = tl.inline_asm_elementwise(TEXT, _OUT8, [word], dtype=(tl.float16, tl.float16), is_pure=True, pack=2)
    else:
        low, high = (word & 0xFF) << 8, word & -256
        if CODES == "e4m3":
            low, high = (low & -32768) | ((low >> 1) & 0x3F80), (high & -32768) | ((high >> 1) & 0x3F80)
        r0 = low.to(tl.int16).to(tl.float16, bitcast=True)
        r1 = high.to(tl.int16).to(tl.float16, bitcast=True)
    return tl.join(r0, r1)
