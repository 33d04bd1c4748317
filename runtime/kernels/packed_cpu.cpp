// Products of bf16 or fp32 activations with packed weights of 2, 3, 4 or 8 bits on a CPU.
//
// Built at first use by cpu_build.py for the machine at hand, called through ctypes by cpu.py. Knows nothing of Python
// or torch: plain pointers, and as many OpenMP threads as the caller says. Threads share output rows only, and each
// row is summed in a fixed order, so neither a second run nor another number of threads changes a bit.
//
// Layout. A block is 16 output rows times 32 inputs: exactly `bits` vectors of 64 bytes, in the order
// [rows / 16][inputs / 32][bits][32 words of 16 bits]. Word 2j+p holds codes of row j at inputs 2r+p, for as many pairs
// r as fit: a vector shifted right by the position of r is a table index for vpermw, and what comes out (32 bf16, rows
// side by side, inputs in pairs) is both an operand of the bf16 dot product and a row of an AMX tile.
//    8 bits: pair r in vector r/2 at bit 8*(r%2), as signed bytes      4 bits: vector r/4, bit 4*(r%4)
//    2 bits: vector r/8, bit 2*(r%8)                                   3 bits: vector r/5, bit 3*(r%5) for r < 15, and
//    bit b of pair 15 in the top bit of vector b.
// Scales are [rows / 16][groups][16] in their own type. Rows past the last are zero.
//
// Codes become bf16 exactly; a group is summed in fp32 and scaled once (with many rows in AMX tiles the scale is
// multiplied in first, which gives the weight rounded to bf16, as the reference has it with bf16 scales).

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <algorithm>

#if defined(__linux__)
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif
#if defined(__AVX512BF16__) && defined(__AVX512BW__)
#include <immintrin.h>
#define BF16_DOT 1
#if defined(__AMX_BF16__) && defined(__linux__)
#define AMX 1
#endif
#elif defined(__F16C__)
#include <immintrin.h>
#endif

