// The task of attention over a paged cache, its softmax, and how partial sums are joined.
//
// The order of every sum is fixed by positions. The keys of a sequence are split into chunks at multiples of CHUNK, wherever they
// lie in memory. Within a chunk a row has its own largest score, the sum of its weights (a lane for each position modulo the
// vector width) and the weighted sum of the values; chunks are joined one after another, oldest first. Positions that a row does
// not see weigh 0 or are left out, which gives the same bits. So the bits of a row depend on neither the other rows, the length
// of the pass, the block size, nor the number of threads.

#pragma once

#include "attention/attention_int4.h"

enum CacheType : int32_t { CACHE_F32 = 0, CACHE_BF16 = 1, CACHE_INT8 = 2, CACHE_INT4 = 3 };

struct Attention {  // mirrored by build.py
    const void* query;  // [tokens, heads, head_dim] of query_type; `out` is of out_type
    const void *keys, *values;  // [blocks, kv_heads, block_size, head_dim], strides in vectors; int4: bytes of two codes
    // With the strides of their vectors. int8: one fp32; key_scales null: keys are decoded before products. int4: int4_groups bf16.
    const void *key_scales, *value_scales;
    const float* sinks;  // [heads], or null: a score per head that is part of the softmax and has no value
    void* out;
    const int32_t* starts;  // [sequences + 1]: sequence s has the tokens starts[s] to starts[s + 1]
    const int32_t* lengths;  // [sequences]: cached positions, the tokens of this pass last
    const int32_t* table;  // [sequences, table_width]: entry i is the block of positions from i * block_size
    int64_t sequences, table_width, blocks, block_size, block_stride, head_stride;
    int64_t kv_heads, group, head_dim;
    int64_t window;  // positions that a token sees, itself included; -n: those from the last multiple of n on
    float scale, softcap;  // score = scale * dot; then softcap * tanh(score / softcap) unless softcap is 0
    int32_t query_type, cache_type, out_type;
    int32_t portable;  // fp32 products, which have the same bits on every processor
};

// Computes a ragged batch of queries over a paged cache; head_dim is a multiple of 16 if the cache is int4. Returns 0; 1: no
// memory; 2: lengths or blocks out of range. Defined in attention_cpu.cpp.
EXPORT int attend(const Attention* a, int threads);

namespace {

// The first position that the token at `position` sees.
inline int64_t first_seen(const Attention& a, int64_t position) {
    if (a.window < 0) return position - position % -a.window;
    return std::max<int64_t>(0, position + 1 - a.window);
}

// Returns whether every block that will be read exists, and every token has a position.
inline bool is_sound(const Attention& a) {
    if (a.starts[0] != 0) return false;
    for (int64_t s = 0; s < a.sequences; s++) {
        const int64_t tokens = int64_t(a.starts[s + 1]) - a.starts[s], length = a.lengths[s];
        if (tokens < 0 || tokens > length || length > a.table_width * a.block_size) return false;
        if (!tokens) continue;
        for (int64_t b = first_seen(a, length - tokens) / a.block_size; b * a.block_size < length; b++) {
            const int32_t block = a.table[s * a.table_width + b];
            if (block < 0 || block >= a.blocks) return false;
        }
    }
    return true;
}

// A key or value at its index of vectors.
template <typename T> inline auto vector_of(const Attention& a, const void* data, const void* scales, int64_t at) {
    if constexpr (std::is_same_v<T, Int4>)
        return Int4Vector{static_cast<const uint8_t*>(data) + at * (a.head_dim / 2), static_cast<const uint16_t*>(scales) + at * int4_groups(a.head_dim)};
    else
        return static_cast<const T*>(data) + at * a.head_dim;
}
template <typename T> inline auto key_vector(const Attention& a, int64_t at) { return vector_of<T>(a, a.keys, a.key_scales, at); }
template <typename T> inline auto value_vector(const Attention& a, int64_t at) { return vector_of<T>(a, a.values, a.value_scales, at); }

// Bytes of a key or of a value.
inline int64_t vector_bytes(const Attention& a) {
    switch (a.cache_type) {
        case CACHE_F32: return a.head_dim * 4;
        case CACHE_BF16: return a.head_dim * 2;
        case CACHE_INT8: return a.head_dim;
        default: return a.head_dim / 2;
    }
}

constexpr int64_t CHUNK = 256;  // positions
constexpr float LOG2E = 1.44269504f;

// The rows of one sequence that share a key head: row r is token r / group, and head r % group of the group.
struct Rows {
    int64_t sequence, head, count, length, tokens;

