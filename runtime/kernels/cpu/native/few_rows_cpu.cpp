// Few rows of integers times packed weights, 16 outputs at a time: codes become bytes in registers, and sums of their dot
// products stay there. Compiled in parallel to packed_cpu.cpp, with the same arithmetic.

#include "products/few_rows.h"

#if WIDTH
namespace {

// Integer sums of row blocks side by side.
template <int M, int N> struct Sums {
    alignas(64) int32_t of[M][N][ROWS];
    void put(int half, const I (&sum)[M][N]) {
        for (int m = 0; m < M; m++)
            for (int n = 0; n < N; n++) memcpy(of[m][n] + half * (WIDTH / 4), &sum[m][n], WIDTH);
    }
};

// Sums of a segment for the rows of one half of each row block: of `steps` blocks, or of a part of a block, `STEPS` fours from four
// `first`. The segment has index `place` in the units.
template <int B, int M, int N, int STEPS>
inline __attribute__((always_inline)) void sum_segment(CodeStreams<B, N> codes, int64_t steps, int first, int half, const Bytes& x,
                                                       int64_t input, int64_t place, I (&sum)[M][N]) {
    constexpr int CHAINS = M * N == 1 ? 2 : 1;  // independent sums hide the latency of the dot product
    I high[M][N][CHAINS] = {}, low[M][N][CHAINS] = {};
    for (int64_t b = 0; b < steps; b++, codes.skip(1)) {
        const int8_t* at = x.bytes + input + b * INPUTS;
        if (half == 0 && first == 0) codes.prefetch();
#pragma GCC unroll 8
        for (int q = first; q < first + STEPS; q++) {
            U code[N];
#pragma GCC unroll 2
            for (int n = 0; n < N; n++) code[n] = four_of<B>(codes.at(n), q, half);
#pragma GCC unroll 8
            for (int m = 0; m < M; m++) {
                int32_t two[2];
                memcpy(&two[0], at + m * 2 * x.stride + 4 * q, 4);
                memcpy(&two[1], at + (m * 2 + 1) * x.stride + 4 * q, 4);
#pragma GCC unroll 2
                for (int n = 0; n < N; n++) {
                    high[m][n][q % CHAINS] = dot<B>(high[m][n][q % CHAINS], code[n], two[0]);
                    low[m][n][q % CHAINS] = dot<B>(low[m][n][q % CHAINS], code[n], two[1]);
                }
            }
        }
    }
#pragma GCC unroll 8
    for (int m = 0; m < M; m++)
#pragma GCC unroll 2
        for (int n = 0; n < N; n++) {
            if (CHAINS == 2) high[m][n][0] += high[m][n][1 % CHAINS], low[m][n][0] += low[m][n][1 % CHAINS];
            sum[m][n] = high[m][n][0] * 256 + low[m][n][0] - (SIGNED_DOTS ? 0 : ZERO<B> * x.units.sum[place + m]);
        }
}

// The totals of M rows and N row blocks.
template <int M, int N> struct Totals {
    Floats of[PARTS][M][N] = {};

    // Adds the sums of a span, of row block n, whose units have index `place`.
    void add_span(const Sums<M, N>& sums, int n, const Floats* scale, const Bytes& x, int64_t place) {
#pragma GCC unroll 8
        for (int m = 0; m < M; m++)
#pragma GCC unroll 4
            for (int part = 0; part < PARTS; part++)
                of[part][m][n] = scaled(load_vector<Ints>(sums.of[m][n] + part * LANES), scale[part],
                                        spread_lanes(x.units.unit[place + m]), of[part][m][n]);
    }
    void add_offsets(int n, const Floats* offset, const Bytes& x, int64_t place) {
#pragma GCC unroll 8
        for (int m = 0; m < M; m++)
#pragma GCC unroll 4
            for (int part = 0; part < PARTS; part++)
                of[part][m][n] = shifted(offset[part], spread_lanes(x.units.shift[place + m]), of[part][m][n]);
    }
    void store(float* y) const {
        for (int m = 0; m < M; m++)
            for (int n = 0; n < N; n++)
                for (int part = 0; part < PARTS; part++) memcpy(y + m * ALONG + n * ROWS + part * LANES, &of[part][m][n], VECTOR);
    }
};

// y [M][ALONG] of N row blocks for M rows of integers. A segment is whole blocks, or half of one: `STEPS` fours of a block. Not
// inlined: callers instantiate it for each kind of codes, and compilers stop optimizing so large a function.
template <int B, int M, int N, int STEPS> __attribute__((noinline)) void rows_bytes(const Weight& w, int64_t row_block, const Bytes& x, float* y) {
    const int64_t segment = cut_of(w).segment, steps = STEPS == FOURS ? segment / INPUTS : 1;
    const int halves = not_unrolled(HALVES);
    CodeStreams<B, N> codes(w, row_block);
    Totals<M, N> total;
    SpanScales<B, N> scales(w, row_block, segment, codes.groups);
    for (int64_t input = 0, s = 0; input < w.inputs; input += steps * INPUTS, codes.skip(steps))
#pragma GCC unroll 2
        for (int first = 0; first < FOURS; first += STEPS, s++) {
            Sums<M, N> sums;
            for (int half = 0; half < halves; half++) {
                I sum[M][N];
                sum_segment<B, M, N, STEPS>(codes, steps, first, half, x, input, s * x.units.segment, sum);
                sums.put(half, sum);
            }
#pragma GCC unroll 2
            for (int n = 0; n < N; n++) {
                total.add_span(sums, n, scales.now[n].scale, x, s * x.units.segment);
                if (w.offsets) total.add_offsets(n, scales.now[n].offset, x, s * x.units.segment);
            }
            scales.advance((s + 1) * segment);
        }
    total.store(y);
}

// The same for super-blocks.
template <int B, int M, int N> __attribute__((noinline)) void rows_levels(const Weight& w, int64_t row_block, const Bytes& x, float* y) {
    constexpr int STEPS = LEVELS<B> / 4;
    const int64_t span = cut_of(w).span;
    CodeStreams<B, N> codes(w, row_block);
    const int halves = not_unrolled(HALVES);
    const int64_t groups = row_block * (w.inputs / LEVELS<B>);
    const int8_t* level = static_cast<const int8_t*>(w.scales) + groups * ROWS;
    Totals<M, N> total;
    for (int64_t input = 0, s = 0; input < w.inputs; input += span, codes.skip(span / INPUTS)) {
        Sums<M, N> sums;
        const int64_t place = s;
        for (int half = 0; half < halves; half++) {
            I whole[M][N] = {};
            s = place;
            CodeStreams<B, N> now = codes;
            for (int64_t i = 0; i < span; i += INPUTS, now.skip(1))
#pragma GCC unroll 2
                for (int first = 0; first < FOURS; first += STEPS, s++) {
                    I sum[M][N];
                    sum_segment<B, M, N, STEPS>(now, 1, first, half, x, input + i, s * x.units.segment, sum);
#pragma GCC unroll 2
                    for (int n = 0; n < N; n++) {
                        I levels;
                        for (int j = 0; j < WIDTH / 4; j++) levels[j] = level[(s + n * codes.groups) * ROWS + half * (WIDTH / 4) + j];
#pragma GCC unroll 8
                        for (int m = 0; m < M; m++) whole[m][n] += sum[m][n] * levels;
                    }
                }
            sums.put(half, whole);
        }
#pragma GCC unroll 2
        for (int n = 0; n < N; n++) {
            const Factors factors(w, row_block + (codes.groups ? n : 0), input);
            total.add_span(sums, n, factors.scale, x, place * x.units.segment);
            for (int64_t i = place; w.offsets && i < s; i++)
                total.add_offsets(n, GroupScales(w, groups + i + n * codes.groups, factors).offset, x, i * x.units.segment);
        }
    }
    total.store(y);
}

template <int B, int M, int N> void few_rows_of(const Weight& w, int64_t row_block, const Bytes& x, float* y) {
    if constexpr (LEVELS<B>)
        if (w.factors) return rows_levels<B, M, N>(w, row_block, x, y);
    if (cut_of(w).segment < INPUTS) rows_bytes<B, M, N, FOURS / 2>(w, row_block, x, y);
    else rows_bytes<B, M, N, FOURS>(w, row_block, x, y);
}

// Calls the instance for `rows` of 1 to M.
template <int B, int M> void of_count(const Weight& w, int64_t row_block, const Bytes& x, int64_t rows, bool once, float* y) {
    if constexpr (M > 1)
        if (rows < M) return of_count<B, M - 1>(w, row_block, x, rows, once, y);
    once = once && M < PART;  // 16-bit integers: products limit as many rows
    each_at_once<B, M>(w, row_block, once, y, [&](auto at_once, int64_t at, float* to) { few_rows_of<B, M, at_once.value>(w, at, x, to); });
}

}  // namespace

void few_rows(const Weight& w, int64_t row_block, const Bytes& x, int64_t rows, bool once, float* y) {
    by_bits(w, [&](auto bits) { of_count<bits.value, PART>(w, row_block, x, rows, once, y); });
}
#endif
