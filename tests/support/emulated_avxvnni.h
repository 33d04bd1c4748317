// AVX-VNNI's dot products in plain code, for a processor that has AVX2 alone: included before everything else (`-include`).
// Follows Intel's Software Developer's Manual (VPDPBUSD, VPDPWSSD).

#pragma once

#include <immintrin.h>
#include <stdint.h>
#include <string.h>

#define __AVXVNNI__ 1

namespace emulated_avxvnni {

// Adds the products of numbers of types A and B in a lane of 32 bits to the lane of `sum`.
template <class A, class B> inline __m256i dot(__m256i sum, __m256i a, __m256i b) {
    constexpr int EACH = 4 / sizeof(A);
    int32_t totals[8];
    A x[8 * EACH];
    B y[8 * EACH];
    memcpy(totals, &sum, sizeof sum);
    memcpy(x, &a, sizeof a);
    memcpy(y, &b, sizeof b);
    for (int i = 0; i < 8 * EACH; i++) totals[i / EACH] += x[i] * y[i];
    memcpy(&sum, totals, sizeof sum);
    return sum;
}

}  // namespace emulated_avxvnni

#define _mm256_dpbusd_avx_epi32 emulated_avxvnni::dot<uint8_t, int8_t>
#define _mm256_dpwssd_avx_epi32 emulated_avxvnni::dot<int16_t, int16_t>
