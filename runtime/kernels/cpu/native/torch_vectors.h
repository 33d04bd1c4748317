// Operations with torch's bits: the same for a vector and for a number, and sums in torch's order.

#pragma once

#include "vectors.h"

namespace {

typedef float Eight __attribute__((vector_size(32)));
typedef float Half __attribute__((vector_size(WIDE * 2)));
typedef double Doubles __attribute__((vector_size(WIDE * 4)));
constexpr float MAGIC = 12582912.0f;  // 1.5 * 2^23: adding it rounds to the nearest integer, ties to even

// The same operations for a vector and for a number.
template <class V> inline V read(const float* from) {
    V v;
    memcpy(&v, from, sizeof v);
    return v;
}
template <class V> inline V spread_to(float x) { return V{} + x; }
template <> inline Wide spread_to<Wide>(float x) { return spread(x); }
#if defined(__AVX512F__)
inline bool any(WideInt lanes) { return _mm512_test_epi32_mask((__m512i)lanes, (__m512i)lanes); }
#elif defined(__AVX2__)
inline bool any(WideInt lanes) { return !_mm256_testz_si256((__m256i)lanes, (__m256i)lanes); }
#else
inline bool any(WideInt lanes) {
    int32_t bits = 0;
    for (int lane = 0; lane < WIDE; lane++) bits |= lanes[lane];
    return bits;
}
#endif

// Integers of 0 to 255, a byte each.
inline void put_bytes(uint8_t* to, Wide values) {
#if defined(__AVX512F__)
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm512_cvtepi32_epi8(_mm512_cvttps_epi32(values)));
#elif defined(__AVX2__)
    const __m256i words = _mm256_cvttps_epi32(values);
    const __m128i halves = _mm_packus_epi32(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
    _mm_storel_epi64(reinterpret_cast<__m128i*>(to), _mm_packus_epi16(halves, halves));
#else
    for (int lane = 0; lane < WIDE; lane++) to[lane] = uint8_t(values[lane]);
#endif
}

inline Wide from_bytes(const uint8_t* from) {
#if defined(__AVX512F__)
    return _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from))));
#elif defined(__AVX2__)
    return _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from))));
#else
    Wide v;
    for (int lane = 0; lane < WIDE; lane++) v[lane] = float(from[lane]);
    return v;
#endif
}

// The sum of term(i, V()) over n numbers, V holding those from i, in torch's order: vectors of 8 lanes in turn to four sums,
// which are summed after 16 additions, those again after 16, then the four sums, then lane by lane.
template <class Term> inline float sum_as_torch(int64_t n, Term term) {
    constexpr int COUNT = 32 / WIDE;
    const int64_t steps = n / 32;
    Wide levels[4][COUNT] = {};
    const auto step = [&](int64_t i) {
        for (int k = 0; k < COUNT; k++) levels[0][k] += term(i * 32 + k * WIDE, Wide());
    };
    int64_t i = 0;
    while (i + 16 <= steps) {
        for (int64_t j = 0; j < 16; j++, i++) step(i);
        for (int64_t j = 1; j < 4; j++) {
            for (int k = 0; k < COUNT; k++) levels[j][k] += levels[j - 1][k], levels[j - 1][k] = Wide{};
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
