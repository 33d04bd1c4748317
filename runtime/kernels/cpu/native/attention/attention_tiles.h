// The products of attention in AMX tiles of bf16, for bf16 queries over caches of bf16 or int8 (whose codes are exact in bf16).
// Weights are rounded to bf16, sums are fp32, over dimensions and positions 32 at a time in order.

#pragma once

#include <utility>

#include "attention/attention_task.h"
#include "products/packed_tiles.h"

namespace {

#if AMX

constexpr int TILE_SIZE = 16 * 32;  // of bf16

// The interface is `FloatPath`'s in attention_float.h. A row's weighted values are stored in the order that `values_at` packs
// them.
template <typename T> struct TilePath {
    static constexpr bool ROTATED = std::is_same_v<T, Int4>;  // the query is fp32 too
    static constexpr int64_t ROWS_AT_ONCE = 64;
    struct Setup {
        const Tiles tiles;
        explicit Setup(int64_t rows) : tiles(std::min<int64_t>(rows, 16), 64, 64) {}
    };

    static int64_t size(const Attention& a) { return (a.head_dim + 31) / 32 * 32; }
    static int64_t query_size(const Attention& a) { return size(a) / 2; }
    static int64_t weights_size() { return CHUNK / 2; }
    static int64_t panel_size(const Attention& a) { return packed_size(a); }
    static int64_t packed_size(const Attention& a) { return CHUNK * size(a); }

    static void take_query(const Attention& a, const Rows& rows, int64_t row, int64_t count, const Room& room) {
        uint16_t* to = reinterpret_cast<uint16_t*>(room.query);
        for (int64_t r = 0; r < count; r++)
            for (int64_t d = 0; d < size(a); d += 32, to += 32) {
                if constexpr (ROTATED) _mm512_store_si512(to, rounded(static_cast<const float*>(a.query) + rows.at(a, row + r) + d, mask_of(a, d)));
                else _mm512_store_si512(to, some(static_cast<const uint16_t*>(a.query) + rows.at(a, row + r), d, mask_of(a, d)));
            }
    }
    static auto keep(const Room& room, int64_t row) {
        return [to = reinterpret_cast<uint16_t*>(room.weights) + row * CHUNK](int64_t p, Wide weight) {
            _mm256_store_si256(reinterpret_cast<__m256i*>(to + p), (__m256i)_mm512_cvtneps_pbh(weight));
        };
    }

    static void pack(const Attention& a, const Chunk& chunk, float* packed) {
        pack_keys(a, chunk, 0, chunk.count, packed);
        pack_values(a, chunk, 0, chunk.count, packed);
    }
    // Tiles of keys and of values are read by all rows while they are in the L1 cache.
    static void score(const Attention& a, const Room& room, int64_t rows, const Span& span, const float* packed) {
        const uint16_t* query = reinterpret_cast<const uint16_t*>(room.query);
        for (int64_t p = span.low; p < span.high; p += 32)
            for (int64_t r = 0; r < rows; r += 32)
                score_keys(query + r * size(a), rows - r, size(a), keys_at(packed) + p * size(a), room.scores + r * CHUNK + p);
    }
    static void mix(const Attention& a, const Room& room, int64_t rows, const Span& span, int64_t, const float* packed) {
        const uint16_t* weights = reinterpret_cast<const uint16_t*>(room.weights);
        for (int64_t d = 0; d < size(a); d += 32)
            for (int64_t r = 0; r < rows; r += 32)
                mix_columns(weights + r * CHUNK, rows - r, values_at(a, packed) + d * CHUNK, span.low, span.high,
                            room.sums + r * sums_of(size(a)) + d, sums_of(size(a)));
    }

    static void score_few(const Attention& a, const Room& room, int64_t rows, const Span& span, const Chunk& chunk) {
        for (int64_t r = 0; r < rows; r += 16) {
            if (rows == 1) score_columns<1>(a, room, r, rows, span, chunk);
            else if (rows == 2) score_columns<2>(a, room, r, rows, span, chunk);
            else if (rows <= 4) score_columns<4>(a, room, r, rows, span, chunk);
            else if (rows <= 8) score_columns<8>(a, room, r, rows, span, chunk);
            else score_columns<16>(a, room, r, rows, span, chunk);
        }
    }
    static void mix_few(const Attention& a, const Room& room, int64_t rows, const Span& span, const Chunk& chunk) {
        pack_values(a, chunk, span.low, std::min(span.high, chunk.count), room.panel);
        mix(a, room, rows, span, chunk.count, room.panel);
    }
    static void mix_row(const Attention& a, const Room& room, int64_t row, int64_t from, int64_t to, const Chunk& chunk) {
        alignas(64) uint16_t weights[16 * CHUNK] = {};
        alignas(64) float sums[16][32];
        memcpy(weights, reinterpret_cast<const uint16_t*>(room.weights) + row * CHUNK, CHUNK * 2);
        pack_values(a, chunk, from, to, room.panel);
        for (int64_t d = 0; d < size(a); d += 32) {
            mix_columns(weights, 16, values_at(a, room.panel) + d * CHUNK, from / 32 * 32, (to + 31) / 32 * 32, sums[0], 32);
            memcpy(room.sums + row * sums_of(size(a)) + d, sums[0], sizeof sums[0]);
        }
    }

    static void write(const Attention& a, float* sums, float share, int64_t to) {
        const __m512i first = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
        const __m512i second = _mm512_add_epi32(first, _mm512_set1_epi32(8));
        uint16_t* out = static_cast<uint16_t*>(a.out) + to;
        for (int64_t d = 0; d < a.head_dim; d += 32) {
            const Wide low = wide(sums + d), high = wide(sums + d + 16);
            put(sums + d, _mm512_permutex2var_ps(low, first, high)), put(sums + d + 16, _mm512_permutex2var_ps(low, second, high));
        }
        if constexpr (ROTATED) rotate_vector(sums, a.head_dim);
        for (int64_t d = 0; d < a.head_dim; d += 32) {
            const __m512bh both = _mm512_cvtne2ps_pbh(wide(sums + d + 16) * share, wide(sums + d) * share);
            _mm512_mask_storeu_epi16(out + d, mask_of(a, d), (__m512i)both);
        }
    }

  private:
    static __mmask32 mask_of(const Attention& a, int64_t d) { return a.head_dim - d >= 32 ? ~__mmask32(0) : (__mmask32(1) << (a.head_dim - d)) - 1; }
    // 32 dimensions of a vector as bf16, those outside the mask 0.
    static __m512i some(const uint16_t* at, int64_t d) { return _mm512_loadu_si512(at + d); }
    static __m512i some(const uint16_t* at, int64_t d, __mmask32 mask) { return _mm512_maskz_loadu_epi16(mask, at + d); }
    static __m512i some(const int8_t* at, int64_t d) { return bf16_of(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(at + d))); }
    static __m512i some(const int8_t* at, int64_t d, __mmask32 mask) { return bf16_of(_mm256_maskz_loadu_epi8(mask, at + d)); }
    static __m512i some(Int4Vector at, int64_t d) { return int4_bf16(at, d, true); }
    static __m512i some(Int4Vector at, int64_t d, __mmask32 mask) { return mask ? int4_bf16(at, d, mask >> 16) : __m512i{}; }
    static __m512i rounded(const float* at, __mmask32 mask) { return (__m512i)_mm512_cvtne2ps_pbh(_mm512_maskz_loadu_ps(__mmask16(mask >> 16), at + 16), _mm512_loadu_ps(at)); }
    // A code is exact in the upper half of an fp32, so halves are moved, not rounded: even ones shifted down, odd ones masked.
    static __m512i bf16_of(__m256i codes) {
        const __m512i words = _mm512_cvtepi8_epi16(codes);
        const __m512i even = (__m512i)_mm512_cvtepi32_ps(_mm512_srai_epi32(_mm512_slli_epi32(words, 16), 16));
        const __m512i odd = (__m512i)_mm512_cvtepi32_ps(_mm512_srai_epi32(words, 16));
        return _mm512_or_si512(_mm512_srli_epi32(even, 16), odd);
    }

