// The products of attention in bf16 pairs (VDPBF16PS), for bf16 queries over caches of bf16 or int8, whose codes are exact in bf16,
// and heads of a multiple of 16. Each product takes the pairs of dimensions or of positions in order, in one accumulator, so the bits
// of a row depend on no other row. Weights are rounded to bf16, as in attention_tiles.h.

#pragma once

#include "attention/attention_float.h"

#if defined(BF16_DOT) && defined(__AVX512BF16__) && VECTOR == 64
#define BF16_PAIRS 1

namespace {

inline Wide dot_pairs(uint32_t x, Wide y, Wide sum) {
    return (Wide)_mm512_dpbf16_ps((__m512)sum, (__m512bh)_mm512_set1_epi32(int32_t(x)), (__m512bh)y);
}

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
template <typename T> struct PairPath : FloatPath<T> {
    using Base = FloatPath<T>;
    using Base::PANEL;
    static constexpr bool CODES = std::is_same_v<T, int8_t>;

    static int64_t query_size(const Attention& a) { return a.head_dim / 2; }
    static int64_t weights_size() { return CHUNK / 2; }
    static int64_t panel_size(const Attention& a) { return PANEL * query_size(a); }
    static int64_t packed_size(const Attention& a) { return CHUNK * a.head_dim; }

    static void take_query(const Attention& a, const Rows& rows, int64_t row, int64_t count, const Room& room) {
        for (int64_t r = 0; r < count; r++)
            memcpy(room.query + r * query_size(a), static_cast<const uint16_t*>(a.query) + rows.at(a, row + r), size_t(a.head_dim) * 2);
    }
    static auto keep(const Room& room, int64_t row) {
        return [to = reinterpret_cast<uint16_t*>(room.weights) + row * CHUNK](int64_t p, Wide weight) { put(to + p, weight); };
    }

    static void pack(const Attention& a, const Chunk& chunk, float* packed) {
        const int64_t end = (chunk.count + 31) / 32 * 32;  // as `Span` rounds what is scored
        for (int64_t p = 0; p < end; p += PANEL) pack_words(a, chunk, p, columns(p, end), packed + p * query_size(a));
        pack_pairs(a, chunk, 0, chunk.count, packed + CHUNK * query_size(a));
    }
    static void score(const Attention& a, const Room& room, int64_t rows, const Span& span, const float* packed) {
        for (int64_t p = span.low / PANEL * PANEL; p < span.high; p += PANEL)
            score_panel(a, room, rows, packed + p * query_size(a), p, columns(p, span.high));
    }
    static void mix(const Attention& a, const Room& room, int64_t rows, const Span& span, int64_t count, const float* packed) {
        mix_pairs(a, room, 0, rows, span.low, std::min(span.high, count), packed + CHUNK * query_size(a));
    }

    static void score_few(const Attention& a, const Room& room, int64_t rows, const Span& span, const Chunk& chunk) {
        for (int64_t p = span.low / PANEL * PANEL; p < span.high; p += PANEL) {
            pack_words(a, chunk, p, columns(p, span.high), room.panel);
            score_panel(a, room, rows, room.panel, p, columns(p, span.high));
        }
    }
    static void mix_few(const Attention& a, const Room& room, int64_t rows, const Span& span, const Chunk& chunk) {
        mix_from(a, room, 0, rows, span.low, std::min(span.high, chunk.count), chunk);
    }
    static void mix_row(const Attention& a, const Room& room, int64_t row, int64_t from, int64_t to, const Chunk& chunk) {
        mix_from(a, room, row, 1, from, to, chunk);
    }

  protected:
    // Vectors of a panel's keys from position p that lie before `end`.
    static int64_t columns(int64_t p, int64_t end) { return std::min<int64_t>(COLUMNS, (end - p + WIDE - 1) / WIDE); }

    // Keys [first, first + PANEL) of a chunk, or their first `columns` vectors, as words [head_dim / 2][PANEL].
    static void pack_words(const Attention& a, const Chunk& chunk, int64_t first, int64_t columns, float* panel) {
        constexpr int64_t EACH = 4 / sizeof(T), STEP = EACH * WIDE;  // values of a stored word; of a vector of words
        for (int64_t p = first; p < first + columns * WIDE; p += WIDE) {
            const bool run = chunk.is_run(a, p, WIDE);
            const T* const keys = key_vector<T>(a, chunk.at[p]);
            for (int64_t d = 0; d < a.head_dim; d += STEP) {
                const int64_t count = std::min<int64_t>(WIDE, (a.head_dim - d) / EACH);
                float* const to = panel + d / 2 * PANEL + p - first;
                Wide v[WIDE];
                if (run && count == WIDE) {  // without 16 addresses, which registers do not hold
#pragma GCC unroll 16
                    for (int i = 0; i < WIDE; i++) v[i] = wide(reinterpret_cast<const float*>(keys + i * a.head_dim + d));
                    transpose(v);
#pragma GCC unroll 16
                    for (int i = 0; i < WIDE; i++) store_word(v[i], to + i * HALVES * PANEL);
                } else {
                    for (int i = 0; i < WIDE; i++) {
                        v[i] = Wide{};
                        if (p + i < chunk.count) memcpy(&v[i], key_vector<T>(a, chunk.at[p + i]) + d, size_t(count) * 4);
                    }
                    transpose(v);
                    for (int i = 0; i < count; i++) store_word(v[i], to + i * HALVES * PANEL);
                }
            }
        }
    }
    // The values of positions [from, to) as words of two positions [CHUNK / 2][head_dim], 0 outside.
    static void pack_pairs(const Attention& a, const Chunk& chunk, int64_t from, int64_t to, float* pairs) {
        for (int64_t p = from / 2; p < (to + 1) / 2; p++)
            for (int64_t d = 0; d < a.head_dim; d += WIDE) put(pairs + p * a.head_dim + d, pair_at(a, chunk, from, to, p, d));
    }
    static void mix_pairs(const Attention& a, const Room& room, int64_t row, int64_t rows, int64_t from, int64_t to, const float* pairs) {
        mix_with(a, room, row, rows, from, to, [=, size = a.head_dim](int64_t p, int64_t d) { return wide(pairs + p * size + d); });
    }

  private:
    // (first, second) of each lane as bf16; both are exact.
    static Wide pair_of(Wide first, Wide second) { return (Wide)((WideBits)first >> 16 | ((WideBits)second & 0xffff0000)); }
    static constexpr int64_t HALVES = CODES ? 2 : 1;  // words of two values in a stored word
    // A stored word of each lane as words of two values.
    static void store_word(Wide v, float* to) {
        if constexpr (!CODES) put(to, v);
        else
            for (int64_t half = 0; half < 2; half++)
                put(to + half * PANEL, pair_of(Base::value_of(v, 2 * half), Base::value_of(v, 2 * half + 1)));
    }
    // The values of the positions of pair p, those in [from, to), from dimension d.
    static Wide pair_at(const Attention& a, const Chunk& chunk, int64_t from, int64_t to, int64_t p, int64_t d) {
        const T *even = value_vector<T>(a, chunk.at[2 * p]) + d, *odd = value_vector<T>(a, chunk.at[2 * p + 1]) + d;
        const bool has_even = 2 * p >= from, has_odd = 2 * p + 1 < to;
        if constexpr (CODES) {
            return pair_of(has_even ? wide(even) : Wide{}, has_odd ? wide(odd) : Wide{});
        } else {
            const auto half = [](const T* at, bool has) { return has ? _mm256_loadu_si256(reinterpret_cast<const __m256i*>(at)) : __m256i{}; };
            const __m512i first = _mm512_cvtepu16_epi32(half(even, has_even)), second = _mm512_cvtepu16_epi32(half(odd, has_odd));
            return (Wide)_mm512_or_si512(first, _mm512_slli_epi32(second, 16));
        }
    }
    static void score_panel(const Attention& a, const Room& room, int64_t rows, const float* panel, int64_t p, int64_t columns) {
        if (columns > COLUMNS / 2) score_columns<COLUMNS>(a, room, rows, panel, p);
        else score_columns<COLUMNS / 2>(a, room, rows, panel, p);
    }
    template <int N> static void score_columns(const Attention& a, const Room& room, int64_t rows, const float* panel, int64_t p) {
        const uint32_t* query = reinterpret_cast<const uint32_t*>(room.query);
        const int64_t size = query_size(a);
        by_rows(rows, [&](auto count, int64_t r) {
            constexpr int M = count;
            Wide sum[M][N] = {};
            pair_product<M, N>(query + r * size, size, 0, size, [=](int64_t d, int n) { return wide(panel + d * PANEL + n * WIDE); }, sum);
            for (int m = 0; m < M; m++)
                for (int n = 0; n < N; n++) put(room.scores + (r + m) * CHUNK + p + n * WIDE, sum[m][n]);
        });
    }
    static void mix_from(const Attention& a, const Room& room, int64_t row, int64_t rows, int64_t from, int64_t to, const Chunk& chunk) {
        mix_with(a, room, row, rows, from, to, [&](int64_t p, int64_t d) { return pair_at(a, chunk, from, to, p, d); });
    }
    // `load(p, d)` reads a vector of pair p of positions, from dimension d.
    template <class Load>
    static void mix_with(const Attention& a, const Room& room, int64_t row, int64_t rows, int64_t from, int64_t to, Load load) {
        const uint32_t* weights = reinterpret_cast<const uint32_t*>(room.weights) + row * (CHUNK / 2);
        const int64_t step = sums_of(a.head_dim), size = a.head_dim;
        const auto some = [&](auto columns, int64_t d) {
            by_rows(rows, [&](auto count, int64_t r) {
                constexpr int M = count, N = columns;
                Wide sum[M][N] = {};
                const auto at = [&](int64_t p, int n) { return load(p, d + n * WIDE); };
                pair_product<M, N>(weights + r * (CHUNK / 2), CHUNK / 2, from / 2, (to + 1) / 2, at, sum);
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
