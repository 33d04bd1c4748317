// Products of bf16 or fp32 activations with packed weights of 2, 3, 4 or 8 bits on a CPU.
//
// Built at first use by cpu_build.py for the machine at hand, called through ctypes by cpu.py. Knows nothing of Python
// or torch: plain pointers, and as many OpenMP threads as the caller says. Threads share output rows only, and each
// row is summed in a fixed order, so neither a second run nor another number of threads changes a bit.
//
// Layout. A block is 16 output rows times 32 inputs: exactly `bits` vectors of 64 bytes, in the order
// [rows / 16][inputs / 32][bits][32 words of 16 bits]. Word 2j+p holds codes of row j at inputs 2r+p, for as many pairs
// r as fit:
//    8 bits: pair r in vector r/2 at bit 8*(r%2), as signed bytes      2 bits: vector r/8, bit 2*(r%8)
//    4 bits: vector r/4, bit 4*(r%4)                                   3 bits: vector r/4, bit 0, 3, 8 or 11 for r < 12;
//    bit b of the pairs 12 to 15 in bits 6, 7, 14 and 15 of vector b
// Shifted and masked by bytes, a vector is an operand of an integer dot product (four inputs of each row side by side);
// shifted by words, it is a table index for vpermw, and what comes out (32 bf16, inputs in pairs) a row of an AMX tile.
// Scales are [rows / 16][groups][16] in their own type. Rows past the last are zero.
//
// Arithmetic. fp32 activations: exact codes, fp32 sums, scaled once a group. Few rows of bf16: activations become integers
// of 16 bits, as two bytes, in units of a power of two for each segment of 32 to 128 inputs: what lies within 1/128 of the
// largest of its segment keeps all its bits. A segment is summed exactly, then scaled; so a row's result does not depend
// on the rows beside it, nor on which instructions summed it. Many rows of bf16: AMX tiles of bf16 with fp32 sums, the
// scale multiplied into the weight first and rounded, as the reference has it with bf16 scales.

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <algorithm>

#if defined(__linux__)
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif
#if defined(__x86_64__)
#include <immintrin.h>
#endif
#if defined(__AVX512VNNI__) && defined(__AVX512BW__)
#define WIDTH 64  // bytes of a vector in integer dot products
#elif defined(__AVX2__)
#define WIDTH 32
#endif
#if defined(__AVX512BF16__) && defined(__AVX512BW__)
#define BF16_DOT 1
#if defined(__AMX_BF16__) && defined(__AMX_INT8__) && defined(__linux__)
#define AMX 1
#endif
#endif

