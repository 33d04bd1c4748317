// Few rows of integers times packed weights, 16 outputs at a time: codes become bytes in registers, and sums of their dot
// products stay there. Compiled in parallel to packed_cpu.cpp, with the same arithmetic.

#include "products/few_rows.h"

#if WIDTH
namespace {

// Sums of a segment for the rows of one half of a block: of `steps` blocks, or of a part of a block, `PART` fours from four
// `first`. The segment has index `place` in the units.
template <int B, int M, int PART>
inline __attribute__((always_inline)) void sum_segment(const uint8_t* block, int64_t steps, int first, int half, const Bytes& x, int64_t input,
                                                       int64_t place, I (&sum)[M]) {
    constexpr int CHAINS = M == 1 ? 2 : 1;  // independent sums hide the latency of the dot product
    I high[M][CHAINS] = {}, low[M][CHAINS] = {};
    for (int64_t b = 0; b < steps; b++, block += STORED<B> * 64) {
        const int8_t* at = x.bytes + input + b * INPUTS;
        if (half == 0 && first == 0) prefetch_far<B>(block);
#pragma GCC unroll 8
        for (int q = first; q < first + PART; q++) {
            const U codes = four_of<B>(block, q, half);
#pragma GCC unroll 8
            for (int m = 0; m < M; m++) {
                int32_t two[2];
                memcpy(&two[0], at + m * 2 * x.stride + 4 * q, 4);
                memcpy(&two[1], at + (m * 2 + 1) * x.stride + 4 * q, 4);
                high[m][q % CHAINS] = dot<B>(high[m][q % CHAINS], codes, two[0]);
                low[m][q % CHAINS] = dot<B>(low[m][q % CHAINS], codes, two[1]);
            }
        }
    }
#pragma GCC unroll 8
    for (int m = 0; m < M; m++) {
        if (CHAINS == 2) high[m][0] += high[m][1 % CHAINS], low[m][0] += low[m][1 % CHAINS];
        sum[m] = high[m][0] * 256 + low[m][0] - (SIGNED_DOTS ? 0 : ZERO<B> * x.units.sum[place + m]);
    }
}

// Adds the sums of a span whose units have index `place`.
template <int M> inline void add_span(const int32_t (*sums)[ROWS], const Floats* scale, const Bytes& x, int64_t place, Floats (*total)[M]) {
#pragma GCC unroll 8
    for (int m = 0; m < M; m++)
#pragma GCC unroll 4
        for (int part = 0; part < PARTS; part++)
            total[part][m] = scaled(load_vector<Ints>(sums[m] + part * LANES), scale[part],
                                    spread_lanes(x.units.unit[place + m]), total[part][m]);
}
template <int M> inline void add_offsets(const Floats* offset, const Bytes& x, int64_t place, Floats (*total)[M]) {
    for (int m = 0; m < M; m++)
        for (int part = 0; part < PARTS; part++)
            total[part][m] = shifted(offset[part], spread_lanes(x.units.shift[place + m]), total[part][m]);
}

// y[m][0..15] of one row block for M rows of integers. A segment is whole blocks, or half of one: `PART` fours of a block. Not
// inlined: callers instantiate it for each kind of codes, and compilers stop optimizing so large a function.
template <int B, int M, int PART> __attribute__((noinline)) void rows_bytes(const Weight& w, int64_t row_block, const Bytes& x, float (*y)[ROWS]) {
    const int64_t segment = cut_of(w).segment, steps = PART == FOURS ? segment / INPUTS : 1, together = w.group / segment;
    constexpr int64_t size = STORED<B> * 64;  // bytes of a block
    const uint8_t* block = w.codes + row_block * (w.inputs / INPUTS) * size;
    Floats total[PARTS][M] = {};
    int64_t at = row_block * (w.inputs / w.group);
    GroupScales group(w, at);
    for (int64_t input = 0, s = 0, next = together; input < w.inputs; input += steps * INPUTS, block += steps * size)
#pragma GCC unroll 2
        for (int first = 0; first < FOURS; first += PART, s++) {
            if (s == next) group = GroupScales(w, ++at), next += together;
            alignas(64) int32_t sums[M][ROWS];
#pragma GCC unroll 2
            for (int half = 0; half < HALVES; half++) {
                I sum[M];
                sum_segment<B, M, PART>(block, steps, first, half, x, input, s * x.units.segment, sum);
                for (int m = 0; m < M; m++) memcpy(sums[m] + half * (WIDTH / 4), &sum[m], WIDTH);
            }
            add_span<M>(sums, group.scale, x, s * x.units.segment, total);
            if (w.offsets) add_offsets<M>(group.offset, x, s * x.units.segment, total);
        }
    for (int m = 0; m < M; m++)
        for (int part = 0; part < PARTS; part++) memcpy(y[m] + part * LANES, &total[part][m], VECTOR);
}

// The same for super-blocks.
template <int B, int M> __attribute__((noinline)) void rows_levels(const Weight& w, int64_t row_block, const Bytes& x, float (*y)[ROWS]) {
    constexpr int64_t size = STORED<B> * 64;
    constexpr int PART = LEVELS<B> / 4;
    const int64_t span = cut_of(w).span;
    const uint8_t* block = w.codes + row_block * (w.inputs / INPUTS) * size;
    const int64_t groups = row_block * (w.inputs / LEVELS<B>);
    const int8_t* level = static_cast<const int8_t*>(w.scales) + groups * ROWS;
    Floats total[PARTS][M] = {};
    for (int64_t input = 0, s = 0; input < w.inputs; input += span) {
        alignas(64) int32_t sums[M][ROWS];
        const int64_t place = s;
#pragma GCC unroll 2
        for (int half = 0; half < HALVES; half++) {
            I whole[M] = {};
            s = place;
            for (int64_t i = 0; i < span; i += INPUTS)
#pragma GCC unroll 2
                for (int first = 0; first < FOURS; first += PART, s++) {
                    I sum[M], levels;
                    for (int j = 0; j < WIDTH / 4; j++) levels[j] = level[s * ROWS + half * (WIDTH / 4) + j];
                    sum_segment<B, M, PART>(block + i / INPUTS * size, 1, first, half, x, input + i, s * x.units.segment, sum);
                    for (int m = 0; m < M; m++) whole[m] += sum[m] * levels;
                }
            for (int m = 0; m < M; m++) memcpy(sums[m] + half * (WIDTH / 4), &whole[m], WIDTH);
        }
        block += span / INPUTS * size;
        const Factors factors(w, row_block, input);
        add_span<M>(sums, factors.scale, x, place * x.units.segment, total);
        for (int64_t i = place; w.offsets && i < s; i++)
            add_offsets<M>(GroupScales(w, groups + i, factors).offset, x, i * x.units.segment, total);
    }
    for (int m = 0; m < M; m++)
        for (int part = 0; part < PARTS; part++) memcpy(y[m] + part * LANES, &total[part][m], VECTOR);
}

template <int B, int M> void few_rows_of(const Weight& w, int64_t row_block, const Bytes& x, float (*y)[ROWS]) {
    if constexpr (LEVELS<B>)
        if (w.factors) return rows_levels<B, M>(w, row_block, x, y);
    if (cut_of(w).segment < INPUTS) rows_bytes<B, M, FOURS / 2>(w, row_block, x, y);
    else rows_bytes<B, M, FOURS>(w, row_block, x, y);
}

// Calls the instance for `rows` of 1 to M.
template <int B, int M> void of_count(const Weight& w, int64_t row_block, const Bytes& x, int64_t rows, float (*y)[ROWS]) {
    if constexpr (M > 1)
        if (rows < M) return of_count<B, M - 1>(w, row_block, x, rows, y);
    few_rows_of<B, M>(w, row_block, x, y);
}

}  // namespace

void few_rows(const Weight& w, int64_t row_block, const Bytes& x, int64_t rows, float (*y)[ROWS]) {
    by_bits(w, [&](auto bits) { of_count<bits.value, FEW>(w, row_block, x, rows, y); });
}
#endif
