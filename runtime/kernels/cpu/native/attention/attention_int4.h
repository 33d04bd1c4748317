// Vectors of an int4 cache: rotated, rounded, and read. runtime/cache/int4.py defines codes and scales and computes the same
// bits; runtime/quantization/int4_vectors.py defines the layout.

#pragma once

#include <float.h>

#include <memory>
#include <new>

#include "vectors.h"

namespace {

constexpr int64_t UNIT = 16, INT4_GROUP = 32;  // dimensions interleaved in 8 bytes; dimensions that share a scale

struct Int4 {  // stands for the type of values in templates
    uint8_t byte;
};
struct Int4Vector {
    const uint8_t* codes;
    const uint16_t* scales;

    float scale(int64_t d) const { return from_bf16(scales[uint64_t(d) / INT4_GROUP]); }
};
inline int64_t int4_groups(int64_t head_dim) { return (head_dim + INT4_GROUP - 1) / INT4_GROUP; }

// ---- The Hadamard transform, in blocks of the largest power of two that divides the size ----

template <int S, size_t... L> inline Wide butterfly(Wide v, std::index_sequence<L...>) {
    const Wide other = __builtin_shuffle(v, WideInt{int(L ^ S)...}), sum = v + other, difference = other - v;
    return __builtin_shuffle(sum, difference, WideInt{int(L & S ? WIDE + L : L)...});
}
// Transforms x [size], size a multiple of 16, in place.
inline void rotate_vector(float* x, int64_t size) {
    constexpr auto lanes = std::make_index_sequence<WIDE>();
    const int64_t block = size & -size;
    const Wide norm = spread(float(1 / sqrt(double(block))));
    for (int64_t d = 0; d < size; d += WIDE) {
        Wide v = wide(x + d);
        v = butterfly<4>(butterfly<2>(butterfly<1>(v, lanes), lanes), lanes);
        if constexpr (WIDE == 16) v = butterfly<8>(v, lanes);
        put(x + d, v);
    }
    for (int64_t step = WIDE; step < block; step *= 2)
        for (int64_t d = 0; d < size; d += 2 * step)
            for (int64_t i = d; i < d + step; i += WIDE) {
                const Wide first = wide(x + i), second = wide(x + i + step);
                put(x + i, first + second);
                put(x + i + step, first - second);
            }
    for (int64_t d = 0; d < size; d += WIDE) put(x + d, wide(x + d) * norm);
}

// ---- Rounding ----

// Codes of `count` (16 or 32) rotated values, 8 bytes for each 16, and their scale.
inline uint16_t pack_group(const float* x, int64_t count, uint8_t* to) {
    Wide high = {}, low = {}, check = {};
    for (int64_t d = 0; d < count; d += WIDE) {
        const Wide v = wide(x + d);
        high = larger(v, high);
        low = larger(-v, low);
        check = multiply_add(v, Wide{}, check);  // 0, or NaN if a value is NaN or infinite
    }
    memset(to, 0, size_t(count / 2));
    if (total(check) != 0) return 0x7fc0;
    const float above = greatest(high), below = greatest(low);
    const uint16_t bits = to_bf16((above > below ? above : -below) * -0.125f);
    const float step = from_bf16(bits);
    if (fabsf(step) < FLT_MIN) return 0;
    const Wide divisor = spread(step), magic = spread(12582912.0f);  // adding it rounds to the nearest integer
    for (int64_t unit = 0; unit < count; unit += UNIT) {
        int32_t codes[UNIT];
        for (int64_t d = 0; d < UNIT; d += WIDE) {
            WideInt code = (WideInt)(wide(x + unit + d) / divisor + magic) - (WideInt)magic;
            code = code > 7 ? WideInt{} + 7 : code < -8 ? WideInt{} - 8 : code;
            memcpy(codes + d, &code, sizeof code);
        }
        for (int64_t i = 0; i < UNIT / 2; i++) to[unit / 2 + i] = uint8_t((codes[i] & 15) | codes[i + UNIT / 2] << 4);
    }
    return bits;
}
// Rotates x [head_dim] in place and converts it to codes [head_dim / 2] and `int4_groups` scales.
inline void pack_vector(float* x, int64_t head_dim, uint8_t* codes, uint16_t* scales) {
    rotate_vector(x, head_dim);
    for (int64_t d = 0; d < head_dim; d += INT4_GROUP)
        scales[d / INT4_GROUP] = pack_group(x + d, std::min(INT4_GROUP, head_dim - d), codes + d / 2);
}
// `size` values from element `at` as fp32, then zeros up to a whole vector.
template <class T> inline void widen(const T* x, int64_t size, float* to) {
    int64_t d = 0;
    for (; d + WIDE <= size; d += WIDE) put(to + d, wide(x + d));
    if (d < size) put(to + d, first_of(x + d, size - d));
}
inline void widen(const void* x, int32_t type, int64_t at, int64_t size, float* to) {
    if (type == F32) widen(static_cast<const float*>(x) + at, size, to);
    else widen(static_cast<const uint16_t*>(x) + at, size, to);
}

// Converts vectors x [vectors, head_dim] to codes and scales. Returns false without memory.
inline bool pack_vectors(const void* x, int32_t type, int64_t vectors, int64_t head_dim, uint8_t* codes, uint16_t* scales, int threads) {
    constexpr int64_t TASK_VECTORS = 16;
    const int64_t tasks = (vectors + TASK_VECTORS - 1) / TASK_VECTORS;
    std::unique_ptr<float[]> room(new (std::nothrow) float[size_t(tasks * head_dim)]);
    if (!room) return false;
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1)
    for (int64_t task = 0; task < tasks; task++)
        for (int64_t i = task * TASK_VECTORS; i < std::min(vectors, (task + 1) * TASK_VECTORS); i++) {
            float* vector = room.get() + task * head_dim;
            widen(x, type, i * head_dim, head_dim, vector);
            pack_vector(vector, head_dim, codes + i * (head_dim / 2), scales + i * int4_groups(head_dim));
        }
    return true;
}

