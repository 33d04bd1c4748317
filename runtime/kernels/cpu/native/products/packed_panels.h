// Any number of rows, on any machine: a segment of the weight is unpacked into a panel that stays in the first cache, and
// multiplied by tiles of rows in registers. Integers of bf16 as words, fp32 as it is.

#pragma once

#include "products/packed_integer.h"

namespace {

// A panel is [steps][PANEL lanes of 4 bytes]: a pair of inputs as words, or one input as a float. A register tile is up to HIGH
// rows times ACROSS vectors. Of 32 vector registers 24 are sums, of 16 at most 12.
constexpr int ACROSS = 2, HIGH = VECTOR == 64 ? 12 : VECTOR == 32 ? 6 : 4;
constexpr int PANEL_BLOCKS = VECTOR == 64 ? 2 : 1, PANEL = PANEL_BLOCKS * ROWS;
constexpr int64_t ACTIVATION_BYTES = 1 << 20;  // of the rows that are multiplied at a time: they stay in the second cache

// Rows are cut into tiles of nearly the same height. In a tile, steps of its rows lie side by side: [steps][rows of the tile].
struct Tiling {
    int64_t rows, high, tiles;
    Tiling(int64_t rows, int64_t high) : rows(rows), high(high), tiles((rows + high - 1) / high) {}
    int64_t first(int64_t tile) const { return rows * tile / tiles; }
    int64_t tile_of(int64_t row) const { return ((row + 1) * tiles - 1) / rows; }
    int64_t together(int64_t row_bytes) const {  // tiles whose rows, of `row_bytes`, are multiplied at a time
        return std::max<int64_t>(1, std::min(tiles, ACTIVATION_BYTES / (high * row_bytes)));
    }
};

// sum + a.x * b.x + a.y * b.y for the two words of each lane.
inline Ints dot_words(Ints sum, Ints a, Ints b) {
#if VECTOR == 64 && defined(__AVX512VNNI__)
    return (Ints)_mm512_dpwssd_epi32((__m512i)sum, (__m512i)a, (__m512i)b);
#elif VECTOR == 64
    return sum + (Ints)_mm512_madd_epi16((__m512i)a, (__m512i)b);
#elif VECTOR == 32 && defined(__AVXVNNI__)
    return (Ints)_mm256_dpwssd_avx_epi32((__m256i)sum, (__m256i)a, (__m256i)b);
#elif VECTOR == 32
    return sum + (Ints)_mm256_madd_epi16((__m256i)a, (__m256i)b);
#elif defined(__SSE2__)
    return sum + (Ints)_mm_madd_epi16((__m128i)a, (__m128i)b);
#else
    return sum + ((a << 16) >> 16) * ((b << 16) >> 16) + (a >> 16) * (b >> 16);
#endif
}

// Integers of 16 bits. Codes are unsigned: sums begin at what their zero costs.
struct WordPanel {
    typedef Ints Sum;
    static constexpr int PER_STEP = 2;  // inputs

    template <int B> static void unpack_block(const uint8_t* block, int from, int to, int32_t* panel) {
#pragma GCC unroll 16
        for (int r = from; r < to; r++, panel += PANEL)
#pragma GCC unroll 4
            for (int part = 0; part < PARTS; part++) {
                const Words codes = pair_of<B>(block, r, part);
                memcpy(panel + part * LANES, &codes, sizeof codes);
            }
    }
    static Sum begin(const Units& units, int64_t at, int32_t zero) { return Ints{} - zero * units.sum[at]; }
    static Sum step(Sum sum, const int32_t* codes, int32_t x) { return dot_words(sum, load_vector<Ints>(codes), Ints{} + x); }
    static Floats end(Sum sum, Floats scale, const Units& units, int64_t at, Floats total) {
        return scaled(sum, scale, units, at, total);
    }
    static Floats shift(Floats offset, const Units& units, int64_t at, Floats total) { return shifted(offset, units, at, total); }
};

// fp32: of the units there is the shift, which is the sum of the activations of a segment.
struct FloatPanel {
    typedef Floats Sum;
    static constexpr int PER_STEP = 1;

