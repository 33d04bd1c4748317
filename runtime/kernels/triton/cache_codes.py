"""Converts int8 and int4 codes of the KV cache to the operands of an MMA, as Triton device code: exact numbers."""

# mypy: disable-error-code="no-untyped-call, no-untyped-def, untyped-decorator"
# Reason: Triton's decorators and device functions carry no types.

import triton
import triton.language as tl

# Codes become the low bits of a power of two whose step is 1, from which a constant is subtracted: integer conversion
# (I2F) is slow. PRMT spreads bytes, two numbers to a word. fp16 holds 1024 + code + 128. bf16 has seven bits after 128:
# of an int8 code those are its lower seven, and 128 or 256 is subtracted, by its sign. Biased numbers keep the bias:
# their user subtracts `INT8_BIAS` times the sum of the other operand. Words are loaded for operands that pass through
# shared memory once converted: bytes are copied to registers and packed again, and a conversion that counts as pure is
# moved behind the copy, where each warp repeats it. The pipeliner for capability 10 refuses others, hence `PURE`. The
# twins in plain operations are for the interpreter and for GPUs without PTX.

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

INT8_BIASED = """{
.reg .b32 a;
xor.b32 a, $2, 0x80808080;
prmt.b32 $0, a, 0x64646464, 0x4140;
prmt.b32 $1, a, 0x64646464, 0x4342;
}"""
INT8_BIAS = tl.constexpr(1024 + 128)

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

# Triton reads module constants only as constexpr.
_INT8_BF16 = tl.constexpr(INT8_BF16)
_INT8_FP16 = tl.constexpr(INT8_FP16)
_INT8_BIASED = tl.constexpr(INT8_BIASED)
_INT4_BF16 = tl.constexpr(INT4_BF16)
_INT4_FP16 = tl.constexpr(INT4_FP16)
_SAME = tl.constexpr("mov.b32 $0, $1;")
# Inputs are read after the first output is written: "&" keeps them in different registers.
_OUT8 = tl.constexpr("=&r," * 2 + "r")
_OUT4 = tl.constexpr("=&r," * 4 + "r")


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
def converted(x, ASM: tl.constexpr, PURE: tl.constexpr):
    """Return x, of 16 bits, without how it was converted.

    Triton lets a thread have twice as many neighbours along K if joins are among it, which only suits operands that
    are loaded before: ldmatrix would read every second row twice from the same banks.
    """
    if ASM and not PURE:
        return tl.inline_asm_elementwise(_SAME, "=r,r", [x], dtype=x.dtype, is_pure=False, pack=2)
    else:
        return x


@triton.jit
def biased_int8(codes):
    """Convert int8 codes to fp16 numbers that are more by `INT8_BIAS`; only with PTX."""
    return tl.inline_asm_elementwise(_INT8_BIASED, _OUT8, [codes], dtype=tl.float16, is_pure=True, pack=4)


@triton.jit
def _numbers(first, second, ROWS: tl.constexpr, WORDS: tl.constexpr, DOT: tl.constexpr):
    """Return the numbers of two int32 words each, two in a word: DOT [ROWS, 4 * WORDS]."""
    pairs = tl.join(first, second).reshape(ROWS, 2 * WORDS)
    low, high = pairs.to(tl.int16).to(DOT, bitcast=True), (pairs >> 16).to(tl.int16).to(DOT, bitcast=True)
    return tl.join(low, high).reshape(ROWS, 4 * WORDS)


@triton.jit
def biased_int8_words(words, ROWS: tl.constexpr, WORDS: tl.constexpr, PURE: tl.constexpr):
    """Convert words as `convert_int8_words` to fp16 numbers that are more by `INT8_BIAS`; only with PTX."""
    first, second = tl.inline_asm_elementwise(
        _INT8_BIASED, _OUT8, [words], dtype=(tl.int32, tl.int32), is_pure=PURE, pack=1
    )
    return _numbers(first, second, ROWS, WORDS, tl.float16)


@triton.jit
def convert_int8_words(
    words, ROWS: tl.constexpr, WORDS: tl.constexpr, DOT: tl.constexpr, ASM: tl.constexpr, PURE: tl.constexpr
):
    """Convert int32 words [ROWS, WORDS] of four int8 codes to DOT [ROWS, 4 * WORDS]."""
    if ASM and tl.bfloat16 == DOT:
        first, second = tl.inline_asm_elementwise(
            _INT8_BF16, _OUT8, [words], dtype=(tl.int32,) * 2, is_pure=PURE, pack=1
        )
        return _numbers(first, second, ROWS, WORDS, DOT)
    elif ASM and tl.float16 == DOT:
        first, second = tl.inline_asm_elementwise(
            _INT8_FP16, _OUT8, [words], dtype=(tl.int32,) * 2, is_pure=PURE, pack=1
        )
        return _numbers(first, second, ROWS, WORDS, DOT)
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
def convert_int4_words(
    words, ROWS: tl.constexpr, WORDS: tl.constexpr, DOT: tl.constexpr, ASM: tl.constexpr, PURE: tl.constexpr
):
    """Convert int32 words [ROWS, WORDS] of eight int4 codes as `convert_int4`, each DOT [ROWS, 4 * WORDS]."""
    if ASM and tl.bfloat16 == DOT:
        a, b, c, d = tl.inline_asm_elementwise(_INT4_BF16, _OUT4, [words], dtype=(tl.int32,) * 4, is_pure=PURE, pack=1)
        return _numbers(a, b, ROWS, WORDS, DOT), _numbers(c, d, ROWS, WORDS, DOT)
    elif ASM and tl.float16 == DOT:
        a, b, c, d = tl.inline_asm_elementwise(_INT4_FP16, _OUT4, [words], dtype=(tl.int32,) * 4, is_pure=PURE, pack=1)
        return _numbers(a, b, ROWS, WORDS, DOT), _numbers(c, d, ROWS, WORDS, DOT)
    else:
        a, b = (words << 28 >> 28).to(DOT), (words << 20 >> 28).to(DOT)
        c, d = (words << 12 >> 28).to(DOT), (words << 4 >> 28).to(DOT)
        e, f = (words << 24 >> 28).to(DOT), (words << 16 >> 28).to(DOT)
        g, h = (words << 8 >> 28).to(DOT), (words >> 28).to(DOT)
        return _together(a, b, c, d, ROWS, WORDS), _together(e, f, g, h, ROWS, WORDS)
