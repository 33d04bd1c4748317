// Rows of bf16 as 16-bit integers, and few rows of them times a weight: exact sums of bytes with AVX-512 VNNI, AVX-VNNI or AVX2.

#pragma once

#include "packed_layout.h"

namespace {

inline float power_of_two(int exponent) {
    const uint32_t word = uint32_t(127 + exponent) << 23;
    float value;
    memcpy(&value, &word, 4);
    return value;
}

// What rows of activations are in units of, segment by segment: [rows][segments].
struct Units {
    float* unit;   // a power of two; NaN where an activation is not finite
    int32_t* sum;  // of the integers of the segment
    int64_t segments;
};

// How every path adds a segment to a row: total + sum * (scale * unit), then, where there are offsets, offset * (sum of the row's
// integers * unit), each rounded once. `at` is the row's segment.
inline Floats scaled(Ints sum, Floats scale, const Units& units, int64_t at, Floats total) {
    return fused(__builtin_convertvector(sum, Floats), scale * units.unit[at], total);
}
inline Floats shifted(Floats offset, const Units& units, int64_t at, Floats total) {
    return fused(offset, Floats{} + float(units.sum[at]) * units.unit[at], total);
}

// Integers [segment] of activations [segment], rounded to units, and their sum. What is within 1/128 of the segment's largest
// keeps all its bits. The largest becomes at most 32639, so that the high byte of 256 * high + low fits.
inline void make_integers(const uint16_t* x, int64_t segment, int16_t* to, float* unit, int32_t* sum) {
    uint16_t largest = 0;
    for (int64_t i = 0; i < segment; i++) largest = std::max<uint16_t>(largest, x[i] & 0x7fff);
    const int exponent = std::max((largest + 1) / 128 - 127, -100);
    const float scale = power_of_two(14 - exponent);
    *unit = largest >= 0x7f80 ? from_bf16(0x7fc0) : power_of_two(exponent - 14);
    if (largest >= 0x7f80) {  // every product is NaN: the integers do not matter
        memset(to, 0, size_t(segment) * sizeof *to);
        *sum = 0;
        return;
    }
    constexpr float MAGIC = 12582912.0f;  // added and taken away, it rounds to the nearest integer, ties to even
    int32_t total = 0;
    for (int64_t i = 0; i < segment; i++) {
        const int32_t v = int32_t((from_bf16(x[i]) * scale + MAGIC) - MAGIC);
        to[i] = int16_t(v);
        total += v;
    }
    *sum = total;
}

// Two bytes to an integer, v = 256 * high + low, in the order of the fours: byte i of four q is input 4q + 2 * (i % 2) + i / 2.
inline void cut_bytes(const int16_t* v, int64_t count, int8_t* high, int8_t* low) {
    for (int64_t i = 0; i < count; i += 4)
        for (int64_t j = 0; j < 4; j++) {
            const int16_t value = v[i + 2 * (j % 2) + j / 2];
            high[i + j] = int8_t((value + 128) >> 8);
            low[i + j] = int8_t(value);
        }
}

#if WIDTH

typedef uint16_t U __attribute__((vector_size(WIDTH), aligned(WIDTH)));
typedef int32_t I __attribute__((vector_size(WIDTH), aligned(WIDTH)));
constexpr int HALVES = 64 / WIDTH;

// sum + codes * four, for four codes and four activations of each row.
template <int B> inline I dot(I sum, U codes, int32_t four) {
#if WIDTH == 64
    return (I)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)codes, _mm512_set1_epi32(four));
#elif defined(__AVXVNNI__)
    return (I)_mm256_dpbusd_avx_epi32((__m256i)sum, (__m256i)codes, _mm256_set1_epi32(four));
#else
    const __m256i x = _mm256_set1_epi32(four), nibble = _mm256_set1_epi8(15);
    const auto add = [&](__m256i part, int weight) {
        sum += (I)_mm256_madd_epi16(_mm256_maddubs_epi16(part, x), _mm256_set1_epi16(int16_t(weight)));
    };
    // Wide codes in halves: a sum of two products must fit 16 bits.
    if (B > 6) add((__m256i)(codes >> 4) & nibble, 16);
    add(B > 6 ? (__m256i)codes & nibble : (__m256i)codes, 1);
    return sum;
