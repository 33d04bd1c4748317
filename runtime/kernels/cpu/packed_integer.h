// Few rows of bf16: activations as 16-bit integers, exact integer sums with AVX-512 VNNI, AVX-VNNI or AVX2.

#pragma once

#include "packed_layout.h"

namespace {

#if WIDTH

typedef uint16_t U __attribute__((vector_size(WIDTH), aligned(WIDTH)));
typedef int32_t I __attribute__((vector_size(WIDTH), aligned(WIDTH)));
typedef float F __attribute__((vector_size(WIDTH), aligned(WIDTH)));
constexpr int LANES = WIDTH / 4, HALVES = ROWS / LANES, FOURS = INPUTS / 4;

inline int64_t segment_of(const Weight& w) { return w.group % 128 == 0 ? 128 : w.group % 64 == 0 ? 64 : 32; }

// The input at byte i of four q: bytes of a lane follow the words and bits of the layout.
template <int B> constexpr int input_of(int q, int i) {
    const int h = i % 2, r = B == 8 ? 2 * q + h : B == 2 ? 8 * (q / 4) + 4 * h + q % 4 : 4 * (q / 2) + 2 * h + q % 2;
    return 2 * r + i / 2;
}

struct Order { uint16_t inputs[INPUTS]; };
template <int B> constexpr Order make_order() {
    Order order{};
    for (int i = 0; i < INPUTS; i++) order.inputs[i] = uint16_t(input_of<B>(i / 4, i % 4));
    return order;
}

// Activations as integers v = 256 * high + low: bytes [rows][high, low][stride], in each block in the order of the fours.
struct Integers {
    int8_t* bytes;
    int64_t stride;  // inputs and a cache line: rows a power of two apart would share a few lines of the cache
    float* units;    // [rows][segments], what the integers are multiples of
    int32_t* zeros;  // [rows][segments], half the range of codes times the sum of the integers
    int64_t segments;
};

inline float power_of_two(int exponent) {
    const uint32_t word = uint32_t(127 + exponent) << 23;
    float value;
    memcpy(&value, &word, 4);
    return value;
}

template <int B> void make_integers(const uint16_t* x, int64_t segment, int8_t* high, int64_t stride, float* unit, int32_t* zero) {
    alignas(64) static constexpr Order order = make_order<B>();
    uint16_t largest = 0;
    for (int64_t i = 0; i < segment; i++) largest = std::max<uint16_t>(largest, x[i] & 0x7fff);
    // The largest becomes at most 32639: 127 * 256 + 127. What is not finite makes everything NaN.
    const int exponent = std::max((largest + 1) / 128 - 127, -100);
    const float scale = power_of_two(14 - exponent);
    *unit = largest >= 0x7f80 ? from_bf16(0x7fc0) : power_of_two(exponent - 14);
    int32_t sum = 0;
    for (int64_t k = 0; k < segment; k += INPUTS) {
        int8_t* to = high + k;
#if WIDTH == 64
        const __m512i pairs = _mm512_loadu_si512(x + k);
        const __m512i lower = _mm512_cvtps_epi32(_mm512_mul_ps(
            _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm512_castsi512_si256(pairs)), 16)), _mm512_set1_ps(scale)));
        const __m512i upper = _mm512_cvtps_epi32(_mm512_mul_ps(
            _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm512_extracti64x4_epi64(pairs, 1)), 16)), _mm512_set1_ps(scale)));
        sum += _mm512_reduce_add_epi32(_mm512_add_epi32(lower, upper));
        const __m512i words = _mm512_permutexvar_epi16(
            _mm512_load_si512(order.inputs),
            _mm512_inserti64x4(_mm512_castsi256_si512(_mm512_cvtepi32_epi16(lower)), _mm512_cvtepi32_epi16(upper), 1));
        const __m512i rounded = _mm512_srai_epi16(_mm512_add_epi16(words, _mm512_set1_epi16(128)), 8);
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm512_cvtepi16_epi8(rounded));
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + stride), _mm512_cvtepi16_epi8(words));
#else
        for (int i = 0; i < INPUTS; i++) {
            const int32_t v = int32_t(__builtin_rintf(from_bf16(x[k + order.inputs[i]]) * scale));
            sum += v;
            to[i] = int8_t((v + 128) >> 8);
            to[stride + i] = int8_t(v);
        }
#endif
    }
    *zero = sum * (1 << (B - 1));
}

// sum + codes * four, for four codes and four activations of each row.
template <int B> inline I dot(I sum, U codes, int32_t four) {
#if WIDTH == 64
    return (I)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)codes, _mm512_set1_epi32(four));