    // A packed chunk: keys as tiles [CHUNK / 16][size / 32] of 16 pairs of dimensions x 16 keys; then values as tiles
    // [size / 32][CHUNK / 32][2] of 16 pairs of positions x 16 dimensions, of which the first has 0-3, 8-11, 16-19, 24-27.
    static const uint16_t* keys_at(const float* packed) { return reinterpret_cast<const uint16_t*>(packed); }
    static const uint16_t* values_at(const Attention& a, const float* packed) { return keys_at(packed) + CHUNK * size(a); }

    // Positions [from, to); positions around them, up to multiples of 32, become 0. WHOLE: there are none, nor such dimensions.
    static bool is_whole(const Attention& a, int64_t from, int64_t to) { return from % 32 == 0 && to % 32 == 0 && a.head_dim % 32 == 0; }
    static void pack_keys(const Attention& a, const Chunk& chunk, int64_t from, int64_t to, float* packed) {
        if (is_whole(a, from, to)) pack_keys_as<true>(a, chunk, from, to, packed);
        else pack_keys_as<false>(a, chunk, from, to, packed);
    }
    static void pack_values(const Attention& a, const Chunk& chunk, int64_t from, int64_t to, float* packed) {
        if (is_whole(a, from, to)) pack_values_as<true>(a, chunk, from, to, packed);
        else pack_values_as<false>(a, chunk, from, to, packed);
    }
    template <bool WHOLE> static void pack_keys_as(const Attention& a, const Chunk& chunk, int64_t from, int64_t to, float* packed) {
        const int64_t wide_size = size(a);
        uint16_t* out = const_cast<uint16_t*>(keys_at(packed)) + from / 32 * 32 * wide_size;
        for (int64_t p = from / 32 * 32; p < (to + 31) / 32 * 32; p += 16) {
            decltype(key_vector<T>(a, 0)) keys[16];
            for (int i = 0; i < 16; i++) keys[i] = key_vector<T>(a, chunk.at[p + i]);
            for (int64_t d = 0; d < wide_size; d += 32, out += TILE_SIZE) {
                const __mmask32 mask = mask_of(a, d);
                Wide v[16];
#pragma GCC unroll 16
                for (int i = 0; i < 16; i++)
                    v[i] = (Wide)(WHOLE ? some(keys[i], d) : some(keys[i], d, p + i >= from && p + i < to ? mask : 0));
                transpose(v);
#pragma GCC unroll 16
                for (int i = 0; i < 16; i++) put(reinterpret_cast<float*>(out + i * 32), v[i]);
            }
        }
    }
    template <bool WHOLE> static void pack_values_as(const Attention& a, const Chunk& chunk, int64_t from, int64_t to, float* packed) {
        const int64_t wide_size = size(a);
        uint16_t* out = const_cast<uint16_t*>(values_at(a, packed));
        for (int64_t p = from / 32 * 32; p < (to + 31) / 32 * 32; p += 2) {
            const auto even = value_vector<T>(a, chunk.at[p]), odd = value_vector<T>(a, chunk.at[p + 1]);
            const __mmask32 has_even = p >= from && p < to ? ~__mmask32(0) : 0, has_odd = p + 1 >= from && p + 1 < to ? ~__mmask32(0) : 0;
            uint16_t* tile = out + p / 32 * 2 * TILE_SIZE + p % 32 / 2 * 32;
            for (int64_t d = 0; d < wide_size; d += 32, tile += 32 * CHUNK) {
                const __m512i first = WHOLE ? some(even, d) : some(even, d, mask_of(a, d) & has_even);
                const __m512i second = WHOLE ? some(odd, d) : some(odd, d, mask_of(a, d) & has_odd);
                _mm512_store_si512(tile, _mm512_unpacklo_epi16(first, second));
                _mm512_store_si512(tile + TILE_SIZE, _mm512_unpackhi_epi16(first, second));
            }
        }
    }

