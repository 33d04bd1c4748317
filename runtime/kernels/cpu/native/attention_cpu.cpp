// Attention over a cache in blocks, and vectors as an int4 cache holds them. Compiled by itself, beside packed_cpu.cpp.

#include "attention/attention.h"

EXPORT int attend(const Attention* a, int threads) { return attend_any(*a, threads); }

// Vectors x [vectors, head_dim] of F32 or BF16, contiguous, as an int4 cache holds them; head_dim is a multiple of 16. 0: done;
// 1: no memory.
EXPORT int pack_int4(const void* x, int32_t type, int64_t vectors, int64_t head_dim, uint8_t* to, int threads) {
    return pack_vectors(x, type, vectors, head_dim, to, threads) ? 0 : 1;
}