#endif
}

// Codes of four q of a block in the bytes of a lane, of the rows of one half.
template <int B> inline __attribute__((always_inline)) U four_of(const uint8_t* block, int q, int half) {
    U code = {};
    each_field<B>([&](auto bits, int first, int place) {
        constexpr int P = bits.value;
        const U v = load_vector<U>(block + 64 * (first + q * P / 8) + WIDTH * half);
        const int shift = P * (q % (8 / P));
        const U moved = shift > place ? v >> uint16_t(shift - place) : shift < place ? v << uint16_t(place - shift) : v;
        code |= P == 8 ? moved : moved & uint16_t((field_mask<P> << place) * 0x101);
    });
    return code;
}

// Integers in bytes: [rows][high, low][stride].
struct Bytes {
    const int8_t* bytes;
    int64_t stride;  // inputs and a cache line: rows a power of two apart would share a few lines of the cache
    Units units;
};

// y[m][0..15] of one row block for M rows of integers. Segments are whole blocks.
template <int B, int M> void rows_bytes(const Weight& w, int64_t row_block, const Bytes& x, float (*y)[ROWS]) {
    constexpr int CHAINS = M == 1 ? 2 : 1;  // independent sums hide the latency of the dot product
    constexpr int ZERO = 1 << (B - 1);
    const int64_t segment = segment_of(w), steps = segment / INPUTS, groups = w.inputs / w.group, segments = x.units.segments;
    const uint8_t* block = w.codes + row_block * (w.inputs / INPUTS) * B * 64;
    Floats total[PARTS][M] = {};
    for (int64_t s = 0; s < segments; s++, block += steps * B * 64) {
        alignas(64) float scales[ROWS];
        const int64_t at_scale = (row_block * groups + s * segment / w.group) * ROWS;
        load_scales(w, at_scale, scales);
        alignas(64) int32_t sums[M][ROWS];
#pragma GCC unroll 2
        for (int half = 0; half < HALVES; half++) {
            I high[M][CHAINS] = {}, low[M][CHAINS] = {};
            for (int64_t b = 0; b < steps; b++) {
                const int8_t* at = x.bytes + s * segment + b * INPUTS;
                if (half == 0) prefetch_twice<B>(block + b * B * 64);
#pragma GCC unroll 8
                for (int q = 0; q < FOURS; q++) {
                    const U codes = four_of<B>(block + b * B * 64, q, half);
#pragma GCC unroll 8
                    for (int m = 0; m < M; m++) {
                        int32_t two[2];
                        memcpy(&two[0], at + m * 2 * x.stride + 4 * q, 4);
                        memcpy(&two[1], at + (m * 2 + 1) * x.stride + 4 * q, 4);
                        high[m][q % CHAINS] = dot<B>(high[m][q % CHAINS], codes, two[0]);
                        low[m][q % CHAINS] = dot<B>(low[m][q % CHAINS], codes, two[1]);
                    }
                }
            }
#pragma GCC unroll 8
            for (int m = 0; m < M; m++) {
                if (CHAINS == 2) high[m][0] += high[m][1 % CHAINS], low[m][0] += low[m][1 % CHAINS];
                const I sum = high[m][0] * 256 + low[m][0] - ZERO * x.units.sum[m * segments + s];
                memcpy(sums[m] + half * (WIDTH / 4), &sum, WIDTH);
            }
        }
#pragma GCC unroll 8
        for (int m = 0; m < M; m++)
#pragma GCC unroll 4
            for (int part = 0; part < PARTS; part++)
                total[part][m] = scaled(load_vector<Ints>(sums[m] + part * LANES), load_vector<Floats>(scales + part * LANES),
                                        x.units, m * segments + s, total[part][m]);
        if (w.offsets)
            for (int m = 0; m < M; m++)
                for (int part = 0; part < PARTS; part++)
                    total[part][m] = shifted(load_vector<Floats>(w.offsets + at_scale + part * LANES), x.units,
                                             m * segments + s, total[part][m]);
    }
    for (int m = 0; m < M; m++)
        for (int part = 0; part < PARTS; part++) memcpy(y[m] + part * LANES, &total[part][m], VECTOR);
}
#endif

}  // namespace
