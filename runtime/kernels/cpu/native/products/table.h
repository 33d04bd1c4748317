// Weights whose codes are 8-bit floats or entries of a table of 16 values, times a scale of their group, decoded 16 at a time in
// registers. Scales are not folded into the values: a group is summed first.

#pragma once

#include <vector>

#include "steps.h"

namespace {

constexpr int64_t TABLE_TASK = 16;  // rows of a weight that a thread takes at a time

enum TableKind : int32_t { TABLE_4_BITS = 0, TABLE_E4M3 = 1, TABLE_E5M2 = 2 };

struct TableWeight {  // mirrored by build.py
    const uint8_t* codes;  // [rows, stride] bytes, the first code of a byte in its low half
    const void* scales;  // [rows, inputs / group] of scale_type, F32 or BF16
    const float* values;  // 16, for TABLE_4_BITS
    int64_t rows, inputs, stride, group;  // group: a multiple of 16
    int32_t kind, scale_type;
    int32_t portable;  // whether sums have LANE lanes, in one order, on every processor
};

constexpr int CODE_VECTORS = LANE / WIDE;  // vectors that 16 codes fill

struct FourBits {
    static constexpr float FACTOR = 1;
    Wide values[CODE_VECTORS];
    explicit FourBits(const TableWeight& t) { memcpy(values, t.values, sizeof values); }
    static constexpr int64_t bytes(int64_t codes) { return codes / 2; }
#if defined(__AVX512F__)
    // Lanes 0 to 7 take the nibbles of the first word, 8 to 15 those of the second.
    void decode(const uint8_t* at, Wide (&w)[1]) const {
        const __m512i pair = _mm512_castsi128_si512(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(at)));
        const __m512i words = _mm512_permutexvar_epi32(_mm512_set_epi64(1LL << 32 | 1, 1LL << 32 | 1, 1LL << 32 | 1,
                                                                        1LL << 32 | 1, 0, 0, 0, 0), pair);
        w[0] = entries(words, WideInt{0, 4, 8, 12, 16, 20, 24, 28, 0, 4, 8, 12, 16, 20, 24, 28});
    }
    // The same 16 in another order, which saves an instruction: 0, 8, 1, 9, ..., 7, 15. `arrange` puts the activations in it.
    void arranged(const uint8_t* at, Wide (&w)[1]) const {
        int64_t both;
        memcpy(&both, at, 8);
        w[0] = entries(_mm512_set1_epi64(both), WideInt{0, 0, 4, 4, 8, 8, 12, 12, 16, 16, 20, 20, 24, 24, 28, 28});
    }
    static V16 arrange(V16 x) { return __builtin_shuffle(x, I16{0, 8, 1, 9, 2, 10, 3, 11, 4, 12, 5, 13, 6, 14, 7, 15}); }
    static constexpr int place(int code) { return code % 8 * 2 + code / 8; }  // the lane of a code
    Wide entries(__m512i words, WideInt shift) const {
        return _mm512_permutexvar_ps(_mm512_srlv_epi32(words, (__m512i)shift), values[0]);
    }
#else
    void decode(const uint8_t* at, Wide (&w)[2]) const {
        uint32_t words[2];
        memcpy(words, at, 8);
        for (int part = 0; part < CODE_VECTORS; part++) {
            const WideInt index = (WideInt)((WideBits{} + words[part]) >> WideBits{0, 4, 8, 12, 16, 20, 24, 28});
#if defined(__AVX2__)
            const Wide low = _mm256_permutevar8x32_ps(values[0], (__m256i)index), high = _mm256_permutevar8x32_ps(values[1], (__m256i)index);
            w[part] = _mm256_blendv_ps(low, high, (Wide)(index << 28));
#else
            w[part] = __builtin_shuffle(values[0], values[1], index & 15);
#endif
        }
    }
    void arranged(const uint8_t* at, Wide (&w)[2]) const { decode(at, w); }
    static V16 arrange(V16 x) { return x; }
    static constexpr int place(int code) { return code; }
#endif
};

