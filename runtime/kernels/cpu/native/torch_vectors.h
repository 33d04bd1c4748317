// Vectors of the machine's own width for what must have torch's bits: one operation for a vector and for a number, and sums in
// torch's order. Knows no weights.

#pragma once

#include "products/packed_layout.h"

namespace {

typedef float Eight __attribute__((vector_size(32)));
typedef float Half __attribute__((vector_size(VECTOR / 2)));
typedef double Doubles __attribute__((vector_size(VECTOR)));
constexpr float MAGIC = 12582912.0f;  // 1.5 * 2^23: adding it rounds to the nearest integer, ties to the even one

// The same for a vector and for a number.
template <class V> inline V read(const float* from) {
    V v;
    memcpy(&v, from, sizeof v);
    return v;
}
template <class V> inline V spread_to(float x) { return V{} + x; }
template <> inline Floats spread_to<Floats>(float x) { return spread_lanes(x); }
template <class V> inline V larger(V a, V b) { return a > b ? a : b; }
template <class V> inline V smaller(V a, V b) { return a < b ? a : b; }
#if VECTOR == 64
template <> inline Floats larger(Floats a, Floats b) { return (Floats)_mm512_max_ps((__m512)a, (__m512)b); }
template <> inline Floats smaller(Floats a, Floats b) { return (Floats)_mm512_min_ps((__m512)a, (__m512)b); }
inline bool any(Ints lanes) { return _mm512_test_epi32_mask((__m512i)lanes, (__m512i)lanes); }
#elif VECTOR == 32
template <> inline Floats larger(Floats a, Floats b) { return (Floats)_mm256_max_ps((__m256)a, (__m256)b); }
template <> inline Floats smaller(Floats a, Floats b) { return (Floats)_mm256_min_ps((__m256)a, (__m256)b); }
inline bool any(Ints lanes) { return !_mm256_testz_si256((__m256i)lanes, (__m256i)lanes); }
#else
inline bool any(Ints lanes) { return lanes[0] | lanes[1] | lanes[2] | lanes[3]; }
#endif

inline float greatest(Floats v) {
#if VECTOR == 64
    return _mm512_reduce_max_ps((__m512)v);
#elif VECTOR == 32
    const __m128 four = _mm_max_ps(_mm256_castps256_ps128((__m256)v), _mm256_extractf128_ps((__m256)v, 1));
    const __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)));
#else
    return larger(larger(v[0], v[1]), larger(v[2], v[3]));
#endif
}

// Integers of 0 to 255, a byte each.
inline void put_bytes(uint8_t* to, Floats values) {
#if VECTOR == 64
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm512_cvtepi32_epi8(_mm512_cvttps_epi32((__m512)values)));
#elif VECTOR == 32
    const __m256i words = _mm256_cvttps_epi32((__m256)values);
    const __m128i halves = _mm_packus_epi32(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
    _mm_storel_epi64(reinterpret_cast<__m128i*>(to), _mm_packus_epi16(halves, halves));
#else
    for (int lane = 0; lane < LANES; lane++) to[lane] = uint8_t(values[lane]);
#endif
}

// The sum of term(i, V()) over n numbers, V holding those from i on, in torch's order: vectors of 8 lanes in turn to four
// sums, those summed 16 at a time and again 16 of these, then the four, then lane after lane.
template <class Term> inline float sum_as_torch(int64_t n, Term term) {
    constexpr int COUNT = 32 / LANES;
    const int64_t steps = n / 32;
    Floats levels[4][COUNT] = {};
    const auto step = [&](int64_t i) {
        for (int k = 0; k < COUNT; k++) levels[0][k] += term(i * 32 + k * LANES, Floats());
    };
    int64_t i = 0;
    while (i + 16 <= steps) {
        for (int64_t j = 0; j < 16; j++, i++) step(i);
        for (int64_t j = 1; j < 4; j++) {
            for (int k = 0; k < COUNT; k++) levels[j][k] += levels[j - 1][k], levels[j - 1][k] = Floats{};
            if (i & (int64_t(15) << (4 * j))) break;
        }
    }
    for (; i < steps; i++) step(i);
    for (int j = 1; j < 4; j++)
        for (int k = 0; k < COUNT; k++) levels[0][k] += levels[j][k];
    Eight four[4];
    memcpy(four, levels[0], sizeof four);
    int64_t done = steps * 32;
    for (; done + 8 <= n; done += 8) four[0] += term(done, Eight());
    const Eight all = ((four[0] + four[1]) + four[2]) + four[3];
    float total = 0;
    for (; done < n; done++) total += term(done, float());
    for (int lane = 0; lane < 8; lane++) total += all[lane];
    return total;
}

}  // namespace
