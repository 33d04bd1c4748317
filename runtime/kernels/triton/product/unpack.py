"""Converts integer codes to fp16 in registers: one logic operation for two weights, the bias left in."""

# mypy: disable-error-code="no-untyped-call, no-untyped-def, untyped-decorator"
# Reason: Triton's decorators and device functions carry no types.

import triton
import triton.language as tl

# A code ORed under the exponent of 1024 is exactly the fp16 number 1024 + 2^e * code while it fits in the ten bits of
# the mantissa; e is the bit at which it is stored (`Layout.fields` of `product.weight_layout`). The product removes
# 1024 and 2^e once per group of weights instead of once per weight.
#
# Each width has inline PTX on two 16-bit fields at a time, and a twin in plain operations for the interpreter and
# GPUs without PTX.

ASM8 = """
prmt.b32 $0, $2, 0x64646464, 0x4240;
prmt.b32 $1, $2, 0x64646464, 0x4341;
"""

ASM4 = """{
.reg .b32 high;
shr.u32 high, $4, 8;
lop3.b32 $0, $4, 0x000f000f, 0x64006400, 0xea;
lop3.b32 $1, $4, 0x00f000f0, 0x64006400, 0xea;
lop3.b32 $2, high, 0x000f000f, 0x64006400, 0xea;
lop3.b32 $3, high, 0x00f000f0, 0x64006400, 0xea;
}"""

ASM2 = """{
.reg .b32 high;
shr.u32 high, $8, 8;
lop3.b32 $0, $8, 0x00030003, 0x64006400, 0xea;
lop3.b32 $1, $8, 0x000c000c, 0x64006400, 0xea;
lop3.b32 $2, $8, 0x00300030, 0x64006400, 0xea;
lop3.b32 $3, $8, 0x00c000c0, 0x64006400, 0xea;
lop3.b32 $4, high, 0x00030003, 0x64006400, 0xea;
lop3.b32 $5, high, 0x000c000c, 0x64006400, 0xea;
lop3.b32 $6, high, 0x00300030, 0x64006400, 0xea;
lop3.b32 $7, high, 0x00c000c0, 0x64006400, 0xea;
}"""

# Outputs 0..7 are the rows at k half 0, 8..15 at k half 1. The last gathers bit 15 of the three words at bits 6, 7, 8.
ASM3 = """{
.reg .b32 a, b, c, d, e, f;
shr.u32 a, $16, 9;
shr.u32 b, $17, 9;
shr.u32 c, $18, 9;
shr.u32 d, $17, 8;
shr.u32 e, $18, 7;
lop3.b32 $0, $16, 0x00070007, 0x64006400, 0xea;
lop3.b32 $1, $17, 0x00070007, 0x64006400, 0xea;
lop3.b32 $2, $18, 0x00070007, 0x64006400, 0xea;
lop3.b32 $3, $16, 0x00380038, 0x64006400, 0xea;
lop3.b32 $4, $17, 0x00380038, 0x64006400, 0xea;
lop3.b32 $5, $18, 0x00380038, 0x64006400, 0xea;
lop3.b32 $6, $16, 0x01c001c0, 0x64006400, 0xea;
lop3.b32 $7, $18, 0x01c001c0, 0x64006400, 0xea;
lop3.b32 $8, a, 0x00070007, 0x64006400, 0xea;
lop3.b32 $9, b, 0x00070007, 0x64006400, 0xea;
lop3.b32 $10, c, 0x00070007, 0x64006400, 0xea;
lop3.b32 $11, a, 0x00380038, 0x64006400, 0xea;
lop3.b32 $12, b, 0x00380038, 0x64006400, 0xea;
lop3.b32 $13, c, 0x00380038, 0x64006400, 0xea;
lop3.b32 $14, $17, 0x01c001c0, 0x64006400, 0xea;
lop3.b32 f, a, 0x00400040, 0x64006400, 0xea;
lop3.b32 f, d, 0x00800080, f, 0xea;
lop3.b32 $15, e, 0x01000100, f, 0xea;
}"""