namespace {

enum Type : int32_t { F32 = 0, BF16 = 1, F16 = 2 };

constexpr int ROWS = 16, INPUTS = 32, PAIRS = INPUTS / 2;
constexpr int64_t TILED = 3, MANY = 48;  // rows from which on AMX beats vectors, and bf16 tiles beat integer ones
constexpr int64_t AHEAD = 4096;  // bytes prefetched ahead of a stream of codes

struct Weight {  // mirrored by cpu.py
    const uint8_t* codes;
    const void* scales;
    int64_t rows, inputs, group;
    int32_t bits, scale_type;
};

inline float from_bf16(uint16_t bits) {
    const uint32_t word = uint32_t(bits) << 16;
    float value;
    memcpy(&value, &word, 4);
    return value;
}

inline uint16_t to_bf16(float value) {  // to nearest, ties to even; NaN stays NaN
    uint32_t word;
    memcpy(&word, &value, 4);
    if (value != value) return uint16_t((word >> 16) | 64);
    return uint16_t((word + 0x7fff + ((word >> 16) & 1)) >> 16);
}

inline float from_f16(uint16_t bits) {
#if defined(__F16C__)
    return _cvtsh_ss(bits);
#else
    const uint32_t sign = uint32_t(bits & 0x8000) << 16, exponent = (bits >> 10) & 31, fraction = bits & 1023;
    uint32_t word = sign | (exponent == 31 ? 0x7f800000u | (fraction << 13) : ((exponent + 112) << 23) | (fraction << 13));
    if (exponent == 0) {
        const float small = float(fraction) * 0x1p-24f;
        memcpy(&word, &small, 4);
        word |= sign;
    }
    float value;
    memcpy(&value, &word, 4);
    return value;
#endif
}

inline uint16_t to_f16(float value) {
#if defined(__F16C__)
    return uint16_t(_cvtss_sh(value, 0));
#else
    uint32_t word;
    memcpy(&word, &value, 4);
    const uint16_t sign = uint16_t((word >> 16) & 0x8000);
    const uint32_t magnitude = word & 0x7fffffff;
    if (magnitude > 0x7f800000) return sign | 0x7e00;
    if (magnitude >= 0x47800000) return sign | 0x7c00;
    if (magnitude < 0x38800000) {  // below the smallest normal number: a multiple of 2^-24, rounded by the addition
        float small;
        memcpy(&small, &magnitude, 4);
        small += 0.5f;
        memcpy(&word, &small, 4);
        return sign | uint16_t(word - 0x3f000000);
    }
    return sign | uint16_t((magnitude - 0x38000000 + 0xfff + ((magnitude >> 13) & 1)) >> 13);
#endif
}

inline float load_scale(const Weight& w, int64_t index) {
    if (w.scale_type == F32) return static_cast<const float*>(w.scales)[index];
    const uint16_t bits = static_cast<const uint16_t*>(w.scales)[index];
    return w.scale_type == BF16 ? from_bf16(bits) : from_f16(bits);
}

inline void store(void* out, int32_t type, int64_t index, float value) {
    if (type == F32) static_cast<float*>(out)[index] = value;
    else static_cast<uint16_t*>(out)[index] = type == BF16 ? to_bf16(value) : to_f16(value);
}

// Where pair r lies: its vector and first bit. Of 3 bits the last four pairs are apart, their bit b in vector b.
template <int B> constexpr int PER_WORD = B == 3 ? 4 : 16 / B;
template <int B> constexpr int vector_of(int r) { return r / PER_WORD<B>; }
template <int B> constexpr int bit_of(int r) { return B == 3 ? 8 * (r % 4 / 2) + 3 * (r % 2) : B * (r % PER_WORD<B>); }
constexpr int spread_bit_of(int r) { return 8 * (r % 4 / 2) + 6 + r % 2; }
template <int B> constexpr bool spread(int r) { return B == 3 && r >= 12; }

inline int64_t blocks_of(int64_t rows) { return (rows + ROWS - 1) / ROWS; }

// ---- Any machine: vectors of 8 floats, which compilers map to AVX2, SSE, NEON or plain code ----

typedef int32_t I8 __attribute__((vector_size(32), aligned(32)));
typedef float F8 __attribute__((vector_size(32), aligned(32)));

// Signed codes of pair r for rows 8*half to 8*half+7 at the even (p = 0) or odd (p = 1) input, as floats.
template <int B> inline F8 pair_codes(const uint8_t* block, int r, int half, int p) {
    auto vector = [&](int v) {
        I8 lanes;
        memcpy(&lanes, block + 64 * v + 32 * half, 32);
        return lanes;
    };
    const int shift = 16 * p;
    if (B == 8) return __builtin_convertvector((vector(r / 2) << (24 - shift - 8 * (r % 2))) >> 24, F8);
    I8 code;
    if (spread<B>(r)) {
        const int at = spread_bit_of(r) + shift;
        code = ((vector(0) >> at) & 1) | ((vector(1) >> (at - 1)) & 2) | ((vector(2) >> (at - 2)) & 4);
    } else
        code = (vector(vector_of<B>(r)) >> (bit_of<B>(r) + shift)) & ((1 << B) - 1);
    return __builtin_convertvector(code - (1 << (B - 1)), F8);
}

// y[m][0..15] of one row block for M rows of fp32 activations.
template <int B, int M> void rows_f32(const Weight& w, int64_t row_block, const float* x, float (*y)[ROWS]) {
    const int64_t groups = w.inputs / w.group, per_group = w.group / INPUTS;
    const uint8_t* block = w.codes + row_block * (w.inputs / INPUTS) * B * 64;
    F8 total[M][2] = {};
    for (int64_t g = 0; g < groups; g++) {
        F8 sum[M][2] = {};
        for (int64_t b = 0; b < per_group; b++, block += B * 64) {
            const float* at = x + (g * per_group + b) * INPUTS;
            __builtin_prefetch(block + AHEAD);
#pragma GCC unroll 16
            for (int r = 0; r < PAIRS; r++)
#pragma GCC unroll 2
                for (int half = 0; half < 2; half++) {
                    const F8 even = pair_codes<B>(block, r, half, 0), odd = pair_codes<B>(block, r, half, 1);
#pragma GCC unroll 4
                    for (int m = 0; m < M; m++) {
                        sum[m][half] += even * at[m * w.inputs + 2 * r];
                        sum[m][half] += odd * at[m * w.inputs + 2 * r + 1];
                    }
                }
        }
        F8 scale[2];
        for (int j = 0; j < ROWS; j++) scale[j / 8][j % 8] = load_scale(w, (row_block * groups + g) * ROWS + j);
        for (int m = 0; m < M; m++)
            for (int half = 0; half < 2; half++) total[m][half] += sum[m][half] * scale[half];
    }
    memcpy(y, total, sizeof total);
}

// ---- Integer dot products: AVX-512 VNNI, AVX-VNNI or AVX2 ----

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

// ---- bf16 on AVX-512 ----

#if BF16_DOT

struct alignas(64) Table { uint16_t values[32]; };

constexpr uint16_t small_bf16(int n) {
    const int size = n < 0 ? -n : n;
    int exponent = 0;
    while (2 << exponent <= size) exponent++;
    return size ? uint16_t((n < 0) << 15 | (127 + exponent) << 7 | ((size << (7 - exponent)) & 127)) : 0;
}

// Indexed by 5 bits of which only the lowest B count: no mask is needed.
template <int B> constexpr Table make_table() {
    Table table{};
    for (int i = 0; i < 32; i++) table.values[i] = small_bf16((i & ((1 << B) - 1)) - (1 << (B - 1)));
    return table;
}

template <int B> inline __m512i load_table() {
    static constexpr Table table = make_table<B>();
    return _mm512_load_si512(table.values);
}

template <int B> constexpr float UNIT = B == 8 ? 0x1p-24f : 1.0f;  // what decoded codes are multiples of

// Calls use(r, 32 bf16) for the pairs r = 0..15 of a block.
template <int B, class Use> inline __attribute__((always_inline)) void decode(const uint8_t* block, __m512i table, Use use) {
    const __m512i* v = reinterpret_cast<const __m512i*>(block);
    if constexpr (B == 8) {
        // The byte in the top of a 32-bit lane is a float of 8 significant bits: its upper half is the bf16.
        const __m512i top = _mm512_set1_epi32(int(0xff000000));
        auto pair = [&](__m512i even, __m512i odd) {
            even = _mm512_castps_si512(_mm512_cvtepi32_ps(even));
            odd = _mm512_castps_si512(_mm512_cvtepi32_ps(_mm512_and_si512(odd, top)));
            return _mm512_or_si512(_mm512_srli_epi32(even, 16), odd);
        };
#pragma GCC unroll 8
        for (int i = 0; i < 8; i++) {
            const __m512i a = _mm512_loadu_si512(v + i);
            use(2 * i, pair(_mm512_slli_epi32(a, 24), _mm512_slli_epi32(a, 8)));
            use(2 * i + 1, pair(_mm512_and_si512(_mm512_slli_epi32(a, 16), top), a));
        }
    } else {
#pragma GCC unroll 16
        for (int r = 0; r < PAIRS; r++) {
            __m512i index;
            if (spread<B>(r)) {
                const int at = spread_bit_of(r);
                const __m512i low = _mm512_srli_epi16(_mm512_loadu_si512(v), at);
                const __m512i middle = _mm512_srli_epi16(_mm512_loadu_si512(v + 1), at - 1);
                const __m512i high = _mm512_srli_epi16(_mm512_loadu_si512(v + 2), at - 2);
                // 0xca selects: bit 0 of low, bit 1 of middle, the rest (bit 2 counts) of high
                const __m512i two = _mm512_ternarylogic_epi32(_mm512_set1_epi16(1), low, middle, 0xca);
                index = _mm512_ternarylogic_epi32(_mm512_set1_epi16(3), two, high, 0xca);
            } else {
                index = _mm512_srli_epi16(_mm512_loadu_si512(v + vector_of<B>(r)), bit_of<B>(r));
            }
            use(r, _mm512_permutexvar_epi16(index, table));
        }
    }
}

inline __m512 load_scales(const Weight& w, int64_t index) {
    if (w.scale_type == F32) return _mm512_loadu_ps(static_cast<const float*>(w.scales) + index);
    const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(static_cast<const uint16_t*>(w.scales) + index));
    if (w.scale_type == F16) return _mm512_cvtph_ps(bits);
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
}

