// AMX: 16-bit integers, in two bytes, times codes in tiles of 16 x 64 bytes. Sums are as exact as on other paths.

#pragma once

#include "products/packed_panels.h"

namespace {

#if AMX

#ifndef TILE_ZERO  // or tests replace the instructions
// Linux grants the tile registers to a process that asks (ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA).
#define TILES_GRANTED() (syscall(SYS_arch_prctl, 0x1023, 18) == 0)
// Assembler instead of the intrinsics: those of GCC 12 hide from the compiler which memory they read and write.
#define TILE_CONFIGURE(from) asm volatile("ldtilecfg (%0)" : : "r"(from) : "memory")
#define TILE_RELEASE() asm volatile("tilerelease" : : :)
#define TILE_ZERO(tile) asm volatile("tilezero %%tmm" #tile : : :)
#define TILE_LOAD(tile, base, stride) \
    asm volatile("tileloadd (%0,%1,1), %%tmm" #tile : : "r"(base), "r"(int64_t(stride)) : "memory")
#define TILE_STORE(base, stride, tile) \
    asm volatile("tilestored %%tmm" #tile ", (%0,%1,1)" : : "r"(base), "r"(int64_t(stride)) : "memory")
#define TILE_DOT_S8(sum, a, b) asm volatile("tdpbssd %%tmm" #b ", %%tmm" #a ", %%tmm" #sum : : :)
#define TILE_DOT_BF16(sum, a, b) asm volatile("tdpbf16ps %%tmm" #b ", %%tmm" #a ", %%tmm" #sum : : :)
#endif

inline bool have_amx() {
    static const bool granted = TILES_GRANTED();
    return granted;
}

// Configures tiles for the life of the object: 4 and 5 are left operands of `high` rows and `width` bytes, 6 and 7 right operands
// of width / 4 rows and `across` bytes, 0 to 3 sums of `high` rows and `across` bytes.
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
        TILE_CONFIGURE(&config);
    }
    ~Tiles() { TILE_RELEASE(); }
    Tiles(const Tiles&) = delete;
    Tiles& operator=(const Tiles&) = delete;
};

constexpr int64_t TILE_BLOCKS = 2;  // row blocks that are multiplied at a time

inline int64_t tile_width(const Weight& w) { return std::min<int64_t>(cut_of(w).segment, 64); }

// Stores the integers of a row: [segments][tiles][segment / width][high, low][rows of the tile][width].
inline void place_bytes(const Tiling& tiling, int64_t row, int64_t inputs, int64_t segment, int64_t width, const int16_t* v, int8_t* x) {
    const int64_t tile = tiling.tile_of(row), start = tiling.first(tile), high = tiling.first(tile + 1) - start;
    for (int64_t i = 0; i < inputs; i += width) {
        int8_t* to = x + 2 * ((tiling.rows * (i / segment) + start) * segment + i % segment * high) + (row - start) * width;
        cut_bytes(v + i, width, to, to + high * width);
    }
}

// Signed codes of `count` blocks in bytes, as a right operand: four q of 16 rows is row q of a tile.
template <int B> void unpack_bytes(const uint8_t* block, int64_t count, U* to) {
    for (int64_t b = 0; b < count; b++, block += STORED<B> * 64, to += FOURS) {
        prefetch<B>(block);
#pragma GCC unroll 8
        for (int q = 0; q < FOURS; q++)
            to[q] = (U)_mm512_sub_epi8((__m512i)four_of<B>(block, q, 0), _mm512_set1_epi8(int8_t(ZERO<B>)));
    }
}

// Calls use(segments that are added at a time, whether there are offsets), both as types. The segments are whole blocks, of the
// inputs of at most two tiles.
template <class Use> void by_segment(const Weight& w, Use use) {
    const int64_t segment = cut_of(w).segment;
    const auto choose = [&](auto parts) { w.offsets ? use(parts, std::true_type()) : use(parts, std::false_type()); };
    if (segment <= 64 && w.inputs / segment % 2 == 0) choose(std::integral_constant<int, 2>());
    else choose(std::integral_constant<int, 1>());
}

// The contents of the sum tiles: sums of PARTS segments of up to 16 rows times 16 outputs, of high and of low bytes; and their
// destination.
template <int PARTS> struct TileSums {
    const Ints (*sums)[2][ROWS];
    const Floats *scale, *offset;
    const float *unit, *shift;  // of the first row and segment
    float* total;
    int64_t row, rows;  // rows from `row` have not been added yet
};

template <int PARTS, bool OFFSETS>
inline __attribute__((always_inline)) void add_rows(TileSums<PARTS>& t, int64_t step, int64_t count) {
    const int64_t last = std::min(t.row + count, t.rows);
    const float *unit = t.unit, *shift = t.shift;  // locals: not read again after each store
    for (; t.row < last; t.row++) {
        float* total = t.total + t.row * TILE_BLOCKS * ROWS;
        Floats now = load_vector<Floats>(total);
#pragma GCC unroll 2
        for (int64_t j = 0; j < PARTS; j++) {
            now = scaled(t.sums[j][0][t.row] * 256 + t.sums[j][1][t.row], t.scale[j], spread_lanes(unit[t.row + j * step]), now);
            if (OFFSETS) now = shifted(t.offset[j], spread_lanes(shift[t.row + j * step]), now);
        }
        memcpy(total, &now, sizeof now);
    }
}

typedef void Unpack(const uint8_t* block, int64_t count, U* to);

// The right operands of a batch of inputs: signed codes, scales and offsets of the segments of each row block.
template <int PARTS> struct alignas(64) Batch {
    U codes[TILE_BLOCKS][128 / 4];
    Floats scale[TILE_BLOCKS][PARTS], offset[TILE_BLOCKS][PARTS];

    void read(const Weight& w, Unpack* unpack, int64_t row_block, int64_t count, int64_t input) {
        const int64_t segment = cut_of(w).segment;
        for (int64_t n = 0; n < count; n++) {
            unpack(w.codes + ((row_block + n) * w.inputs + input) / INPUTS * w.bits * 64, PARTS * segment / INPUTS, codes[n]);
            for (int64_t j = 0; j < PARTS; j++) {
                const GroupScales group = scales_at(w, row_block + n, input + j * segment);
                scale[n][j] = group.scale[0], offset[n][j] = group.offset[0];
            }
        }
    }
};

// multiply_panel for tiles of up to 16 rows; Tiles(16, tile_width(w), 64) are configured.
//
// Five tiles are in use: a core whose other thread is busy has few registers to rename them to, and with all eight each load
// waits until every product that reads the old tile has retired, which takes four times as long. The weight's tiles are reused
// for NEAR tiles of rows.
template <int PARTS, bool OFFSETS>
void multiply_tiles(const Weight& w, Unpack* unpack, int64_t row_block, const Tiling& tiling, int64_t first, int64_t last,
                    const int8_t* x, const Units& units, float* total, uint16_t* y) {
    constexpr int64_t NEAR = 2;
    const int64_t segment = cut_of(w).segment, width = tile_width(w), inputs = PARTS * segment, row = tiling.first(first);
    const int64_t count = std::min(TILE_BLOCKS, blocks_of(w.rows) - row_block), rows = tiling.first(last) - row;
    const bool two = inputs > width;  // tiles of the weight
    Batch<PARTS> batches[2];
    alignas(64) Ints part[2][PARTS][2][ROWS];
    TileSums<PARTS> before{};  // a sum can be read once its tile has retired: it is added while the next tiles are multiplied
    const auto add = [&](int64_t most) { add_rows<PARTS, OFFSETS>(before, units.segment, most); };
    const auto multiply = [&](int64_t input, int64_t n, int64_t t, const Batch<PARTS>& batch, Ints (*sums)[2][ROWS]) {
        const int64_t start = tiling.first(t), high = tiling.first(t + 1) - start;
        const int8_t* at = x + 2 * (tiling.rows * input + start * segment);
        TILE_ZERO(0);
        TILE_ZERO(1);
        TILE_LOAD(4, at, width);
        TILE_DOT_S8(0, 4, 6);
        add(ROWS / 4);
        TILE_LOAD(4, at + high * width, width);
        TILE_DOT_S8(1, 4, 6);
        add(ROWS / 4);
        if (two) {
            if (PARTS == 2) {
                TILE_STORE(sums[0][0], 64, 0);
                TILE_STORE(sums[0][1], 64, 1);
                TILE_ZERO(0);
                TILE_ZERO(1);
            }
            at += 2 * width * (PARTS == 2 ? tiling.rows : high);
            TILE_LOAD(4, at, width);
            TILE_DOT_S8(0, 4, 7);
            add(ROWS / 4);
            TILE_LOAD(4, at + high * width, width);
            TILE_DOT_S8(1, 4, 7);
        }
        add(ROWS);
        TILE_STORE(sums[PARTS - 1][0], 64, 0);
        TILE_STORE(sums[PARTS - 1][1], 64, 1);
        const int64_t place = start * units.row + input / segment * units.segment;
        before = {sums, batch.scale[n], batch.offset[n], units.unit + place, units.shift + place,
                  total + ((start - row) * TILE_BLOCKS + n) * ROWS, 0, high};
    };
    memset(total, 0, size_t(rows) * TILE_BLOCKS * ROWS * sizeof *total);
    batches[0].read(w, unpack, row_block, count, 0);
    int64_t done = 0;
    for (int64_t input = 0; input < w.inputs; input += inputs) {
        const Batch<PARTS>& batch = batches[input / inputs % 2];
        for (int64_t near = first; near < last; near += NEAR) {
            for (int64_t n = 0; n < count; n++) {
                TILE_LOAD(6, batch.codes[n], 64);
                if (two) TILE_LOAD(7, batch.codes[n] + width / 4, 64);
                for (int64_t t = near; t < std::min(near + NEAR, last); t++) multiply(input, n, t, batch, part[done++ % 2]);
            }
            if (near == first && input + inputs < w.inputs)
                batches[(input / inputs + 1) % 2].read(w, unpack, row_block, count, input + inputs);
        }
    }
    add(ROWS);
    for (int64_t m = 0; m < rows; m++)
        for (int64_t n = 0; n < count; n++)
            store_row(y, BF16, (row + m) * w.rows + (row_block + n) * ROWS, total + (m * TILE_BLOCKS + n) * ROWS,
                      std::min<int64_t>(ROWS, w.rows - (row_block + n) * ROWS));
}

#else

inline bool have_amx() { return false; }

#endif

}  // namespace
