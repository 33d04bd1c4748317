// The products of attention in fp32, for every cache type and processor: a dot product is summed over the dimensions one by one,
// a weighted sum over the positions one by one, each in one accumulator. Heads of any size: vectors in memory of their own are
// padded with zeros, and nothing after a vector of the cache is read.

#pragma once

#include "attention/attention_task.h"

namespace {

#if defined(__AVX512F__)
constexpr int COLUMNS = 4;  // vectors of the result in registers, for 6 rows
#else
constexpr int COLUMNS = 2;
#endif

// c [M][N vectors] = a [M][from..to) times b [from..to)[N vectors], which `load(k, n)` reads.
template <int M, int N, class Load>
inline void product(const float* a, int64_t a_row, int64_t from, int64_t to, Load load, float* c, int64_t c_row) {
    Wide sum[M][N] = {};
    for (int64_t k = from; k < to; k++) {
        Wide b[N];
#pragma GCC unroll 4
        for (int n = 0; n < N; n++) b[n] = load(k, n);
#pragma GCC unroll 6
        for (int m = 0; m < M; m++) {
            const Wide x = spread(a[m * a_row + k]);
#pragma GCC unroll 4
            for (int n = 0; n < N; n++) sum[m][n] = multiply_add(x, b[n], sum[m][n]);
        }
    }
    for (int m = 0; m < M; m++)
        for (int n = 0; n < N; n++) put(c + m * c_row + n * WIDE, sum[m][n]);
}
template <int N, class Load>
inline void product_of_rows(int64_t rows, const float* a, int64_t a_row, int64_t from, int64_t to, Load load, float* c, int64_t c_row) {
    int64_t r = 0;
    for (; r + 6 <= rows; r += 6) product<6, N>(a + r * a_row, a_row, from, to, load, c + r * c_row, c_row);
    if (r + 4 <= rows) product<4, N>(a + r * a_row, a_row, from, to, load, c + r * c_row, c_row), r += 4;
    if (r + 2 <= rows) product<2, N>(a + r * a_row, a_row, from, to, load, c + r * c_row, c_row), r += 2;
    if (r < rows) product<1, N>(a + r * a_row, a_row, from, to, load, c + r * c_row, c_row);
}

// One implementation of the products that `attend` in attention.h needs. Sizes are in floats.
template <typename T> struct FloatPath {
    static constexpr bool ROTATED = std::is_same_v<T, Int4>;
    static constexpr int64_t ROWS_AT_ONCE = 48, PANEL = COLUMNS * WIDE;  // PANEL: keys multiplied together

    struct Setup {  // what products of weights and values keep in registers or tiles while they run
        explicit Setup(int64_t) {}
    };

    static int64_t size(const Attention& a) { return (a.head_dim + WIDE - 1) / WIDE * WIDE; }  // of the weighted values of a row
    static int64_t query_size(const Attention& a) { return size(a); }  // of the query of a row
    static int64_t weights_size() { return 0; }  // none: weights replace the scores of a row
    static int64_t panel_size(const Attention& a) { return PANEL * size(a); }
    static int64_t packed_size(const Attention& a) { return 2 * CHUNK * size(a); }

    static void take_query(const Attention& a, const Rows& rows, int64_t row, int64_t count, const Room& room) {
        for (int64_t r = 0; r < count; r++)
            widen(a.query, a.query_type, rows.at(a, row + r), a.head_dim, room.query + r * query_size(a));
    }
    static auto keep(const Room& room, int64_t row) {
        return [to = room.scores + row * CHUNK](int64_t p, Wide weight) { put(to + p, weight); };
    }

    // A chunk that many rows read: packed once, keys in panels, then values.
    static void pack(const Attention& a, const Chunk& chunk, float* packed) {
        for (int64_t p = 0; p < chunk.count; p += PANEL) pack_panel(a, chunk, p, packed + p * size(a));
        pack_values(a, chunk, packed + CHUNK * size(a));
    }
    static void pack_values(const Attention& a, const Chunk& chunk, float* values) {
        const int64_t whole = a.head_dim / WIDE * WIDE;
        for (int64_t p = 0; p < chunk.count; p++, values += size(a)) {
            const auto vector = value_vector<T>(a, chunk.at[p]);
            for (int64_t d = 0; d < whole; d += WIDE) put(values + d, values_at(vector, d));
            if (whole < a.head_dim) put(values + whole, last_values(vector, whole, a.head_dim));
        }
    }
    static void score(const Attention& a, const Room& room, int64_t rows, const Span& span, const float* packed) {
        for (int64_t p = span.low / PANEL * PANEL; p < span.high; p += PANEL)
            score_panel(a, room, rows, packed + p * size(a), p);
    }
    static void mix(const Attention& a, const Room& room, int64_t rows, const Span& span, int64_t count, const float* packed) {
        mix_packed(a, room, rows, span, count, packed + CHUNK * size(a));
    }
    static void mix_packed(const Attention& a, const Room& room, int64_t rows, const Span& span, int64_t count, const float* values) {
        const int64_t step = size(a);
        const auto load = [=](int64_t p, int64_t d) { return wide(values + p * step + d); };
        const auto load_last = [=, whole = a.head_dim / WIDE * WIDE](int64_t p) { return load(p, whole); };
        mix_with(a, room, 0, rows, span.low, std::min(span.high, count), load, load_last);
    }

    // A chunk that few rows read: one panel of keys at a time, values in place.
    static void score_few(const Attention& a, const Room& room, int64_t rows, const Span& span, const Chunk& chunk) {
        for (int64_t p = span.low / PANEL * PANEL; p < span.high; p += PANEL) {
            pack_panel(a, chunk, p, room.panel);
            score_panel(a, room, rows, room.panel, p);
        }
    }
    static void mix_few(const Attention& a, const Room& room, int64_t rows, const Span& span, const Chunk& chunk) {
        mix_from(a, room, 0, rows, span.low, std::min(span.high, chunk.count), chunk);
    }
    // One row over [from, to).
    static void mix_row(const Attention& a, const Room& room, int64_t row, int64_t from, int64_t to, const Chunk& chunk) {
        mix_from(a, room, row, 1, from, to, chunk);
    }

    static void write(const Attention& a, float* sums, float share, int64_t to) {
        if constexpr (ROTATED) rotate_vector(sums, a.head_dim);
        for (int64_t d = 0; d < a.head_dim; d += WIDE) {
            const Wide v = wide(sums + d) * share;
            if (a.out_type == F32) write_vector(static_cast<float*>(a.out) + to + d, v, a.head_dim - d);
            else write_vector(static_cast<uint16_t*>(a.out) + to + d, v, a.head_dim - d);
        }
    }

  protected:
    template <typename U> static Wide values_at(const U* vector, int64_t d) { return wide(vector + d); }
    static Wide values_at(Int4Vector vector, int64_t d) { return wide(vector, d); }
    // Values [from, size), fewer than a vector.
    template <typename U> static Wide last_values(const U* vector, int64_t from, int64_t size) { return first_of(vector + from, size - from); }
    static Wide last_values(Int4Vector, int64_t, int64_t) { return Wide{}; }  // there are none
    template <typename U> static void write_vector(U* to, Wide v, int64_t count) {
        if (count >= WIDE) put(to, v);
        else put_first(to, v, count);
    }
    // Keys [first, first + PANEL) of a chunk as [size][PANEL], 0 past the last. Words of several values are transposed whole
    // and split afterwards: bf16 takes half the shuffles, int8 a fourth.
    // SCALED: each key is multiplied by its entry of `scale`.
    template <bool SCALED = false>
    static void pack_panel(const Attention& a, const Chunk& chunk, int64_t first, float* panel, const float* scale = nullptr) {
        if constexpr (ROTATED) pack_codes(a, chunk, first, panel);
        else pack_whole<SCALED>(a, chunk, first, panel, scale);
    }
    template <bool SCALED> static void pack_whole(const Attention& a, const Chunk& chunk, int64_t first, float* panel, const float* scale) {
        constexpr int64_t EACH = 4 / sizeof(T), STEP = EACH * WIDE;  // values of a word; values of a vector of words
        const int64_t whole = EACH > 1 ? a.head_dim / STEP * STEP : 0, even = a.head_dim / WIDE * WIDE;
        for (int64_t p = first; p < first + PANEL; p += WIDE) {
            float* to = panel + p - first;
            const T* keys[WIDE];
            for (int i = 0; i < WIDE; i++) keys[i] = key_vector<T>(a, chunk.at[p + i]);
            Wide v[WIDE];
            const auto keep = [&, by = SCALED ? wide(scale + p) : Wide{}](float* at, Wide values) { put(at, SCALED ? values * by : values); };
            for (int64_t d = 0; d < whole; d += STEP) {
#pragma GCC unroll 16
                for (int i = 0; i < WIDE; i++)
                    v[i] = p + i < chunk.count ? wide(reinterpret_cast<const float*>(keys[i] + d)) : Wide{};
                transpose(v);
#pragma GCC unroll 16
                for (int i = 0; i < WIDE; i++)
                    for (int64_t part = 0; part < EACH; part++) keep(to + (d + i * EACH + part) * PANEL, value_of(v[i], part));
            }
            for (int64_t d = whole; d < even; d += WIDE) {
#pragma GCC unroll 16
                for (int i = 0; i < WIDE; i++) v[i] = p + i < chunk.count ? wide(keys[i] + d) : Wide{};
                transpose(v);
#pragma GCC unroll 16
                for (int i = 0; i < WIDE; i++) keep(to + (d + i) * PANEL, v[i]);
            }
            if (even < a.head_dim) pack_last(a, chunk, p, to + even * PANEL, SCALED ? wide(scale + p) : spread(1.0f));
        }
    }
    // The dimensions of `pack_whole` after the last whole vector, times `by`. Not inlined: heads without them would be slower.
    __attribute__((noinline)) static void pack_last(const Attention& a, const Chunk& chunk, int64_t p, float* to, Wide by) {
        const int64_t even = a.head_dim / WIDE * WIDE;
        Wide v[WIDE];
        for (int i = 0; i < WIDE; i++)
            v[i] = p + i < chunk.count ? last_values(key_vector<T>(a, chunk.at[p + i]), even, a.head_dim) : Wide{};
        transpose(v);
        for (int i = 0; i < WIDE; i++) put(to + i * PANEL, v[i] * by);
    }
    // `pack_whole` for words of eight codes, times their scales.
    static void pack_codes(const Attention& a, const Chunk& chunk, int64_t first, float* panel) {
        const int64_t words = a.head_dim / 8;
        for (int64_t p = first; p < first + PANEL; p += WIDE) {
            Int4Vector keys[WIDE];
            for (int i = 0; i < WIDE; i++) keys[i] = key_vector<T>(a, chunk.at[p + i]);
            for (int64_t w = 0; w < words; w += WIDE) {
                Wide v[WIDE];
#pragma GCC unroll 16
                for (int i = 0; i < WIDE; i++)
                    v[i] = p + i < chunk.count ? words_of(keys[i].codes + w * 4, words - w) : Wide{};
                transpose(v);
                Wide scale = {};
                for (int64_t i = 0; i < WIDE && w + i < words; i++) {
                    const int64_t d = (w + i) / 2 * UNIT + (w + i) % 2 * 4;  // dimension of the word's first code
                    if (d % INT4_GROUP == 0)
                        for (int j = 0; j < WIDE; j++) scale[j] = p + j < chunk.count ? keys[j].scale(d) : 0;
                    float* to = panel + d * PANEL + p - first;
#pragma GCC unroll 8
                    for (int place = 0; place < 8; place++)
                        put(to + (place % 4 + place / 4 * 8) * PANEL, code_of((WideBits)v[i], place) * scale);
                }
            }
        }
    }
    // The values at index `part` of every word.
    static Wide value_of(Wide words, int64_t part) {
        if constexpr (std::is_same_v<T, float>) return words;
        else if constexpr (std::is_same_v<T, uint16_t>) return (Wide)(part ? (WideBits)words & 0xffff0000 : (WideBits)words << 16);
        else return __builtin_convertvector((WideInt)((WideBits)words << (24 - 8 * part)) >> 24, Wide);
    }
    static void score_panel(const Attention& a, const Room& room, int64_t rows, const float* panel, int64_t p) {
        const auto load = [=](int64_t d, int n) { return wide(panel + d * PANEL + n * WIDE); };
        product_of_rows<COLUMNS>(rows, room.query, query_size(a), 0, a.head_dim, load, room.scores + p, CHUNK);
    }
    static void mix_from(const Attention& a, const Room& room, int64_t row, int64_t rows, int64_t from, int64_t to, const Chunk& chunk) {
        mix_with(a, room, row, rows, from, to, [&](int64_t p, int64_t d) { return values_at(value_vector<T>(a, chunk.at[p]), d); },
                 [&](int64_t p) { return last_values(value_vector<T>(a, chunk.at[p]), a.head_dim / WIDE * WIDE, a.head_dim); });
    }
    // `load(p, d)` reads a vector of values, `load_last(p)` the last one if it is not whole.
    template <class Load, class LoadLast>
    static void mix_with(const Attention& a, const Room& room, int64_t row, int64_t rows, int64_t from, int64_t to, Load load, LoadLast load_last) {
        const int64_t step = sums_of(size(a)), whole = a.head_dim / WIDE * WIDE;
        const auto some = [&](auto columns, int64_t d) {
            const auto at = [=](int64_t p, int n) { return load(p, d + n * WIDE); };
            product_of_rows<columns>(rows, room.scores + row * CHUNK, CHUNK, from, to, at, room.sums + row * step + d, step);
        };
        int64_t d = 0;
        for (; d + COLUMNS * WIDE <= whole; d += COLUMNS * WIDE) some(std::integral_constant<int, COLUMNS>(), d);
        for (; d < whole; d += WIDE) some(std::integral_constant<int, 1>(), d);
        if constexpr (!ROTATED)  // int4 vectors are multiples of 16
            if (d < a.head_dim) mix_last(rows, room.scores + row * CHUNK, from, to, load_last, room.sums + row * step + d, step);
    }
    template <class Load> __attribute__((noinline))
    static void mix_last(int64_t rows, const float* weights, int64_t from, int64_t to, Load load, float* sums, int64_t step) {
        const auto at = [&](int64_t p, int) { return load(p); };
        product_of_rows<1>(rows, weights, CHUNK, from, to, at, sums, step);
    }
};

}  // namespace
