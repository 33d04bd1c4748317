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

// The scales of a chunk's int8 codes. Keys are decoded whole, since the two vectors of a position have scales of their own.
struct LatentScales {
    float latent[CHUNK], rotated[CHUNK];

    LatentScales(const Latent& a, const Chunk& chunk) {
        if (a.cache_type != CACHE_INT8) return;
        const float *from = static_cast<const float*>(a.value_scales), *rest = static_cast<const float*>(a.rotated.value_scales);
        for (int64_t p = 0; p < CHUNK; p++) latent[p] = from[chunk.at[p]], rotated[p] = rest[chunk.at[p]];
    }
};

// The interface is `FloatPath`'s.
template <typename T> struct LatentPath : FloatPath<T> {
    using Base = FloatPath<T>;
    using Base::PANEL;

    static const Latent& whole(const Attention& a) { return static_cast<const Latent&>(a); }
    static int64_t query_size(const Attention& a) { return Base::size(a) + Base::size(whole(a).rotated); }
    static int64_t panel_size(const Attention& a) { return PANEL * query_size(a); }
    static int64_t packed_size(const Attention& a) { return CHUNK * (query_size(a) + Base::size(a)); }

    static void take_query(const Attention& a, const Rows& rows, int64_t row, int64_t count, const Room& room) {
        const Attention& rotated = whole(a).rotated;
        for (int64_t r = 0; r < count; r++) {
            float* to = room.query + r * query_size(a);
            const int64_t at = rows.at(a, row + r);
            widen(a.query, a.query_type, at, a.head_dim, to);
            widen(rotated.query, rotated.query_type, at / a.head_dim * rotated.head_dim, rotated.head_dim, to + Base::size(a));
        }
    }

    static void pack(const Attention& a, const Chunk& chunk, float* packed) {
        const LatentScales scales(whole(a), chunk);
        for (int64_t p = 0; p < chunk.count; p += PANEL) pack_keys(a, chunk, scales, p, packed + p * query_size(a));
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
        const LatentScales scales(whole(a), chunk);
        for (int64_t p = span.low / PANEL * PANEL; p < span.high; p += PANEL) {
            pack_keys(a, chunk, scales, p, room.panel);
            score_panel(a, room, rows, room.panel, p);
        }
    }

  private:
    // Keys [first, first + PANEL) of a chunk as [sizes of rank and rope][PANEL].
    static void pack_keys(const Attention& a, const Chunk& chunk, const LatentScales& scales, int64_t first, float* panel) {
        float* rest = panel + Base::size(a) * PANEL;
        constexpr bool SCALED = std::is_same_v<T, int8_t>;
        Base::template pack_panel<SCALED>(a, chunk, first, panel, scales.latent);
        Base::template pack_panel<SCALED>(whole(a).rotated, chunk, first, rest, scales.rotated);
    }
    static void score_panel(const Attention& a, const Room& room, int64_t rows, const float* panel, int64_t p) {
        const auto load = [=](int64_t d, int n) { return wide(panel + d * PANEL + n * WIDE); };
        product_of_rows<COLUMNS>(rows, room.query, query_size(a), 0, query_size(a), load, room.scores + p, CHUNK);
    }
};

}  // namespace
