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

// The integers of a row to their places: [segments][tiles][segment / width][high, low][rows of the tile][width].
inline void place_bytes(const Tiling& tiling, int64_t row, int64_t inputs, int64_t segment, int64_t width, const int16_t* v, int8_t* x) {
    const int64_t tile = tiling.tile_of(row), start = tiling.first(tile), high = tiling.first(tile + 1) - start;
    for (int64_t i = 0; i < inputs; i += width) {
        int8_t* to = x + 2 * ((tiling.rows * (i / segment) + start) * segment + i % segment * high) + (row - start) * width;
        cut_bytes(v + i, width, to, to + high * width);
    }
}

// Signed codes of `count` blocks in bytes, as a right operand: four q of 16 rows is row q of a tile.
template <int B> void unpack_bytes(const uint8_t* block, int64_t count, U* to) {
    for (int64_t b = 0; b < count; b++, block += B * 64, to += FOURS) {
        prefetch<B>(block);
#pragma GCC unroll 8
        for (int q = 0; q < FOURS; q++)
            to[q] = (U)_mm512_sub_epi8((__m512i)four_of<B>(block, q, 0), _mm512_set1_epi8(int8_t(1 << (B - 1))));
    }
}

// Calls use(segments that are added up at a time, whether there are offsets), both as types. What is added up is whole blocks of
// at most 128 inputs.
template <class Use> void by_segment(const Weight& w, Use use) {
    const int64_t segment = segment_of(w), segments = w.inputs / segment;
    const auto choose = [&](auto parts) { w.offsets ? use(parts, std::true_type()) : use(parts, std::false_type()); };
    if (segment <= 32 && segments % 4 == 0) choose(std::integral_constant<int, 4>());
    else if (segment <= 64 && segments % 2 == 0) choose(std::integral_constant<int, 2>());
    else choose(std::integral_constant<int, 1>());
}

// What has left the tiles: the sums of PARTS segments of up to 16 rows times 16 outputs, of high and of low bytes; and where
// they go.
template <int PARTS> struct TileSums {
    const Ints (*sums)[2][ROWS];
    const Floats *scale, *offset;
    const float *unit, *shift;  // of the first row and segment
    float* total;
    int64_t row, rows;  // rows from `row` on have not been added
};

template <int PARTS, bool OFFSETS>
inline __attribute__((always_inline)) void add_rows(TileSums<PARTS>& t, int64_t step, int64_t count) {
    const int64_t last = std::min(t.row + count, t.rows);
    const Units units{const_cast<float*>(t.unit), nullptr, const_cast<float*>(t.shift), 1, step};
    for (; t.row < last; t.row++) {
        float* total = t.total + t.row * TILE_BLOCKS * ROWS;
        Floats now = load_vector<Floats>(total);
#pragma GCC unroll 4
        for (int64_t j = 0; j < PARTS; j++) {
            now = scaled(t.sums[j][0][t.row] * 256 + t.sums[j][1][t.row], t.scale[j], units, t.row + j * step, now);
            if (OFFSETS) now = shifted(t.offset[j], units, t.row + j * step, now);
        }
        memcpy(total, &now, sizeof now);
    }
}

// As multiply_panel, for tiles of up to 16 rows; Tiles(16, tile_width(w), 64) are configured.
//
// No more than four tiles are in use. A core whose other thread is busy has few to rename them to: with all eight, a tile is loaded
// only once every product that reads what it held has retired, and products take four times as long.
template <int PARTS, bool OFFSETS>
void multiply_tiles(const Weight& w, void (*unpack)(const uint8_t*, int64_t, U*), int64_t row_block, const Tiling& tiling, int64_t first,
                    int64_t last, const int8_t* x, const Units& units, float* total, uint16_t* y) {
    const int64_t segment = segment_of(w), width = tile_width(w), groups = w.inputs / w.group, batch = PARTS * segment;
    const int64_t row = tiling.first(first), count = std::min(TILE_BLOCKS, blocks_of(w.rows) - row_block);
    const int64_t block_bytes = w.bits * 64, slots = 2 * batch / width;
    alignas(64) U codes[2][TILE_BLOCKS][128 / 4];
    alignas(64) Ints part[2][PARTS][2][ROWS];
    Floats scale[2][TILE_BLOCKS][PARTS], offset[2][TILE_BLOCKS][PARTS];
    memset(total, 0, size_t(tiling.first(last) - row) * TILE_BLOCKS * ROWS * sizeof *total);
    const auto prepare = [&](int64_t i) {
        const int64_t turn = i / batch % 2;
        for (int64_t n = 0; n < count; n++) {
            unpack(w.codes + ((row_block + n) * w.inputs + i) / INPUTS * block_bytes, batch / INPUTS, codes[turn][n]);
            for (int64_t j = 0; j < PARTS; j++) {
                const int64_t at = ((row_block + n) * groups + (i + j * segment) / w.group) * ROWS;
                alignas(64) float scales[ROWS];
                load_scales(w, at, scales);
                scale[turn][n][j] = load_vector<Floats>(scales);
                if (OFFSETS) offset[turn][n][j] = load_vector<Floats>(w.offsets + at);
            }
        }
    };
    // What leaves the tiles can be read once it has retired: it is added while the next tiles are multiplied.
    TileSums<PARTS> before{};
    int64_t units_done = 0;
    prepare(0);
    for (int64_t i = 0; i < w.inputs; i += batch) {
        const int64_t turn = i / batch % 2;
        for (int64_t t = first; t < last; t++) {
            const int64_t start = tiling.first(t), high = tiling.first(t + 1) - start;
            for (int64_t n = 0; n < count; n++, units_done++) {
                Ints (*sums)[2][ROWS] = part[units_done % 2];
                for (int64_t j = 0; j < PARTS; j++) {
                    const int8_t* at = x + 2 * (tiling.rows * (i + j * segment) + start * segment);
                    TILE_ZERO(0);
                    TILE_ZERO(1);
                    for (int64_t k = 0; k < segment; k += width, at += 2 * high * width) {
                        TILE_LOAD(6, codes[turn][n] + (j * segment + k) / 4, 64);
                        TILE_LOAD(4, at, width);
                        TILE_DOT_S8(0, 4, 6);
                        add_rows<PARTS, OFFSETS>(before, units.segment, ROWS / slots);
                        TILE_LOAD(4, at + high * width, width);
                        TILE_DOT_S8(1, 4, 6);
                        add_rows<PARTS, OFFSETS>(before, units.segment, ROWS / slots);
                    }
                    TILE_STORE(sums[j][0], 64, 0);
                    TILE_STORE(sums[j][1], 64, 1);
                }
                add_rows<PARTS, OFFSETS>(before, units.segment, ROWS);
                const int64_t place = start * units.row + i / segment * units.segment;
                before = {sums, scale[turn][n], offset[turn][n], units.unit + place, units.shift + place,
                          total + ((start - row) * TILE_BLOCKS + n) * ROWS, 0, high};
            }
            if (t == first && i + batch < w.inputs) prepare(i + batch);
        }
    }
    add_rows<PARTS, OFFSETS>(before, units.segment, ROWS);
    for (int64_t m = 0; m < tiling.first(last) - row; m++)
        for (int64_t n = 0; n < count; n++)
            store_row(y, BF16, (row + m) * w.rows + (row_block + n) * ROWS, total + (m * TILE_BLOCKS + n) * ROWS,
                      std::min<int64_t>(ROWS, w.rows - (row_block + n) * ROWS));
}

#else

inline bool have_amx() { return false; }

#endif

}  // namespace
