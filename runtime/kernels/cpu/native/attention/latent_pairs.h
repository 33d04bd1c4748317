// The products of latent attention in bf16 pairs (VDPBF16PS), for bf16 queries over caches of bf16 or int8, whose codes are exact in
// bf16. Each product takes the pairs in order, in one accumulator, so the bits of a row depend on no other row. Weights are rounded
// to bf16, as in attention_tiles.h.

#pragma once

#include "attention/latent_path.h"

#if defined(BF16_DOT) && defined(__AVX512BF16__) && VECTOR == 64
#define LATENT_PAIRS 1

namespace {

inline Wide dot_pairs(uint32_t x, Wide y, Wide sum) {
    return (Wide)_mm512_dpbf16_ps((__m512)sum, (__m512bh)_mm512_set1_epi32(int32_t(x)), (__m512bh)y);
}
// (first, second) of each lane as bf16; both are exact.
inline Wide pair_of(Wide first, Wide second) { return (Wide)((WideBits)first >> 16 | ((WideBits)second & 0xffff0000)); }

// c [M][N vectors] += a [M][from..to) times b [from..to)[N vectors], both in words of two values; `load(k, n)` reads b.
template <int M, int N, class Load>
inline void pair_product(const uint32_t* a, int64_t a_row, int64_t from, int64_t to, Load load, Wide (&sum)[M][N]) {
    for (int64_t k = from; k < to; k++) {
        Wide b[N];
#pragma GCC unroll 4
        for (int n = 0; n < N; n++) b[n] = load(k, n);
#pragma GCC unroll 6
        for (int m = 0; m < M; m++) {
#pragma GCC unroll 4
            for (int n = 0; n < N; n++) sum[m][n] = dot_pairs(a[m * a_row + k], b[n], sum[m][n]);
        }
    }
}
// Calls `each` with the number of rows as a constant and the first row, for all rows.
template <class Each> inline void by_rows(int64_t rows, Each each) {
    int64_t r = 0;
    for (; r + 6 <= rows; r += 6) each(std::integral_constant<int, 6>(), r);
    if (r + 4 <= rows) each(std::integral_constant<int, 4>(), r), r += 4;
    if (r + 2 <= rows) each(std::integral_constant<int, 2>(), r), r += 2;
    if (r < rows) each(std::integral_constant<int, 1>(), r);
}

// The interface is `FloatPath`'s; sizes are in words of two values.
template <typename T> struct LatentPairs : LatentPath<T> {
    using Base = LatentPath<T>;
    using Base::PANEL, Base::whole;
    static constexpr bool CODES = std::is_same_v<T, int8_t>;

    static int64_t query_size(const Attention& a) { return Base::query_size(a) / 2; }
    static int64_t weights_size() { return CHUNK / 2; }
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
    static auto keep(const Room& room, int64_t row) {
        return [to = reinterpret_cast<uint16_t*>(room.weights) + row * CHUNK](int64_t p, Wide weight) { put(to + p, weight); };
    }

    // Vectors of a panel's keys from position p that lie before `end`.
    static int64_t columns(int64_t p, int64_t end) { return std::min<int64_t>(COLUMNS, (end - p + WIDE - 1) / WIDE); }

    static void pack(const Attention& a, const Chunk& chunk, float* packed) {
        const int64_t end = (chunk.count + 31) / 32 * 32;  // as `Span` rounds what is scored
        for (int64_t p = 0; p < end; p += PANEL) pack_keys(a, chunk, p, columns(p, end), packed + p * query_size(a));
        float* scales = packed + CHUNK * query_size(a);
        if (CODES) new (scales) LatentScales(whole(a), chunk);
        pack_pairs(a, chunk, 0, chunk.count, scales + 2 * CHUNK);
    }
    static void score(const Attention& a, const Room& room, int64_t rows, const Span& span, const float* packed) {
        const float* scales = packed + CHUNK * query_size(a);
        for (int64_t p = span.low / PANEL * PANEL; p < span.high; p += PANEL)
            score_panel(a, room, rows, packed + p * query_size(a), p, columns(p, span.high), scales + p, scales + CHUNK + p);
    }
    static void mix(const Attention& a, const Room& room, int64_t rows, const Span& span, int64_t count, const float* packed) {
        mix_pairs(a, room, 0, rows, span.low, std::min(span.high, count), packed + CHUNK * query_size(a) + 2 * CHUNK);
    }
    static void score_few(const Attention& a, const Room& room, int64_t rows, const Span& span, const Chunk& chunk) {
        const LatentScales scales(whole(a), chunk);
        for (int64_t p = span.low / PANEL * PANEL; p < span.high; p += PANEL) {
            const int64_t count = columns(p, span.high);
            pack_keys(a, chunk, p, count, room.panel);
            score_panel(a, room, rows, room.panel, p, count, scales.latent + p, scales.rotated + p);
        }
    }
    static void mix_few(const Attention& a, const Room& room, int64_t rows, const Span& span, const Chunk& chunk) {
        const int64_t to = std::min(span.high, chunk.count);
        pack_pairs(a, chunk, span.low, to, room.panel);
        mix_pairs(a, room, 0, rows, span.low, to, room.panel);
    }
    static void mix_row(const Attention& a, const Room& room, int64_t row, int64_t from, int64_t to, const Chunk& chunk) {
        pack_pairs(a, chunk, from, to, room.panel);
        mix_pairs(a, room, row, 1, from, to, room.panel);
    }

  private:
    // Keys [first, first + PANEL) of a chunk, or their first `columns` vectors, as words [(rank + rope) / 2][PANEL].
    static void pack_keys(const Attention& a, const Chunk& chunk, int64_t first, int64_t columns, float* panel) {
        pack_words(a, chunk, first, columns, panel);
        pack_words(whole(a).rotated, chunk, first, columns, panel + a.head_dim / 2 * PANEL);
    }
    static void pack_words(const Attention& a, const Chunk& chunk, int64_t first, int64_t columns, float* panel) {
        constexpr int64_t EACH = 4 / sizeof(T), STEP = EACH * WIDE;  // values of a stored word; of a vector of words
        for (int64_t p = first; p < first + columns * WIDE; p += WIDE) {
            const T* keys[WIDE];
            for (int i = 0; i < WIDE; i++) keys[i] = key_vector<T>(a, chunk.at[p + i]);
            for (int64_t d = 0; d < a.head_dim; d += STEP) {
                const int64_t count = std::min<int64_t>(WIDE, (a.head_dim - d) / EACH);
                Wide v[WIDE];
                if (count == WIDE && p + WIDE <= chunk.count) {
#pragma GCC unroll 16
                    for (int i = 0; i < WIDE; i++) v[i] = wide(reinterpret_cast<const float*>(keys[i] + d));
                } else {
                    for (int i = 0; i < WIDE; i++) {
                        v[i] = Wide{};
                        if (p + i < chunk.count) memcpy(&v[i], keys[i] + d, size_t(count) * 4);
                    }
                }
                transpose(v);
                store_words(v, count, panel + d / 2 * PANEL + p - first);
            }
        }
    }
    static void store_words(const Wide (&v)[WIDE], int64_t count, float* to) {
#pragma GCC unroll 16
        for (int i = 0; i < WIDE; i++) {
            if (i >= count) return;
            if constexpr (!CODES) put(to + i * PANEL, v[i]);
            else
                for (int64_t half = 0; half < 2; half++)
                    put(to + (2 * i + half) * PANEL, pair_of(Base::value_of(v[i], 2 * half), Base::value_of(v[i], 2 * half + 1)));
        }
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

    // The values of positions [from, to) as words of two positions [CHUNK / 2][rank], 0 outside.
    static void pack_pairs(const Attention& a, const Chunk& chunk, int64_t from, int64_t to, float* pairs) {
        for (int64_t p = from / 2 * 2; p < to; p += 2) {
            const T *even = value_vector<T>(a, chunk.at[p]), *odd = value_vector<T>(a, chunk.at[p + 1]);
            for (int64_t d = 0; d < a.head_dim; d += WIDE) {
                const Wide first = p >= from ? wide(even + d) : Wide{};
                const Wide second = p + 1 < to ? wide(odd + d) : Wide{};
                put(pairs + p / 2 * a.head_dim + d, pair_of(first, second));
            }
        }
    }
    static void mix_pairs(const Attention& a, const Room& room, int64_t row, int64_t rows, int64_t from, int64_t to, const float* pairs) {
        const uint32_t* weights = reinterpret_cast<const uint32_t*>(room.weights) + row * (CHUNK / 2);
        const int64_t step = sums_of(a.head_dim), size = a.head_dim;
        const auto some = [&](auto columns, int64_t d) {
            const auto load = [=](int64_t p, int n) { return wide(pairs + p * size + d + n * WIDE); };
            by_rows(rows, [&](auto count, int64_t r) {
                constexpr int M = count, N = columns;
                Wide sum[M][N] = {};
                pair_product<M, N>(weights + r * (CHUNK / 2), CHUNK / 2, from / 2, (to + 1) / 2, load, sum);
                for (int m = 0; m < M; m++)
                    for (int n = 0; n < N; n++) put(room.sums + (row + r + m) * step + d + n * WIDE, sum[m][n]);
            });
        };
        int64_t d = 0;
        for (; d + COLUMNS * WIDE <= size; d += COLUMNS * WIDE) some(std::integral_constant<int, COLUMNS>(), d);
        for (; d < size; d += WIDE) some(std::integral_constant<int, 1>(), d);
    }
};

}  // namespace
#endif
