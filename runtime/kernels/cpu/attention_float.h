// Attention's task, and its two products in fp32 for every kind of cache: vectors of 16 floats, which compilers map to what the
// machine has.

#pragma once

#include <math.h>

#include "packed_layout.h"

namespace {

enum CacheType : int32_t { CACHE_F32 = 0, CACHE_BF16 = 1, CACHE_INT8 = 2 };

struct Attention {  // mirrored by build.py
    const void *query;  // [sequences, tokens, heads, head_dim] of query_type, as is `out`
    const void *keys, *values;  // [sequences, kv_heads, capacity, head_dim], `strides` in elements
    const float *key_scales, *value_scales;  // [sequences, kv_heads, capacity], for int8
    void* out;
    int64_t sequences, kv_heads, group, tokens, head_dim;
    int64_t length;  // positions filled, the new tokens last
    int64_t window;  // positions a token sees, itself included
    int64_t sequence_stride, head_stride;  // of keys and of values; a position is head_dim
    int32_t query_type, cache_type;
};

typedef float V16 __attribute__((vector_size(64), aligned(64)));
typedef int32_t I16 __attribute__((vector_size(64), aligned(64)));
constexpr int64_t CHUNK = 512, LANE = 16;

inline V16 load16(const float* at) {
    V16 v;
    memcpy(&v, at, 64);
    return v;
}
inline V16 load16(const uint16_t* at) {
    typedef uint16_t Half __attribute__((vector_size(32)));
    typedef uint32_t Word __attribute__((vector_size(64)));
    Half half;
    memcpy(&half, at, 32);
    return (V16)(__builtin_convertvector(half, Word) << 16);
}
inline V16 load16(const int8_t* at) {
    V16 v;
    for (int i = 0; i < 16; i++) v[i] = float(at[i]);
    return v;
}

// e^x for x <= 0, to 2 units in the last place; below -87 it is 0.
inline V16 exponential(V16 x) {
    const V16 zero = {}, floor = zero - 87.0f, magic = zero + 12582912.0f;
    const I16 gone = x < floor;
    x = gone ? floor : x;
    const V16 shifted = x * 1.44269504f + magic, n = shifted - magic;
    const V16 r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
    V16 y = r * 1.9875691500e-4f + 1.3981999507e-3f;
    y = y * r + 8.3334519073e-3f;
    y = y * r + 4.1665795894e-2f;
    y = y * r + 1.6666665459e-1f;
    y = y * r + 5.0000001201e-1f;
    y = y * r * r + r + 1.0f;
    const I16 power = ((I16)shifted - (I16)magic + 127) << 23;
    const V16 result = y * (V16)power;
    return gone ? zero : result;
}

// Lane i of the result is the sum of sums[i].
template <int S> inline V16 fold(V16 a, V16 b) {
    I16 keep, swap;
#pragma GCC unroll 16
    for (int i = 0; i < 16; i++) {
        keep[i] = (i & S) ? 16 + i : i;
        swap[i] = (i & S) ? 16 + (i ^ S) : (i ^ S);
    }
    return __builtin_shuffle(a, b, keep) + __builtin_shuffle(a, b, swap);
}
inline V16 sums_of(V16 (&s)[16]) {
#pragma GCC unroll 8
    for (int i = 0; i < 8; i++) s[i] = fold<8>(s[i], s[i + 8]);
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) s[i] = fold<4>(s[i], s[i + 4]);
    s[0] = fold<2>(s[0], s[2]);
    s[1] = fold<2>(s[1], s[3]);
    return fold<1>(s[0], s[1]);
}
inline float sum_of(V16 v) {
    float total = 0;
    for (int i = 0; i < 16; i++) total += v[i];
    return total;
}

// scores [rows][CHUNK] of `count` keys; `query` [rows][head_dim] in fp32, the softmax's factor in it. `room` holds 16 keys.
template <typename T>
void score(const Attention& a, const float* query, int64_t rows, const T* keys, const float* scales, int64_t count,
           float* room, float* scores) {
    const int64_t dim = a.head_dim;
    for (int64_t p = 0; p < count; p += LANE) {
        const int64_t some = std::min(LANE, count - p);
        for (int64_t i = 0; i < some; i++)
            for (int64_t d = 0; d < dim; d += LANE) {
                const V16 key = load16(keys + (p + i) * dim + d);
                memcpy(room + i * dim + d, &key, 64);
            }
        V16 scale = {};
        scale += 1.0f;
        if (scales)
            for (int64_t i = 0; i < some; i++) scale[i] = scales[p + i];
        for (int64_t r = 0; r < rows; r++) {
            V16 sums[16] = {};
            for (int64_t d = 0; d < dim; d += LANE) {
                const V16 q = load16(query + r * dim + d);
#pragma GCC unroll 16
                for (int i = 0; i < 16; i++) sums[i] += q * load16(room + i * dim + d);
            }
            const V16 total = sums_of(sums) * scale;
            memcpy(scores + r * CHUNK + p, &total, 64);
        }
    }
}

// out [rows][head_dim] = weights [rows][CHUNK] times `count` values, 4 rows and 64 columns at a time.
template <typename T, int M, int N>
void mix_some(const float* weights, const T* values, int64_t dim, int64_t count, float* out) {
    V16 sums[M][N] = {};
    for (int64_t p = 0; p < count; p++) {
        V16 value[N];
#pragma GCC unroll 4
        for (int n = 0; n < N; n++) value[n] = load16(values + p * dim + n * LANE);
        __builtin_prefetch(values + p * dim + AHEAD / sizeof(T));
#pragma GCC unroll 4
        for (int m = 0; m < M; m++)
#pragma GCC unroll 4
            for (int n = 0; n < N; n++) sums[m][n] += value[n] * weights[m * CHUNK + p];
    }
    for (int m = 0; m < M; m++) memcpy(out + m * dim, sums[m], sizeof sums[m]);
}
template <typename T, int M> void mix_rows(const float* weights, const T* values, int64_t dim, int64_t count, float* out) {
    int64_t d = 0;
    for (; d + 4 * LANE <= dim; d += 4 * LANE) mix_some<T, M, 4>(weights, values + d, dim, count, out + d);
    for (; d < dim; d += LANE) mix_some<T, M, 1>(weights, values + d, dim, count, out + d);
}
template <typename T>
void mix(const float* weights, int64_t rows, const T* values, int64_t dim, int64_t count, float* room, float* out) {
    (void)room;
    int64_t r = 0;
    for (; r + 4 <= rows; r += 4) mix_rows<T, 4>(weights + r * CHUNK, values, dim, count, out + r * dim);
    for (; r < rows; r++) mix_rows<T, 1>(weights + r * CHUNK, values, dim, count, out + r * dim);
}

}  // namespace
