// Many rows of 8-bit integers times packed weights, by panels of unpacked codes. The arithmetic is that of one_byte.h.

#include "products/few_rows.h"
#include "products/packed_panels.h"

#include <utility>

namespace {

// With AVX2, codes are multiplied as words where sums of two products fill 16 bits: of bytes, each such sum would be widened, and
// the activations given the signs of the codes. On Zen 3 that takes 1.13 times as long.
template <int FIT> constexpr bool AS_WORDS = VECTOR == 32 && FIT == 0;
template <int B> constexpr int PER_STEP = AS_WORDS<FITTING<B>> ? 2 : 4;  // inputs
template <int B> using Number = std::conditional_t<AS_WORDS<FITTING<B>>, int16_t, int8_t>;  // of an activation
// Inputs of a panel. With 32 outputs 64 KiB of codes, which are read ahead from the L2 cache, or 32 KiB, which the 48 KiB of
// Zen 5's L1 cache hold.
constexpr int64_t PANEL_INPUTS = ZEN5 ? 1024 : 2048;

// A panel of codes, unpacked once for all rows. Sums of a span take registers in addition to those of a segment, so tiles are
// lower than those of 16-bit activations.
template <int STEP> struct OneBytePanel {
    static constexpr int PER_STEP = STEP;
    static constexpr int64_t INPUTS_HELD = PANEL_INPUTS;
    static constexpr bool FOLDS = false, LEVELED = false;

    template <int B, bool> static void unpack_block(const uint8_t* block, int from, int to, const int32_t* level, int32_t* panel) {
        if (AS_WORDS<FITTING<B>>) return WordPanel::unpack_block<B, false>(block, from, to, level, panel);
#pragma GCC unroll 8
        for (int q = from / 2; q < to / 2; q++, panel += PANEL)
#pragma GCC unroll 4
            for (int part = 0; part < PARTS; part++) {
                const Words codes = byte_codes<B>(block, q, part);
                memcpy(panel + part * LANES, &codes, sizeof codes);
            }
    }
};
constexpr int BYTE_HIGH = VECTOR == 32 ? 3 : 6;  // of 32 vector registers 24 are sums, of 16 12

// Rows of integers in the order in which tiles read them. A piece is what a tile reads with one panel: [steps][rows], then of each
// segment [rows] units, [rows] sums times what is subtracted from a number, and [rows] shifts.
template <int B> struct Pieces {
    int32_t* memory;
    const Tiling& tiling;
    const int64_t inputs, segment;

    static int64_t words(int64_t count, int64_t segment) { return count / PER_STEP<B> + 3 * (count / segment); }  // of a row
    int64_t inputs_at(int64_t input) const { return std::min(PANEL_INPUTS, inputs - input); }
    int32_t* at(int64_t tile, int64_t input) const {
        return memory + tiling.rows * words(input, segment) + tiling.first(tile) * words(inputs_at(input), segment);
    }
    // Stores the `high` rows of a tile, `stride` bytes apart, with their units.
    template <int M = BYTE_HIGH> void place(int64_t tile, int64_t high, const Number<B>* x, int64_t stride, const Units& units) const {
        if constexpr (M > 1)
            if (high < M) return place<M - 1>(tile, high, x, stride, units);
        for (int64_t input = 0; input < inputs; input += PANEL_INPUTS) {
            const int64_t count = inputs_at(input), segments = count / segment, first = input / segment;
            int32_t* to = at(tile, input);
            const auto interleave = [&](const void* from, int64_t row, int64_t words) {  // sequential stores: strided ones are slower
                const auto* word = static_cast<const char*>(from);
                for (int64_t i = 0; i < words; i++, word += 4, to += M)
#pragma GCC unroll 6
                    for (int m = 0; m < M; m++) memcpy(to + m, word + m * row, 4);
            };
            interleave(x + input, stride, count / PER_STEP<B>);
            interleave(units.unit + first, units.row * 4, segments);
            interleave(units.sum + first, units.row * 4, segments);
            interleave(units.shift + first, units.row * 4, segments);
        }
    }
};

struct ByteStrip {
    const int32_t *panel, *piece;
    const float *scales, *offsets;  // [spans][PANEL]
    float* total;  // [M][PANEL]
    int64_t spans;
};

// The sum of the products of pairs of words, in lanes of 32 bits.
struct WordSum {
    Ints sum;
    void begin(Ints) { sum = Ints{}; }
    template <bool> inline __attribute__((always_inline)) void add(int, Words codes, Ints x) {
        sum = dot_words(sum, (Ints)codes, x);
        asm("" : "+v"(sum));  // in order, as a ByteSum
    }
    Ints end(Ints) const { return sum; }
};
// The sum of COUNT steps: pairs of words, or fours of bytes.
template <int FIT, int COUNT> using StepSum = std::conditional_t<AS_WORDS<FIT>, WordSum, ByteSum<FIT, COUNT>>;

// M rows times a panel. A span is RUNS segments of STEPS steps.
template <int FIT, int M, int RUNS, int STEPS, bool OFFSETS> void multiply_byte_tile(const ByteStrip& strip) {
    ByteStrip t = strip;  // a copy: the compiler must not assume that stores change it
    const int64_t segments = t.spans * RUNS;
    for (int lane = 0; lane < PANEL; lane += ACROSS * LANES) {
        const int32_t *codes = t.panel + lane, *x = t.piece, *start = x + segments * (STEPS + 1) * M;
        const float *unit = reinterpret_cast<const float*>(x + segments * STEPS * M), *shift = unit + 2 * segments * M;
        const float *scales = t.scales + lane, *offsets = t.offsets + lane;
        Floats total[M][ACROSS];
        const auto each = [&](auto use) __attribute__((always_inline)) {
#pragma GCC unroll 6
            for (int m = 0; m < M; m++)
#pragma GCC unroll 2
                for (int v = 0; v < ACROSS; v++) use(m, v, t.total + m * PANEL + lane + v * LANES);
        };
        // With several segments in a span, registers hold the sums of the span, and totals are in memory.
        constexpr bool HELD = RUNS == 1;
        if (HELD) each([&](int m, int v, const float* at) { total[m][v] = load_vector<Floats>(at); });
        for (int64_t s = 0; s < t.spans; s++, scales += PANEL, offsets += PANEL, shift += RUNS * M) {
            Floats span[M][ACROSS] = {};
            for (int run = 0; run < RUNS; run++, unit += M, start += M) {
                StepSum<FIT, STEPS> sum[M][ACROSS];
                each([&](int m, int v, const float*) { sum[m][v].begin(Ints{} + start[m]); });
#pragma GCC unroll 16
                for (int q = 0; q < STEPS; q++, codes += PANEL, x += M) {
                    Words code[ACROSS];
#pragma GCC unroll 2
                    for (int v = 0; v < ACROSS; v++) {
                        code[v] = load_vector<Words>(codes + v * LANES);
                        if (VECTOR == 32) asm("" : "+x"(code[v]));  // GCC would load it again for each row
                    }
#pragma GCC unroll 6
                    for (int m = 0; m < M; m++) {
                        const Ints four = Ints{} + x[m];
#pragma GCC unroll 2
                        for (int v = 0; v < ACROSS; v++) sum[m][v].template add<true>(q, code[v], four);
                    }
                }
                each([&](int m, int v, const float*) {
                    span[m][v] = add_byte_segment(sum[m][v].end(Ints{} + start[m]), spread_lanes(unit[m]), span[m][v]);
                });
            }
            if (!HELD) asm("" : "+r"(t.total));  // prevents spilling totals from span to span, which is slower
            each([&](int m, int v, float* at) {
                Floats now = HELD ? total[m][v] : load_vector<Floats>(at);
                now = add_byte_span(span[m][v], load_vector<Floats>(scales + v * LANES), now);
                if (OFFSETS) now = shifted(load_vector<Floats>(offsets + v * LANES), spread_lanes(shift[m]), now);
                if (HELD) total[m][v] = now;
                else memcpy(at, &now, VECTOR);
            });
        }
        if (HELD) each([&](int m, int v, float* at) { memcpy(at, &total[m][v], VECTOR); });
    }
}

typedef void MultiplyTile(const ByteStrip& t);

// The functions for tiles of 1 to BYTE_HIGH rows.
template <int FIT, int RUNS, int STEPS, bool OFFSETS, int... M> MultiplyTile* const* tiles_of(std::integer_sequence<int, M...>) {
    static constexpr MultiplyTile* tiles[] = {multiply_byte_tile<FIT, M + 1, RUNS, STEPS, OFFSETS>...};
    return tiles;
}
template <int B, bool OFFSETS> MultiplyTile* const* tiles_for(const Cut& cut) {
    constexpr std::make_integer_sequence<int, BYTE_HIGH> heights;
    constexpr int FIT = FITTING<B>, STEPS = BYTE_SEGMENT / PER_STEP<B>;
    if (cut.segment < BYTE_SEGMENT) return tiles_of<FIT, 1, STEPS / 2, OFFSETS>(heights);
    switch (cut.span / cut.segment) {
        case 1: return tiles_of<FIT, 1, STEPS, OFFSETS>(heights);
        case 2: return tiles_of<FIT, 2, STEPS, OFFSETS>(heights);
        default: return tiles_of<FIT, 4, STEPS, OFFSETS>(heights);
    }
}

// Prefetches the codes of the next panel, some after each tile: reading them from memory takes longer than unpacking them.
class NextCodes {
    const uint8_t *at[PANEL_BLOCKS], *end;  // of each row block; of the first
    const int64_t step;

public:
    NextCodes(const Weight& w, int64_t row_block, int64_t input, int64_t inputs, int64_t tiles)
        : step(inputs / INPUTS * w.bits * 64 / tiles / 64 * 64 + 64) {
        const int64_t row = w.inputs / INPUTS * w.bits * 64, next = input + inputs;
        const bool last = next == w.inputs;
        for (int b = 0; b < PANEL_BLOCKS; b++)
            at[b] = w.codes + (row_block + (last ? PANEL_BLOCKS : 0) + b) * row + (last ? 0 : next / INPUTS * w.bits * 64);
        end = at[0] + inputs / INPUTS * w.bits * 64;
        for (int b = 0; b < PANEL_BLOCKS; b++) prefetch_scales(w, row_block + (last ? PANEL_BLOCKS : 0) + b, last ? 0 : next);
    }
    void prefetch() {
        if (at[0] >= end) return;
        for (const uint8_t*& block : at) {
            for (int64_t i = 0; i < step; i += 64) __builtin_prefetch(block + i, 0, 2);
            block += step;
        }
    }

private:
    // Of the groups of INPUTS_HELD inputs: with few rows, waiting for them takes as long as a tile.
    static void prefetch_scales(const Weight& w, int64_t row_block, int64_t input) {
        const auto values = [&](const void* from, int64_t size) {
            const uint8_t* const first = static_cast<const uint8_t*>(from) + (row_block * w.inputs + input) / w.group * ROWS * size;
            const int64_t bytes = std::max<int64_t>(1, PANEL_INPUTS / w.group) * ROWS * size;
            for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(first + i);
        };
        values(w.scales, w.scale_type >= I8 ? 1 : w.scale_type == F32 ? 4 : 2);
        if (w.offsets) values(w.offsets, w.factors ? 1 : 4);
    }
};

// multiply_panel for bytes.
template <int B>
void multiply_byte_panel(const Weight& w, int64_t row_block, const Tiling& tiling, int64_t first, int64_t last, const Pieces<B>& x, float* total,
                         uint16_t* y) {
    const Cut cut = byte_cut_of(w), whole{cut.span, cut.span, 0};  // scales are those of spans
    const int64_t row = tiling.first(first), count = std::min<int64_t>(PANEL_BLOCKS, blocks_of(w.rows) - row_block);
    const int64_t width = std::min<int64_t>(PANEL, w.rows - row_block * ROWS);
    MultiplyTile* const* const multiply = w.offsets ? tiles_for<B, true>(cut) : tiles_for<B, false>(cut);
    Panel<OneBytePanel<PER_STEP<B>>> panel;
    if (count < PANEL_BLOCKS) memset(&panel, 0, sizeof panel);
    for (int64_t input = 0; input < w.inputs; input += PANEL_INPUTS) {
        const int64_t inputs = x.inputs_at(input);
        panel.template read<B>(w, whole, row_block, count, input, inputs);
        NextCodes next(w, row_block, input, inputs, last - first);
        for (int64_t t = first, start = row, end; t < last; t++, start = end) {
            end = tiling.first(t + 1);
            float* const totals = total + (start - row) * PANEL;
            if (!input) memset(totals, 0, size_t(end - start) * PANEL * sizeof *totals);
            multiply[end - start - 1]({panel.codes, x.at(t, input), panel.scales[0], panel.offsets[0], totals, inputs / cut.span});
            next.prefetch();
            if (input + inputs == w.inputs)
                for (int64_t m = start; m < end; m++)
                    store_row(y, BF16, m * w.rows + row_block * ROWS, total + (m - row) * PANEL, width);
        }
    }
}

template <int B> bool multiply_byte_rows_of(const Weight& w, const uint16_t* x, int64_t rows, uint16_t* y, int threads) {
    const Cut cut = byte_cut_of(w);
    const int64_t segments = w.inputs / cut.segment;
    const Tiling tiling(rows, BYTE_HIGH);
    const int64_t room = rounded_up(rows * Pieces<B>::words(w.inputs, cut.segment) * 4 + 64);
    const int64_t row = rounded_up(w.inputs * int64_t(sizeof(Number<B>))), notes = rounded_up(segments * 4);
    const int64_t each = BYTE_HIGH * (row + 3 * notes) + rounded_up(tiling.together(w.inputs) * tiling.high * PANEL * 4);  // of a thread
    const Memory memory(room + threads * each);
    if (!memory.at) return false;
    const Pieces<B> pieces{reinterpret_cast<int32_t*>(memory.at), tiling, w.inputs, cut.segment};
    int next = 0;
#pragma omp parallel num_threads(threads)
    {
        int self;
#pragma omp atomic capture
        self = next++;
        char* at = memory.at + room + self * each;
        const auto take = [&](int64_t bytes) { return std::exchange(at, at + BYTE_HIGH * bytes); };
        char* const integers = take(row);
        float* const unit = reinterpret_cast<float*>(take(notes));
        int32_t* const sum = reinterpret_cast<int32_t*>(take(notes));
        float* const shift = reinterpret_cast<float*>(take(notes));
        const Units units{unit, sum, shift, notes / 4, 1};
        float* const total = reinterpret_cast<float*>(at);
#pragma omp for schedule(static)
        for (int64_t t = 0; t < tiling.tiles; t++) {
            const int64_t start = tiling.first(t), high = tiling.first(t + 1) - start;
            for (int64_t m = 0; m < high; m++)
                make_bytes(x + (start + m) * w.inputs, w.inputs, cut, -BYTE_ZERO<B>,
                           reinterpret_cast<Number<B>*>(integers + m * row), units.from(m));
            pieces.place(t, high, reinterpret_cast<Number<B>*>(integers), row, units);
        }
        each_panel(w, tiling, w.inputs, PANEL_BLOCKS, [&](int64_t first, int64_t last, int64_t row_block) {
            multiply_byte_panel<B>(w, row_block, tiling, first, last, pieces, total, y);
        });
    }
    return true;
}

}  // namespace

// x [rows, inputs] to y [rows, w.rows]; returns false without memory.
bool multiply_byte_rows(const Weight& w, const uint16_t* x, int64_t rows, uint16_t* y, int threads) {
    return by_bits(w, [&](auto bits) { return multiply_byte_rows_of<bits.value>(w, x, rows, y, threads); });
}
