// Weights whose codes are 8-bit floats or entries of a table of 16 values, times a scale of their group: rows of codes as they
// are stored, decoded 16 at a time in registers. Scales are not folded into the values: a group is summed first.

#pragma once

#include <vector>

#include "steps.h"

namespace {

constexpr int64_t TABLE_TASK = 16;  // rows of a weight that one thread takes at a time

enum TableKind : int32_t { TABLE_4_BITS = 0, TABLE_E4M3 = 1, TABLE_E5M2 = 2 };

struct TableWeight {  // mirrored by build.py
    const uint8_t* codes;  // [rows, stride] bytes, the first code of a byte in its low half
    const void* scales;  // [rows, inputs / group] of scale_type, F32 or BF16
    const float* values;  // 16, for TABLE_4_BITS
    int64_t rows, inputs, stride, group;  // group: a multiple of 16
    int32_t kind, scale_type;
};

typedef uint8_t Bytes16 __attribute__((vector_size(16)));

// To lanes of 32 bits; compilers make many instructions of the plain conversion.
inline I16 widened(Bytes16 bytes) {
#if defined(__AVX512F__)
    return (I16)_mm512_cvtepu8_epi32((__m128i)bytes);
#elif defined(__AVX2__)
    const __m256i halves[2] = {_mm256_cvtepu8_epi32((__m128i)bytes), _mm256_cvtepu8_epi32(_mm_srli_si128((__m128i)bytes, 8))};
    return load_vector<I16>(halves);
#else
    typedef uint16_t Half __attribute__((vector_size(32)));
    return __builtin_convertvector(__builtin_convertvector(bytes, Half), I16);
#endif
}

#if defined(__AVX2__) && !defined(__AVX512F__)
// Entries of a table of 16 by the low four bits of each lane.
inline __m256 entries(V16 values, __m256i index) {
    const auto* half = reinterpret_cast<const float*>(&values);
    const __m256 low = _mm256_permutevar8x32_ps(_mm256_loadu_ps(half), index), high = _mm256_permutevar8x32_ps(_mm256_loadu_ps(half + 8), index);
    return _mm256_blendv_ps(low, high, _mm256_castsi256_ps(_mm256_slli_epi32(index, 28)));
}
#endif

struct FourBits {
    V16 values;
    explicit FourBits(const TableWeight& t) { memcpy(&values, t.values, 64); }
    static constexpr int64_t bytes(int64_t codes) { return codes / 2; }
    // Lanes 0 to 7 take the nibbles of the first word, 8 to 15 those of the second.
    V16 decode(const uint8_t* at) const {
        const I16 shift = {0, 4, 8, 12, 16, 20, 24, 28, 0, 4, 8, 12, 16, 20, 24, 28};
#if defined(__AVX512F__)
        const __m512i pair = _mm512_castsi128_si512(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(at)));
        const __m512i words = _mm512_permutexvar_epi32(_mm512_set_epi64(1LL << 32 | 1, 1LL << 32 | 1, 1LL << 32 | 1,
                                                                        1LL << 32 | 1, 0, 0, 0, 0), pair);
        return (V16)_mm512_permutexvar_ps(_mm512_srlv_epi32(words, (__m512i)shift), (__m512)values);
#else
        uint32_t pair[2];
        memcpy(pair, at, 8);
        U16 words;
        for (int lane = 0; lane < LANE; lane++) words[lane] = pair[lane / 8];
        return __builtin_shuffle(values, (I16)(words >> (U16)shift) & 15);
#endif
    }
    // The same 16 in another order, which takes an instruction less: 0, 8, 1, 9, ..., 7, 15. Values are put in it by `arrange`.
    V16 arranged(const uint8_t* at) const {
        const I16 shift = {0, 0, 4, 4, 8, 8, 12, 12, 16, 16, 20, 20, 24, 24, 28, 28};
#if defined(__AVX512F__)
        int64_t both;
        memcpy(&both, at, 8);
        return (V16)_mm512_permutexvar_ps(_mm512_srlv_epi32(_mm512_set1_epi64(both), (__m512i)shift), (__m512)values);
#elif defined(__AVX2__)
        int64_t both;
        memcpy(&both, at, 8);
        const auto* by = reinterpret_cast<const __m256i*>(&shift);
        const __m256i words = _mm256_set1_epi64x(both);
        const __m256 found[2] = {entries(values, _mm256_srlv_epi32(words, by[0])), entries(values, _mm256_srlv_epi32(words, by[1]))};
        return load_vector<V16>(found);
#else
        uint32_t pair[2];
        memcpy(pair, at, 8);
        U16 words;
        for (int lane = 0; lane < LANE; lane++) words[lane] = pair[lane % 2];
        return __builtin_shuffle(values, (I16)(words >> (U16)shift) & 15);
#endif
    }
    static V16 arrange(V16 x) { return __builtin_shuffle(x, I16{0, 8, 1, 9, 2, 10, 3, 11, 4, 12, 5, 13, 6, 14, 7, 15}); }
};

