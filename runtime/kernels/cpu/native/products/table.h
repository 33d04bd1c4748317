// Weights whose codes are 8-bit floats or entries of a table of 16 values, times a scale of their group: rows of codes as they
// are stored, decoded 16 at a time in registers. Scales are not folded into the values: a group is summed first.

#pragma once

#include "steps.h"

namespace {

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
#else
    typedef uint16_t Half __attribute__((vector_size(32)));
    return __builtin_convertvector(__builtin_convertvector(bytes, Half), I16);
#endif
}

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

// x fp32 [M, inputs] times row n, to y [M]: sums over a group, then over groups, for every M in the same order.
template <int M, class Codes>
inline void table_row(const TableWeight& t, const Codes& codes, int64_t n, const float* x, float* y) {
    const int64_t groups = t.inputs / t.group;
    const uint8_t* at = t.codes + n * t.stride;
    V16 total[M] = {};
    for (int64_t g = 0; g < groups; g++) {
        V16 sum[M] = {};
        for (int64_t i = g * t.group; i < (g + 1) * t.group; i += LANE) {
            const V16 w = codes.decode(at + Codes::bytes(i));
            for (int m = 0; m < M; m++) sum[m] += w * load16(x + m * t.inputs + i);
        }
        const float scale = scale_at(t, n * groups + g);
        for (int m = 0; m < M; m++) total[m] += sum[m] * scale;
    }
    for (int m = 0; m < M; m++) y[m] = sum_of(total[m]);
}

// The same of `rows` rows, each y[m] handed on with its m.
template <class Codes, class Put>
inline void table_column(const TableWeight& t, const Codes& codes, int64_t n, const float* x, int64_t rows, Put put) {
    float y[4];
    int64_t m = 0;
    for (; m + 4 <= rows; m += 4) {
        table_row<4>(t, codes, n, x + m * t.inputs, y);
        for (int each = 0; each < 4; each++) put(m + each, y[each]);
    }
    for (; m < rows; m++) {
        table_row<1>(t, codes, n, x + m * t.inputs, y);
        put(m, y[0]);
    }
}

// x fp32 [rows, inputs] to y fp32 [rows, t.rows].
inline void table_product(const TableWeight& t, const float* x, int64_t rows, float* y, int threads) {
    by_kind(t, [&](const auto& codes) {
#pragma omp parallel for num_threads(threads) schedule(static)
        for (int64_t n = 0; n < t.rows; n++)
            table_column(t, codes, n, x, rows, [&](int64_t m, float sum) { y[m * t.rows + n] = sum; });
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
