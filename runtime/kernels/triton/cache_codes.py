"""Converts int8 and int4 codes of the KV cache to the operands of an MMA, as Triton device code: exact numbers."""

# mypy: disable-error-code="no-untyped-call, no-untyped-def, untyped-decorator"
# Reason: Triton's decorators and device functions carry no types.

import triton
import triton.language as tl

# Codes become the low bits of a power of two whose step is 1, from which a constant is subtracted: integer conversion
# (I2F) is slow. PRMT spreads bytes, two numbers to a word. fp16 holds 1024 + code + 128. bf16 has seven bits after 128:
# of an int8 code those are its lower seven, and 128 or 256 is subtracted, by its sign. The twins in plain operations
# are for the interpreter and for GPUs without PTX.

INT8_BF16 = """{
.reg .b32 a, b, c, d, one;
mov.b32 one, 0x3f803f80;
prmt.b32 a, $2, 0x43434343, 0x4140;
prmt.b32 b, $2, 0x43434343, 0x4342;
lop3.b32 c, a, 0xff80ff80, 0x80008000, 0xea;
lop3.b32 d, b, 0xff80ff80, 0x80008000, 0xea;
and.b32 a, a, 0xff7fff7f;
and.b32 b, b, 0xff7fff7f;
fma.rn.bf16x2 $0, a, one, c;
fma.rn.bf16x2 $1, b, one, d;
}"""

INT8_FP16 = """{
.reg .b32 a, b, c, bias;
mov.b32 bias, 0xe480e480;
xor.b32 a, $2, 0x80808080;
prmt.b32 b, a, 0x64646464, 0x4140;
prmt.b32 c, a, 0x64646464, 0x4342;
add.rn.f16x2 $0, b, bias;
add.rn.f16x2 $1, c, bias;
}"""

_INT4 = """{{
.reg .b32 low, high, a, b, c, d, one, bias;
mov.b32 one, {one};
mov.b32 bias, {bias};
shr.u32 high, $4, 4;
lop3.b32 low, $4, 0x88888888, 0x0f0f0f0f, 0x28;
lop3.b32 high, high, 0x88888888, 0x0f0f0f0f, 0x28;
prmt.b32 a, low, {power}, 0x4140;
prmt.b32 b, low, {power}, 0x4342;
prmt.b32 c, high, {power}, 0x4140;
prmt.b32 d, high, {power}, 0x4342;
fma.rn.{dtype} $0, a, one, bias;
fma.rn.{dtype} $1, b, one, bias;
fma.rn.{dtype} $2, c, one, bias;
fma.rn.{dtype} $3, d, one, bias;
}}"""
_BF16 = {"dtype": "bf16x2", "one": "0x3f803f80"}
_FP16 = {"dtype": "f16x2", "one": "0x3c003c00"}
INT4_BF16 = _INT4.format(**_BF16, bias="0xc308c308", power="0x43434343")  # 128 + 8
INT4_FP16 = _INT4.format(**_FP16, bias="0xe408e408", power="0x64646464")  # 1024 + 8

# Two words at a time: byte n of both is in the lower bytes of a register.
_WORDS = """{{
.reg .b32 a, b, c, d, e, one, bias;
mov.b32 one, {one};
mov.b32 bias, {bias};
prmt.b32 a, ${first}, ${second}, 0x0400;
prmt.b32 b, ${first}, ${second}, 0x0501;
prmt.b32 c, ${first}, ${second}, 0x0602;
prmt.b32 d, ${first}, ${second}, 0x0703;
{steps}}}"""
_INT8_BF16_STEP = """lop3.b32 e, {name}, 0x00800080, 0xc300c300, 0xea;
lop3.b32 {name}, {name}, 0x007f007f, 0x43004300, 0xea;
fma.rn.bf16x2 ${low}, {name}, one, e;
"""
_INT8_FP16_STEP = """lop3.b32 {name}, {name}, 0x00ff00ff, 0x64806480, 0x6a;
fma.rn.f16x2 ${low}, {name}, one, bias;
"""
_INT4_STEP = """lop3.b32 e, {name}, 0x000f000f, {power}, 0x6a;
shr.u32 {name}, {name}, 4;
lop3.b32 {name}, {name}, 0x000f000f, {power}, 0x6a;
fma.rn.{dtype} ${low}, e, one, bias;
fma.rn.{dtype} ${high}, {name}, one, bias;
"""


def _words(step: str, outputs: int, bias: str, values: dict[str, str], power: str = "") -> str:
    """Return the assembly of `step` for each byte; its outputs come before the two words."""
    steps = (step.format(low=n, high=4 + n, name=name, power=power, **values) for n, name in enumerate("abcd"))
    return _WORDS.format(first=outputs, second=outputs + 1, bias=bias, steps="".join(steps), **values)


INT8_WORDS_BF16 = _words(_INT8_BF16_STEP, 4, "0", _BF16)
INT8_WORDS_FP16 = _words(_INT8_FP16_STEP, 4, "0xe480e480", _FP16)  # 1024 + 128
INT4_WORDS_BF16 = _words(_INT4_STEP, 8, "0xc308c308", _BF16, "0x43084308")
INT4_WORDS_FP16 = _words(_INT4_STEP, 8, "0xe408e408", _FP16, "0x64086408")

