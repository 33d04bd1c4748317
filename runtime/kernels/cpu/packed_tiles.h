// What AVX-512 with bf16 and AMX add: weights decoded to bf16, dense rows, and products in tiles.

#pragma once

#include "packed_integer.h"

namespace {

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
    constexpr int BATCH = 4;  // blocks: 128 inputs
    alignas(64) U tile[2][BATCH * FOURS];
    alignas(64) I part[2][BATCH][2 * ROWS];
    const int64_t segment = segment_of(w), steps = segment / INPUTS, groups = w.inputs / w.group, blocks = w.inputs / INPUTS;
    const int64_t per_tile = std::min<int64_t>(steps, 2), batches = (blocks + BATCH - 1) / BATCH;
    const uint8_t* codes = w.codes + row_block * blocks * B * 64;
    F total[ROWS] = {};
    const auto unpack = [&](int64_t i) {
        for (int64_t b = i * BATCH; b < std::min((i + 1) * BATCH, blocks); b++) {
            U* to = &tile[i % 2][b % BATCH * FOURS];
            prefetch<B>(codes + b * B * 64);
            each_four<B>(codes + b * B * 64, 0, [&](int q, U four) { to[q] = four; });
        }
    };
    const auto multiply = [&](int64_t i) {
        for (int64_t b = i * BATCH; b < std::min((i + 1) * BATCH, blocks); b += steps) {
            TILE_ZERO(0);
            if (rows > 8) TILE_ZERO(2);
            for (int64_t t = b; t < b + steps; t += per_tile) {
                const int8_t* at = x.bytes + t * INPUTS;
                TILE_LOAD(6, &tile[i % 2][t % BATCH * FOURS], 64);
                TILE_LOAD(4, at, x.stride);
                TILE_DOT_SU8(0, 4, 6);
                if (rows > 8) {
                    TILE_LOAD(5, at + 16 * x.stride, x.stride);
                    TILE_DOT_SU8(2, 5, 6);
                }
            }
            TILE_STORE(part[i % 2][b % BATCH], 64, 0);
            if (rows > 8) TILE_STORE(part[i % 2][b % BATCH] + 16, 64, 2);
        }
    };
    const auto add = [&](int64_t i) {
        for (int64_t b = i * BATCH; b < std::min((i + 1) * BATCH, blocks); b += steps) {
            const int64_t s = b / steps;
            const I* sums = part[i % 2][b % BATCH];
            const F scale = (F)load_scales(w, (row_block * groups + s * segment / w.group) * ROWS);
            for (int64_t m = 0; m < rows; m++) {
                const I sum = sums[2 * m] * 256 + sums[2 * m + 1] - x.zeros[m * x.segments + s];
                total[m] += __builtin_convertvector(sum, F) * (scale * x.units[m * x.segments + s]);
            }
        }
    };
    // Tiles are loaded from memory once what was stored there has retired, so each stage works on another batch.
    for (int64_t i = 0; i < batches + 2; i++) {
        if (i < batches) unpack(i);
        if (i >= 2) add(i - 2);
        if (i >= 1 && i <= batches) multiply(i - 1);
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

}  // namespace
