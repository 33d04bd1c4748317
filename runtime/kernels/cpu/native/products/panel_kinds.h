// The kinds of panels of unpacked codes: words, bytes if their dot products are faster, or fp32; and the step that multiplies
// them.

#pragma once

#include "products/packed_integer.h"

namespace {

// A panel is [steps][PANEL lanes of 4 bytes] of up to 128 inputs, one span or several: a pair of inputs as words, four as bytes,
// or one input as a float. Activations have WORDS times 4 bytes for a step. A register tile is up to HIGH rows times ACROSS
// vectors: of 32 vector registers 24 are sums, of 16 at most 12.
constexpr int ACROSS = 2, HIGH = VECTOR == 64 ? 12 : VECTOR == 32 ? 6 : 4;
constexpr int PANEL_BLOCKS = VECTOR == 64 ? 2 : 1, PANEL = PANEL_BLOCKS * ROWS;

// sum + a.x * b.x + a.y * b.y for the two words of each lane.
inline Ints dot_words(Ints sum, Ints a, Ints b) {
#if VECTOR == 64 && defined(__AVX512VNNI__)
    return (Ints)_mm512_dpwssd_epi32((__m512i)sum, (__m512i)a, (__m512i)b);
#elif VECTOR == 64
    return sum + (Ints)_mm512_madd_epi16((__m512i)a, (__m512i)b);
#elif VECTOR == 32 && defined(__AVXVNNI__)
    return (Ints)_mm256_dpwssd_avx_epi32((__m256i)sum, (__m256i)a, (__m256i)b);
#elif VECTOR == 32
    return sum + (Ints)_mm256_madd_epi16((__m256i)a, (__m256i)b);
#elif defined(__SSE2__)
    return sum + (Ints)_mm_madd_epi16((__m128i)a, (__m128i)b);
#else
    return sum + ((a << 16) >> 16) * ((b << 16) >> 16) + (a >> 16) * (b >> 16);
#endif
}

// 16-bit integers times signed codes. With `READ`, the instruction reads `x` itself: one instruction less than broadcasting it
// first, but a load for each vector instead of one. Doing so for every second row balances both.
struct WordPanel {
    typedef Ints Sum, Whole;
    static constexpr int PER_STEP = 2, WORDS = 1;  // inputs
    static constexpr int64_t INPUTS_HELD = SPAN;  // of a panel
    // With super-blocks, either codes are multiplied by integer scales in the panel (FOLDS), or sums of groups in the tile (LEVELED).
    static constexpr bool FOLDS = true, LEVELED = false;

    static Cut cut(const Weight& w) { return cut_of(w); }
    template <int B, bool FOLD> static void unpack_block(const uint8_t* block, int from, int to, const int32_t* level, int32_t* panel) {
        Words levels[PARTS];
        for (int part = 0; FOLD && part < PARTS; part++) {
            const Ints one = load_vector<Ints>(level + part * LANES);
            levels[part] = (Words)((one & 0xffff) | (one << 16));
        }
#pragma GCC unroll 16
        for (int r = from; r < to; r++, panel += PANEL)
#pragma GCC unroll 4
            for (int part = 0; part < PARTS; part++) {
                Words codes = pair_of<B>(block, r, part) - uint16_t(ZERO<B>);
                if (FOLD) codes *= levels[part];
                memcpy(panel + part * LANES, &codes, sizeof codes);
            }
    }
    static void arrange(int16_t*, int64_t) {}
    template <bool READ> static Sum step(Sum sum, Ints codes, const int32_t* x, int) {
#if VECTOR == 64 && defined(__AVX512VNNI__)
        if (READ) {
            asm("vpdpwssd %2%{1to16%}, %1, %0" : "+v"(sum) : "v"(codes), "m"(*x));
            return sum;
        }
#endif
        return dot_words(sum, codes, Ints{} + *x);
    }
    static Ints with(Ints, Ints sum, Ints) { return sum; }
    static Floats unit(const float* at) { return spread_lanes(*at); }
    static Floats end(Ints whole, Floats scale, Floats unit, Floats total) { return scaled(whole, scale, unit, total); }
};

#if WIDTH == 16
// Integers split in two bytes, times signed codes: two byte dot products replace four word multiplications.
struct BytePanel {
    struct Sum {
        I high, low;
    };
    typedef Ints Whole;
    static constexpr int PER_STEP = 4, WORDS = 2;
    static constexpr int64_t INPUTS_HELD = SPAN;
    static constexpr bool FOLDS = false, LEVELED = true;