// As fp16, which processors convert: E5M2 is the upper byte of an fp16; E4M3 has one exponent bit less and a bias of 7, where
// fp16 has 15, so the result is multiplied by FACTOR.
template <int MANTISSA> struct EightBits {
    static constexpr float FACTOR = MANTISSA == 3 ? 256 : 1;
    explicit EightBits(const TableWeight&) {}
    static constexpr int64_t bytes(int64_t codes) { return codes; }
    void decode(const uint8_t* at, Wide (&w)[CODE_VECTORS]) const {
        typedef int8_t Bytes __attribute__((vector_size(16)));
        typedef int16_t Halves __attribute__((vector_size(32)));
        Bytes codes;
        memcpy(&codes, at, 16);
#if defined(__AVX2__)
        const Halves wider = (Halves)_mm256_cvtepi8_epi16((__m128i)codes);
#else
        const Halves wider = __builtin_convertvector(codes, Halves);
#endif
        const Halves half = MANTISSA == 3 ? (wider << 7) & int16_t(0xbfff) : wider << 8;
        uint16_t halves[LANE];
        memcpy(halves, &half, sizeof half);
        for (int part = 0; part < CODE_VECTORS; part++) w[part] = wide(halves, part * WIDE, F16);
    }
    void arranged(const uint8_t* at, Wide (&w)[CODE_VECTORS]) const { decode(at, w); }
    static V16 arrange(V16 x) { return x; }
    static constexpr int place(int code) { return code; }
};

template <class Use> inline void by_kind(const TableWeight& t, Use use) {
    if (t.kind == TABLE_4_BITS) return use(FourBits(t));
    if (t.kind == TABLE_E4M3) return use(EightBits<3>(t));
    use(EightBits<2>(t));
}

inline float scale_at(const TableWeight& t, int64_t index) {
    if (t.scale_type == F32) return static_cast<const float*>(t.scales)[index];
    const uint32_t word = uint32_t(static_cast<const uint16_t*>(t.scales)[index]) << 16;
    float scale;
    memcpy(&scale, &word, 4);
    return scale;
}

inline Wide spread_scale(const TableWeight& t, int64_t index) {
#if defined(__AVX512BW__)
    if (t.scale_type != F32)
        return (Wide)_mm512_slli_epi32(_mm512_set1_epi16(static_cast<const int16_t*>(t.scales)[index]), 16);
#endif
    return spread(scale_at(t, index));
}

template <class Codes> inline float sum_in_order(const Wide (&v)[CODE_VECTORS]) {
    float lanes[LANE], sum = 0;
    memcpy(lanes, v, sizeof lanes);
    for (int code = 0; code < LANE; code++) sum += lanes[Codes::place(code)];
    return sum;
}

// x fp32 [M, inputs], arranged, times R rows from n, to y [R][M]: sums over a group, then over groups, in an order that does not
// depend on M and R. Portable sums have LANE lanes, others one vector.
template <bool PORTABLE, int M, int R, class Codes>
inline void table_rows(const TableWeight& t, const Codes& codes, int64_t n, const float* x, float (*y)[M]) {
    constexpr int SUMS = PORTABLE ? CODE_VECTORS : 1;
    const int64_t groups = t.inputs / t.group;
    const uint8_t* at = t.codes + n * t.stride;
    Wide all[R][M][SUMS] = {};
    for (int64_t g = 0; g < groups; g++) {
        Wide sum[R][M][SUMS] = {};
        for (int64_t i = g * t.group; i < (g + 1) * t.group; i += LANE)
            for (int r = 0; r < R; r++) {
                Wide w[CODE_VECTORS];
                codes.arranged(at + r * t.stride + Codes::bytes(i), w);
                for (int part = 0; part < CODE_VECTORS; part++)
                    for (int m = 0; m < M; m++) {
                        Wide& to = sum[r][m][part % SUMS];
                        to = multiply_add(w[part], wide(x + m * t.inputs + i + part * WIDE), to);
                    }
            }
        for (int r = 0; r < R; r++) {
            const Wide scale = spread_scale(t, (n + r) * groups + g);
            for (int m = 0; m < M; m++)
                for (int i = 0; i < SUMS; i++) all[r][m][i] = multiply_add(sum[r][m][i] * Codes::FACTOR, scale, all[r][m][i]);
        }
    }
    for (int r = 0; r < R; r++)
        for (int m = 0; m < M; m++)
            if constexpr (PORTABLE) y[r][m] = sum_in_order<Codes>(all[r][m]);
            else y[r][m] = total(all[r][m][0]);
}