# Triton reads module constants only as constexpr.
_INT8_BF16 = tl.constexpr(INT8_BF16)
_INT8_FP16 = tl.constexpr(INT8_FP16)
_INT8_WORDS_BF16 = tl.constexpr(INT8_WORDS_BF16)
_INT8_WORDS_FP16 = tl.constexpr(INT8_WORDS_FP16)
_INT4_BF16 = tl.constexpr(INT4_BF16)
_INT4_FP16 = tl.constexpr(INT4_FP16)
_INT4_WORDS_BF16 = tl.constexpr(INT4_WORDS_BF16)
_INT4_WORDS_FP16 = tl.constexpr(INT4_WORDS_FP16)
# Inputs are read after the first output is written: "&" keeps them in different registers.
_OUT8 = tl.constexpr("=&r," * 2 + "r")
_OUT4 = tl.constexpr("=&r," * 4 + "r")
_OUT_INT4_WORDS = tl.constexpr("=&r," * 8 + "r,r")
_OUT_INT8_WORDS = tl.constexpr("=&r," * 4 + "r,r")


@triton.jit
def _together(a, b, c, d, ROWS: tl.constexpr, WORDS: tl.constexpr):
    return tl.join(tl.join(a, c), tl.join(b, d)).reshape(ROWS, 4 * WORDS)


@triton.jit
def convert_int8(codes, DOT: tl.constexpr, ASM: tl.constexpr):
    """Convert int8 codes to DOT."""
    if ASM and tl.bfloat16 == DOT:
        return tl.inline_asm_elementwise(_INT8_BF16, _OUT8, [codes], dtype=tl.bfloat16, is_pure=True, pack=4)
    elif ASM and tl.float16 == DOT:
        return tl.inline_asm_elementwise(_INT8_FP16, _OUT8, [codes], dtype=tl.float16, is_pure=True, pack=4)
    else:
        return codes.to(DOT)


@triton.jit
def convert_int8_words(words, ROWS: tl.constexpr, WORDS: tl.constexpr, DOT: tl.constexpr, ASM: tl.constexpr):
    """Convert int32 words [ROWS, WORDS] of four int8 codes to DOT [ROWS, 4 * WORDS]."""
    if ASM and tl.bfloat16 == DOT:
        a, b, c, d = tl.inline_asm_elementwise(
            _INT8_WORDS_BF16, _OUT_INT8_WORDS, [words], dtype=(tl.bfloat16,) * 4, is_pure=True, pack=2
        )
    elif ASM and tl.float16 == DOT:
        a, b, c, d = tl.inline_asm_elementwise(
            _INT8_WORDS_FP16, _OUT_INT8_WORDS, [words], dtype=(tl.float16,) * 4, is_pure=True, pack=2
        )
    else:
        a, b = (words << 24 >> 24).to(DOT), (words << 16 >> 24).to(DOT)
        c, d = (words << 8 >> 24).to(DOT), (words >> 24).to(DOT)
    return _together(a, b, c, d, ROWS, WORDS)


@triton.jit
def _signed(half, DOT: tl.constexpr):
    return ((half ^ 8).to(tl.int32) - 8).to(DOT)


@triton.jit
def convert_int4(packed, DOT: tl.constexpr, ASM: tl.constexpr):
    """Convert bytes of two codes to DOT: those of the lower halves and those of the upper halves."""
    if ASM and tl.bfloat16 == DOT:
        return tl.inline_asm_elementwise(_INT4_BF16, _OUT4, [packed], dtype=(tl.bfloat16,) * 2, is_pure=True, pack=4)
    elif ASM and tl.float16 == DOT:
        return tl.inline_asm_elementwise(_INT4_FP16, _OUT4, [packed], dtype=(tl.float16,) * 2, is_pure=True, pack=4)
    else:
        return _signed(packed & 15, DOT), _signed(packed >> 4, DOT)


@triton.jit
def convert_int4_words(words, ROWS: tl.constexpr, WORDS: tl.constexpr, DOT: tl.constexpr, ASM: tl.constexpr):
    """Convert int32 words [ROWS, WORDS] of eight int4 codes as `convert_int4`, each DOT [ROWS, 4 * WORDS]."""
    if ASM and tl.bfloat16 == DOT:
        a, b, c, d, e, f, g, h = tl.inline_asm_elementwise(
            _INT4_WORDS_BF16, _OUT_INT4_WORDS, [words], dtype=(tl.bfloat16,) * 8, is_pure=True, pack=2
        )
    elif ASM and tl.float16 == DOT:
        a, b, c, d, e, f, g, h = tl.inline_asm_elementwise(
            _INT4_WORDS_FP16, _OUT_INT4_WORDS, [words], dtype=(tl.float16,) * 8, is_pure=True, pack=2
        )
    else:
        a, b = (words << 28 >> 28).to(DOT), (words << 20 >> 28).to(DOT)
        c, d = (words << 12 >> 28).to(DOT), (words << 4 >> 28).to(DOT)
        e, f = (words << 24 >> 28).to(DOT), (words << 16 >> 28).to(DOT)
        g, h = (words << 8 >> 28).to(DOT), (words >> 28).to(DOT)
    return _together(a, b, c, d, ROWS, WORDS), _together(e, f, g, h, ROWS, WORDS)