    static Cut cut(const Weight& w) { return cut_of(w); }
    template <int B, bool> static void unpack_block(const uint8_t* block, int from, int to, const int32_t*, int32_t* panel) {
#pragma GCC unroll 8
        for (int q = from / 2; q < to / 2; q++, panel += PANEL)
#pragma GCC unroll 4
            for (int part = 0; part < PARTS; part++) {
                const U codes = four_of<B>(block, q, part);
                memcpy(panel + part * LANES, &codes, sizeof codes);
            }
    }
    // Reorders a row in place: of each four inputs the high bytes, then the low ones.
    static void arrange(int16_t* row, int64_t inputs) {
        for (int64_t i = 0; i < inputs; i += 16) {
            int8_t high[16], low[16];
            cut_bytes(row + i, 16, high, low);
            for (int q = 0; q < 4; q++) {
                memcpy(row + i + 4 * q, high + 4 * q, 4);
                memcpy(row + i + 4 * q + 2, low + 4 * q, 4);
            }
        }
    }
    template <bool READ> static Sum step(Sum sum, Ints codes, const int32_t* x, int rows) {
        return {dot<8>(sum.high, (U)codes, x[0]), dot<8>(sum.low, (U)codes, x[rows])};
    }
    static Ints with(Ints whole, Sum sum, Ints level) { return whole + (sum.high * 256 + sum.low) * level; }
    static Floats unit(const float* at) { return spread_lanes(*at); }
    static Floats end(Ints whole, Floats scale, Floats unit, Floats total) { return scaled(whole, scale, unit, total); }
};
typedef BytePanel IntegerPanel;
#else
typedef WordPanel IntegerPanel;
#endif

// fp32: the only unit is the shift, the sum of the activations of a segment. Each segment is scaled separately.
struct FloatPanel {
    typedef Floats Sum, Whole;
    static constexpr int PER_STEP = 1, WORDS = 1;
    static constexpr int64_t INPUTS_HELD = SPAN;
    static constexpr bool FOLDS = false, LEVELED = false;

    static Cut cut(const Weight& w) {
        const int64_t segment = cut_of(w).segment;
        return {segment, segment, 0};
    }
    template <int B, bool> static void unpack_block(const uint8_t* block, int from, int to, const int32_t*, int32_t* panel) {
#pragma GCC unroll 16
        for (int r = from; r < to; r++, panel += 2 * PANEL)
#pragma GCC unroll 4
            for (int part = 0; part < PARTS; part++) {
                const Ints codes = (Ints)pair_of<B>(block, r, part);
                const Floats even = __builtin_convertvector((codes & 0xffff) - ZERO<B>, Floats);
                const Floats odd = __builtin_convertvector((codes >> 16) - ZERO<B>, Floats);
                memcpy(panel + part * LANES, &even, sizeof even);
                memcpy(panel + PANEL + part * LANES, &odd, sizeof odd);
            }
    }
    template <bool READ> static Sum step(Sum sum, Ints codes, const int32_t* x, int) {
        float value;
        memcpy(&value, x, 4);
#if VECTOR == 64
        if (READ) {
            asm("vfmadd231ps %2%{1to16%}, %1, %0" : "+v"(sum) : "v"(codes), "m"(value));
            return sum;
        }
#endif
        return fused((Floats)codes, spread_lanes(value), sum);
    }
    static Floats with(Floats, Floats sum, Ints) { return sum; }
    static Floats unit(const float*) { return Floats{}; }
    static Floats end(Floats whole, Floats scale, Floats, Floats total) { return fused(whole, scale, total); }
};

}  // namespace