namespace {

enum Type : int32_t { F32 = 0, BF16 = 1, F16 = 2 };

constexpr int ROWS = 16, INPUTS = 32, PAIRS = INPUTS / 2;
constexpr int64_t AHEAD = 1024;  // bytes prefetched ahead of a stream of codes: the best of 0.25 to 16 KiB

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

// Where pair r lies: (vector, first bit); the last pair of 3 bits is apart.
template <int B> constexpr int PER_WORD = 16 / B;
template <int B> constexpr int vector_of(int r) { return r / PER_WORD<B>; }
template <int B> constexpr int bit_of(int r) { return B * (r % PER_WORD<B>); }

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
    if (B == 3 && r == 15)
        code = ((vector(0) >> (15 + shift)) & 1) | ((vector(1) >> (14 + shift)) & 2) | ((vector(2) >> (13 + shift)) & 4);
    else
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

// ---- AVX-512 with bf16 dot products ----

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
        constexpr int PER = PER_WORD<B>;
#pragma GCC unroll 4
        for (int i = 0; i < B; i++) {
            const __m512i a = _mm512_loadu_si512(v + i);
#pragma GCC unroll 8
            for (int s = 0; s < PER; s++)
                use(i * PER + s, _mm512_permutexvar_epi16(s ? _mm512_srli_epi16(a, B * s) : a, table));
        }
        if constexpr (B == 3) {
            const __m512i low = _mm512_srli_epi16(_mm512_loadu_si512(v), 15);
            const __m512i middle = _mm512_srli_epi16(_mm512_loadu_si512(v + 1), 14);
            const __m512i high = _mm512_srli_epi16(_mm512_loadu_si512(v + 2), 13);
            // bit 0 of low, else bit 1 of middle, else high (its bit 2; lower bits are masked by the two selections)
            const __m512i one = _mm512_set1_epi16(1), three = _mm512_set1_epi16(3);
            const __m512i both = _mm512_ternarylogic_epi32(one, low, middle, 0xca);
            use(15, _mm512_permutexvar_epi16(_mm512_ternarylogic_epi32(three, both, high, 0xca), table));
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

// y[m][0..15] of one row block for M rows of bf16 activations.
template <int B, int M> void rows_bf16(const Weight& w, int64_t row_block, const uint16_t* x, float (*y)[ROWS]) {
    constexpr int CHAINS = M == 1 ? 4 : M == 2 ? 2 : 1;  // independent sums hide the latency of the dot product
    const __m512i table = load_table<B>();
    const int64_t groups = w.inputs / w.group, per_group = w.group / INPUTS;
    const uint8_t* block = w.codes + row_block * (w.inputs / INPUTS) * B * 64;
    __m512 total[M];
    for (int m = 0; m < M; m++) total[m] = _mm512_setzero_ps();
    for (int64_t g = 0; g < groups; g++) {
        __m512 sum[M][CHAINS];
        for (int m = 0; m < M; m++)
            for (int c = 0; c < CHAINS; c++) sum[m][c] = _mm512_setzero_ps();
        for (int64_t b = 0; b < per_group; b++, block += B * 64) {
            const uint16_t* at = x + (g * per_group + b) * INPUTS;
            prefetch<B>(block);
            decode<B>(block, table, [&](int r, __m512i pair) {
#pragma GCC unroll 8
                for (int m = 0; m < M; m++) {
                    int32_t two;
                    memcpy(&two, at + m * w.inputs + 2 * r, 4);
                    sum[m][r % CHAINS] =
                        _mm512_dpbf16_ps(sum[m][r % CHAINS], (__m512bh)pair, (__m512bh)_mm512_set1_epi32(two));
                }
            });
        }
        const __m512 scale = _mm512_mul_ps(load_scales(w, (row_block * groups + g) * ROWS), _mm512_set1_ps(UNIT<B>));
        for (int m = 0; m < M; m++) {
            if (CHAINS == 4) sum[m][0] = _mm512_add_ps(_mm512_add_ps(sum[m][0], sum[m][1]),
                                                       _mm512_add_ps(sum[m][2 % CHAINS], sum[m][3 % CHAINS]));
            if (CHAINS == 2) sum[m][0] = _mm512_add_ps(sum[m][0], sum[m][1 % CHAINS]);
            total[m] = _mm512_fmadd_ps(sum[m][0], scale, total[m]);
        }
    }
    for (int m = 0; m < M; m++) _mm512_storeu_ps(y[m], total[m]);
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
#define TILE_DOT(sum, a, b) asm volatile("tdpbf16ps %%tmm" #b ", %%tmm" #a ", %%tmm" #sum : : :)

constexpr int TILE = ROWS * INPUTS;

// Tiles for the life of the object: 0 to 3 are sums, 4 and 5 activations, 6 and 7 weights. Tiles 0, 1, 4 take `first`
// rows of activations, 2, 3, 5 take `second`.
struct Tiles {
    Tiles(int64_t first, int64_t second) {
        struct alignas(64) {
            uint8_t palette, start, reserved[14];
            uint16_t bytes[16];
            uint8_t rows[16];
        } config;
        memset(&config, 0, sizeof config);
        config.palette = 1;
        for (int tile = 0; tile < 8; tile++) {
            const int64_t rows = tile >= 6 ? PAIRS : tile == 2 || tile == 3 || tile == 5 ? second : first;
            config.rows[tile] = uint8_t(rows);
            config.bytes[tile] = rows ? 64 : 0;
        }
        asm volatile("ldtilecfg (%0)" : : "r"(&config) : "memory");
    }
    ~Tiles() { asm volatile("tilerelease" : : :); }
    Tiles(const Tiles&) = delete;
    Tiles& operator=(const Tiles&) = delete;
};

// y[m][0..15] of one row block for up to 32 rows of bf16 activations; Tiles(min(rows, 16), rows - 16) are configured.
template <int B> void rows_amx(const Weight& w, int64_t row_block, const uint16_t* x, int64_t rows, float (*y)[ROWS]) {
    constexpr int RING = 4;  // tiles written ahead of those being multiplied
    alignas(64) uint16_t tile[RING][TILE];
    alignas(64) float part[2 * ROWS][ROWS];
    const __m512i table = load_table<B>();
    const int64_t groups = w.inputs / w.group, per_group = w.group / INPUTS, stride = 2 * w.inputs;
    const uint8_t* block = w.codes + row_block * (w.inputs / INPUTS) * B * 64;
    memset(y, 0, size_t(rows) * sizeof *y);
    for (int64_t g = 0; g < groups; g++) {
        TILE_ZERO(0);
        if (rows > ROWS) TILE_ZERO(2);
        for (int64_t b = 0; b < per_group; b++, block += B * 64) {
            const uint16_t* at = x + (g * per_group + b) * INPUTS;
            uint16_t* to = tile[b % RING];
            prefetch<B>(block);
            decode<B>(block, table, [&](int r, __m512i pair) { _mm512_store_si512(to + r * INPUTS, pair); });
            TILE_LOAD(6, to, 64);
            TILE_LOAD(4, at, stride);
            TILE_DOT(0, 4, 6);
            if (rows > ROWS) {
                TILE_LOAD(5, at + ROWS * w.inputs, stride);
                TILE_DOT(2, 5, 6);
            }
        }
        TILE_STORE(part, 64, 0);
        if (rows > ROWS) TILE_STORE(part[ROWS], 64, 2);
        const __m512 scale = _mm512_mul_ps(load_scales(w, (row_block * groups + g) * ROWS), _mm512_set1_ps(UNIT<B>));
        for (int64_t m = 0; m < rows; m++)
            _mm512_storeu_ps(y[m], _mm512_fmadd_ps(_mm512_load_ps(part[m]), scale, _mm512_loadu_ps(y[m])));
    }
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
        TILE_DOT(0, 4, 6);
        TILE_LOAD(7, b + other, 64);
        TILE_DOT(1, 4, 7);
        TILE_LOAD(5, a + other, 64);
        TILE_DOT(2, 5, 6);
        TILE_DOT(3, 5, 7);
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
                if (B == 3 && r == 15)
                    for (int b = 0; b < 3; b++) to[b * INPUTS] |= uint16_t(((code >> b) & 1) << 15);
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

// 1 to 4 activations times one row block.
template <int B> void few_rows(const Weight& w, int64_t row_block, const void* x, int32_t type, int64_t rows, void* y) {
    float part[4][ROWS];
#if BF16_DOT
    if (type == BF16) {
        const uint16_t* at = static_cast<const uint16_t*>(x);
        if (rows == 1) rows_bf16<B, 1>(w, row_block, at, part);
        else if (rows == 2) rows_bf16<B, 2>(w, row_block, at, part);
        else if (rows == 3) rows_bf16<B, 3>(w, row_block, at, part);
        else rows_bf16<B, 4>(w, row_block, at, part);
    } else
#endif
    {
        const float* at = static_cast<const float*>(x);
        if (rows == 1) rows_f32<B, 1>(w, row_block, at, part);
        else if (rows == 2) rows_f32<B, 2>(w, row_block, at, part);
        else if (rows == 3) rows_f32<B, 3>(w, row_block, at, part);
        else rows_f32<B, 4>(w, row_block, at, part);
    }
    const int64_t row = row_block * ROWS;
    for (int64_t m = 0; m < rows; m++)
        for (int64_t j = 0; j < std::min<int64_t>(ROWS, w.rows - row); j++) store(y, type, m * w.rows + row + j, part[m][j]);
}

template <int B> void matmul_few(const Weight& w, const void* x, int32_t type, int64_t rows, void* y, int threads) {
    const int64_t chunk = turn(w, threads), size = type == F32 ? 4 : 2;
#pragma omp parallel for num_threads(threads) schedule(dynamic, chunk)
    for (int64_t n = 0; n < blocks_of(w.rows); n++)
        for (int64_t m = 0; m < rows; m += 4)
            few_rows<B>(w, n, static_cast<const char*>(x) + m * w.inputs * size, type, std::min<int64_t>(4, rows - m),
                        static_cast<char*>(y) + m * w.rows * size);
}

#if AMX
template <int B> void matmul_amx_few(const Weight& w, const uint16_t* x, int64_t rows, uint16_t* y, int threads) {
    const int64_t chunk = turn(w, threads);
#pragma omp parallel num_threads(threads)
    {
        const Tiles tiles(std::min<int64_t>(rows, ROWS), std::max<int64_t>(rows - ROWS, 0));
        float part[2 * ROWS][ROWS];
#pragma omp for schedule(dynamic, chunk)
        for (int64_t n = 0; n < blocks_of(w.rows); n++) {
            rows_amx<B>(w, n, x, rows, part);
            for (int64_t m = 0; m < rows; m++)
                store_row(y + m * w.rows + n * ROWS, _mm512_loadu_ps(part[m]), w.rows - n * ROWS);
        }
    }
}

// Many rows: activations rearranged into tiles once, the weight two row blocks at a time. False: no memory.
template <int B> bool matmul_amx_many(const Weight& w, const uint16_t* x, int64_t rows, uint16_t* y, int threads) {
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
        const Tiles tiles(ROWS, ROWS);
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

constexpr int64_t AMX_ROWS = 4, AMX_MANY = 48;

template <int B> int matmul_any(const Weight& w, const void* x, int32_t type, int64_t rows, void* y, int threads) {
#if AMX
    if (type == BF16 && rows >= AMX_ROWS && have_amx()) {
        const uint16_t* at = static_cast<const uint16_t*>(x);
        uint16_t* to = static_cast<uint16_t*>(y);
        if (rows >= AMX_MANY) return matmul_amx_many<B>(w, at, rows, to, threads) ? 0 : 1;
        for (int64_t m = 0; m < rows; m += 2 * ROWS)
            matmul_amx_few<B>(w, at + m * w.inputs, std::min<int64_t>(2 * ROWS, rows - m), to + m * w.rows, threads);
        return 0;
    }
#endif
    matmul_few<B>(w, x, type, rows, y, threads);
    return 0;
}

}  // namespace

#define EXPORT extern "C" __attribute__((visibility("default")))

// Bit 0: bf16 dot products, bit 1: AMX tiles.
EXPORT int packed_features() {
#if BF16_DOT
    return 1 | (have_amx() ? 2 : 0);
#else
    return 0;
#endif
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

// x [rows, inputs] to y [rows, w->rows], both of `type`: F32, or BF16 where packed_features has bit 0. 0 on success,
// 1 where memory for activations in tiles is missing.
EXPORT int packed_matmul(const Weight* w, const void* x, int32_t type, int64_t rows, void* y, int threads) {
    if (w->bits == 8) return matmul_any<8>(*w, x, type, rows, y, threads);
    if (w->bits == 4) return matmul_any<4>(*w, x, type, rows, y, threads);
    if (w->bits == 3) return matmul_any<3>(*w, x, type, rows, y, threads);
    return matmul_any<2>(*w, x, type, rows, y, threads);
}

// bf16 weight [outputs, inputs] as torch has it, times 1 to 4 rows of bf16; inputs a multiple of 32. Needs bit 0.
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
