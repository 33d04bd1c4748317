// Attention's task over a cache in blocks, its softmax, and how partial sums are joined.
//
// The order of every sum is fixed by positions. The keys of a sequence are cut into chunks at multiples of CHUNK, wherever
// they lie in memory. Within a chunk a row has its own largest score, the sum of its weights (a lane for each position modulo
// the width of a vector) and the weighted sum of the values; chunks are joined one after another, oldest first. Positions
// that a row does not see weigh 0 or are left out, which is the same. So the bits of a row depend on neither the rows beside
// it, the length of the pass, the size of blocks, nor the number of threads.

#pragma once

#include "attention/attention_int4.h"

enum CacheType : int32_t { CACHE_F32 = 0, CACHE_BF16 = 1, CACHE_INT8 = 2, CACHE_INT4 = 3 };

struct Attention {  // mirrored by build.py
    const void* query;  // [tokens, heads, head_dim] of query_type; `out` is of out_type
    const void *keys, *values;  // [blocks, kv_heads, block_size, head_dim], strides in elements; see vector_size
    const float *key_scales, *value_scales;  // [blocks, kv_heads, block_size] for int8, strides as above / head_dim
    const float* sinks;  // [heads], or null: a score per head that takes its share of the weights and has no value
    void* out;
    const int32_t* starts;  // [sequences + 1]: tokens of sequence s are starts[s] up to starts[s + 1]
    const int32_t* lengths;  // [sequences]: positions filled, the tokens of this pass last
    const int32_t* table;  // [sequences, table_width]: the block of positions i * block_size and on
    int64_t sequences, table_width, blocks, block_size, block_stride, head_stride;
    int64_t kv_heads, group, head_dim;
    int64_t window;  // positions a token sees, itself included
    float scale, softcap;  // score = scale * dot; softcap * tanh(score / softcap) where that is not 0
    int32_t query_type, cache_type, out_type;
};

// A ragged batch of queries against a cache in blocks; head_dim is a multiple of 16. 0: done; 1: no memory; 2: lengths or blocks
// that cannot be. In attention_cpu.cpp.
EXPORT int attend(const Attention* a, int threads);

namespace {

// Whether every block that will be read is one, and every token has its place.
inline bool is_sound(const Attention& a) {
    if (a.starts[0] != 0) return false;
    for (int64_t s = 0; s < a.sequences; s++) {
        const int64_t tokens = int64_t(a.starts[s + 1]) - a.starts[s], length = a.lengths[s];
        if (tokens < 0 || tokens > length || length > a.table_width * a.block_size) return false;
        if (!tokens) continue;
        for (int64_t b = std::max<int64_t>(0, length - tokens + 1 - a.window) / a.block_size; b * a.block_size < length; b++) {
            const int32_t block = a.table[s * a.table_width + b];
            if (block < 0 || block >= a.blocks) return false;
        }
    }
    return true;
}

// Elements from one position to the next: values or codes of a head, or the bytes of an int4 vector.
inline int64_t vector_size(const Attention& a) { return a.cache_type == CACHE_INT4 ? int4_bytes(a.head_dim) : a.head_dim; }
// The vector of keys or values that begins at an element.
template <typename T> inline auto vector_of(const Attention& a, const void* data, int64_t at) {
    if constexpr (std::is_same_v<T, Int4>) {
        const uint8_t* codes = static_cast<const uint8_t*>(data) + at;
        return Int4Vector{codes, codes + a.head_dim / 2};
    } else {
        (void)a;
        return static_cast<const T*>(data) + at;
    }
}

constexpr int64_t CHUNK = 256;  // positions
constexpr float LOG2E = 1.44269504f;

// The rows of one sequence that share a key head: row r is token r / group, head r % group of those.
struct Rows {
    int64_t sequence, head, count, length, tokens;

    Rows(const Attention& a, int64_t sequence, int64_t head) : sequence(sequence), head(head), length(a.lengths[sequence]) {
        tokens = a.starts[sequence + 1] - a.starts[sequence];
        count = tokens * a.group;
    }
    // Positions [begin, end) are what row r sees.
    int64_t end(const Attention& a, int64_t r) const { return length - tokens + r / a.group + 1; }
    int64_t begin(const Attention& a, int64_t r) const { return std::max<int64_t>(0, end(a, r) - a.window); }
    int64_t first_chunk(const Attention& a) const { return begin(a, 0) / CHUNK; }
    int64_t chunks(const Attention& a) const { return tokens ? (length + CHUNK - 1) / CHUNK - first_chunk(a) : 0; }
    // Element of the query and of the result at which row r begins.
    int64_t at(const Attention& a, int64_t r) const {
        return (((a.starts[sequence] + r / a.group) * a.kv_heads + head) * a.group + r % a.group) * a.head_dim;
    }
};

// Where the positions of one chunk lie. Those before the oldest that a row sees are not looked up, since their blocks may be
// gone; in their place, and in that of positions past the last, stands one that is there.
struct Chunk {
    int64_t first, count, oldest;  // position of the first; of those looked up, one past the last and the first
    int64_t at[CHUNK];  // elements from the start of keys and values