// The mantissa moves to its place in an fp32 and the exponent gets its bias; below the smallest exponent a one is hidden and
// taken away again, so that no arithmetic meets a subnormal number.
template <int MANTISSA, int BIAS> struct EightBits {
    explicit EightBits(const TableWeight&) {}
    static constexpr int64_t bytes(int64_t codes) { return codes; }
    V16 decode(const uint8_t* at) const {
        Bytes16 raw;
        memcpy(&raw, at, 16);
        const I16 all = widened(raw), size = (all & 0x7f) << (23 - MANTISSA), zero = {};
        const V16 least = (V16)(zero + ((128 - BIAS) << 23));
        const V16 normal = (V16)(size + ((127 - BIAS) << 23)), small = (V16)(size + ((128 - BIAS) << 23)) - least;
        const V16 value = (all & 0x7f) < (1 << MANTISSA) ? small : normal;
        return (V16)((I16)value | ((all & 0x80) << 24));
    }
    V16 arranged(const uint8_t* at) const { return decode(at); }
    static V16 arrange(V16 x) { return x; }
};

template <class Use> inline void by_kind(const TableWeight& t, Use use) {
    if (t.kind == TABLE_4_BITS) return use(FourBits(t));
    if (t.kind == TABLE_E4M3) return use(EightBits<3, 7>(t));
    use(EightBits<2, 15>(t));
}

inline float scale_at(const TableWeight& t, int64_t index) {
    if (t.scale_type == F32) return static_cast<const float*>(t.scales)[index];
    const uint32_t word = uint32_t(static_cast<const uint16_t*>(t.scales)[index]) << 16;
    float scale;
    memcpy(&scale, &word, 4);
    return scale;
}

inline V16 spread_scale(const TableWeight& t, int64_t index) {
#if defined(__AVX512BW__)
    if (t.scale_type != F32)
        return (V16)_mm512_slli_epi32(_mm512_set1_epi16(static_cast<const int16_t*>(t.scales)[index]), 16);
#endif
    return V16{} + scale_at(t, index);
}

// x fp32 [M, inputs], arranged, times R rows from n, to y [R][M]: sums over a group, then over groups, in the same order whatever
// M and R are.
template <int M, int R, class Codes>
inline void table_rows(const TableWeight& t, const Codes& codes, int64_t n, const float* x, float (*y)[M]) {
    const int64_t groups = t.inputs / t.group;
    const uint8_t* at = t.codes + n * t.stride;
    V16 total[R][M] = {};
    for (int64_t g = 0; g < groups; g++) {
        V16 sum[R][M] = {};
        for (int64_t i = g * t.group; i < (g + 1) * t.group; i += LANE)
            for (int r = 0; r < R; r++) {
                const V16 w = codes.arranged(at + r * t.stride + Codes::bytes(i));
                for (int m = 0; m < M; m++) sum[r][m] += w * load16(x + m * t.inputs + i);
            }
        for (int r = 0; r < R; r++) {
            const V16 scale = spread_scale(t, (n + r) * groups + g);
            for (int m = 0; m < M; m++) total[r][m] += sum[r][m] * scale;
        }
    }
    for (int r = 0; r < R; r++)
        for (int m = 0; m < M; m++) y[r][m] = sum_of(total[r][m]);
}

// Rows x fp32 [rows, inputs], arranged, times rows first ... end of the weight; each product is handed on with its row of x and of
// the weight.
template <class Codes, class Put>
inline void table_part(const TableWeight& t, const Codes& codes, int64_t first, int64_t end, const float* x, int64_t rows, Put put) {
    int64_t m = 0;
    for (; m + 4 <= rows; m += 4)
        for (int64_t n = first; n < end; n++) {
            float y[1][4];
            table_rows<4, 1>(t, codes, n, x + m * t.inputs, y);
            for (int each = 0; each < 4; each++) put(m + each, n, y[0][each]);
        }
    for (; m < rows; m++) {
        int64_t n = first;
        float y[4][1];
        for (; n + 4 <= end; n += 4) {
            table_rows<1, 4>(t, codes, n, x + m * t.inputs, y);
            for (int each = 0; each < 4; each++) put(m, n + each, y[each][0]);
        }
        for (; n < end; n++) {
            table_rows<1, 1>(t, codes, n, x + m * t.inputs, y);
            put(m, n, y[0][0]);
        }
    }
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

// Rows first ... first + count of the weight to out [count, inputs] of F32 or BF16, rounded once.
inline void table_unpack(const TableWeight& t, int64_t first, int64_t count, void* out, int32_t type, int threads) {
    by_kind(t, [&](const auto& codes) {
        const int64_t groups = t.inputs / t.group;
#pragma omp parallel for num_threads(threads) schedule(static)
        for (int64_t row = 0; row < count; row++) {
            for (int64_t i = 0; i < t.inputs; i += LANE) {
                const uint8_t* at = t.codes + (first + row) * t.stride + codes.bytes(i);
                const V16 w = codes.decode(at) * scale_at(t, (first + row) * groups + i / t.group);
                if (type == BF16) store16(static_cast<uint16_t*>(out) + row * t.inputs + i, w);
                else memcpy(static_cast<float*>(out) + row * t.inputs + i, &w, 64);
            }
        }
    });
}

}  // namespace