    // 16 keys from position p as rows of bf16: in place, or a copy with 0 past the head's dimensions.
    struct Lines {
        const uint16_t* at;
        int64_t bytes;  // stride of the keys
    };
    static Lines lines_of(const Attention& a, const Chunk& chunk, int64_t p, uint16_t* copy) {
        if constexpr (std::is_same_v<T, uint16_t>)
            if (a.head_dim % 32 == 0 && chunk.is_run(a, p, 16)) return {key_vector<T>(a, chunk.at[p]), a.head_dim * 2};
        const int64_t wide_size = size(a), whole = a.head_dim / 32 * 32;
        for (int64_t i = 0; i < 16; i++) {
            const auto key = key_vector<T>(a, chunk.at[p + i]);
            uint16_t* to = copy + i * wide_size;
            for (int64_t d = 0; d < whole; d += 32) _mm512_store_si512(to + d, some(key, d));
            if (whole < wide_size) _mm512_store_si512(to + whole, some(key, whole, mask_of(a, whole)));
        }
        return {copy, size(a) * 2};
    }

    // Scores of up to N rows of queries from `row`. Products commute: with the keys as left operand, in place, only the queries
    // are transposed, and the sums are those of `score_keys`. The result is [keys][N].
    template <int N>
    static void score_columns(const Attention& a, const Room& room, int64_t row, int64_t rows, const Span& span, const Chunk& chunk) {
        uint16_t* copies = reinterpret_cast<uint16_t*>(room.panel);  // of 64 keys: while 32 are copied, the 32 before are read
        uint16_t* query = copies + 64 * size(a);
        for (int64_t d = 0; d < size(a); d += 32) {
            Wide v[16];
            for (int64_t i = 0; i < 16; i++)
                v[i] = row + i < rows ? wide(room.query + ((row + i) * size(a) + d) / 2) : Wide{};
            transpose(v);
            for (int64_t i = 0; i < 16; i++) memcpy(query + (d / 2 + i) * 2 * N, &v[i], 4 * N);
        }
        const Tiles tiles(16, 64, 4 * N);
        alignas(64) float products[CHUNK * N];
        Lines lines[2][2];
        for (int64_t p = span.low; p < span.high + 32; p += 32) {
            if (p < span.high)
                for (int64_t i = 0; i < 2; i++) lines[p / 32 % 2][i] = lines_of(a, chunk, p + 16 * i, copies + (p % 64 + 16 * i) * size(a));
            if (p == span.low) continue;
            const Lines &first = lines[p / 32 % 2 ^ 1][0], &second = lines[p / 32 % 2 ^ 1][1];
            TILE_ZERO(0);
            TILE_ZERO(1);
            for (int64_t d = 0; d < size(a); d += 32) {
                TILE_LOAD(6, query + d * N, 4 * N);
                TILE_LOAD(4, first.at + d, first.bytes);
                TILE_DOT_BF16(0, 4, 6);
                TILE_LOAD(5, second.at + d, second.bytes);
                TILE_DOT_BF16(1, 5, 6);
            }
            TILE_STORE(products + (p - 32) * N, 4 * N, 0);
            TILE_STORE(products + (p - 16) * N, 4 * N, 1);
        }
        for (int64_t p = span.low; p < span.high; p += 16) {
            Wide v[N];
#pragma GCC unroll 16
            for (int i = 0; i < N; i++) v[i] = wide(products + p * N + i * 16);
            put_columns<N>(v, room.scores + row * CHUNK + p, CHUNK);
        }
    }
    // The columns of [16][N], `step` apart.
    template <int N> static void put_columns(const Wide* v, float* to, int64_t step) {
        if constexpr (N == 1) put(to, v[0]);
        else {
            constexpr WideInt evens{0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30};
            Wide even[N / 2], odd[N / 2];
#pragma GCC unroll 8
            for (int i = 0; i < N / 2; i++) {
                even[i] = __builtin_shuffle(v[2 * i], v[2 * i + 1], evens);
                odd[i] = __builtin_shuffle(v[2 * i], v[2 * i + 1], evens + 1);
            }
            put_columns<N / 2>(even, to, 2 * step);
            put_columns<N / 2>(odd, to + step, 2 * step);
        }
    }