# Triton reads module constants only as constexpr.
_ASM8 = tl.constexpr(ASM8)
_ASM4 = tl.constexpr(ASM4)
_ASM3 = tl.constexpr(ASM3)
_ASM2 = tl.constexpr(ASM2)
# An input is read after the first output is written: "&" keeps them in different registers.
_OUT8 = tl.constexpr("=&r," * 2 + "r")
_OUT4 = tl.constexpr("=&r," * 4 + "r")
_OUT2 = tl.constexpr("=&r," * 8 + "r")
_OUT3 = tl.constexpr("=&r," * 16 + "r,r,r")


@triton.jit
def _field(word, MASK: tl.constexpr):
    """The twin of one masked OR: int16 to the fp16 number 1024 + (word & MASK)."""
    return ((word & MASK) | 0x6400).to(tl.float16, bitcast=True)


@triton.jit
def unpack8(word, ASM: tl.constexpr):
    """Convert int16 [...] to fp16 [..., row]."""
    if ASM:
        r0, r1 = tl.inline_asm_elementwise(_ASM8, _OUT8, [word], dtype=(tl.float16, tl.float16), is_pure=True, pack=2)
    else:
        r0, r1 = _field(word, 0x00FF), _field(word >> 8, 0x00FF)
    return tl.join(r0, r1)


@triton.jit
def unpack4(word, ASM: tl.constexpr):
    """Convert int16 [...] to fp16 [..., row, k half]."""
    if ASM:
        r0, r1, h0, h1 = tl.inline_asm_elementwise(_ASM4, _OUT4, [word], dtype=(tl.float16,) * 4, is_pure=True, pack=2)
    else:
        high = word >> 8
        r0, r1, h0, h1 = _field(word, 0x000F), _field(word, 0x00F0), _field(high, 0x000F), _field(high, 0x00F0)
    return tl.join(tl.join(r0, r1), tl.join(h0, h1))


@triton.jit
def unpack2(word, ASM: tl.constexpr):
    """Convert int16 [...] to fp16 [..., half of rows, repeat, k half]."""
    if ASM:
        r0, r1, r2, r3, h0, h1, h2, h3 = tl.inline_asm_elementwise(
            _ASM2, _OUT2, [word], dtype=(tl.float16,) * 8, is_pure=True, pack=2
        )
    else:
        high = word >> 8
        r0, r1, r2, r3 = _field(word, 0x0003), _field(word, 0x000C), _field(word, 0x0030), _field(word, 0x00C0)
        h0, h1, h2, h3 = _field(high, 0x0003), _field(high, 0x000C), _field(high, 0x0030), _field(high, 0x00C0)
    low = tl.join(tl.join(r0, r1), tl.join(r2, r3))
    return tl.join(low, tl.join(tl.join(h0, h1), tl.join(h2, h3)))


@triton.jit
def unpack3(a, b, c, ASM: tl.constexpr):
    """Convert three int16 [...] to fp16 [..., half of rows, repeat % 2, repeat / 2, k half]."""
    if ASM:
        r0, r1, r2, r3, r4, r5, r6, r7, h0, h1, h2, h3, h4, h5, h6, h7 = tl.inline_asm_elementwise(
            _ASM3, _OUT3, [a, b, c], dtype=(tl.float16,) * 16, is_pure=True, pack=2
        )
    else:
        a9, b9, c9 = a >> 9, b >> 9, c >> 9
        r0, r1, r2 = _field(a, 0x0007), _field(b, 0x0007), _field(c, 0x0007)
        r3, r4, r5 = _field(a, 0x0038), _field(b, 0x0038), _field(c, 0x0038)
        r6, r7 = _field(a, 0x01C0), _field(c, 0x01C0)
        h0, h1, h2 = _field(a9, 0x0007), _field(b9, 0x0007), _field(c9, 0x0007)
        h3, h4, h5 = _field(a9, 0x0038), _field(b9, 0x0038), _field(c9, 0x0038)
        h6 = _field(b, 0x01C0)
        h7 = _field((a9 & 0x0040) | ((b >> 8) & 0x0080) | ((c >> 7) & 0x0100), 0x01C0)
    low = tl.join(tl.join(tl.join(r0, r1), tl.join(r2, r3)), tl.join(tl.join(r4, r5), tl.join(r6, r7)))
    high = tl.join(tl.join(tl.join(h0, h1), tl.join(h2, h3)), tl.join(tl.join(h4, h5), tl.join(h6, h7)))
    return tl.join(low, high)
