// Rows of bf16 as integers of one byte, and the sums of their products with codes.
//
// Each segment of 32 inputs (16 in groups of 16) has a unit of its own, its largest magnitude / 127. A row and an output are summed
// the same way everywhere: the products of a segment exactly, as integers; the sums of a span times their units, in order, with one
// rounding each; the span times its scale. So their bits depend on neither the instructions nor other rows.

#pragma once

#include "products/packed_integer.h"

namespace {

// Rounds the activations of a segment, each as `mask` leaves it, to bytes in the order of `cut_bytes` or to words in their own
// order; returns their sum.
template <int SEGMENT, class T> inline int32_t round_segment(const uint16_t* x, uint16_t mask, float scale, T* to) {
    typedef int16_t Sixteen __attribute__((vector_size(32)));
    typedef int8_t Bytes16 __attribute__((vector_size(16)));
    constexpr Sixteen order = {0, 2, 1, 3, 4, 6, 5, 7, 8, 10, 9, 11, 12, 14, 13, 15};
    constexpr float MAGIC = 12582912.0f;  // as in `span_integers`
    int16_t numbers[SEGMENT];
    int32_t total = 0;
    for (int i = 0; i < SEGMENT; i++) {
        // Fused explicitly: otherwise the compiler's options decide whether the product is rounded first.
        const float rounded = __builtin_fmaf(from_bf16(x[i] & mask), scale, MAGIC);
        int32_t word;
        memcpy(&word, &rounded, 4);
        numbers[i] = int16_t(word);
        total += word - 0x4b400000;  // the bits of MAGIC
    }
    if constexpr (sizeof(T) == sizeof *numbers) {
        memcpy(to, numbers, sizeof numbers);
        return total;
    }
    for (int i = 0; i < SEGMENT; i += 16) {
        Sixteen all;
        memcpy(&all, numbers + i, sizeof all);
        const Bytes16 bytes = __builtin_convertvector(__builtin_shuffle(all, order), Bytes16);
        memcpy(to + i, &bytes, sizeof bytes);
    }
    return total;
}

// Converts up to BATCH segments of activations; their units are computed together. `at`: index of the first unit; sums are stored
// times `factor`.
constexpr int64_t BATCH = 16;
template <int SEGMENT, class T>
void byte_segments(const uint16_t* x, int64_t count, int32_t factor, T* to, const Units& units, int64_t at) {
    uint16_t largest[BATCH] = {}, mask[BATCH];
    float scale[BATCH], unit[BATCH];
    for (int64_t s = 0; s < count; s++) {
        uint16_t most = 0;
        for (int i = 0; i < SEGMENT; i++) most = std::max<uint16_t>(most, x[s * SEGMENT + i] & 0x7fff);
        largest[s] = most;
    }
    for (int64_t s = 0; s < BATCH; s++) {
        const bool finite = largest[s] < 0x7f80;  // otherwise every product is NaN, whatever the integers
        const float extent = std::max(finite ? from_bf16(largest[s]) : 0, 0x1p-100f);
        mask[s] = finite ? 0xffff : 0;
        scale[s] = 127 / extent;
        unit[s] = finite ? extent * (1 / 127.0f) : from_bf16(0x7fc0);
    }
    for (int64_t s = 0; s < count; s++, at += units.segment) {
        const int32_t total = round_segment<SEGMENT, T>(x + s * SEGMENT, mask[s], scale[s], to + s * SEGMENT);
        units.unit[at] = unit[s];
        units.sum[at] = factor * total;
        units.shift[at] = float(total);
    }
}

// Converts a row of activations [inputs] to integers of one byte, stored as T. The shift of a span, the factor of an offset, is that
// of its first segment.
template <class T> void make_bytes(const uint16_t* x, int64_t inputs, const Cut& cut, int32_t factor, T* to, const Units& units) {
    for (int64_t i = 0; i < inputs; i += BATCH * cut.segment) {
        const int64_t count = std::min(BATCH, (inputs - i) / cut.segment), at = i / cut.segment * units.segment;
        (cut.segment == 16 ? byte_segments<16, T> : byte_segments<32, T>)(x + i, count, factor, to + i, units, at);
    }
    const int64_t runs = cut.span / cut.segment;
    for (int64_t i = 0, at = 0; i < inputs; i += cut.span) {
        const int64_t first = at;
        float shift = 0;
        for (int64_t run = 0; run < runs; run++, at += units.segment) shift = __builtin_fmaf(units.shift[at], units.unit[at], shift);
        units.shift[first] = shift;
    }
}

// ---- Sums of a segment ----

// Instructions that add four products to a lane: of numbers from 0 and signed bytes, or (NEON) of signed codes and signed bytes.
#if (VECTOR == 64 && defined(__AVX512VNNI__)) || (VECTOR == 32 && defined(__AVXVNNI__))
#define BYTE_DOTS 1
#else
#define BYTE_DOTS 0
#endif
#if defined(__ARM_FEATURE_DOTPROD)
#define SIGNED_BYTE_DOTS 1
#else
#define SIGNED_BYTE_DOTS 0
#endif
#define PAIR_SUMS (!BYTE_DOTS && !SIGNED_BYTE_DOTS && VECTOR > 16)  // instructions that add two products, to 16 bits

// How many fours of numbers below or equal to LARGEST, times bytes, fit a sum of 16 bits: each lane has two products of a four. 0:
// none does; those of signed codes do.
template <int B> constexpr int FITTING = !PAIR_SUMS || LARGEST<B> < 16 ? FOURS : LARGEST<B> < 32 ? 4 : LARGEST<B> < 64 ? 2 : 0;
template <int B> constexpr bool SIGNED_CODES = SIGNED_BYTE_DOTS || FITTING<B> == 0;
template <int B> constexpr int BYTE_ZERO = SIGNED_CODES<B> ? 0 : ZERO<B>;

// The sum of the products of COUNT fours, in lanes of 32 bits. It starts with what compensates for numbers that count from 0.
template <int FIT, int COUNT> struct ByteSum {
    Ints sum;
#if PAIR_SUMS
    Words part;
    static constexpr bool ONE_PART = FIT >= COUNT;  // the sum takes no register before the end
#else
    static constexpr bool ONE_PART = false;
#endif
    // Both take the same `start`.
    inline __attribute__((always_inline)) void begin(Ints start) {
        if (!ONE_PART) sum = start;
    }
    inline __attribute__((always_inline)) Ints end(Ints start) const {
#if PAIR_SUMS
        if (ONE_PART) return widened(part) + start;
#endif
        (void)start;
        return sum;
    }

    // Adds four `q`. IN_ORDER: GCC would compute all products of a segment before it adds any, and spill most.
    template <bool IN_ORDER> inline __attribute__((always_inline)) void add(int q, Words codes, Ints x) {
#if BYTE_DOTS && VECTOR == 64
        sum = (Ints)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)codes, (__m512i)x);
#elif BYTE_DOTS
        sum = (Ints)_mm256_dpbusd_avx_epi32((__m256i)sum, (__m256i)codes, (__m256i)x);
#elif SIGNED_BYTE_DOTS
        sum = (Ints)vdotq_s32((int32x4_t)sum, (int8x16_t)codes, (int8x16_t)x);
#elif PAIR_SUMS
        if constexpr (FIT == 0) {
            add_widened<IN_ORDER>(signed_pairs(codes, x));
        } else {
            part = q % FIT ? part + pairs(codes, x) : pairs(codes, x);
            asm("" : "+v"(part));  // in order in any case
            if (!ONE_PART && (q % FIT == FIT - 1 || q == COUNT - 1)) add_widened<IN_ORDER>(part);
        }
#else
        uint8_t a[VECTOR];
        int8_t b[VECTOR];
        memcpy(a, &codes, sizeof a);
        memcpy(b, &x, sizeof b);
        for (int i = 0; i < VECTOR; i++) sum[i / 4] += a[i] * b[i];
#endif
    }