    template <int B> static void unpack_block(const uint8_t* block, int from, int to, int32_t* panel) {
#pragma GCC unroll 16
        for (int r = from; r < to; r++, panel += 2 * PANEL)
#pragma GCC unroll 4
            for (int part = 0; part < PARTS; part++) {
                const Ints codes = (Ints)pair_of<B>(block, r, part);
                const Floats even = __builtin_convertvector((codes & 0xffff) - (1 << (B - 1)), Floats);
                const Floats odd = __builtin_convertvector((codes >> 16) - (1 << (B - 1)), Floats);
                memcpy(panel + part * LANES, &even, sizeof even);
                memcpy(panel + PANEL + part * LANES, &odd, sizeof odd);
            }
    }
    static Sum begin(const Units&, int64_t, int32_t) { return Floats{}; }
    static Sum step(Sum sum, const int32_t* codes, int32_t x) {
        float value;
        memcpy(&value, &x, 4);
        return fused(load_vector<Floats>(codes), Floats{} + value, sum);
    }
    static Floats end(Sum sum, Floats scale, const Units&, int64_t, Floats total) { return fused(sum, scale, total); }
    static Floats shift(Floats offset, const Units& units, int64_t at, Floats total) {
        return shifted(offset, units, at, total);
    }
};

// What a register tile adds up: a segment of M rows times a panel.
struct Segment {
    const int32_t *panel, *x;  // x: [steps][M]
    const float *scales, *offsets;  // [PANEL]; offsets may be null
    float* total;  // [M][PANEL]
    int64_t steps, at;  // `at` is the segment of the tile's first row
    int32_t zero;  // the code that means 0
};

template <class P, int M> void multiply_tile(const Segment& t, const Units& units) {
    for (int lane = 0; lane < PANEL; lane += ACROSS * LANES) {
        typename P::Sum sum[M][ACROSS];
#pragma GCC unroll 12
        for (int m = 0; m < M; m++)
#pragma GCC unroll 2
            for (int v = 0; v < ACROSS; v++) sum[m][v] = P::begin(units, t.at + m * units.row, t.zero);
        const int32_t *codes = t.panel + lane, *x = t.x;
        for (int64_t step = 0; step < t.steps; step++, codes += PANEL, x += M)
#pragma GCC unroll 12
            for (int m = 0; m < M; m++)
#pragma GCC unroll 2
                for (int v = 0; v < ACROSS; v++) sum[m][v] = P::step(sum[m][v], codes + v * LANES, x[m]);
#pragma GCC unroll 12
        for (int m = 0; m < M; m++)
#pragma GCC unroll 2
            for (int v = 0; v < ACROSS; v++) {
                float* total = t.total + m * PANEL + lane + v * LANES;
                const int64_t at = t.at + m * units.row;
                Floats y = P::end(sum[m][v], load_vector<Floats>(t.scales + lane + v * LANES), units, at,
                                  load_vector<Floats>(total));
                if (t.offsets) y = P::shift(load_vector<Floats>(t.offsets + lane + v * LANES), units, at, y);
                memcpy(total, &y, sizeof y);
            }
    }
}

template <class P> void multiply_rows(int64_t rows, const Segment& t, const Units& units) {
    static_assert(HIGH <= 12);
    switch (rows) {
        case 1: return multiply_tile<P, 1>(t, units);
        case 2: return multiply_tile<P, 2>(t, units);
        case 3: return multiply_tile<P, 3>(t, units);
        case 4: return multiply_tile<P, 4>(t, units);
        case 5: return multiply_tile<P, std::min(HIGH, 5)>(t, units);
        case 6: return multiply_tile<P, std::min(HIGH, 6)>(t, units);
        case 7: return multiply_tile<P, std::min(HIGH, 7)>(t, units);
        case 8: return multiply_tile<P, std::min(HIGH, 8)>(t, units);
        case 9: return multiply_tile<P, std::min(HIGH, 9)>(t, units);
        case 10: return multiply_tile<P, std::min(HIGH, 10)>(t, units);
        case 11: return multiply_tile<P, std::min(HIGH, 11)>(t, units);
        default: return multiply_tile<P, HIGH>(t, units);
    }
}

// Inputs [first, first + count) of the row blocks of a panel; count is 16, 32, 64 or 128.
template <class P, int B> void unpack_panel(const Weight& w, int64_t row_block, int64_t first, int64_t count, int32_t* panel) {
    const int64_t blocks = w.inputs / INPUTS;
    for (int n = 0; n < PANEL_BLOCKS; n++, panel += ROWS) {
        if (row_block + n >= blocks_of(w.rows)) continue;  // what is there is multiplied, but not stored
        const uint8_t* block = w.codes + ((row_block + n) * blocks + first / INPUTS) * B * 64;
        if (count < INPUTS) {
            if (first % INPUTS) {
                P::template unpack_block<B>(block, PAIRS / 2, PAIRS, panel);
            } else {
                prefetch<B>(block);
                P::template unpack_block<B>(block, 0, PAIRS / 2, panel);
            }
            continue;
        }
        for (int64_t b = 0; b < count / INPUTS; b++, block += B * 64) {
            prefetch<B>(block);
            P::template unpack_block<B>(block, 0, PAIRS, panel + b * (INPUTS / P::PER_STEP) * PANEL);
        }
    }
}

// Tiles [first, last) of rows times the panel at `row_block`, to y. `total` has room for their rows.
template <class P, int B>
void multiply_panel(const Weight& w, int64_t row_block, const Tiling& tiling, int64_t first, int64_t last, const int32_t* x,
                    const Units& units, float* total, void* y, int32_t type) {
    const int64_t segment = segment_of(w), steps = segment / P::PER_STEP, row = tiling.first(first), groups = w.inputs / w.group;
    const int64_t rows = tiling.first(last) - row;
    alignas(64) int32_t panel[128 / P::PER_STEP * PANEL];
    alignas(64) float scales[PANEL], offsets[PANEL];
    memset(total, 0, size_t(rows) * PANEL * sizeof *total);
    memset(panel, 0, sizeof panel);
    memset(scales, 0, sizeof scales);
    memset(offsets, 0, sizeof offsets);
    for (int64_t s = 0; s < w.inputs / segment; s++) {
        unpack_panel<P, B>(w, row_block, s * segment, segment, panel);
        for (int n = 0; n < PANEL_BLOCKS && row_block + n < blocks_of(w.rows); n++) {
            const int64_t at = ((row_block + n) * groups + s * segment / w.group) * ROWS;
            load_scales(w, at, scales + n * ROWS);
            if (w.offsets) memcpy(offsets + n * ROWS, w.offsets + at, ROWS * sizeof(float));
        }
        for (int64_t t = first; t < last; t++) {
            const int64_t start = tiling.first(t), high = tiling.first(t + 1) - start;
            const Segment task{panel, x + start * (w.inputs / P::PER_STEP) + s * steps * high, scales, w.offsets ? offsets : nullptr,
                               total + (start - row) * PANEL, steps, start * units.row + s * units.segment, 1 << (B - 1)};
            multiply_rows<P>(high, task, units);
        }
    }
    for (int64_t m = 0; m < rows; m++)
        for (int n = 0; n < PANEL_BLOCKS && row_block + n < blocks_of(w.rows); n++)
            store_row(y, type, (row + m) * w.rows + (row_block + n) * ROWS, total + m * PANEL + n * ROWS,
                      std::min<int64_t>(ROWS, w.rows - (row_block + n) * ROWS));
}

// Row `row` of activations to its places in its tile: 4 bytes a step.
inline void place_row(const Tiling& tiling, int64_t row, int64_t steps, const void* from, int32_t* x) {
    const int64_t tile = tiling.tile_of(row), start = tiling.first(tile), high = tiling.first(tile + 1) - start;
    int32_t* to = x + start * steps + row - start;
    for (int64_t i = 0; i < steps; i++) memcpy(to + i * high, static_cast<const char*>(from) + 4 * i, 4);
}

// Shares pairs of a part of the rows and a panel of the weight among the threads of a parallel region. Calls
// use(first tile, tile after the last, first row block).
template <class Use> void each_panel(const Weight& w, const Tiling& tiling, int64_t row_bytes, int64_t panel_blocks, Use use) {
    const int64_t together = tiling.together(row_bytes), parts = (tiling.tiles + together - 1) / together;
    const int64_t panels = (blocks_of(w.rows) + panel_blocks - 1) / panel_blocks;
#pragma omp for schedule(guided) nowait
    for (int64_t i = 0; i < parts * panels; i++) {
        const int64_t part = i / panels;  // parts are of nearly one size, or threads would wait for each other
        use(tiling.tiles * part / parts, tiling.tiles * (part + 1) / parts, i % panels * panel_blocks);
    }
}

}  // namespace