// ---- Reading ----

#if defined(__AVX512F__)
inline Wide int4_levels() { return Wide{0, 1, 2, 3, 4, 5, 6, 7, -8, -7, -6, -5, -4, -3, -2, -1}; }  // by code
#endif

// Values of dimensions [d, d + WIDE), still rotated.
inline Wide wide(Int4Vector v, int64_t d) {
    const uint8_t* unit = v.codes + uint64_t(d) / UNIT * (UNIT / 2);
#if defined(__AVX512F__)
    int64_t bytes;
    memcpy(&bytes, unit, 8);
    const __m512i halves = _mm512_setr_epi32(0, 0, 0, 0, 0, 0, 0, 0, 4, 4, 4, 4, 4, 4, 4, 4);
    const __m512i codes = _mm512_srlv_epi32(_mm512_cvtepu8_epi32(_mm_set1_epi64x(bytes)), halves);
    return _mm512_permutexvar_ps(codes, int4_levels()) * spread(v.scale(d));
#else
    typedef uint8_t Bytes __attribute__((vector_size(WIDE)));
    Bytes bytes;
    memcpy(&bytes, unit, sizeof bytes);
    const WideInt codes = (WideInt)(__builtin_convertvector(bytes, WideBits) << (d % UNIT ? 24 : 28)) >> 28;
    return __builtin_convertvector(codes, Wide) * spread(v.scale(d));
#endif
}
// Code `place` of every word of 8 codes: first the lower halves of its bytes, then the upper.
inline Wide code_of(WideBits words, int place) {
#if defined(__AVX512F__)
    return _mm512_permutexvar_ps((__m512i)(words >> (place % 4 * 8 + place / 4 * 4)), int4_levels());
#else
    return __builtin_convertvector((WideInt)(words << (28 - place % 4 * 8 - place / 4 * 4)) >> 28, Wide);
#endif
}
// The next `count` words of codes, at most WIDE, then zeros.
inline Wide words_of(const uint8_t* at, int64_t count) {
#if defined(__AVX512F__)
    return (Wide)_mm512_maskz_loadu_epi32(__mmask16((1u << std::min<int64_t>(count, 16)) - 1), at);
#else
    Wide v = {};
    if (count >= WIDE) memcpy(&v, at, sizeof v);
    else memcpy(&v, at, size_t(count) * 4);
    return v;
#endif
}

#if AMX
// 32 dimensions of a vector as bf16 (its last 16, and 0): code times scale, rounded.
inline __m512i int4_bf16(Int4Vector v, int64_t d, bool whole) {
    const __m512 scaled = int4_levels() * spread(v.scale(d));
    const __m512i levels = (__m512i)_mm512_cvtne2ps_pbh(scaled, scaled);
    int64_t bytes[2] = {};
    memcpy(bytes, v.codes + uint64_t(d) / 2, whole ? 16 : 8);
    const __m256i twice = _mm256_mask_set1_epi64(_mm256_set1_epi64x(bytes[0]), 0b1100, bytes[1]);
    const __m512i halves = _mm512_setr_epi64(0, 0, 0x0004000400040004, 0x0004000400040004, 0, 0, 0x0004000400040004, 0x0004000400040004);
    // The lower 5 bits of an index count, and the fifth belongs to another code: the table is repeated.
    return _mm512_permutexvar_epi16(_mm512_srlv_epi16(_mm512_cvtepu8_epi16(twice), halves), levels);
}
#endif

}  // namespace
