// The products of latent attention in bf16 pairs, as in attention_pairs.h.

#pragma once

#include "attention/attention_pairs.h"
#include "attention/latent_path.h"

#if BF16_PAIRS

namespace {

// The interface is `FloatPath`'s; sizes are in words of two values.
template <typename T> struct LatentPairs : PairPath<T> {
    using Base = PairPath<T>;
    using Base::PANEL, Base::CODES, Base::columns;

    static const Latent& whole(const Attention& a) { return LatentPath<T>::whole(a); }
    static int64_t query_size(const Attention& a) { return Base::query_size(a) + Base::query_size(whole(a).rotated); }
    static int64_t panel_size(const Attention& a) { return std::max(PANEL * query_size(a), CHUNK / 2 * a.head_dim); }
    static int64_t packed_size(const Attention& a) { return CHUNK * query_size(a) + 2 * CHUNK + CHUNK / 2 * a.head_dim; }

    static void take_query(const Attention& a, const Rows& rows, int64_t row, int64_t count, const Room& room) {
        const Attention& rotated = whole(a).rotated;
        for (int64_t r = 0; r < count; r++) {
            uint16_t* to = reinterpret_cast<uint16_t*>(room.query + r * query_size(a));
            const int64_t at = rows.at(a, row + r);
            memcpy(to, static_cast<const uint16_t*>(a.query) + at, size_t(a.head_dim) * 2);
            memcpy(to + a.head_dim, static_cast<const uint16_t*>(rotated.query) + at / a.head_dim * rotated.head_dim, size_t(rotated.head_dim) * 2);
        }
    }

    static void pack(const Attention& a, const Chunk& chunk, float* packed) {
        const int64_t end = (chunk.count + 31) / 32 * 32;  // as `Span` rounds what is scored
        for (int64_t p = 0; p < end; p += PANEL) pack_keys(a, chunk, p, columns(p, end), packed + p * query_size(a));
        float* scales = packed + CHUNK * query_size(a);
        if (CODES) new (scales) LatentScales(whole(a), chunk);
        Base::pack_pairs(a, chunk, 0, chunk.count, scales + 2 * CHUNK);
    }
    static void score(const Attention& a, const Room& room, int64_t rows, const Span& span, const float* packed) {
        const float* scales = packed + CHUNK * query_size(a);
        for (int64_t p = span.low / PANEL * PANEL; p < span.high; p += PANEL)
            score_panel(a, room, rows, packed + p * query_size(a), p, columns(p, span.high), scales + p, scales + CHUNK + p);
    }
    static void mix(const Attention& a, const Room& room, int64_t rows, const Span& span, int64_t count, const float* packed) {
        Base::mix_pairs(a, room, 0, rows, span.low, std::min(span.high, count), packed + CHUNK * query_size(a) + 2 * CHUNK);
    }
    static void score_few(const Attention& a, const Room& room, int64_t rows, const Span& span, const Chunk& chunk) {
        const LatentScales scales(whole(a), chunk);
        for (int64_t p = span.low / PANEL * PANEL; p < span.high; p += PANEL) {
            const int64_t count = columns(p, span.high);
            pack_keys(a, chunk, p, count, room.panel);
            score_panel(a, room, rows, room.panel, p, count, scales.latent + p, scales.rotated + p);
        }
    }
    // The heads of a latent are many rows, so its values are packed for them.
    static void mix_few(const Attention& a, const Room& room, int64_t rows, const Span& span, const Chunk& chunk) {
        const int64_t to = std::min(span.high, chunk.count);
        Base::pack_pairs(a, chunk, span.low, to, room.panel);
        Base::mix_pairs(a, room, 0, rows, span.low, to, room.panel);
    }

  private:
    // Keys [first, first + PANEL) of a chunk, or their first `columns` vectors, as words [(rank + rope) / 2][PANEL].
    static void pack_keys(const Attention& a, const Chunk& chunk, int64_t first, int64_t columns, float* panel) {
        Base::pack_words(a, chunk, first, columns, panel);
        Base::pack_words(whole(a).rotated, chunk, first, columns, panel + a.head_dim / 2 * PANEL);
    }
    static void score_panel(const Attention& a, const Room& room, int64_t rows, const float* panel, int64_t p, int64_t columns,
                            const float* scale, const float* rotated_scale) {
        if (columns > COLUMNS / 2) score_columns<COLUMNS>(a, room, rows, panel, p, scale, rotated_scale);
        else score_columns<COLUMNS / 2>(a, room, rows, panel, p, scale, rotated_scale);
    }
    template <int N>
    static void score_columns(const Attention& a, const Room& room, int64_t rows, const float* panel, int64_t p, const float* scale,
                              const float* rotated_scale) {
        const uint32_t* query = reinterpret_cast<const uint32_t*>(room.query);
        const int64_t size = query_size(a), rank = a.head_dim / 2;
        const auto load = [=](int64_t d, int n) { return wide(panel + d * PANEL + n * WIDE); };
        by_rows(rows, [&](auto count, int64_t r) {
            constexpr int M = count;
            Wide sum[M][N] = {}, rest[M][N] = {};
            pair_product<M, N>(query + r * size, size, 0, rank, load, sum);
            if constexpr (CODES) {
                for (int m = 0; m < M; m++)
                    for (int n = 0; n < N; n++) put(room.scores + (r + m) * CHUNK + p + n * WIDE, sum[m][n] * wide(scale + n * WIDE));
                pair_product<M, N>(query + r * size, size, rank, size, load, rest);
                for (int m = 0; m < M; m++)
                    for (int n = 0; n < N; n++) {
                        float* to = room.scores + (r + m) * CHUNK + p + n * WIDE;
                        put(to, multiply_add(rest[m][n], wide(rotated_scale + n * WIDE), wide(to)));
                    }
            } else {
                pair_product<M, N>(query + r * size, size, rank, size, load, sum);
                for (int m = 0; m < M; m++)
                    for (int n = 0; n < N; n++) put(room.scores + (r + m) * CHUNK + p + n * WIDE, sum[m][n]);
            }
        });
    }
};

}  // namespace
#endif
