// Attention of a few query tokens over a cache of bf16, fp32 or int8: what a reply and the checking of guesses need.
//
// The keys of a sequence and head are cut into chunks at fixed positions; a chunk makes a partial sum with its own largest
// score, and partial sums are joined in order (flash-decoding). So the bits of a row depend on neither the number of threads
// nor the rows beside it. Codes are read as they lie: score = dot(q, code) * scale of the key, and the scale of a value is
// multiplied into its weight.

#pragma once

#include "attention_int8.h"

namespace {

// Weights in place of a row's scores: e^(score - largest) for those in [from, to), 0 beside. Returns their sum.
inline float soften(float* scores, int64_t count, int64_t from, int64_t to, float* largest) {
    const float none = -__builtin_inff();
    float most = none;
    for (int64_t p = 0; p < (count + LANE - 1) / LANE * LANE; p++) {
        scores[p] = p >= from && p < to ? scores[p] : none;
        most = scores[p] > most || scores[p] != scores[p] ? scores[p] : most;
    }
    *largest = most;
    V16 sum = {};
    for (int64_t p = 0; p < count; p += LANE) {
        V16 weight = {};
        if (most > none || most != most) weight = exponential(load16(scores + p) - most);
        memcpy(scores + p, &weight, 64);
        sum += weight;
    }
    return sum_of(sum);
}

// Memory of one thread, in floats: query, scores, and what `score` and `mix` need beside.
inline int64_t room_of(const Attention& a) {
    const int64_t rows = a.group * a.tokens, dim = (a.head_dim + 63) / 64 * 64;
    return rows * (a.head_dim + CHUNK) + LANE * dim + 1024 + rows * (dim + CHUNK + 256);
}
// Of a partial sum: per row its largest score, the sum of its weights (a vector's room), and the weighted values.
inline int64_t partial_of(const Attention& a) { return a.group * a.tokens * (a.head_dim + LANE); }

template <typename T> void attend_chunk(const Attention& a, int64_t sequence, int64_t head, int64_t first, float* room, float* partial) {
    const int64_t dim = a.head_dim, rows = a.group * a.tokens, count = std::min(CHUNK, a.length - first);
    const int64_t at = sequence * a.sequence_stride + head * a.head_stride + first * dim;
    float *query = room, *scores = query + rows * dim, *more = scores + rows * CHUNK;
    const float factor = 1.0f / __builtin_sqrtf(float(dim));
    for (int64_t r = 0; r < rows; r++) {
        const int64_t from = ((sequence * a.tokens + r / a.group) * a.kv_heads + head) * a.group * dim + r % a.group * dim;
        for (int64_t d = 0; d < dim; d++)
            query[r * dim + d] = factor * (a.query_type == F32 ? static_cast<const float*>(a.query)[from + d]
                                                               : from_bf16(static_cast<const uint16_t*>(a.query)[from + d]));
    }
    const bool codes = a.cache_type == CACHE_INT8;
    score(a, query, rows, static_cast<const T*>(a.keys) + at, codes ? a.key_scales + at / dim : nullptr, count, more, scores);
    for (int64_t r = 0; r < rows; r++) {
        const int64_t end = a.length - a.tokens + r / a.group + 1 - first, begin = end - a.window;
        float *row = partial + r * (dim + LANE), *weights = scores + r * CHUNK;
        row[1] = soften(weights, count, begin, end, row);
        if (codes)
            for (int64_t p = 0; p < count; p++) weights[p] *= a.value_scales[at / dim + p];
    }
    float* mixed = query;  // not needed any more
    mix(scores, rows, static_cast<const T*>(a.values) + at, dim, count, more, mixed);
    for (int64_t r = 0; r < rows; r++) memcpy(partial + r * (dim + LANE) + LANE, mixed + r * dim, size_t(dim) * 4);
}

// The partial sums of one row, `step` apart, joined and stored at element `to`.
inline void join(const Attention& a, const float* partial, int64_t chunks, int64_t step, int64_t to) {
    const float none = -__builtin_inff();
    float most = none, total = 0;
    for (int64_t c = 0; c < chunks; c++) most = partial[c * step] > most || partial[c * step] != partial[c * step] ? partial[c * step] : most;
    for (int64_t c = 0; c < chunks; c++) total += partial[c * step] == none ? 0.0f : partial[c * step + 1] * expf(partial[c * step] - most);
    for (int64_t d = 0; d < a.head_dim; d += LANE) {
        V16 sum = {};
        for (int64_t c = 0; c < chunks; c++)
            if (partial[c * step] != none) sum += load16(partial + c * step + LANE + d) * expf(partial[c * step] - most);
        sum /= total;
        for (int i = 0; i < 16; i++) store(a.out, a.query_type, to + d + i, sum[i]);
    }
}

// False: no memory.
template <typename T> bool attend_all(const Attention& a, int threads) {
    const int64_t oldest = std::max<int64_t>(0, a.length - a.tokens - a.window + 1), begin = oldest / CHUNK;
    const int64_t chunks = (a.length + CHUNK - 1) / CHUNK - begin, heads = a.sequences * a.kv_heads;
    const int64_t rows = a.group * a.tokens, room = room_of(a), step = partial_of(a), tasks = heads * chunks;
    float* memory = static_cast<float*>(aligned_alloc(64, size_t(tasks * step + threads * room) * 4));
    if (!memory) return false;
    int next = 0;
#pragma omp parallel num_threads(threads)
    {
        int self;
#pragma omp atomic capture
        self = next++;
#pragma omp for schedule(dynamic, 1)
        for (int64_t i = 0; i < tasks; i++)
            attend_chunk<T>(a, i / chunks / a.kv_heads, i / chunks % a.kv_heads, (begin + i % chunks) * CHUNK,
                            memory + tasks * step + self * room, memory + i * step);
#pragma omp for schedule(static)
        for (int64_t i = 0; i < heads * rows; i++) {
            const int64_t head = i / rows, r = i % rows, s = head / a.kv_heads, h = head % a.kv_heads;
            const int64_t to = (((s * a.tokens + r / a.group) * a.kv_heads + h) * a.group + r % a.group) * a.head_dim;
            join(a, memory + head * chunks * step + r * (a.head_dim + LANE), chunks, step, to);
        }
    }
    free(memory);
    return true;
}

}  // namespace
