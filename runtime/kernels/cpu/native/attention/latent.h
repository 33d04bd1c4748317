// Latent attention over a paged cache: one vector per position is the key and the value of all heads, and a second, rotated, is
// the rest of the key. The arithmetic and its order are those of attention_task.h and attention_float.h.

#pragma once

#include "attention/attention.h"
#include "attention/latent_task.h"

namespace {

struct Latent : Attention {
    Attention rotated;

    explicit Latent(const LatentTask& t)
        : Attention(latent_view(t, t.query, t.latents, t.latent_scales, t.rank)),
          rotated(latent_view(t, t.rotated_query, t.rotated, t.rotated_scales, t.rope)) {}
};

// The rotated vectors of a chunk. Keys are decoded whole, since the two vectors of a position have scales of their own.
struct RotatedChunk {
    Chunk chunk;
    float scale[CHUNK], rotated_scale[CHUNK];  // of int8 caches

    RotatedChunk(const Latent& a, const Chunk& latents) : chunk(latents) {
        const int64_t from = vector_size(a), to = vector_size(a.rotated);
        for (int64_t p = 0; p < CHUNK; p++) {
            const int64_t vector = latents.at[p] / from;
            chunk.at[p] = vector * to;
            if (a.cache_type == CACHE_INT8) scale[p] = a.value_scales[vector], rotated_scale[p] = a.rotated.value_scales[vector];
        }
    }
};

// The interface is `FloatPath`'s.
template <typename T> struct LatentPath : FloatPath<T> {
    using Base = FloatPath<T>;
    using Base::PANEL;

    static const Latent& whole(const Attention& a) { return static_cast<const Latent&>(a); }
    static int64_t query_size(const Attention& a) { return a.head_dim + whole(a).rotated.head_dim; }
    static int64_t panel_size(const Attention& a) { return PANEL * query_size(a); }
    static int64_t packed_size(const Attention& a) { return CHUNK * (query_size(a) + a.head_dim); }

    static void take_query(const Attention& a, const Rows& rows, int64_t row, int64_t count, const Room& room) {
        const Attention& rotated = whole(a).rotated;
        for (int64_t r = 0; r < count; r++) {
            float* to = room.query + r * query_size(a);
            const int64_t at = rows.at(a, row + r);
            widen(a.query, a.query_type, at, a.head_dim, to);
            widen(rotated.query, rotated.query_type, at / a.head_dim * rotated.head_dim, rotated.head_dim, to + a.head_dim);
        }
    }

    static void pack(const Attention& a, const Chunk& chunk, float* packed) {
        const RotatedChunk rotated(whole(a), chunk);
        for (int64_t p = 0; p < chunk.count; p += PANEL) pack_keys(a, chunk, rotated, p, packed + p * query_size(a));
        Base::pack_values(a, chunk, packed + CHUNK * query_size(a));
    }
    static void score(const Attention& a, const Room& room, int64_t rows, const Span& span, const float* packed) {
        for (int64_t p = span.low / PANEL * PANEL; p < span.high; p += PANEL)
            score_panel(a, room, rows, packed + p * query_size(a), p);
    }
    static void mix(const Attention& a, const Room& room, int64_t rows, const Span& span, int64_t count, const float* packed) {
        Base::mix_packed(a, room, rows, span, count, packed + CHUNK * query_size(a));
    }

    static void score_few(const Attention& a, const Room& room, int64_t rows, const Span& span, const Chunk& chunk) {
        const RotatedChunk rotated(whole(a), chunk);
        for (int64_t p = span.low / PANEL * PANEL; p < span.high; p += PANEL) {
            pack_keys(a, chunk, rotated, p, room.panel);
            score_panel(a, room, rows, room.panel, p);
        }
    }

  private:
    // Keys [first, first + PANEL) of a chunk as [rank + rope][PANEL].
    static void pack_keys(const Attention& a, const Chunk& chunk, const RotatedChunk& rotated, int64_t first, float* panel) {
        float* rest = panel + a.head_dim * PANEL;
        constexpr bool SCALED = std::is_same_v<T, int8_t>;
        Base::template pack_panel<SCALED>(a, chunk, first, panel, rotated.scale);
        Base::template pack_panel<SCALED>(whole(a).rotated, rotated.chunk, first, rest, rotated.rotated_scale);
    }
    static void score_panel(const Attention& a, const Room& room, int64_t rows, const float* panel, int64_t p) {
        const auto load = [=](int64_t d, int n) { return wide(panel + d * PANEL + n * WIDE); };
        product_of_rows<COLUMNS>(rows, room.query, query_size(a), 0, query_size(a), load, room.scores + p, CHUNK);
    }
};

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

template <typename T> int attend_latent_by(Latent a, int threads) {
    std::unique_ptr<float[]> queries[2];
    if constexpr (LatentPath<T>::ROTATED) {
        queries[0] = rotated_queries(a, threads);
        queries[1] = rotated_queries(a.rotated, threads);
        if (!queries[0] || !queries[1]) return 1;
    }
    const Attending<LatentPath<T>> attending{a, threads};
    return attending.run_all(true) && attending.run_all(false) ? 0 : 1;
}

inline int attend_latent_any(const LatentTask& task, int threads) try {
    const Latent a(task);
    if (!is_sound(a)) return 2;
    if (a.cache_type == CACHE_INT8) return attend_latent_by<int8_t>(a, threads);
    if (a.cache_type == CACHE_INT4) return attend_latent_by<Int4>(a, threads);
    if (a.cache_type == CACHE_BF16) return attend_latent_by<uint16_t>(a, threads);
    return attend_latent_by<float>(a, threads);
} catch (const std::bad_alloc&) {
    return 1;
}

}  // namespace