    Rows(const Attention& a, int64_t sequence, int64_t head) : sequence(sequence), head(head), length(a.lengths[sequence]) {
        tokens = a.starts[sequence + 1] - a.starts[sequence];
        count = tokens * a.group;
    }
    // Row r sees the positions [begin, end).
    int64_t end(const Attention& a, int64_t r) const { return length - tokens + r / a.group + 1; }
    int64_t begin(const Attention& a, int64_t r) const { return first_seen(a, end(a, r) - 1); }
    int64_t first_chunk(const Attention& a) const { return begin(a, 0) / CHUNK; }
    int64_t chunks(const Attention& a) const { return tokens ? (length + CHUNK - 1) / CHUNK - first_chunk(a) : 0; }
    // Offset of row r in the query and in the result.
    int64_t at(const Attention& a, int64_t r) const {
        return (((a.starts[sequence] + r / a.group) * a.kv_heads + head) * a.group + r % a.group) * a.head_dim;
    }
};

// Where the positions of one chunk lie. Positions before the oldest that a row sees are not looked up, since their blocks may
// have been freed; those, and positions past the last, get the offset of a position that exists.
struct Chunk {
    int64_t first, count, oldest;  // index of the first position; those looked up are [oldest, count)
    int64_t at[CHUNK];  // index of the key and of the value

    Chunk(const Attention& a, const Rows& rows, int64_t first) : first(first), count(std::min(CHUNK, rows.length - first)) {
        const int32_t* table = a.table + rows.sequence * a.table_width;
        oldest = std::max<int64_t>(0, rows.begin(a, 0) - first);
        for (int64_t p = oldest; p < count;) {
            const int64_t position = first + p, inside = position % a.block_size;
            const int64_t base = table[position / a.block_size] * a.block_stride + rows.head * a.head_stride;
            for (int64_t i = inside; i < a.block_size && p < count; i++) at[p++] = base + i;
        }
        std::fill(at, at + oldest, at[oldest]);
        std::fill(at + count, at + CHUNK, at[count - 1]);
    }
    // Returns whether positions [p, p + some) exist and are contiguous.
    bool is_run(const Attention& a, int64_t p, int64_t some) const {
        return p >= oldest && p + some <= count && (first + p) % a.block_size + some <= a.block_size;
    }
};

// The scales of a chunk's int8 codes.
struct Scales {
    float key[CHUNK], value[CHUNK];

    void take(const Attention& a, const Chunk& chunk) {
        if (a.cache_type != CACHE_INT8) return;
        memset(this, 0, sizeof *this);
        const float *keys = static_cast<const float*>(a.key_scales), *values = static_cast<const float*>(a.value_scales);
        for (int64_t p = 0; p < chunk.count; p++) {
            key[p] = keys ? keys[chunk.at[p]] : 1.0f;
            value[p] = values[chunk.at[p]];
        }
    }
};

// The positions [low, high) of a chunk, in multiples of 32, that any of `count` rows from `row` sees.
struct Span {
    int64_t low, high;

