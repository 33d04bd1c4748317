// The layout of repacked weights, their scales, and the number formats: what every path of packed_cpu.cpp starts from.
//
// Layout. A block is 16 output rows times 32 inputs: exactly `bits` vectors of 64 bytes, in the order
// [rows / 16][inputs / 32][bits][32 words of 16 bits]. Word 2j+p holds codes of row j at inputs 2r+p, for as many pairs
// r as fit:
//    8 bits: pair r in vector r/2 at bit 8*(r%2), as signed bytes      2 bits: vector r/8, bit 2*(r%8)
//    4 bits: vector r/4, bit 4*(r%4)                                   3 bits: vector r/4, bit 0, 3, 8 or 11 for r < 12;
//    bit b of the pairs 12 to 15 in bits 6, 7, 14 and 15 of vector b
// Shifted and masked by bytes, a vector is an operand of an integer dot product (four inputs of each row side by side);
// shifted by words, it is a table index for vpermw, and what comes out (32 bf16, inputs in pairs) a row of an AMX tile.
// Scales are [rows / 16][groups][16] in their own type. Rows past the last are zero.

#pragma once

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <algorithm>

#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif
#if defined(__x86_64__)
#include <immintrin.h>
#endif
#if defined(__AVX512VNNI__) && defined(__AVX512BW__)
#define WIDTH 64  // bytes of a vector in integer dot products
#elif defined(__AVX2__)
#define WIDTH 32
#endif
#if defined(__AVX512BF16__) && defined(__AVX512BW__)
#define BF16_DOT 1
#if defined(__AMX_BF16__) && defined(__AMX_INT8__) && defined(__linux__)
#define AMX 1
#endif
#endif

namespace {

enum Type : int32_t { F32 = 0, BF16 = 1, F16 = 2 };

constexpr int ROWS = 16, INPUTS = 32, PAIRS = INPUTS / 2;
constexpr int64_t TILED = 3, MANY = 48;  // rows from which on AMX beats vectors, and bf16 tiles beat integer ones
constexpr int64_t AHEAD = 2048;  // bytes prefetched ahead of a stream: 1 to 2 KiB is best by far

struct Weight {  // mirrored by build.py
    const uint8_t* codes;
    const void* scales;
    int64_t rows, inputs, group;
    int32_t bits, scale_type;
};

inline float from_bf16(uint16_t bits) {
    const uint32_t word = uint32_t(bits) << 16;
    float value;
    memcpy(&value, &word, 4);
    return value;
}

inline uint16_t to_bf16(float value) {  // to nearest, ties to even; NaN stays NaN
    uint32_t word;
    memcpy(&word, &value, 4);
    if (value != value) return uint16_t((word >> 16) | 64);
    return uint16_t((word + 0x7fff + ((word >> 16) & 1)) >> 16);
}

inline float from_f16(uint16_t bits) {
#if defined(__F16C__)
    return _cvtsh_ss(bits);
#else
    const uint32_t sign = uint32_t(bits & 0x8000) << 16, exponent = (bits >> 10) & 31, fraction = bits & 1023;
    uint32_t word = sign | (exponent == 31 ? 0x7f800000u | (fraction << 13) : ((exponent + 112) << 23) | (fraction << 13));
    if (exponent == 0) {
        const float small = float(fraction) * 0x1p-24f;
        memcpy(&word, &small, 4);
        word |= sign;
    }
    float value;
    memcpy(&value, &word, 4);
    return value;
#endif
}

inline uint16_t to_f16(float value) {
#if defined(__F16C__)
    return uint16_t(_cvtss_sh(value, 0));
#else
    uint32_t word;
    memcpy(&word, &value, 4);
    const uint16_t sign = uint16_t((word >> 16) & 0x8000);
    const uint32_t magnitude = word & 0x7fffffff;
    if (magnitude > 0x7f800000) return sign | 0x7e00;
    if (magnitude >= 0x47800000) return sign | 0x7c00;
    if (magnitude < 0x38800000) {  // below the smallest normal number: a multiple of 2^-24, rounded by the addition
        float small;
        memcpy(&small, &magnitude, 4);
        small += 0.5f;
        memcpy(&word, &small, 4);
        return sign | uint16_t(word - 0x3f000000);
    }
    return sign | uint16_t((magnitude - 0x38000000 + 0xfff + ((magnitude >> 13) & 1)) >> 13);
#endif
}

inline float load_scale(const Weight& w, int64_t index) {
    if (w.scale_type == F32) return static_cast<const float*>(w.scales)[index];
    const uint16_t bits = static_cast<const uint16_t*>(w.scales)[index];
    return w.scale_type == BF16 ? from_bf16(bits) : from_f16(bits);
}

inline void store(void* out, int32_t type, int64_t index, float value) {
    if (type == F32) static_cast<float*>(out)[index] = value;
    else static_cast<uint16_t*>(out)[index] = type == BF16 ? to_bf16(value) : to_f16(value);
}

// Where pair r lies: its vector and first bit. Of 3 bits the last four pairs are apart, their bit b in vector b.
template <int B> constexpr int PER_WORD = B == 3 ? 4 : 16 / B;
template <int B> constexpr int vector_of(int r) { return r / PER_WORD<B>; }
template <int B> constexpr int bit_of(int r) { return B == 3 ? 8 * (r % 4 / 2) + 3 * (r % 2) : B * (r % PER_WORD<B>); }
constexpr int spread_bit_of(int r) { return 8 * (r % 4 / 2) + 6 + r % 2; }
template <int B> constexpr bool spread(int r) { return B == 3 && r >= 12; }

inline int64_t blocks_of(int64_t rows) { return (rows + ROWS - 1) / ROWS; }

// ---- Any machine: vectors of 8 floats, which compilers map to AVX2, SSE, NEON or plain code ----

typedef int32_t I8 __attribute__((vector_size(32), aligned(32)));
typedef float F8 __attribute__((vector_size(32), aligned(32)));

// Signed codes of pair r for rows 8*half to 8*half+7 at the even (p = 0) or odd (p = 1) input, as floats.
template <int B> inline F8 pair_codes(const uint8_t* block, int r, int half, int p) {
    auto vector = [&](int v) {
        I8 lanes;
        memcpy(&lanes, block + 64 * v + 32 * half, 32);
        return lanes;
    };
    const int shift = 16 * p;
    if (B == 8) return __builtin_convertvector((vector(r / 2) << (24 - shift - 8 * (r % 2))) >> 24, F8);
    I8 code;
    if (spread<B>(r)) {
        const int at = spread_bit_of(r) + shift;
        code = ((vector(0) >> at) & 1) | ((vector(1) >> (at - 1)) & 2) | ((vector(2) >> (at - 2)) & 4);
    } else
        code = (vector(vector_of<B>(r)) >> (bit_of<B>(r) + shift)) & ((1 << B) - 1);
    return __builtin_convertvector(code - (1 << (B - 1)), F8);
}

}  // namespace
