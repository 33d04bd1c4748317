// What AMX adds: integers of 16 bits, in two bytes, times codes in tiles of 16 x 64 bytes. Sums are as exact as elsewhere.

#pragma once

#include "packed_panels.h"

namespace {

#if AMX

// Assembler instead of the intrinsics: those of GCC 12 hide from the compiler which memory they read and write.
#define TILE_ZERO(tile) asm volatile("tilezero %%tmm" #tile : : :)
#define TILE_LOAD(tile, base, stride) \
    asm volatile("tileloadd (%0,%1,1), %%tmm" #tile : : "r"(base), "r"(int64_t(stride)) : "memory")
#define TILE_STORE(base, stride, tile) \
    asm volatile("tilestored %%tmm" #tile ", (%0,%1,1)" : : "r"(base), "r"(int64_t(stride)) : "memory")
#define TILE_DOT_S8(sum, a, b) asm volatile("tdpbssd %%tmm" #b ", %%tmm" #a ", %%tmm" #sum : : :)
#define TILE_DOT_BF16(sum, a, b) asm volatile("tdpbf16ps %%tmm" #b ", %%tmm" #a ", %%tmm" #sum : : :)

inline bool have_amx() {
    // Linux grants the tile registers to a process that asks (ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA).
    static const bool granted = syscall(SYS_arch_prctl, 0x1023, 18) == 0;
    return granted;
}

// Tiles for the life of the object: 4 and 5 are left operands of `high` rows and `width` bytes, 6 and 7 right operands of
// width / 4 rows and `across` bytes, 0 to 3 sums of `high` rows and `across` bytes.
struct Tiles {
    Tiles(int64_t high, int64_t width, int64_t across) {
        struct alignas(64) {
            uint8_t palette, start, reserved[14];
            uint16_t bytes[16];
            uint8_t rows[16];
        } config;
        memset(&config, 0, sizeof config);
        config.palette = 1;
        for (int tile = 0; tile < 8; tile++) {
            config.rows[tile] = uint8_t(tile >= 6 ? width / 4 : high);
            config.bytes[tile] = uint16_t(tile == 4 || tile == 5 ? width : across);
        }
        asm volatile("ldtilecfg (%0)" : : "r"(&config) : "memory");
    }
    ~Tiles() { asm volatile("tilerelease" : : :); }
    Tiles(const Tiles&) = delete;
    Tiles& operator=(const Tiles&) = delete;
};

constexpr int64_t TILE_BLOCKS = 2;  // row blocks that are multiplied at a time

inline int64_t tile_width(const Weight& w) { return std::min<int64_t>(segment_of(w), 64); }

// The integers of a row to their places: [tiles][inputs / width][high, low][rows of the tile][width].
inline void place_bytes(const Tiling& tiling, int64_t row, int64_t inputs, int64_t width, const int16_t* v, int8_t* x) {
    const int64_t tile = tiling.tile_of(row), start = tiling.first(tile), high = tiling.first(tile + 1) - start;
    int8_t* to = x + start * 2 * inputs + (row - start) * width;
    for (int64_t i = 0; i < inputs; i += width, to += 2 * high * width) cut_bytes(v + i, width, to, to + high * width);
}

// As multiply_panel, for tiles of up to 16 rows; Tiles(16, tile_width(w), 64) are configured.
template <int B>
void multiply_tiles(const Weight& w, int64_t row_block, const Tiling& tiling, int64_t first, int64_t last, const int8_t* x,
                    const Units& units, float* total, uint16_t* y) {
    const int64_t segment = segment_of(w), width = tile_width(w), groups = w.inputs / w.group, blocks = w.inputs / INPUTS;
    const int64_t row = tiling.first(first), count = std::min(TILE_BLOCKS, blocks_of(w.rows) - row_block);
    alignas(64) U codes[2][TILE_BLOCKS][128 / 4];
    alignas(64) Ints part[2][2 * TILE_BLOCKS][ROWS];
    memset(total, 0, size_t(tiling.first(last) - row) * TILE_BLOCKS * ROWS * sizeof *total);
    const auto unpack = [&](int64_t s) {
        for (int64_t n = 0; n < count; n++) {
            const uint8_t* block = w.codes + ((row_block + n) * blocks + s * segment / INPUTS) * B * 64;
            U* to = codes[s % 2][n];
            for (int64_t b = 0; b < segment / INPUTS; b++, block += B * 64, to += FOURS) {
                prefetch<B>(block);
#pragma GCC unroll 8
                for (int q = 0; q < FOURS; q++)
                    to[q] = (U)_mm512_sub_epi8((__m512i)four_of<B>(block, q, 0), _mm512_set1_epi8(int8_t(1 << (B - 1))));
            }
        }
    };
    const auto multiply = [&](int64_t s, int64_t t, Ints (*sums)[ROWS]) {
        const int64_t start = tiling.first(t), high = tiling.first(t + 1) - start;
        const int8_t* at = x + start * 2 * w.inputs + s * segment * 2 * high;
        TILE_ZERO(0);
        TILE_ZERO(1);
        TILE_ZERO(2);
        TILE_ZERO(3);
        for (int64_t k = 0; k < segment; k += width, at += 2 * high * width) {
            TILE_LOAD(4, at, width);
            TILE_LOAD(6, codes[s % 2][0] + k / 4, 64);
            TILE_DOT_S8(0, 4, 6);
            TILE_LOAD(5, at + high * width, width);
            TILE_DOT_S8(1, 5, 6);
            if (count < 2) continue;
            TILE_LOAD(7, codes[s % 2][1] + k / 4, 64);
            TILE_DOT_S8(2, 4, 7);
            TILE_DOT_S8(3, 5, 7);
        }
        TILE_STORE(sums[0], 64, 0);
        TILE_STORE(sums[1], 64, 1);
        if (count < 2) return;
        TILE_STORE(sums[2], 64, 2);
        TILE_STORE(sums[3], 64, 3);
    };
    const auto add = [&](int64_t s, int64_t t, const Ints (*sums)[ROWS]) {
        const int64_t start = tiling.first(t), high = tiling.first(t + 1) - start;
        for (int64_t n = 0; n < count; n++) {
            const int64_t at_scale = ((row_block + n) * groups + s * segment / w.group) * ROWS;
            alignas(64) float scales[ROWS];
            load_scales(w, at_scale, scales);
            const Floats scale = load_vector<Floats>(scales);
            float* value = total + ((start - row) * TILE_BLOCKS + n) * ROWS;
            for (int64_t m = 0, at = start * units.segments + s; m < high; m++, at += units.segments, value += TILE_BLOCKS * ROWS) {
                const Ints sum = sums[2 * n][m] * 256 + sums[2 * n + 1][m];
                Floats now = scaled(sum, scale, units, at, load_vector<Floats>(value));
                if (w.offsets) now = shifted(load_vector<Floats>(w.offsets + at_scale), units, at, now);
                memcpy(value, &now, sizeof now);
            }
        }
    };
    // Tiles are loaded from memory once what was stored there has retired, so a turn unpacks what the next one multiplies, and
    // adds what the one before has multiplied.
    const int64_t tiles = last - first, turns = units.segments * tiles;
    for (int64_t i = 0; i < turns + 2; i++) {
        if (i < turns && i % tiles == 0) unpack(i / tiles);
        if (i > 1) add((i - 2) / tiles, first + (i - 2) % tiles, part[i % 2]);
        if (i > 0 && i <= turns) multiply((i - 1) / tiles, first + (i - 1) % tiles, part[(i - 1) % 2]);
    }
    for (int64_t m = 0; m < tiling.first(last) - row; m++)
        for (int64_t n = 0; n < count; n++)
            store_row(y, BF16, (row + m) * w.rows + (row_block + n) * ROWS, total + (m * TILE_BLOCKS + n) * ROWS,
                      std::min<int64_t>(ROWS, w.rows - (row_block + n) * ROWS));
}

#else

inline bool have_amx() { return false; }

#endif

}  // namespace