    Span(const Attention& a, const Rows& rows, int64_t row, int64_t count, int64_t first) {
        low = std::clamp<int64_t>(rows.begin(a, row) - first, 0, CHUNK) / 32 * 32;
        high = (std::clamp<int64_t>(rows.end(a, row + count - 1) - first, 0, CHUNK) + 31) / 32 * 32;
    }
};

// Floats of a row's sums: `size` weighted values, the sums of the weights in `LANE` lanes on every processor, and the largest score.
inline int64_t sums_of(int64_t size) { return size + 2 * LANE; }
inline float& most_of(float* sums, int64_t size) { return sums[size + LANE]; }

// Memory of one thread, for a block of rows.
struct Room {
    float *query, *scores, *weights, *panel;
    float *sums, *joined;  // [rows][sums_of(size)]: of a chunk, of all chunks so far
};

// Computes the weights of a row's products with keys and passes them to `keep(position, weights)`. Only [begin, end) of the span
// counts, the rest becomes 0. Scores are in units of log 2. Sets the sum of the weights, by lane, and the largest score in
// `sums`.
template <bool CODES, bool CAPPED, class Keep>
inline void soften_as(const Attention& a, float* scores, const Span& span, int64_t begin, int64_t end, const Scales& scales,
                      float* sums, int64_t size, Keep keep) {
    const float none = -__builtin_inff();
    const Wide factor = spread(CAPPED ? a.scale / a.softcap : a.scale * LOG2E), cap = spread(a.softcap * LOG2E);
    if (CODES || CAPPED)
        for (int64_t p = span.low; p < span.high; p += WIDE) {
            Wide x = wide(scores + p);
            if (CODES) x *= wide(scales.key + p);
            put(scores + p, CAPPED ? tangent(x * factor) * cap : x);
        }
    for (int64_t p = span.low; p < begin; p++) scores[p] = none;
    for (int64_t p = end; p < span.high; p++) scores[p] = none;
    Wide most = spread(none);
    for (int64_t p = span.low; p < span.high; p += WIDE) most = larger(wide(scores + p), most);
    const float largest = CAPPED ? greatest(most) : greatest(most) * factor[0];
    most_of(sums, size) = largest;
    // `largest` is rounded and the products below are not: beyond 2^22 no weight would be near 1, so the scores are
    // subtracted before they are multiplied.
    const bool steep = !CAPPED && largest - largest == 0 && (largest > 4194304.0f || largest < -4194304.0f);
    if (steep)
        for (int64_t p = span.low; p < span.high; p += WIDE) put(scores + p, (wide(scores + p) - greatest(most)) * factor);
    const Wide slope = steep ? spread(1.0f) : factor, reach = spread(steep ? 0.0f : -largest);
    Wide all[LANE / WIDE] = {};
    for (int64_t p = span.low; p < span.high; p += WIDE) {
        const Wide x = wide(scores + p);
        Wide weight = power_of_two(CAPPED ? x + reach : multiply_add(x, slope, reach));
        all[p / WIDE % (LANE / WIDE)] += weight;
        if (CODES) {
            weight *= wide(scales.value + p);
            if (p < begin || p + WIDE > end)  // a NaN scale must not reach rows that do not see it
                for (int64_t i = 0; i < WIDE; i++) weight[i] = p + i < begin || p + i >= end ? 0.0f : weight[i];
        }
        keep(p, weight);
    }
    for (int64_t i = 0; i < LANE; i += WIDE) put(sums + size + i, all[i / WIDE]);
}
template <class Keep>
inline void soften(const Attention& a, float* scores, const Span& span, int64_t begin, int64_t end, const Scales& scales,
                   float* sums, int64_t size, Keep keep) {
    if (a.cache_type != CACHE_INT8 && a.softcap == 0) soften_as<false, false>(a, scores, span, begin, end, scales, sums, size, keep);
    else if (a.softcap == 0) soften_as<true, false>(a, scores, span, begin, end, scales, sums, size, keep);
    else if (a.cache_type != CACHE_INT8) soften_as<false, true>(a, scores, span, begin, end, scales, sums, size, keep);
    else soften_as<true, true>(a, scores, span, begin, end, scales, sums, size, keep);
}

// The sums of no position.
inline void clear(float* sums, int64_t size) {
    memset(sums, 0, size_t(sums_of(size)) * 4);
    most_of(sums, size) = -__builtin_inff();
}

// Joins the sums of a chunk to those of the chunks before it.
inline void join(float* sums, float* chunk, int64_t size) {
    const float both = std::max(most_of(sums, size), most_of(chunk, size));
    const Wide old = power_of_two(spread(most_of(sums, size) - both)), young = power_of_two(spread(most_of(chunk, size) - both));
    for (int64_t i = 0; i < size + LANE; i += WIDE) put(sums + i, multiply_add(wide(chunk + i), young, wide(sums + i) * old));
    most_of(sums, size) = both;
}

// The factor by which a row's sums are multiplied in the end.
inline float share_of(const Attention& a, const Rows& rows, int64_t r, float* sums, int64_t size) {
    float weights = sum_of(load16(sums + size)), factor = 1;
    if (a.sinks) {
        const float sink = a.sinks[rows.head * a.group + r % a.group] * LOG2E, both = std::max(most_of(sums, size), sink);
        factor = power_of_two(spread(most_of(sums, size) - both))[0];
        weights = weights * factor + power_of_two(spread(sink - both))[0];
    }
    return factor / weights;
}

}  // namespace