    // Multiplies up to 32 rows a [rows][a_row], columns `low` to `high`, by 32 columns, to `out` [rows][out_row]. `tiles`: the
    // two tiles of the 32 columns that belong to columns [p, p + 32) of a.
    template <class Tiles>
    static void multiply_square(const uint16_t* a, int64_t rows, int64_t a_row, int64_t low, int64_t high, Tiles tiles, float* out, int64_t out_row) {
        TILE_ZERO(0);
        TILE_ZERO(1);
        if (rows > 16) {
            TILE_ZERO(2);
            TILE_ZERO(3);
        }
        for (int64_t p = low; p < high; p += 32) {
            const std::pair<const uint16_t*, const uint16_t*> both = tiles(p);
            TILE_LOAD(6, both.first, 64);
            TILE_LOAD(4, a + p, a_row * 2);
            TILE_DOT_BF16(0, 4, 6);
            TILE_LOAD(7, both.second, 64);
            TILE_DOT_BF16(1, 4, 7);
            if (rows <= 16) continue;
            TILE_LOAD(5, a + 16 * a_row + p, a_row * 2);
            TILE_DOT_BF16(2, 5, 6);
            TILE_DOT_BF16(3, 5, 7);
        }
        TILE_STORE(out, out_row * 4, 0);
        TILE_STORE(out + 16, out_row * 4, 1);
        if (rows <= 16) return;
        TILE_STORE(out + 16 * out_row, out_row * 4, 2);
        TILE_STORE(out + 16 * out_row + 16, out_row * 4, 3);
    }
    // Scores of up to 32 rows of queries [rows][size] with 32 keys, to `out` [rows][CHUNK].
    static void score_keys(const uint16_t* query, int64_t rows, int64_t size, const uint16_t* keys, float* out) {
        const auto tiles = [=](int64_t d) { return std::make_pair(keys + d * 16, keys + (size + d) * 16); };
        multiply_square(query, rows, size, 0, size, tiles, out, CHUNK);
    }
    // 32 columns of up to 32 rows of weights [rows][CHUNK] times values [low, high), to `out`.
    static void mix_columns(const uint16_t* weights, int64_t rows, const uint16_t* values, int64_t low, int64_t high, float* out, int64_t out_row) {
        const auto tiles = [=](int64_t p) {
            const uint16_t* value = values + p / 32 * 2 * TILE_SIZE;
            return std::make_pair(value, value + TILE_SIZE);
        };
        multiply_square(weights, rows, CHUNK, low, high, tiles, out, out_row);
    }
};

#endif

}  // namespace
