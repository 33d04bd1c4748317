// What lies between the products, in bf16: norm, rotation, activation. Rounded wherever torch rounds.

#pragma once

#include "vectors.h"

namespace {

typedef uint32_t U16 __attribute__((vector_size(64), aligned(64)));

// To bf16, to nearest, ties to even; NaN stays NaN.
inline V16 rounded(V16 v) {
    const U16 word = (U16)v;
    const U16 near = word + 0x7fff + ((word >> 16) & 1);
    return (V16)((v != v ? word | 0x400000 : near) & 0xffff0000);
}

inline void store16(uint16_t* at, V16 v) {
    typedef uint16_t Half __attribute__((vector_size(32)));
    const Half half = __builtin_convertvector((U16)rounded(v) >> 16, Half);
    memcpy(at, &half, 32);
}

// x / sqrt(mean of x^2 + eps) * gain of a row x [size]; size is a multiple of 16.
inline void norm_row(const uint16_t* x, int64_t size, const uint16_t* gain, float eps, uint16_t* y) {
    V16 sum = {};
    for (int64_t i = 0; i < size; i += LANE) {
        const V16 v = load16(x + i);
        sum += v * v;
    }
    const float root = 1.0f / sqrtf(sum_of(sum) / float(size) + eps);
    for (int64_t i = 0; i < size; i += LANE) store16(y + i, load16(x + i) * root * load16(gain + i));
}

// SiLU(gate) * up of a row [gate, up], each of `size`, a multiple of 16.
inline void gate_row(const uint16_t* x, int64_t size, uint16_t* y) {
    for (int64_t i = 0; i < size; i += LANE) {
        const V16 gate = load16(x + i), zero = {};
        const I16 below = gate < 0;
        const V16 power = exponential(below ? gate : -gate);
        const V16 active = gate * (below ? power : zero + 1.0f) / (power + 1.0f);
        store16(y + i, rounded(active) * load16(x + size + i));
    }
}

struct Rotation {  // mirrored by build.py
    const uint16_t* x;  // [sequences, tokens, heads, 2 * half], strides in elements; half is a multiple of 16
    const uint16_t *cos, *sin;  // [tokens, half]
    uint16_t* out;  // as x, contiguous
    int64_t sequences, tokens, heads, half, sequence_stride, token_stride;
};

inline void rotate_token(const Rotation& r, int64_t sequence, int64_t token) {
    const uint16_t* x = r.x + sequence * r.sequence_stride + token * r.token_stride;
    uint16_t* out = r.out + (sequence * r.tokens + token) * r.heads * 2 * r.half;
    for (int64_t head = 0; head < r.heads; head++, x += 2 * r.half, out += 2 * r.half)
        for (int64_t i = 0; i < r.half; i += LANE) {
            const V16 first = load16(x + i), second = load16(x + r.half + i);
            const V16 c = load16(r.cos + token * r.half + i), s = load16(r.sin + token * r.half + i);
            store16(out + i, rounded(first * c) - rounded(second * s));
            store16(out + r.half + i, rounded(second * c) + rounded(first * s));
        }
}

}  // namespace
