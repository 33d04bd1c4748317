// The task of latent attention over a paged cache: one vector per position is the key and the value of all heads, and a second,
// rotated, is the rest of the key. Defined in attention_cpu.cpp.

#pragma once

#include "attention/attention_task.h"

struct LatentTask {  // mirrored by latent.py
    const void *query, *rotated_query;  // [tokens, heads, rank] and [tokens, heads, rope] of query_type
    const void *latents, *rotated;  // [blocks, block_size, rank] and [blocks, block_size, rope], contiguous; see Attention
    const void *latent_scales, *rotated_scales;  // of int8 and int4 caches
    void* out;  // [tokens, heads, rank] of out_type
    const int32_t *starts, *lengths, *table;  // see Attention
    int64_t sequences, table_width, blocks, block_size, heads, rank, rope;
    float scale;
    int32_t query_type, cache_type, out_type, portable;  // portable: see Attention
};

// Computes a ragged batch of queries; rank and rope are multiples of 16 if the cache is int4. Returns 0; 1: no memory; 2: lengths
// or blocks out of range. Defined in attention_cpu.cpp.
EXPORT int attend_latent(const LatentTask* task, int threads);

namespace {

// One of the two vectors of a position as attention sees it.
inline Attention latent_view(const LatentTask& t, const void* query, const void* data, const void* scales, int64_t size) {
    const void* key_scales = t.cache_type == CACHE_INT4 ? scales : nullptr;
    return {query, data, data, key_scales, scales, nullptr, t.out, t.starts, t.lengths, t.table, t.sequences, t.table_width, t.blocks,
            t.block_size, t.block_size, t.block_size, 1, t.heads, size, int64_t(1) << 62, t.scale, 0, t.query_type, t.cache_type, t.out_type, t.portable};
}

}  // namespace
