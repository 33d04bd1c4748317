// Rows of bf16 as 16-bit integers, in words and in bytes, codes as bytes, and dot products of bytes: with AVX-512 VNNI, AVX-VNNI,
// AVX2 or NEON.

#pragma once

#include "products/packed_scales.h"

// Units of rows of activations, by segment: those of a row and segment have index row * `row` + segment * `segment`.
struct Units {
    float* unit;   // a power of two, for all segments of a span; NaN if an activation is not finite
    int32_t* sum;  // of the integers of the segment
    float* shift;  // that sum as a float: the factor of an offset
    int64_t row, segment;
    Units from(int64_t m) const { return {unit + m * row, sum + m * row, shift + m * row, row, segment}; }  // skips the first m rows
};

// Integers in bytes: [rows][high, low][stride], or [rows][stride] of one byte each.
struct Bytes {
    const int8_t* bytes;
    int64_t stride;
    Units units;
};

namespace {

inline float power_of_two(int exponent) {
    const uint32_t word = uint32_t(127 + exponent) << 23;
    float value;
    memcpy(&value, &word, 4);
    return value;
}

// How every path adds a span to a row: total + sum * (scale * unit), then, with offsets, offset * shift of each segment, each
// rounded once. The unit and the shifts are those of the row.
inline Floats scaled(Ints sum, Floats scale, Floats unit, Floats total) {
    return fused(__builtin_convertvector(sum, Floats), scale * unit, total);
}
inline Floats shifted(Floats offset, Floats shift, Floats total) { return fused(offset, shift, total); }

// Rounds activations [parts * SEGMENT] of a span to integers of a unit and stores them from index `at`. Values within 1/128 of
// the span's largest keep all their bits, or within 1/32 if integers have two bits less: the error of smaller ones is far below
// the rounding error of the largest in bf16. The largest integer is 32639, so that the high byte of 256 * high + low fits.
template <int SEGMENT> void span_integers(const uint16_t* x, const Cut& cut, int16_t* to, const Units& units, int64_t at) {
    uint16_t largest = 0;
    for (int64_t i = 0; i < cut.span; i++) largest = std::max<uint16_t>(largest, x[i] & 0x7fff);
    const int exponent = std::max((largest + 1) / 128 - 127, -100) + cut.less;
    const bool finite = largest < 0x7f80;  // otherwise every product is NaN, whatever the integers
    const float scale = power_of_two(14 - exponent), unit = finite ? power_of_two(exponent - 14) : from_bf16(0x7fc0);
    for (const uint16_t* end = x + cut.span; x < end; x += SEGMENT, to += SEGMENT, at += units.segment) {
        constexpr float MAGIC = 12582912.0f;  // adding it rounds to the nearest integer, ties to even, in the low bits
        uint32_t total = 0;
        for (int i = 0; i < SEGMENT; i++) {
            const float rounded = (finite ? from_bf16(x[i]) * scale : 0) + MAGIC;
            uint32_t word;
            memcpy(&word, &rounded, 4);
            to[i] = int16_t(word);
            total += word;
        }
        total -= uint32_t(SEGMENT) * 0x4b400000;  // the bits of MAGIC
        units.unit[at] = unit;
        units.sum[at] = int32_t(total);
        units.shift[at] = float(int32_t(total)) * unit;
    }
}

// Converts a row of activations [inputs] to row `row`, cut for the weight.
inline void make_integers(const uint16_t* x, int64_t inputs, const Cut& cut, int64_t row, int16_t* to, const Units& units) {
    const int64_t step = cut.span / cut.segment * units.segment;
    for (int64_t i = 0, at = row * units.row; i < inputs; i += cut.span, at += step) switch (cut.segment) {
            case 16: span_integers<16>(x + i, cut, to + i, units, at); break;
            case 32: span_integers<32>(x + i, cut, to + i, units, at); break;
            case 64: span_integers<64>(x + i, cut, to + i, units, at); break;
            default: span_integers<128>(x + i, cut, to + i, units, at);
        }
}

// Two bytes per integer, v = 256 * high + low, in the order of the fours: byte i of four q is input 4q + 2 * (i % 2) + i / 2.
// `count` is a multiple of 16.
inline void cut_bytes(const int16_t* v, int64_t count, int8_t* high, int8_t* low) {
    typedef int16_t Words16 __attribute__((vector_size(32)));
    typedef int8_t Bytes16 __attribute__((vector_size(16)));
    constexpr Words16 order = {0, 2, 1, 3, 4, 6, 5, 7, 8, 10, 9, 11, 12, 14, 13, 15};
    for (int64_t i = 0; i < count; i += 16) {
        Words16 all;
        memcpy(&all, v + i, sizeof all);
        all = __builtin_shuffle(all, order);
        const Bytes16 upper = __builtin_convertvector((all + 128) >> 8, Bytes16), lower = __builtin_convertvector(all, Bytes16);
        memcpy(high + i, &upper, sizeof upper);
        memcpy(low + i, &lower, sizeof lower);
    }
}

#if WIDTH

typedef uint16_t U __attribute__((vector_size(WIDTH), aligned(WIDTH)));
typedef int32_t I __attribute__((vector_size(WIDTH), aligned(WIDTH)));
constexpr int HALVES = 64 / WIDTH;  // of a row block
#if WIDTH == 16
constexpr bool SIGNED_DOTS = true;  // NEON multiplies signed by signed; elsewhere codes count from 0, and ZERO is subtracted from the sums
#else
constexpr bool SIGNED_DOTS = false;
#endif

// sum + codes * four, for four codes and four activations of each row.
template <int B> inline I dot(I sum, U codes, int32_t four) {
#if WIDTH == 16
    return (I)vdotq_s32((int32x4_t)sum, (int8x16_t)codes, (int8x16_t)vdupq_n_s32(four));
#elif WIDTH == 64
    return (I)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)codes, _mm512_set1_epi32(four));
#elif defined(__AVXVNNI__)
    return (I)_mm256_dpbusd_avx_epi32((__m256i)sum, (__m256i)codes, _mm256_set1_epi32(four));
#else
    const __m256i x = _mm256_set1_epi32(four), nibble = _mm256_set1_epi8(15);
    const auto add = [&](__m256i part, int weight) {
        sum += (I)_mm256_madd_epi16(_mm256_maddubs_epi16(part, x), _mm256_set1_epi16(int16_t(weight)));
    };
    // Large codes are split in two: a sum of two products must fit 16 bits.
    constexpr bool halves = LARGEST<B> > 127;
    if (halves) add((__m256i)(codes >> 4) & nibble, 16);
    add(halves ? (__m256i)codes & nibble : (__m256i)codes, 1);
    return sum;
#endif
}

// The codes of four q of a block in the bytes of each lane, for the rows of one half; signed if dot products are.
template <int B> inline __attribute__((always_inline)) U four_of(const uint8_t* block, int q, int half) {
    return four_numbers<B, U, SIGNED_DOTS ? ZERO<B> : 0>(block, q, half);
}
#endif

}  // namespace