#elif defined(__AVXVNNI__)
    return (I)_mm256_dpbusd_avx_epi32((__m256i)sum, (__m256i)codes, _mm256_set1_epi32(four));
#else
    const __m256i x = _mm256_set1_epi32(four), nibble = _mm256_set1_epi8(15);
    const auto add = [&](__m256i part, int weight) {
        sum += (I)_mm256_madd_epi16(_mm256_maddubs_epi16(part, x), _mm256_set1_epi16(int16_t(weight)));
    };
    if (B == 8) add((__m256i)(codes >> 4) & nibble, 16);  // in halves: a sum of two products must fit 16 bits
    add(B == 8 ? (__m256i)codes & nibble : (__m256i)codes, 1);
    return sum;
#endif
}

// Calls use(q, codes of four q in the bytes of a lane) for q = 0..7, for the rows of one half.
template <int B, class Use> inline __attribute__((always_inline)) void each_four(const uint8_t* block, int half, Use use) {
    const auto vector = [&](int v) {
        U lanes;
        memcpy(&lanes, block + 64 * v + WIDTH * half, WIDTH);
        return lanes;
    };
    constexpr int PER = FOURS / (B == 3 ? 4 : B);  // fours in a vector
    constexpr uint16_t MASK = B == 8 ? 0xffff : ((1 << B) - 1) * 0x101;
#pragma GCC unroll 8
    for (int q = 0; q < FOURS; q++) {
        if (B == 8) use(q, vector(q) ^ uint16_t(0x8080));
        else if (B != 3 || q < 6) use(q, (vector(q / PER) >> (B * (q % PER))) & MASK);
        else use(q, ((vector(0) >> q) & uint16_t(0x101)) | ((vector(1) >> (q - 1)) & uint16_t(0x202)) |
                        ((vector(2) >> (q - 2)) & uint16_t(0x404)));
    }
}

// y[m][0..15] of one row block for M rows of integers, of which rows past `rows` repeat the last.
template <int B, int M> void rows_int(const Weight& w, int64_t row_block, const Integers& x, int64_t rows, float (*y)[ROWS]) {
    constexpr int CHAINS = M == 1 ? 2 : 1;  // independent sums hide the latency of the dot product
    const int64_t segment = segment_of(w), steps = segment / INPUTS, groups = w.inputs / w.group;
    const uint8_t* block = w.codes + row_block * (w.inputs / INPUTS) * B * 64;
    int64_t row[M];
    for (int m = 0; m < M; m++) row[m] = std::min<int64_t>(m, rows - 1);
    F total[HALVES][M] = {};
    for (int64_t s = 0; s < x.segments; s++, block += steps * B * 64) {
        float scales[ROWS];
        for (int j = 0; j < ROWS; j++) scales[j] = load_scale(w, (row_block * groups + s * segment / w.group) * ROWS + j);
#pragma GCC unroll 2
        for (int half = 0; half < HALVES; half++) {
            I high[M][CHAINS] = {}, low[M][CHAINS] = {};
            for (int64_t b = 0; b < steps; b++) {
                const int8_t* at = x.bytes + s * segment + b * INPUTS;
#pragma GCC unroll 8
                for (int v = 0; v < B && half == 0; v++) __builtin_prefetch(block + (b * B + v) * 64 + AHEAD);
                each_four<B>(block + b * B * 64, half, [&](int q, U codes) {
#pragma GCC unroll 8
                    for (int m = 0; m < M; m++) {
                        int32_t two[2];
                        memcpy(&two[0], at + row[m] * 2 * x.stride + 4 * q, 4);
                        memcpy(&two[1], at + (row[m] * 2 + 1) * x.stride + 4 * q, 4);
                        high[m][q % CHAINS] = dot<B>(high[m][q % CHAINS], codes, two[0]);
                        low[m][q % CHAINS] = dot<B>(low[m][q % CHAINS], codes, two[1]);
                    }
                });
            }
            F scale;
            memcpy(&scale, scales + half * LANES, sizeof scale);
#pragma GCC unroll 8
            for (int m = 0; m < M; m++) {
                if (CHAINS == 2) high[m][0] += high[m][1 % CHAINS], low[m][0] += low[m][1 % CHAINS];
                const I sum = high[m][0] * 256 + low[m][0] - x.zeros[row[m] * x.segments + s];
                total[half][m] += __builtin_convertvector(sum, F) * (scale * x.units[row[m] * x.segments + s]);
            }
        }
    }
    for (int m = 0; m < M; m++)
        for (int half = 0; half < HALVES; half++) memcpy(y[m] + half * LANES, &total[half][m], WIDTH);
}
#endif

}  // namespace
