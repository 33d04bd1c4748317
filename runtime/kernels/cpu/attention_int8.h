// Scores and sums over int8 codes with AVX-512 VNNI: what is multiplied by the codes becomes integers of 16 bits, as two bytes,
// in units of its row's largest; sums are exact. `score` and `mix` mean what they mean in attention.h.

#pragma once

#include "attention_float.h"

namespace {

#if WIDTH == 64

constexpr int64_t BLOCK = 64;  // bytes of a vector: dimensions, and positions between two visits of the sums

inline int64_t whole_blocks(int64_t dim) { return (dim + BLOCK - 1) / BLOCK * BLOCK; }

// v = 256 * high + low for one row of `count` values, `room` of which (a multiple of 64) are written.
struct Row {
    int8_t *high, *low;
    float unit;
    int32_t high_sum, low_sum;
};
inline Row make_row(const float* x, int64_t count, int64_t room, int8_t* to) {
    float largest = 0, check = 0;
    for (int64_t i = 0; i < count; i++) {
        largest = std::max(largest, __builtin_fabsf(x[i]));
        check += x[i] * 0.0f;  // NaN where anything is not finite
    }
    Row row{to, to + room, largest / 32639.0f + check, 0, 0};
    const __m512 factor = _mm512_set1_ps(largest > 1e-30f && check == 0 ? 32639.0f / largest : 0.0f);
    __m512i high_sum = _mm512_setzero_si512(), low_sum = high_sum;
    for (int64_t i = 0; i < room; i += 16) {
        const __mmask16 valid = count - i >= 16 ? 0xffff : count > i ? __mmask16((1 << (count - i)) - 1) : 0;
        const __m512i v = _mm512_maskz_cvtps_epi32(valid, _mm512_mul_ps(_mm512_maskz_loadu_ps(valid, x + i), factor));
        const __m512i high = _mm512_srai_epi32(_mm512_add_epi32(v, _mm512_set1_epi32(128)), 8);
        high_sum = _mm512_add_epi32(high_sum, high);
        low_sum = _mm512_add_epi32(low_sum, _mm512_sub_epi32(v, _mm512_slli_epi32(high, 8)));
        _mm_storeu_si128(reinterpret_cast<__m128i*>(row.high + i), _mm512_cvtepi32_epi8(high));
        _mm_storeu_si128(reinterpret_cast<__m128i*>(row.low + i), _mm512_cvtepi32_epi8(v));
    }
    row.high_sum = 128 * _mm512_reduce_add_epi32(high_sum);
    row.low_sum = 128 * _mm512_reduce_add_epi32(low_sum);
    return row;
}

// 64 codes (or as many as there are) with 128 added, as the unsigned side of a dot product wants them.
inline __m512i load_codes(const int8_t* at, __mmask64 valid) {
    return _mm512_xor_si512(_mm512_maskz_loadu_epi8(valid, at), _mm512_set1_epi8(-128));
}
inline __mmask64 mask_of(int64_t dim, int64_t d) { return dim - d >= BLOCK ? ~__mmask64(0) : (__mmask64(1) << (dim - d)) - 1; }
inline __m512i four_bytes(const int8_t* at) {
    int32_t word;
    memcpy(&word, at, 4);
    return _mm512_set1_epi32(word);
}
inline __m512 value_of(__m512i high, __m512i low, const Row& row) {
    const __m512 upper = _mm512_cvtepi32_ps(_mm512_sub_epi32(high, _mm512_set1_epi32(row.high_sum)));
    const __m512 lower = _mm512_cvtepi32_ps(_mm512_sub_epi32(low, _mm512_set1_epi32(row.low_sum)));
    return _mm512_mul_ps(_mm512_fmadd_ps(upper, _mm512_set1_ps(256), lower), _mm512_set1_ps(row.unit));
}

// 16 vectors of 16 words, rows and columns exchanged.
inline void transpose(__m512i (&v)[16]) {
    __m512i t[16];
#pragma GCC unroll 8
    for (int i = 0; i < 16; i += 2) {
        t[i] = _mm512_unpacklo_epi32(v[i], v[i + 1]);
        t[i + 1] = _mm512_unpackhi_epi32(v[i], v[i + 1]);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 16; i += 4) {
        v[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
        v[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
        v[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
        v[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        t[i] = _mm512_shuffle_i32x4(v[i], v[i + 4], 0x88);
        t[i + 4] = _mm512_shuffle_i32x4(v[i], v[i + 4], 0xdd);
        t[i + 8] = _mm512_shuffle_i32x4(v[i + 8], v[i + 12], 0x88);
        t[i + 12] = _mm512_shuffle_i32x4(v[i + 8], v[i + 12], 0xdd);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        v[i] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0x88);
        v[i + 8] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0xdd);
        v[i + 4] = _mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0x88);
        v[i + 12] = _mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0xdd);
    }
}

template <int M> void score_rows(const Row* rows, const __m512i* keys, int64_t words, __m512 scale, float* scores) {
    __m512i high[M], low[M];
    for (int m = 0; m < M; m++) high[m] = low[m] = _mm512_setzero_si512();
    for (int64_t w = 0; w < words; w++) {
        const __m512i key = _mm512_load_si512(keys + w);
#pragma GCC unroll 4
        for (int m = 0; m < M; m++) {
            high[m] = _mm512_dpbusd_epi32(high[m], key, four_bytes(rows[m].high + 4 * w));
            low[m] = _mm512_dpbusd_epi32(low[m], key, four_bytes(rows[m].low + 4 * w));
        }
    }
    for (int m = 0; m < M; m++) _mm512_storeu_ps(scores + m * CHUNK, _mm512_mul_ps(value_of(high[m], low[m], rows[m]), scale));
}

template <>
inline void score(const Attention& a, const float* query, int64_t rows, const int8_t* keys, const float* scales, int64_t count,
                  float* room, float* scores) {
    const int64_t dim = a.head_dim, padded = whole_blocks(dim), words = padded / 4;
    __m512i* block = reinterpret_cast<__m512i*>(room);  // [words][16 keys]
    Row* made = reinterpret_cast<Row*>(room + 16 * words);
    int8_t* bytes = reinterpret_cast<int8_t*>(made + rows);
    for (int64_t r = 0; r < rows; r++) made[r] = make_row(query + r * dim, dim, padded, bytes + r * 2 * padded);
    for (int64_t p = 0; p < count; p += LANE) {
        const int64_t some = std::min(LANE, count - p);
        const __mmask16 valid = __mmask16((1u << some) - 1);
        for (int64_t d = 0; d < dim; d += BLOCK) {
            __m512i v[16];
            const __mmask64 columns = mask_of(dim, d);
#pragma GCC unroll 16
            for (int i = 0; i < 16; i++) v[i] = load_codes(keys + (p + i) * dim + d, i < some ? columns : 0);
            __builtin_prefetch(keys + p * dim + d + AHEAD);
            transpose(v);
#pragma GCC unroll 16
            for (int i = 0; i < 16; i++) _mm512_store_si512(block + d / 4 + i, v[i]);
        }
        const __m512 scale = _mm512_maskz_loadu_ps(valid, scales + p);
        int64_t r = 0;
        for (; r + 4 <= rows; r += 4) score_rows<4>(made + r, block, words, scale, scores + r * CHUNK + p);
        for (; r < rows; r++) score_rows<1>(made + r, block, words, scale, scores + r * CHUNK + p);
    }
}

// Sums [rows][high, low][4 vectors] over 64 positions; lane 4i+j of vector n is dimension 16i+4n+j.
template <int M> void mix_block(const Row* rows, int64_t p, const __m512i* values, __m512i* sums) {
    __m512i high[M][4], low[M][4];
    for (int m = 0; m < M; m++)
        for (int n = 0; n < 4; n++) high[m][n] = sums[8 * m + n], low[m][n] = sums[8 * m + 4 + n];
    for (int64_t four = 0; four < BLOCK / 4; four++) {
#pragma GCC unroll 2
        for (int m = 0; m < M; m++) {
            const __m512i upper = four_bytes(rows[m].high + p + 4 * four), lower = four_bytes(rows[m].low + p + 4 * four);
#pragma GCC unroll 4
            for (int n = 0; n < 4; n++) {
                const __m512i value = _mm512_load_si512(values + 4 * four + n);
                high[m][n] = _mm512_dpbusd_epi32(high[m][n], value, upper);
                low[m][n] = _mm512_dpbusd_epi32(low[m][n], value, lower);
            }
        }
    }
    for (int m = 0; m < M; m++)
        for (int n = 0; n < 4; n++) sums[8 * m + n] = high[m][n], sums[8 * m + 4 + n] = low[m][n];
}

template <>
inline void mix(const float* weights, int64_t rows, const int8_t* values, int64_t dim, int64_t count, float* room, float* out) {
    __m512i* block = reinterpret_cast<__m512i*>(room);  // [16 fours][4 vectors]
    __m512i* sums = block + BLOCK;
    Row* made = reinterpret_cast<Row*>(sums + 8 * rows);
    int8_t* bytes = reinterpret_cast<int8_t*>(made + rows);
    for (int64_t r = 0; r < rows; r++) made[r] = make_row(weights + r * CHUNK, count, CHUNK, bytes + r * 2 * CHUNK);
    for (int64_t d = 0; d < dim; d += BLOCK) {
        const __mmask64 columns = mask_of(dim, d);
        memset(sums, 0, size_t(rows) * 8 * 64);
        for (int64_t p = 0; p < count; p += BLOCK) {
#pragma GCC unroll 4
            for (int64_t four = 0; four < BLOCK / 4; four++) {
                __m512i v[4];
#pragma GCC unroll 4
                for (int i = 0; i < 4; i++) {
                    const int64_t at = p + 4 * four + i;
                    v[i] = load_codes(values + at * dim + d, at < count ? columns : 0);
                }
                __builtin_prefetch(values + (p + 4 * four) * dim + d + AHEAD);
                const __m512i first = _mm512_unpacklo_epi8(v[0], v[1]), second = _mm512_unpackhi_epi8(v[0], v[1]);
                const __m512i third = _mm512_unpacklo_epi8(v[2], v[3]), fourth = _mm512_unpackhi_epi8(v[2], v[3]);
                _mm512_store_si512(block + 4 * four, _mm512_unpacklo_epi16(first, third));
                _mm512_store_si512(block + 4 * four + 1, _mm512_unpackhi_epi16(first, third));
                _mm512_store_si512(block + 4 * four + 2, _mm512_unpacklo_epi16(second, fourth));
                _mm512_store_si512(block + 4 * four + 3, _mm512_unpackhi_epi16(second, fourth));
            }
            int64_t r = 0;
            for (; r + 2 <= rows; r += 2) mix_block<2>(made + r, p, block, sums + 8 * r);
            for (; r < rows; r++) mix_block<1>(made + r, p, block, sums + 8 * r);
        }
        for (int64_t r = 0; r < rows; r++)
            for (int64_t n = 0; n < 4; n++) {
                alignas(64) float lanes[16];
                _mm512_store_ps(lanes, value_of(sums[8 * r + n], sums[8 * r + 4 + n], made[r]));
                for (int64_t i = 0; i < 16; i++) {
                    const int64_t column = d + i / 4 * 16 + 4 * n + i % 4;
                    if (column < dim) out[r * dim + column] = lanes[i];
                }
            }
    }
}

#endif

}  // namespace