template <int B> inline void prefetch(const uint8_t* block) {
#pragma GCC unroll 8
    for (int i = 0; i < B; i++) _mm_prefetch(reinterpret_cast<const char*>(block + AHEAD + 64 * i), _MM_HINT_T0);
}

// As `decode`, with the scales of the 16 rows multiplied in and the product rounded to bf16.
template <int B, class Use>
inline __attribute__((always_inline)) void decode_scaled(const uint8_t* block, __m512i table, __m512 scale, Use use) {
    alignas(64) static constexpr uint16_t side_by_side[32] = {0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
                                                              8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
    const __m512i order = _mm512_load_si512(side_by_side), top = _mm512_set1_epi32(int(0xffff0000));
    decode<B>(block, table, [&](int r, __m512i pair) {
        const __m512 even = _mm512_mul_ps(_mm512_castsi512_ps(_mm512_slli_epi32(pair, 16)), scale);
        const __m512 odd = _mm512_mul_ps(_mm512_castsi512_ps(_mm512_and_si512(pair, top)), scale);
        use(r, _mm512_permutexvar_epi16(order, (__m512i)_mm512_cvtne2ps_pbh(odd, even)));
    });
}

// One row of a bf16 weight [rows, inputs] times M activations, added up over the inputs (a multiple of 32).
template <int M> void dense_row(const uint16_t* row, int64_t inputs, const uint16_t* x, float* y) {
    constexpr int CHAINS = 4;
    __m512 sum[M][CHAINS];
    for (int m = 0; m < M; m++)
        for (int c = 0; c < CHAINS; c++) sum[m][c] = _mm512_setzero_ps();
    const auto step = [&](int64_t k, int c) {
        const __m512i weights = _mm512_loadu_si512(row + k);
        _mm_prefetch(reinterpret_cast<const char*>(row + k) + AHEAD, _MM_HINT_T0);
#pragma GCC unroll 4
        for (int m = 0; m < M; m++)
            sum[m][c] = _mm512_dpbf16_ps(sum[m][c], (__m512bh)weights, (__m512bh)_mm512_loadu_si512(x + m * inputs + k));
    };
    int64_t k = 0;
    for (; k + 32 * CHAINS <= inputs; k += 32 * CHAINS)
#pragma GCC unroll 4
        for (int c = 0; c < CHAINS; c++) step(k + 32 * c, c);
    for (; k < inputs; k += 32) step(k, 0);
    for (int m = 0; m < M; m++)
        y[m] = _mm512_reduce_add_ps(_mm512_add_ps(_mm512_add_ps(sum[m][0], sum[m][1]), _mm512_add_ps(sum[m][2], sum[m][3])));
}
#endif

// ---- AMX: tiles of 16 x 32 bf16 ----

#if AMX

// Assembler instead of the intrinsics: those of GCC 12 hide from the compiler which memory they read and write.
#define TILE_ZERO(tile) asm volatile("tilezero %%tmm" #tile : : :)
#define TILE_LOAD(tile, base, stride) \
    asm volatile("tileloadd (%0,%1,1), %%tmm" #tile : : "r"(base), "r"(int64_t(stride)) : "memory")
#define TILE_STORE(base, stride, tile) \
    asm volatile("tilestored %%tmm" #tile ", (%0,%1,1)" : : "r"(base), "r"(int64_t(stride)) : "memory")
#define TILE_DOT_SU8(sum, a, b) asm volatile("tdpbsud %%tmm" #b ", %%tmm" #a ", %%tmm" #sum : : :)
#define TILE_DOT_BF16(sum, a, b) asm volatile("tdpbf16ps %%tmm" #b ", %%tmm" #a ", %%tmm" #sum : : :)

constexpr int TILE = ROWS * INPUTS;

// Tiles for the life of the object: 0 to 3 are sums, 4 and 5 activations, 6 and 7 weights. Tiles 0, 1, 4 have `first`
// rows, 2, 3, 5 have `second`; a row of activations has `width` bytes.
struct Tiles {
    Tiles(int64_t first, int64_t second, int64_t width) {
        struct alignas(64) {
            uint8_t palette, start, reserved[14];
            uint16_t bytes[16];
            uint8_t rows[16];
        } config;
        memset(&config, 0, sizeof config);
        config.palette = 1;
        for (int tile = 0; tile < 8; tile++) {
            const int64_t rows = tile >= 6 ? width / 4 : tile == 2 || tile == 3 || tile == 5 ? second : first;
            config.rows[tile] = uint8_t(rows);
            config.bytes[tile] = uint16_t(!rows ? 0 : tile == 4 || tile == 5 ? width : 64);
        }
        asm volatile("ldtilecfg (%0)" : : "r"(&config) : "memory");
    }
    ~Tiles() { asm volatile("tilerelease" : : :); }
    Tiles(const Tiles&) = delete;
    Tiles& operator=(const Tiles&) = delete;
};

// As rows_int, for up to 16 rows: 8 activations, as high and low bytes, fill the rows of a tile; codes of 64 inputs, in
// fours, are the other operand. Tiles(min(2 * rows, 16), 2 * rows - 16, min(segment, 64)) are configured.
template <int B> void rows_tiles(const Weight& w, int64_t row_block, const Integers& x, int64_t rows, float (*y)[ROWS]) {
    constexpr int RING = 4;  // tiles written ahead of those being multiplied
    alignas(64) U tile[RING][2 * FOURS];
    alignas(64) I part[2 * ROWS];
    const int64_t segment = segment_of(w), steps = segment / INPUTS, groups = w.inputs / w.group;
    const int64_t per_tile = std::min<int64_t>(steps, 2);
    const uint8_t* block = w.codes + row_block * (w.inputs / INPUTS) * B * 64;
    F total[ROWS] = {};
    int turn = 0;
    for (int64_t s = 0; s < x.segments; s++) {
        TILE_ZERO(0);
        if (rows > 8) TILE_ZERO(2);
        for (int64_t b = 0; b < steps; b += per_tile, turn = (turn + 1) % RING) {
            const int8_t* at = x.bytes + s * segment + b * INPUTS;
            for (int64_t i = 0; i < per_tile; i++, block += B * 64) {
                prefetch<B>(block);
                each_four<B>(block, 0, [&](int q, U codes) { tile[turn][i * FOURS + q] = codes; });
            }
            TILE_LOAD(6, tile[turn], 64);
            TILE_LOAD(4, at, x.stride);
            TILE_DOT_SU8(0, 4, 6);
            if (rows > 8) {
                TILE_LOAD(5, at + 16 * x.stride, x.stride);
                TILE_DOT_SU8(2, 5, 6);
            }
        }
        TILE_STORE(part, 64, 0);
        if (rows > 8) TILE_STORE(part + 16, 64, 2);
        const F scale = (F)load_scales(w, (row_block * groups + s * segment / w.group) * ROWS);
        for (int64_t m = 0; m < rows; m++) {
            const I sum = part[2 * m] * 256 + part[2 * m + 1] - x.zeros[m * x.segments + s];
            total[m] += __builtin_convertvector(sum, F) * (scale * x.units[m * x.segments + s]);
        }
    }
    memcpy(y, total, size_t(rows) * sizeof *y);
}

inline void store_row(uint16_t* to, __m512 values, int64_t count) {
    const __mmask16 mask = count >= ROWS ? 0xffff : __mmask16((1 << count) - 1);
    _mm256_mask_storeu_epi16(to, mask, (__m256i)_mm512_cvtneps_pbh(values));
}

// Two row blocks of the weight as tiles [2][inputs / 32][16][32], scales multiplied in.
template <int B> void make_panel(const Weight& w, int64_t row_block, uint16_t* panel) {
    const __m512i table = load_table<B>();
    const int64_t steps = w.inputs / INPUTS, groups = w.inputs / w.group, per_group = w.group / INPUTS;
    for (int64_t n = row_block; n < row_block + 2; n++) {
        if (n >= blocks_of(w.rows)) {
            memset(panel, 0, size_t(steps) * TILE * 2);
            break;
        }
        const uint8_t* block = w.codes + n * steps * B * 64;
        for (int64_t k = 0; k < steps; k++, block += B * 64, panel += TILE) {
            const __m512 scale = _mm512_mul_ps(load_scales(w, (n * groups + k / per_group) * ROWS), _mm512_set1_ps(UNIT<B>));
            prefetch<B>(block);
            decode_scaled<B>(block, table, scale, [&](int r, __m512i pair) { _mm512_store_si512(panel + r * INPUTS, pair); });
        }
    }
}

// 32 activations (tiles [2][inputs / 32][16][32]) times 32 rows of the weight, to y from `row` on.
inline void multiply_panel(const Weight& w, const uint16_t* a, const uint16_t* b, uint16_t* y, int64_t rows, int64_t row) {
    alignas(64) float part[2][2][ROWS][ROWS];
    const int64_t steps = w.inputs / INPUTS, other = steps * TILE;
    TILE_ZERO(0);
    TILE_ZERO(1);
    TILE_ZERO(2);
    TILE_ZERO(3);
    for (int64_t k = 0; k < steps; k++, a += TILE, b += TILE) {
        TILE_LOAD(4, a, 64);
        TILE_LOAD(6, b, 64);
        TILE_DOT_BF16(0, 4, 6);
        TILE_LOAD(7, b + other, 64);
        TILE_DOT_BF16(1, 4, 7);
        TILE_LOAD(5, a + other, 64);
        TILE_DOT_BF16(2, 5, 6);
        TILE_DOT_BF16(3, 5, 7);
    }
    TILE_STORE(part[0][0], 64, 0);
    TILE_STORE(part[0][1], 64, 1);
    TILE_STORE(part[1][0], 64, 2);
    TILE_STORE(part[1][1], 64, 3);
    for (int64_t m = 0; m < std::min<int64_t>(rows, 2 * ROWS); m++)
        for (int n = 0; n < 2; n++)
            if (row + n * ROWS < w.rows)
                store_row(y + m * w.rows + row + n * ROWS, _mm512_load_ps(part[m / ROWS][n][m % ROWS]), w.rows - row - n * ROWS);
}
#endif

bool have_amx() {
#if AMX
    // Linux grants the tile registers to a process that asks (ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA).
    static const bool granted = syscall(SYS_arch_prctl, 0x1023, 18) == 0;
    return granted;
#else
    return false;
#endif
}

// Row blocks a thread takes at a time: about 64 KiB of codes, and several turns for each thread.
int64_t turn(const Weight& w, int threads) {
    const int64_t bytes = w.inputs * w.bits * ROWS / 8;
    return std::max<int64_t>(1, std::min((int64_t(1) << 16) / bytes, blocks_of(w.rows) / (4 * threads)));
}

template <int B> void shuffle_block(const uint32_t* packed, int64_t words, int64_t rows, int64_t steps, uint16_t* out) {
    for (int64_t k = 0; k < steps; k++, out += B * INPUTS) {
        memset(out, 0, B * 64);
        for (int64_t j = 0; j < rows; j++) {
            const uint32_t* in = packed + j * words + k * B;
#pragma GCC unroll 32
            for (int i = 0; i < INPUTS; i++) {
                const int at = i * B % 32, r = i / 2;
                uint32_t code = in[i * B / 32] >> at;
                if (at + B > 32) code |= in[i * B / 32 + 1] << (32 - at);
                code &= (1u << B) - 1;
                uint16_t* to = out + 2 * j + i % 2;
                if (B == 8) code ^= 0x80;
                if (spread<B>(r))
                    for (int b = 0; b < 3; b++) to[b * INPUTS] |= uint16_t(((code >> b) & 1) << spread_bit_of(r));
                else
                    to[vector_of<B>(r) * INPUTS] |= uint16_t(code << bit_of<B>(r));
            }
        }
    }
}

template <int B> void shuffle_all(const uint32_t* packed, int64_t words, const Weight& w, int threads) {
    const int64_t steps = w.inputs / INPUTS;
    uint16_t* out = reinterpret_cast<uint16_t*>(const_cast<uint8_t*>(w.codes));
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t n = 0; n < blocks_of(w.rows); n++)
        shuffle_block<B>(packed + n * ROWS * words, words, std::min<int64_t>(ROWS, w.rows - n * ROWS), steps,
                         out + n * steps * B * INPUTS);
}

template <int B> void dequantize_all(const Weight& w, int64_t first, int64_t count, void* out, int32_t type, int threads) {
    const int64_t steps = w.inputs / INPUTS, groups = w.inputs / w.group, per_group = w.group / INPUTS;
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t n = 0; n < (count + ROWS - 1) / ROWS; n++) {
        const int64_t row_block = first / ROWS + n, rows = std::min<int64_t>(ROWS, count - n * ROWS);
        for (int64_t k = 0; k < steps; k++) {
            const uint8_t* block = w.codes + (row_block * steps + k) * B * 64;
            const int64_t scales = (row_block * groups + k / per_group) * ROWS, to = n * ROWS * w.inputs + k * INPUTS;
#if BF16_DOT
            if (type == BF16) {
                alignas(64) uint32_t pairs[PAIRS][ROWS];
                const __m512 scale = _mm512_mul_ps(load_scales(w, scales), _mm512_set1_ps(UNIT<B>));
                decode_scaled<B>(block, load_table<B>(), scale, [&](int r, __m512i pair) { _mm512_store_si512(pairs[r], pair); });
                uint32_t* at = reinterpret_cast<uint32_t*>(static_cast<uint16_t*>(out) + to);
                for (int64_t j = 0; j < rows; j++)
                    for (int r = 0; r < PAIRS; r++) at[j * w.inputs / 2 + r] = pairs[r][j];
                continue;
            }
#endif
            F8 values[INPUTS][2];
#pragma GCC unroll 16
            for (int r = 0; r < PAIRS; r++)
                for (int half = 0; half < 2; half++)
                    for (int p = 0; p < 2; p++) values[2 * r + p][half] = pair_codes<B>(block, r, half, p);
            for (int64_t j = 0; j < rows; j++) {
                const float scale = load_scale(w, scales + j);
                for (int i = 0; i < INPUTS; i++) store(out, type, to + j * w.inputs + i, values[i][j / 8][j % 8] * scale);
            }
        }
    }
}

inline void store_block(const Weight& w, int64_t row_block, const float (*part)[ROWS], int64_t rows, void* y, int32_t type) {
    const int64_t row = row_block * ROWS, count = std::min<int64_t>(ROWS, w.rows - row);
    for (int64_t m = 0; m < rows; m++)
        for (int64_t j = 0; j < count; j++) store(y, type, m * w.rows + row + j, part[m][j]);
}

template <int B> void matmul_f32(const Weight& w, const float* x, int64_t rows, float* y, int threads) {
    const int64_t chunk = turn(w, threads);
#pragma omp parallel for num_threads(threads) schedule(dynamic, chunk)
    for (int64_t n = 0; n < blocks_of(w.rows); n++)
        for (int64_t m = 0; m < rows; m += 4) {
            float part[4][ROWS];
            const float* at = x + m * w.inputs;
            if (rows - m == 1) rows_f32<B, 1>(w, n, at, part);
            else if (rows - m == 2) rows_f32<B, 2>(w, n, at, part);
            else if (rows - m == 3) rows_f32<B, 3>(w, n, at, part);
            else rows_f32<B, 4>(w, n, at, part);
            store_block(w, n, part, std::min<int64_t>(4, rows - m), y + m * w.rows, F32);
        }
}

#if WIDTH
template <int B> void few_rows(const Weight& w, int64_t row_block, const Integers& x, int64_t rows, float (*y)[ROWS]) {
    if (rows == 1) rows_int<B, 1>(w, row_block, x, rows, y);
    else if (rows == 2) rows_int<B, 2>(w, row_block, x, rows, y);
    else if (rows <= 4) rows_int<B, 4>(w, row_block, x, rows, y);
    else rows_int<B, 8>(w, row_block, x, rows, y);
}

// False: no memory.
template <int B> bool matmul_int(const Weight& w, const uint16_t* x, int64_t rows, uint16_t* y, int threads) {
    const int64_t chunk = turn(w, threads), segment = segment_of(w), segments = w.inputs / segment, stride = w.inputs + 64;
    const bool tiled = rows >= TILED && have_amx();
    const int64_t most = tiled ? 16 : 8, bytes = rows * 2 * stride, notes = rows * segments * 4;
    int8_t* memory = static_cast<int8_t*>(aligned_alloc(64, size_t(bytes + 2 * notes + 63) & ~size_t(63)));
    if (!memory) return false;
    const Integers all{memory, stride, reinterpret_cast<float*>(memory + bytes),
                       reinterpret_cast<int32_t*>(memory + bytes + notes), segments};
#pragma omp parallel num_threads(threads)
    {
#pragma omp for schedule(static)
        for (int64_t i = 0; i < rows * segments; i++)
            make_integers<B>(x + i * segment, segment, all.bytes + i / segments * 2 * stride + i % segments * segment, stride,
                             all.units + i, all.zeros + i);
        for (int64_t m = 0; m < rows; m += most) {
            const int64_t count = std::min(most, rows - m), s = m * segments;
            const Integers some{all.bytes + m * 2 * stride, stride, all.units + s, all.zeros + s, segments};
            float part[ROWS][ROWS];
#if AMX
            if (tiled) {
                const Tiles tiles(std::min<int64_t>(2 * count, 16), std::max<int64_t>(2 * count - 16, 0),
                                  std::min<int64_t>(segment, 64));
#pragma omp for schedule(dynamic, chunk) nowait
                for (int64_t n = 0; n < blocks_of(w.rows); n++) {
                    rows_tiles<B>(w, n, some, count, part);
                    store_block(w, n, part, count, y + m * w.rows, BF16);
                }
                continue;
            }
#endif
#pragma omp for schedule(dynamic, chunk) nowait
            for (int64_t n = 0; n < blocks_of(w.rows); n++) {
                few_rows<B>(w, n, some, count, part);
                store_block(w, n, part, count, y + m * w.rows, BF16);
            }
        }
    }
    free(memory);
    return true;
}
#endif

#if AMX
// Many rows: activations rearranged into tiles once, the weight two row blocks at a time. False: no memory.
template <int B> bool matmul_many(const Weight& w, const uint16_t* x, int64_t rows, uint16_t* y, int threads) {
    const int64_t steps = w.inputs / INPUTS, row_tiles = 2 * ((rows + 2 * ROWS - 1) / (2 * ROWS)), panel = 2 * steps * TILE;
    uint16_t* a = static_cast<uint16_t*>(aligned_alloc(64, size_t(row_tiles * steps * TILE + threads * panel) * 2));
    if (!a) return false;
    uint16_t* panels = a + row_tiles * steps * TILE;
    int next = 0;
#pragma omp parallel num_threads(threads)
    {
        int self;
#pragma omp atomic capture
        self = next++;
        uint16_t* b = panels + self * panel;
        const Tiles tiles(16, 16, 64);
#pragma omp for schedule(static)
        for (int64_t t = 0; t < row_tiles * ROWS; t++)
            for (int64_t k = 0; k < steps; k++) {
                uint16_t* to = a + ((t / ROWS * steps + k) * ROWS + t % ROWS) * INPUTS;
                if (t < rows) memcpy(to, x + t * w.inputs + k * INPUTS, 64);
                else memset(to, 0, 64);
            }
#pragma omp for schedule(dynamic, 1)
        for (int64_t n = 0; n < blocks_of(w.rows); n += 2) {
            make_panel<B>(w, n, b);
            for (int64_t m = 0; m < rows; m += 2 * ROWS)
                multiply_panel(w, a + m / ROWS * steps * TILE, b, y + m * w.rows, rows - m, n * ROWS);
        }
    }
    free(a);
    return true;
}
#endif

// 0: done; 1: no memory; 2: bf16 is not taken here.
template <int B> int matmul_any(const Weight& w, const void* x, int32_t type, int64_t rows, void* y, int threads) {
    if (type == F32) {
        matmul_f32<B>(w, static_cast<const float*>(x), rows, static_cast<float*>(y), threads);
        return 0;
    }
#if WIDTH
    const uint16_t* at = static_cast<const uint16_t*>(x);
    uint16_t* to = static_cast<uint16_t*>(y);
#if AMX
    if (rows >= MANY && have_amx()) return matmul_many<B>(w, at, rows, to, threads) ? 0 : 1;
#endif
    return matmul_int<B>(w, at, rows, to, threads) ? 0 : 1;
#else
    return 2;
#endif
}

}  // namespace

