// Any number of rows on any machine: some inputs of the weight are unpacked into a panel that stays in the L1 cache and is
// multiplied by tiles of rows in registers. The kinds of panels are in panel_kinds.h.

#pragma once

#include "products/panel_kinds.h"

namespace {

constexpr int UNROLL = VECTOR == 64 ? 1 : 2;  // steps of a tile; if they have few instructions, the loop overhead matters
constexpr int64_t ACTIVATION_BYTES = 1 << 20;  // of the rows that are multiplied at a time: they stay in the L2 cache

// Rows are split into tiles of nearly the same height, the higher ones first. In a tile, the steps of its rows are adjacent:
// [steps][rows of the tile].
struct Tiling {
    int64_t rows, high, tiles, low, higher;  // `higher` tiles have one row more than `low`
    Tiling(int64_t rows, int64_t high)
        : rows(rows), high(high), tiles(std::max<int64_t>(1, (rows + high - 1) / high)), low(rows / tiles), higher(rows % tiles) {}
    int64_t first(int64_t tile) const { return tile * low + std::min(tile, higher); }
    int64_t tile_of(int64_t row) const {
        const int64_t beyond = row - higher * (low + 1);
        return beyond < 0 ? row / (low + 1) : higher + beyond / low;
    }
    // Parts of the tiles of nearly equal size (threads would wait for each other); the rows of a part, of `row_bytes` each, are
    // multiplied at a time.
    int64_t parts(int64_t row_bytes) const { return std::min(tiles, (rows * row_bytes + ACTIVATION_BYTES - 1) / ACTIVATION_BYTES); }
    int64_t together(int64_t row_bytes) const {  // tiles of the largest part
        const int64_t count = parts(row_bytes);
        return (tiles + count - 1) / count;
    }
};

// The operands and totals of a register tile: `spans` of M rows times a panel.
struct Strip {
    const int32_t *panel, *x;  // x: [steps][WORDS][M]
    const float *scales, *offsets;  // [spans][PANEL], [spans][segments][PANEL]
    const int32_t* levels;  // as offsets, for panels that do not contain them
    const float *unit, *shift;  // of the first row and segment, followed by the other rows
    float* total;  // [M][PANEL]
    int64_t spans, segments, steps, next;  // `steps` and `segments` of a span; the units of the next segment are `next` elements further
};

// Passed by value: the compiler must not assume that stores change it.
template <class P, int M, bool OFFSETS> void multiply_tile(Strip t) {
    const int64_t runs = P::LEVELED ? t.segments : 1, steps = t.steps / runs;
    for (int lane = 0; lane < PANEL; lane += ACROSS * LANES) {
        const int32_t *codes = t.panel + lane, *x = t.x;
        for (int64_t s = 0; s < t.spans; s++) {
            typename P::Whole whole[M][ACROSS] = {};
            for (int64_t run = 0; run < runs; run++) {
                typename P::Sum sum[M][ACROSS] = {};
#pragma GCC unroll UNROLL
                for (int64_t step = 0; step < steps; step++, codes += PANEL, x += P::WORDS * M) {
                    Ints code[ACROSS];
#pragma GCC unroll 2
                    for (int v = 0; v < ACROSS; v++) code[v] = load_vector<Ints>(codes + v * LANES);
#pragma GCC unroll 12
                    for (int m = 0; m < M; m++)
#pragma GCC unroll 2
                        for (int v = 0; v < ACROSS; v++)
                            sum[m][v] = m % 2 ? P::template step<true>(sum[m][v], code[v], x + m, M)
                                              : P::template step<false>(sum[m][v], code[v], x + m, M);
                }
                Ints level[ACROSS] = {};
                for (int v = 0; P::LEVELED && v < ACROSS; v++)
                    level[v] = load_vector<Ints>(t.levels + (s * t.segments + run) * PANEL + lane + v * LANES);
#pragma GCC unroll 12
                for (int m = 0; m < M; m++)
#pragma GCC unroll 2
                    for (int v = 0; v < ACROSS; v++) whole[m][v] = P::with(whole[m][v], sum[m][v], level[v]);
            }
            Floats scale[ACROSS], total[M][ACROSS];  // scales are loaded to registers first: scaling would wait for loads
            for (int v = 0; v < ACROSS; v++) scale[v] = load_vector<Floats>(t.scales + s * PANEL + lane + v * LANES);
            asm("" : "+r"(t.total));  // prevents spilling totals from span to span, which is slower
            const int64_t first = s * t.segments;
#pragma GCC unroll 12
            for (int m = 0; m < M; m++) {
                const Floats unit = P::unit(t.unit + first * t.next + m);
#pragma GCC unroll 2
                for (int v = 0; v < ACROSS; v++)
                    total[m][v] = P::end(whole[m][v], scale[v], unit, load_vector<Floats>(t.total + m * PANEL + lane + v * LANES));
            }
            for (int64_t i = first; OFFSETS && i < first + t.segments; i++) {
                Floats offset[ACROSS];
                for (int v = 0; v < ACROSS; v++) offset[v] = load_vector<Floats>(t.offsets + i * PANEL + lane + v * LANES);
#pragma GCC unroll 12
                for (int m = 0; m < M; m++) {
                    const Floats shift = spread_lanes(t.shift[i * t.next + m]);
#pragma GCC unroll 2
                    for (int v = 0; v < ACROSS; v++) total[m][v] = shifted(offset[v], shift, total[m][v]);
                }
            }
#pragma GCC unroll 12
            for (int m = 0; m < M; m++)
#pragma GCC unroll 2
                for (int v = 0; v < ACROSS; v++) memcpy(t.total + m * PANEL + lane + v * LANES, &total[m][v], VECTOR);
        }
    }
}

template <class P, bool OFFSETS> void multiply_rows(int64_t rows, const Strip& t) {
    static_assert(HIGH <= 12);
    switch (rows) {
        case 1: return multiply_tile<P, 1, OFFSETS>(t);
        case 2: return multiply_tile<P, 2, OFFSETS>(t);
        case 3: return multiply_tile<P, 3, OFFSETS>(t);
        case 4: return multiply_tile<P, 4, OFFSETS>(t);
        case 5: return multiply_tile<P, std::min(HIGH, 5), OFFSETS>(t);
        case 6: return multiply_tile<P, std::min(HIGH, 6), OFFSETS>(t);
        case 7: return multiply_tile<P, std::min(HIGH, 7), OFFSETS>(t);
        case 8: return multiply_tile<P, std::min(HIGH, 8), OFFSETS>(t);
        case 9: return multiply_tile<P, std::min(HIGH, 9), OFFSETS>(t);
        case 10: return multiply_tile<P, std::min(HIGH, 10), OFFSETS>(t);
        case 11: return multiply_tile<P, std::min(HIGH, 11), OFFSETS>(t);
        default: return multiply_tile<P, HIGH, OFFSETS>(t);
    }
}

// Some inputs of the row blocks of a panel: codes, and how a tile scales their sums.
template <class P> struct alignas(64) Panel {
    static constexpr int64_t SEGMENTS = P::INPUTS_HELD / 16;  // the maximum
    int32_t codes[P::INPUTS_HELD / P::PER_STEP * PANEL], levels[SEGMENTS][PANEL];
    float scales[SEGMENTS][PANEL], offsets[SEGMENTS][PANEL];

    // Unpacks inputs [first, first + count) of `blocks` row blocks; count is a multiple of 32. Missing row blocks are left
    // as they are: they are multiplied, but not stored.
    template <int B> void read(const Weight& w, const Cut& cut, int64_t row_block, int64_t blocks, int64_t first, int64_t count) {
        for (int64_t at = 0; at < blocks * ROWS; row_block++, at += ROWS) {
            cut.levels() ? read_levels(w, cut, row_block, first, count, at) : read_scales(w, cut, row_block, first, count, at);
            if constexpr (P::FOLDS && LEVELS<B>)
                if (cut.levels()) {
                    unpack<B, true>(w, cut, row_block, first, count, at);
                    continue;
                }
            unpack<B, false>(w, cut, row_block, first, count, at);
        }
    }

private:
    void read_scales(const Weight& w, const Cut& cut, int64_t row_block, int64_t first, int64_t count, int64_t at) {
        for (int64_t s = 0; s < count / cut.segment; s++) {
            const GroupScales group = scales_at(w, row_block, first + s * cut.segment);
            memcpy(scales[s] + at, group.scale, sizeof group.scale);
            memcpy(offsets[s] + at, group.offset, sizeof group.offset);
            for (int j = 0; P::LEVELED && j < ROWS; j++) levels[s][at + j] = 1;
        }
    }
    // A span is inside one super-block; a segment is a group.
    void read_levels(const Weight& w, const Cut& cut, int64_t row_block, int64_t first, int64_t count, int64_t at) {
        const int64_t runs = cut.span / cut.segment;
        for (int64_t span = 0; span < count / cut.span; span++) {
            const Factors factors(w, row_block, first + span * cut.span);
            memcpy(scales[span] + at, factors.scale, sizeof factors.scale);
            for (int64_t s = span * runs; s < (span + 1) * runs; s++) {
                const int64_t group = (row_block * w.inputs + first) / w.group + s;
                const auto* level = static_cast<const int8_t*>(w.scales) + group * ROWS;
                for (int j = 0; j < ROWS; j++) levels[s][at + j] = level[j];
                if (!w.offsets) continue;
                const GroupScales scaled(w, group, factors);
                memcpy(offsets[s] + at, scaled.offset, sizeof scaled.offset);
            }
        }
    }
    template <int B, bool FOLD> void unpack(const Weight& w, const Cut& cut, int64_t row_block, int64_t first, int64_t count, int64_t at) {
        const uint8_t* block = w.codes + (row_block * (w.inputs / INPUTS) + first / INPUTS) * STORED<B> * 64;
        for (int64_t i = 0; i < count; i += INPUTS, block += STORED<B> * 64) {
            prefetch<B>(block);
            const auto half = [&](int from, int to) {
                const int64_t input = i + 2 * from;
                P::template unpack_block<B, FOLD>(block, from, to, levels[input / cut.segment] + at, codes + input / P::PER_STEP * PANEL + at);
            };
            if (FOLD && LEVELS<B> < INPUTS) half(0, PAIRS / 2), half(PAIRS / 2, PAIRS);
            else half(0, PAIRS);
        }
    }
};

// Multiplies tiles [first, last) of rows by the panel at `row_block`, to y. `total` has room for their rows.
template <class P, int B>
void multiply_panel(const Weight& w, int64_t row_block, const Tiling& tiling, int64_t first, int64_t last, const int32_t* x,
                    const Units& units, float* total, void* y, int32_t type) {
    const Cut cut = P::cut(w);
    const int64_t segments = cut.span / cut.segment, row = tiling.first(first);
    const int64_t rows = tiling.first(last) - row, count = std::min<int64_t>(PANEL_BLOCKS, blocks_of(w.rows) - row_block);
    const int64_t width = std::min<int64_t>(PANEL, w.rows - row_block * ROWS);
    Panel<P> panel;
    memset(total, 0, size_t(rows) * PANEL * sizeof *total);
    if (count < PANEL_BLOCKS) memset(&panel, 0, sizeof panel);
    for (int64_t input = 0; input < w.inputs; input += SPAN) {
        const int64_t inputs = std::min(SPAN, w.inputs - input), place = input / cut.segment * units.segment;
        panel.template read<B>(w, cut, row_block, count, input, inputs);
        for (int64_t t = first, start = row, next; t < last; t++, start = next) {
            next = tiling.first(t + 1);
            const Strip strip{panel.codes, x + (start * w.inputs + input * (next - start)) / P::PER_STEP * P::WORDS, panel.scales[0],
                              panel.offsets[0], panel.levels[0], units.unit + start + place, units.shift + start + place,
                              total + (start - row) * PANEL, inputs / cut.span, segments, cut.span / P::PER_STEP, units.segment};
            w.offsets ? multiply_rows<P, true>(next - start, strip) : multiply_rows<P, false>(next - start, strip);
            if (input + inputs == w.inputs)  // in one pass: rows are far apart, and are written while the next tile is multiplied
                for (int64_t m = start; m < next; m++)
                    store_row(y, type, m * w.rows + row_block * ROWS, total + (m - row) * PANEL, width);
        }
    }
}

// Copies the rows of a tile, of 4 bytes a step, to their places. Row m is read at from(m); NEAR steps of all rows at a time stay
// in the L1 cache. NEAR divides the number of steps.
template <int64_t NEAR = 16, class From> void place_tile(const Tiling& tiling, int64_t tile, int64_t steps, From from, int32_t* x) {
    const int64_t start = tiling.first(tile), high = tiling.first(tile + 1) - start;
    int32_t* to = x + start * steps;
    for (int64_t i = 0; i < steps; i += NEAR, to += NEAR * high)
        for (int64_t m = 0; m < high; m++) {
            int32_t values[NEAR];
            memcpy(values, reinterpret_cast<const char*>(from(m)) + 4 * i, sizeof values);
#pragma GCC unroll 16
            for (int64_t j = 0; j < NEAR; j++) to[j * high + m] = values[j];
        }
}

// Shares pairs of a part of the rows and a panel of the weight among the threads of a parallel region. Calls use(first tile, end
// of the tiles, first row block).
template <class Use> void each_panel(const Weight& w, const Tiling& tiling, int64_t row_bytes, int64_t panel_blocks, Use use) {
    const int64_t parts = tiling.parts(row_bytes), panels = (blocks_of(w.rows) + panel_blocks - 1) / panel_blocks;
#pragma omp for schedule(guided) nowait
    for (int64_t i = 0; i < parts * panels; i++) {
        const int64_t part = i / panels;
        use(tiling.tiles * part / parts, tiling.tiles * (part + 1) / parts, i % panels * panel_blocks);
    }
}

}  // namespace
