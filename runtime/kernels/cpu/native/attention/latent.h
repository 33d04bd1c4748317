// Latent attention over a paged cache, by the products that suit cache and processor.

#pragma once

#include "attention/latent_pairs.h"

namespace {

// The queries of one vector rotated as int4 caches store it, fp32.
inline std::unique_ptr<float[]> rotated_queries(Attention& a, int threads) {
    const int64_t vectors = a.starts[a.sequences] * a.group;
    std::unique_ptr<float[]> query(new (std::nothrow) float[size_t(vectors * a.head_dim)]);
    if (!query) return query;
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1 && vectors > ALONE_VECTORS)
    for (int64_t i = 0; i < vectors; i++) {
        float* x = query.get() + i * a.head_dim;
        widen(a.query, a.query_type, i * a.head_dim, a.head_dim, x);
        rotate_vector(x, a.head_dim);
    }
    a.query = query.get();
    a.query_type = F32;
    return query;
}

template <class Path> int attend_latent_by(Latent a, int threads) {
    std::unique_ptr<float[]> queries[2];
    if constexpr (Path::ROTATED) {
        queries[0] = rotated_queries(a, threads);
        queries[1] = rotated_queries(a.rotated, threads);
        if (!queries[0] || !queries[1]) return 1;
    }
    const Attending<Path> attending{a, threads};
    return attending.run_all(true) && attending.run_all(false) ? 0 : 1;
}

inline int attend_latent_any(const LatentTask& task, int threads) try {
    const Latent a(task);
    if (!is_sound(a)) return 2;
#if BF16_PAIRS
    if (a.query_type == BF16 && !a.portable && a.head_dim % WIDE == 0 && a.rotated.head_dim % WIDE == 0) {
        if (a.cache_type == CACHE_BF16) return attend_latent_by<LatentPairs<uint16_t>>(a, threads);
        if (a.cache_type == CACHE_INT8) return attend_latent_by<LatentPairs<int8_t>>(a, threads);
    }
#endif
    if (a.cache_type == CACHE_INT8) return attend_latent_by<LatentPath<int8_t>>(a, threads);
    if (a.cache_type == CACHE_INT4) return attend_latent_by<LatentPath<Int4>>(a, threads);
    if (a.cache_type == CACHE_BF16) return attend_latent_by<LatentPath<uint16_t>>(a, threads);
    return attend_latent_by<LatentPath<float>>(a, threads);
} catch (const std::bad_alloc&) {
    return 1;
}

}  // namespace