// M rows of x from row m times rows [first, end) of the weight, R at a time: as many sums as registers hold.
template <bool PORTABLE, int M, int R, class Codes, class Put>
inline void table_block(const TableWeight& t, const Codes& codes, int64_t first, int64_t end, const float* x, int64_t m, Put put) {
    int64_t n = first;
    for (float y[R][M]; n + R <= end; n += R) {
        table_rows<PORTABLE, M, R>(t, codes, n, x + m * t.inputs, y);
        for (int r = 0; r < R; r++)
            for (int each = 0; each < M; each++) put(m + each, n + r, y[r][each]);
    }
    if constexpr (R > 1) table_block<PORTABLE, M, 1>(t, codes, n, end, x, m, put);
}

// Rows x fp32 [rows, inputs], arranged, times rows [first, end) of the weight; each product is passed on with its row of x and of
// the weight.
template <bool PORTABLE, class Codes, class Put>
inline void table_part_as(const TableWeight& t, const Codes& codes, int64_t first, int64_t end, const float* x, int64_t rows, Put put) {
    int64_t m = 0;
    for (; m + 4 <= rows; m += 4) table_block<PORTABLE, 4, WIDE / 4>(t, codes, first, end, x, m, put);
    for (; m + 2 <= rows; m += 2) table_block<PORTABLE, 2, WIDE / 4>(t, codes, first, end, x, m, put);
    for (; m < rows; m++) table_block<PORTABLE, 1, 4>(t, codes, first, end, x, m, put);
}
template <class Codes, class Put>
inline void table_part(const TableWeight& t, const Codes& codes, int64_t first, int64_t end, const float* x, int64_t rows, Put put) {
    if (t.portable) table_part_as<true>(t, codes, first, end, x, rows, put);
    else table_part_as<false>(t, codes, first, end, x, rows, put);
}

// x fp32 [rows, inputs] to y fp32 [rows, t.rows].
inline void table_product(const TableWeight& t, const float* x, int64_t rows, float* y, int threads) {
    by_kind(t, [&](const auto& codes) {
        std::vector<float> arranged(size_t(rows * t.inputs));
        for (int64_t i = 0; i < rows * t.inputs; i += LANE) store16(arranged.data() + i, codes.arrange(load16(x + i)));
#pragma omp parallel for num_threads(threads) schedule(static)
        for (int64_t task = 0; task < (t.rows + TABLE_TASK - 1) / TABLE_TASK; task++)
            table_part(t, codes, task * TABLE_TASK, std::min((task + 1) * TABLE_TASK, t.rows), arranged.data(), rows,
                       [&](int64_t m, int64_t n, float sum) { y[m * t.rows + n] = sum; });
    });
}

// Rows [first, first + count) of the weight to out [count, inputs] of F32 or BF16, rounded once.
inline void table_unpack(const TableWeight& t, int64_t first, int64_t count, void* out, int32_t type, int threads) {
    by_kind(t, [&](const auto& codes) {
        constexpr float FACTOR = std::remove_reference_t<decltype(codes)>::FACTOR;
        const int64_t groups = t.inputs / t.group;
#pragma omp parallel for num_threads(threads) schedule(static)
        for (int64_t row = 0; row < count; row++) {
            for (int64_t i = 0; i < t.inputs; i += LANE) {
                Wide w[CODE_VECTORS];
                codes.decode(t.codes + (first + row) * t.stride + codes.bytes(i), w);
                const Wide scale = spread(scale_at(t, (first + row) * groups + i / t.group));
                for (int part = 0; part < CODE_VECTORS; part++) {
                    const int64_t at = row * t.inputs + i + part * WIDE;
                    if (type == BF16) put(static_cast<uint16_t*>(out) + at, w[part] * FACTOR * scale);
                    else put(static_cast<float*>(out) + at, w[part] * FACTOR * scale);
                }
            }
        }
    });
}

}  // namespace
