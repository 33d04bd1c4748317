// Few rows of 8-bit integers times packed weights, 16 outputs at a time: codes are unpacked in registers. The arithmetic is that
// of one_byte.h.

#include "products/few_rows.h"

#if WIDTH
namespace {

// BYTE_ZERO times the sum of a segment, in every lane.
template <int B> inline Ints times_zero(int32_t sum) {
#if VECTOR == 64 && BYTE_DOTS
    // Compilers would multiply the scalar, and store it before they spread it.
    if constexpr (B != E2M1) return (Ints)_mm512_slli_epi32(_mm512_set1_epi32(sum), __builtin_ctz(ZERO<B>));
#endif
    return Ints{} + sum * BYTE_ZERO<B>;
}

constexpr int UNSPILLED = VECTOR == 64 ? 4 : 1;  // rows whose products GCC may compute before it adds any

// Adds a segment, STEPS fours from four FIRST of a block of each row block, to the sums of a span. `place`: index of its units;
// `input`: of its first input.
template <int B, int M, int N, int STEPS, int FIRST>
inline __attribute__((always_inline)) void few_segment(const CodeStreams<B, N>& codes, int part, int64_t input, const Bytes& x, int64_t place,
                                                       Floats (&span)[M][N]) {
    ByteSum<FITTING<B>, STEPS> sum[M][N];
    const int32_t* const start = x.units.sum + place;
    const int8_t* const at = x.bytes + input;
    const auto each = [](auto use) __attribute__((always_inline)) {
#pragma GCC unroll 9
        for (int m = 0; m < M; m++)
#pragma GCC unroll 2
            for (int n = 0; n < N; n++) use(m, n);
    };
    each([&](int m, int n) { sum[m][n].begin(times_zero<B>(start[m])); });
#pragma GCC unroll 8
    for (int q = 0; q < STEPS; q++) {
        Words code[N];
#pragma GCC unroll 2
        for (int n = 0; n < N; n++) code[n] = byte_codes<B>(codes.at(n), FIRST + q, part);
        each([&](int m, int n) {
            int32_t four;
            memcpy(&four, at + m * x.stride + 4 * q, 4);
            sum[m][n].template add<(M > UNSPILLED)>(q, code[n], Ints{} + four);
        });
    }
    each([&](int m, int n) {
        span[m][n] = add_byte_segment(sum[m][n].end(times_zero<B>(start[m])), spread_lanes(x.units.unit[place + m]), span[m][n]);
    });
}

// y [M][ALONG] of N row blocks for M rows. A segment is a block, or half of one (STEPS fours).
template <int B, int M, int N, int STEPS>
__attribute__((noinline)) void few_byte_rows_of(const Weight& w, int64_t row_block, const Bytes& x, float* y) {
    const int64_t runs = byte_cut_of(w).span / BYTE_SEGMENT;  // segments of a span, if they are blocks
    CodeStreams<B, N> codes(w, row_block);
    Floats total[PARTS][M][N] = {};
    SpanScales<B, N> scales(w, row_block, byte_cut_of(w).span, codes.groups);
    const auto add = [&](int part, int64_t place, const Floats (&span)[M][N]) __attribute__((always_inline)) {
#pragma GCC unroll 9
        for (int m = 0; m < M; m++)
#pragma GCC unroll 2
            for (int n = 0; n < N; n++) total[part][m][n] = add_byte_span(span[m][n], scales.now[n].scale[part], total[part][m][n]);
        if (w.offsets)
#pragma GCC unroll 9
            for (int m = 0; m < M; m++)
#pragma GCC unroll 2
                for (int n = 0; n < N; n++)
                    total[part][m][n] = shifted(scales.now[n].offset[part], spread_lanes(x.units.shift[place + m]), total[part][m][n]);
    };
    for (int64_t input = 0, place = 0; input < w.inputs;) {
        if constexpr (STEPS == FOURS) {
            const CodeStreams<B, N> first = codes;
#pragma GCC unroll 4
            for (int part = 0; part < PARTS; part++) {
                Floats span[M][N] = {};
                codes = first;
                for (int64_t run = 0; run < runs; run++, codes.skip(1)) {
                    if (part == 0) codes.prefetch();
                    few_segment<B, M, N, FOURS, 0>(codes, part, input + run * INPUTS, x, place + run * x.units.segment, span);
                }
                add(part, place, span);
            }
            input += runs * INPUTS, place += runs * x.units.segment;
            scales.advance(input);
        } else {
            codes.prefetch();
            const auto half = [&](auto first) __attribute__((always_inline)) {
#pragma GCC unroll 4
                for (int part = 0; part < PARTS; part++) {
                    Floats span[M][N] = {};
                    few_segment<B, M, N, STEPS, first.value>(codes, part, input, x, place, span);
                    add(part, place, span);
                }
                input += 4 * STEPS, place += x.units.segment;
                scales.advance(input);
            };
            half(std::integral_constant<int, 0>());
            half(std::integral_constant<int, STEPS>());
            codes.skip(1);
        }
    }
    for (int m = 0; m < M; m++)
        for (int n = 0; n < N; n++)
            for (int part = 0; part < PARTS; part++) memcpy(y + m * ALONG + n * ROWS + part * LANES, &total[part][m][n], VECTOR);
}

// Calls the instance for `rows` of 1 to M.
template <int B, int M> void few_of_count(const Weight& w, int64_t row_block, const Bytes& x, int64_t rows, bool once, float* y) {
    if constexpr (M > 1)
        if (rows < M) return few_of_count<B, M - 1>(w, row_block, x, rows, once, y);
    each_at_once<B, M>(w, row_block, once, y, [&](auto at_once, int64_t at, float* to) {
        if (byte_cut_of(w).segment < INPUTS) few_byte_rows_of<B, M, at_once.value, FOURS / 2>(w, at, x, to);
        else few_byte_rows_of<B, M, at_once.value, FOURS>(w, at, x, to);
    });
}

}  // namespace

void few_byte_rows(const Weight& w, int64_t row_block, const Bytes& x, int64_t rows, bool once, float* y) {
    by_bits(w, [&](auto bits) {
        constexpr int MOST = STORED<bits.value> < LONG_BITS ? BYTE_PART : LONG_PART;
        few_of_count<bits.value, MOST>(w, row_block, x, rows, once, y);
    });
}
#endif
