// Products of each head with a weight of its own, by dense.h: the bits of a row do not depend on the other rows.

#pragma once

#include <atomic>

#include "products/packed_layout.h"

// Defined in packed_cpu.cpp.
EXPORT int dense_matmul(int32_t, const void*, int64_t, int64_t, const void*, int64_t, void*, int, int);

struct HeadProduct {  // mirrored by latent.py
    const void *x, *weight;  // [tokens, heads, inputs] with strides in elements; [heads, outputs, inputs]
    void* y;  // [tokens, heads, outputs]
    int64_t tokens, heads, inputs, outputs, token_stride, head_stride;
    int32_t type, portable;  // F32 or BF16, of all three; portable: by portable_dense.h
};

namespace {

inline bool multiply_head_of(const HeadProduct& h, int64_t head) {
    const int64_t size = h.type == F32 ? 4 : 2, in = h.inputs * size, out = h.outputs * size;
    const char *x = static_cast<const char*>(h.x) + head * h.head_stride * size;
    const char* weight = static_cast<const char*>(h.weight) + head * h.outputs * in;
    char* y = static_cast<char*>(h.y) + head * out;
    if (h.tokens == 1) return !dense_matmul(h.type, weight, h.outputs, h.inputs, x, 1, y, h.portable, 1);
    char* rows = static_cast<char*>(aligned_alloc(64, size_t(h.tokens * (in + out) + 63) & ~size_t(63)));
    if (!rows) return false;
    char* results = rows + h.tokens * in;
    for (int64_t token = 0; token < h.tokens; token++) memcpy(rows + token * in, x + token * h.token_stride * size, size_t(in));
    const bool done = !dense_matmul(h.type, weight, h.outputs, h.inputs, rows, h.tokens, results, h.portable, 1);
    for (int64_t token = 0; token < h.tokens; token++) memcpy(y + token * h.heads * out, results + token * out, size_t(out));
    free(rows);
    return done;
}

// Returns false without memory.
inline bool multiply_heads(const HeadProduct& h, int threads) {
    std::atomic<bool> done{true};
#pragma omp parallel for num_threads(threads) schedule(dynamic, 1) if (threads > 1)
    for (int64_t head = 0; head < h.heads; head++)
        if (!multiply_head_of(h, head)) done = false;
    return done;
}

}  // namespace