    Chunk(const Attention& a, const Rows& rows, int64_t first) : first(first), count(std::min(CHUNK, rows.length - first)) {
        const int32_t* table = a.table + rows.sequence * a.table_width;
        const int64_t step = vector_size(a);
        oldest = std::max<int64_t>(0, rows.begin(a, 0) - first);
        for (int64_t p = oldest; p < count;) {
            const int64_t position = first + p, inside = position % a.block_size;
            const int64_t base = table[position / a.block_size] * a.block_stride + rows.head * a.head_stride;
            for (int64_t i = inside; i < a.block_size && p < count; i++) at[p++] = base + i * step;
        }
        std::fill(at, at + oldest, at[oldest]);
        std::fill(at + count, at + CHUNK, at[count - 1]);
    }
    // Whether positions [p, p + some) are there and lie one behind another.
    bool is_run(const Attention& a, int64_t p, int64_t some) const {
        return p >= oldest && p + some <= count && (first + p) % a.block_size + some <= a.block_size;
    }
};

// What is kept of a chunk's codes beside the codes.
struct Scales {
    float key[CHUNK], value[CHUNK];

    void take(const Attention& a, const Chunk& chunk) {
        if (a.cache_type != CACHE_INT8) return;
        memset(this, 0, sizeof *this);
        int64_t vector = 0;  // a division per position would take longer than its products
        for (int64_t p = 0; p < chunk.count; p++) {
            vector = p && chunk.at[p] == chunk.at[p - 1] + a.head_dim ? vector + 1 : chunk.at[p] / a.head_dim;
            key[p] = a.key_scales[vector];
            value[p] = a.value_scales[vector];
        }
    }
};

// The positions [low, high) of a chunk, in multiples of 32, that any of `count` rows from `row` on sees.
struct Span {
    int64_t low, high;

    Span(const Attention& a, const Rows& rows, int64_t row, int64_t count, int64_t first) {
        low = std::clamp<int64_t>(rows.begin(a, row) - first, 0, CHUNK) / 32 * 32;
        high = (std::clamp<int64_t>(rows.end(a, row + count - 1) - first, 0, CHUNK) + 31) / 32 * 32;
    }
};

// A row's sums: `size` weighted values, a vector's room for the sum of the weights, one for the largest score.
inline int64_t sums_of(int64_t size) { return size + 2 * LANE; }
inline float& most_of(float* sums, int64_t size) { return sums[size + LANE]; }

// Memory of one thread, for some rows.
struct Room {
    float *query, *scores, *weights, *panel;
    float *sums, *joined;  // [rows][sums_of(size)]: of a chunk, of all chunks so far
};

// Weights, as `keep(position, weights)` stores them, of a row's products with keys. Only [begin, end) of the span counts, the
// rest becomes 0. Scores are in units of log 2. Sets the sum of the weights, by lanes, and the largest score in `sums`.
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
    for (int64_t p = span.low; p < span.high; p += WIDE) {
        const Wide x = wide(scores + p);
        most = x > most ? x : most;
    }
    const float largest = CAPPED ? greatest(most) : greatest(most) * factor[0];
    most_of(sums, size) = largest;
    const Wide reach = spread(-largest);
    Wide all = {};
    for (int64_t p = span.low; p < span.high; p += WIDE) {
        const Wide x = wide(scores + p);
        Wide weight = power_of_two(CAPPED ? x + reach : multiply_add(x, factor, reach));
        all += weight;
        if (CODES) {
            weight *= wide(scales.value + p);
            if (p < begin || p + WIDE > end)  // a scale that is no number must not reach rows that do not see it
                for (int64_t i = 0; i < WIDE; i++) weight[i] = p + i < begin || p + i >= end ? 0.0f : weight[i];
        }
        keep(p, weight);
    }
    put(sums + size, all);
}
template <class Keep>
inline void soften(const Attention& a, float* scores, const Span& span, int64_t begin, int64_t end, const Scales& scales,
                   float* sums, int64_t size, Keep keep) {
    if (a.cache_type != CACHE_INT8 && a.softcap == 0) soften_as<false, false>(a, scores, span, begin, end, scales, sums, size, keep);
    else if (a.softcap == 0) soften_as<true, false>(a, scores, span, begin, end, scales, sums, size, keep);
    else if (a.cache_type != CACHE_INT8) soften_as<false, true>(a, scores, span, begin, end, scales, sums, size, keep);
    else soften_as<true, true>(a, scores, span, begin, end, scales, sums, size, keep);
}

// Sums of no position at all.
inline void clear(float* sums, int64_t size) {
    memset(sums, 0, size_t(sums_of(size)) * 4);
    most_of(sums, size) = -__builtin_inff();
}

// Joins what a chunk gave to what the chunks before it gave.
inline void join(float* sums, float* chunk, int64_t size) {
    const float both = std::max(most_of(sums, size), most_of(chunk, size));
    const Wide old = power_of_two(spread(most_of(sums, size) - both)), young = power_of_two(spread(most_of(chunk, size) - both));
    for (int64_t i = 0; i < size + WIDE; i += WIDE) put(sums + i, multiply_add(wide(chunk + i), young, wide(sums + i) * old));
    most_of(sums, size) = both;
}

// What a row's sums are multiplied by in the end.
inline float share_of(const Attention& a, const Rows& rows, int64_t r, float* sums, int64_t size) {
    float weights = total(wide(sums + size)), factor = 1;
    if (a.sinks) {
        const float sink = a.sinks[rows.head * a.group + r % a.group] * LOG2E, both = std::max(most_of(sums, size), sink);
        factor = power_of_two(spread(most_of(sums, size) - both))[0];
        weights = weights * factor + power_of_two(spread(sink - both))[0];
    }
    return factor / weights;
}

}  // namespace