#define EXPORT extern "C" __attribute__((visibility("default")))

// Bit 0: packed_matmul takes bf16; bit 1: many rows of it in AMX tiles; bit 2: dense_matmul works.
EXPORT int packed_features() {
    int features = have_amx() ? 2 : 0;
#if WIDTH
    features |= 1;
#endif
#if BF16_DOT
    features |= 4;
#endif
    return features;
}

// From the words on disk, int32 [rows, words], to w->codes (64-byte aligned, room for whole blocks).
EXPORT void packed_shuffle(const Weight* w, const uint32_t* packed, int64_t words, int threads) {
#if defined(__linux__)
    // Huge pages, where the kernel gives them: a stream of codes then costs no walks through page tables.
    const uintptr_t huge = uintptr_t(1) << 21, first = (uintptr_t(w->codes) + huge - 1) & ~(huge - 1);
    const uintptr_t end = (uintptr_t(w->codes) + blocks_of(w->rows) * w->inputs * w->bits * ROWS / 8) & ~(huge - 1);
    if (end > first) madvise(reinterpret_cast<void*>(first), end - first, MADV_HUGEPAGE);
#endif
    if (w->bits == 8) shuffle_all<8>(packed, words, *w, threads);
    else if (w->bits == 4) shuffle_all<4>(packed, words, *w, threads);
    else if (w->bits == 3) shuffle_all<3>(packed, words, *w, threads);
    else shuffle_all<2>(packed, words, *w, threads);
}