private:
#if PAIR_SUMS
    template <bool IN_ORDER> inline __attribute__((always_inline)) void add_widened(Words words) {
        sum += widened(words);
        if (IN_ORDER) asm("" : "+v"(sum));
    }
    static Words pairs(Words codes, Ints x) {
#if VECTOR == 64
        return (Words)_mm512_maddubs_epi16((__m512i)codes, (__m512i)x);
#else
        return (Words)_mm256_maddubs_epi16((__m256i)codes, (__m256i)x);
#endif
    }
    // Of signed codes: their magnitudes times x with their signs, at most 2 x 128 x 127.
    static Words signed_pairs(Words codes, Ints x) {
#if VECTOR == 64
        const __m512i c = (__m512i)codes, zero = _mm512_setzero_si512();
        return pairs((Words)_mm512_abs_epi8(c), (Ints)_mm512_mask_sub_epi8((__m512i)x, _mm512_movepi8_mask(c), zero, (__m512i)x));
#else
        return pairs((Words)_mm256_abs_epi8((__m256i)codes), (Ints)_mm256_sign_epi8((__m256i)x, (__m256i)codes));
#endif
    }
    static Ints widened(Words words) {
#if VECTOR == 64
        return (Ints)_mm512_madd_epi16((__m512i)words, _mm512_set1_epi16(1));
#else
        return (Ints)_mm256_madd_epi16((__m256i)words, _mm256_set1_epi16(1));
#endif
    }
#endif
};

// The codes of four q of a block for the rows of vector `part`: numbers from 0, or signed.
template <int B> inline __attribute__((always_inline)) Words byte_codes(const uint8_t* block, int q, int part) {
    return four_numbers<B, Words, SIGNED_CODES<B> ? ZERO<B> : 0>(block, q, part);
}

// How the sum of a segment is added to its span, and a span to a row.
inline Floats add_byte_segment(Ints sum, Floats unit, Floats span) { return fused(__builtin_convertvector(sum, Floats), unit, span); }
inline Floats add_byte_span(Floats span, Floats scale, Floats total) { return fused(span, scale, total); }

}  // namespace
