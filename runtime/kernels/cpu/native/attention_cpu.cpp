// Attention over a paged cache, and vectors of an int4 cache. A translation unit of its own, compiled in parallel to
// packed_cpu.cpp.

#include "attention/attention.h"
#include "attention/latent.h"

EXPORT int attend(const Attention* a, int threads) { return attend_any(*a, threads); }

EXPORT int attend_latent(const LatentTask* task, int threads) { return attend_latent_any(*task, threads); }

// Converts vectors x [vectors, head_dim] of F32 or BF16, contiguous, to codes and scales of an int4 cache; head_dim is a multiple
// of 16. Returns 0, or 1 without memory.
EXPORT int pack_int4(const void* x, int32_t type, int64_t vectors, int64_t head_dim, uint8_t* codes, uint16_t* scales, int threads) {
    return pack_vectors(x, type, vectors, head_dim, codes, scales, threads) ? 0 : 1;
}