// Rows [first, first + count) of the weight to out [count, inputs] of `type`; `first` is a multiple of 16.
EXPORT void packed_dequantize(const Weight* w, int64_t first, int64_t count, void* out, int32_t type, int threads) {
    if (w->bits == 8) dequantize_all<8>(*w, first, count, out, type, threads);
    else if (w->bits == 4) dequantize_all<4>(*w, first, count, out, type, threads);
    else if (w->bits == 3) dequantize_all<3>(*w, first, count, out, type, threads);
    else dequantize_all<2>(*w, first, count, out, type, threads);
}

// x [rows, inputs] to y [rows, w->rows], both of `type`: F32, or BF16 where packed_features has bit 0.
// 0: done; 1: no memory for rearranged activations; 2: BF16 is not taken.
EXPORT int packed_matmul(const Weight* w, const void* x, int32_t type, int64_t rows, void* y, int threads) {
    if (w->bits == 8) return matmul_any<8>(*w, x, type, rows, y, threads);
    if (w->bits == 4) return matmul_any<4>(*w, x, type, rows, y, threads);
    if (w->bits == 3) return matmul_any<3>(*w, x, type, rows, y, threads);
    return matmul_any<2>(*w, x, type, rows, y, threads);
}

// bf16 weight [outputs, inputs] as torch has it, times 1 to 4 rows of bf16; inputs a multiple of 32. Needs bit 2.
EXPORT void dense_matmul(const uint16_t* w, int64_t outputs, int64_t inputs, const uint16_t* x, int64_t rows, uint16_t* y,
                         int threads) {
#if BF16_DOT
    const int64_t chunk = std::max<int64_t>(1, (int64_t(1) << 16) / (2 * inputs));
#pragma omp parallel for num_threads(threads) schedule(dynamic, chunk)
    for (int64_t n = 0; n < outputs; n++) {
        float sum[4];
        if (rows == 1) dense_row<1>(w + n * inputs, inputs, x, sum);
        else if (rows == 2) dense_row<2>(w + n * inputs, inputs, x, sum);
        else if (rows == 3) dense_row<3>(w + n * inputs, inputs, x, sum);
        else dense_row<4>(w + n * inputs, inputs, x, sum);
        for (int64_t m = 0; m < rows; m++) y[m * outputs + n] = to_bf16(sum[m]);
    }
#else
    (void)w, (void)outputs, (void)inputs, (void)x, (void)rows, (void)y, (void)threads;
#endif
}

// Reads `bytes` (a multiple of 64) with all threads, for the time it takes; returns their sum as 32-bit words.
EXPORT int64_t read_memory(const uint8_t* at, int64_t bytes, int threads) {
    int64_t total = 0;
#pragma omp parallel for num_threads(threads) schedule(static) reduction(+ : total)
    for (int64_t page = 0; page < bytes; page += 4096) {
        I8 sum[2] = {};
        for (int64_t i = page; i < std::min(page + 4096, bytes); i += 64) {
            __builtin_prefetch(at + i + AHEAD);
            I8 lanes[2];
            memcpy(lanes, at + i, 64);
            sum[0] += lanes[0];
            sum[1] += lanes[1];
        }
        for (int lane = 0; lane < 8; lane++) total += sum[0][lane] + sum[1][lane];
    }
    return total;
}
