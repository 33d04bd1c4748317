// A dense weight [outputs, inputs] of bf16 or fp32 in torch's layout times any number of rows of its type, with fp32 sums. Each
// output is summed in one order, whatever the other rows: in AMX tiles (bf16), or lane by lane of a vector and then over the
// lanes.

#pragma once

#include "products/packed_tiles.h"

namespace {

template <class T> struct Dense {  // T: float, or uint16_t for bf16
    const T *w, *x;
    int64_t outputs, inputs, rows;
    T* y;
    const T* last = nullptr;  // [outputs, STEP]: the last inputs of each row of w if they are no whole step, then zeros
};

// ---- Vectors: a register tile is up to HIGH rows times ACROSS outputs ----

// Sums of one vector each, and the size of a register tile.
struct OneVector {
    typedef Floats Sum;
    static constexpr int ACROSS = 4, HIGH = VECTOR == 64 ? 6 : 3;
    // One row waits for memory, which is read faster as one stream than as four; shorter vectors need four sums to hide their latency.
    static constexpr int ALONE_ACROSS = VECTOR == 64 ? 1 : ACROSS;
};

// How a type is multiplied: STEP weights, one vector, times the matching activations, which `expand` lays out.
template <class T> struct Element;
template <> struct Element<uint16_t> : OneVector {
    typedef uint16_t Value;
    static constexpr int STEP = 2 * LANES;
    static void store(uint16_t* to, float value) { *to = to_bf16(value); }
#if defined(BF16_DOT) && defined(__AVX512BF16__) && VECTOR == 64
    // bf16 dot products, for processors on which they are faster than converting.
    typedef uint16_t Activation;
    static void expand(const uint16_t* x, int64_t inputs, Activation* to) { memcpy(to, x, size_t(inputs) * sizeof *x); }
    struct Weights {
        Ints pairs;
        explicit Weights(const uint16_t* w) : pairs(load_vector<Ints>(w)) {}
        Floats add(Floats sum, const Activation* x) const {
            return (Floats)_mm512_dpbf16_ps((__m512)sum, (__m512bh)pairs, (__m512bh)load_vector<Ints>(x));
        }
    };
#else
    // Exact products in fp32: the even inputs of a vector, then the odd ones.
    typedef float Activation;
    static void expand(const uint16_t* x, int64_t inputs, Activation* to) {
        for (int64_t i = 0; i < inputs; i += STEP)
            for (int64_t j = 0; j < LANES; j++)
                to[i + j] = from_bf16(x[i + 2 * j]), to[i + LANES + j] = from_bf16(x[i + 2 * j + 1]);
    }
    struct Weights {
        Floats even, odd;
        explicit Weights(const uint16_t* w) {
            const Ints pairs = load_vector<Ints>(w);
            even = (Floats)(pairs << 16), odd = (Floats)(pairs & int32_t(0xffff0000));
        }
        Floats add(Floats sum, const Activation* x) const {
            return fused(odd, load_vector<Floats>(x + LANES), fused(even, load_vector<Floats>(x), sum));
        }
    };
#endif
};
template <> struct Element<float> : OneVector {
    typedef float Value;
    static constexpr int STEP = LANES;
    typedef float Activation;
    static void store(float* to, float value) { *to = value; }
    static void expand(const float* x, int64_t inputs, Activation* to) { memcpy(to, x, size_t(inputs) * sizeof *x); }
    struct Weights {
        Floats values;
        explicit Weights(const float* w) : values(load_vector<Floats>(w)) {}
        Floats add(Floats sum, const Activation* x) const { return fused(values, load_vector<Floats>(x), sum); }
    };
};
template <class E> using Value = typename E::Value;
template <class E> using Activation = typename E::Activation;

template <class E> int64_t whole_inputs(int64_t inputs) { return inputs / E::STEP * E::STEP; }
// Activations of a row: whole steps.
template <class E> int64_t row_size(int64_t inputs) { return whole_inputs<E>(inputs + E::STEP - 1); }
// The inputs of a row after the last whole step, then zeros, to `to` [STEP].
template <class E> void take_last(const Value<E>* row, int64_t inputs, Value<E>* to) {
    std::fill(std::copy(row + whole_inputs<E>(inputs), row + inputs, to), to + E::STEP, Value<E>());
}
template <class E> void expand_row(const Value<E>* x, int64_t inputs, Activation<E>* to) {
    const int64_t whole = whole_inputs<E>(inputs);
    E::expand(x, whole, to);
    if (whole == inputs) return;
    Value<E> last[E::STEP];
    take_last<E>(x, inputs, last);
    E::expand(last, E::STEP, to + whole);
}

template <int S, size_t... L> inline Floats add_half(Floats v, std::index_sequence<L...>) {
    return v + __builtin_shuffle(v, Ints{int(L ^ S)...});
}
// The sum of all lanes: of the two halves, of their halves, and so on. A product of few inputs takes as long for this as for the rest.
template <int S = LANES / 2> inline float sum_lanes(Floats v) {
    const Floats sums = add_half<S>(v, std::make_index_sequence<LANES>());
    if constexpr (S > 1) return sum_lanes<S / 2>(sums);
    return sums[0];
}

// M rows of x times WIDE outputs from `output`; outputs past the last repeat it. EVEN: the inputs are whole steps.
template <int M, int WIDE, bool EVEN, class E>
void dense_tile(const Dense<Value<E>>& d, int64_t output, const Activation<E>* x, Value<E>* y) {
    const Value<E>* row[WIDE];
    for (int n = 0; n < WIDE; n++) row[n] = d.w + std::min(output + n, d.outputs - 1) * d.inputs;
    typename E::Sum sum[M][WIDE] = {};
    const int64_t step = EVEN ? d.inputs : row_size<E>(d.inputs), whole = EVEN ? d.inputs : whole_inputs<E>(d.inputs);
    // Near the end of a row, the same row of the next tile is prefetched.
    const auto ahead = [&](int n, int64_t k) {
        const int64_t at = k + AHEAD / 2 / int64_t(sizeof(Value<E>));
        return row[n] + at + (at < d.inputs ? 0 : (WIDE - 1) * d.inputs);
    };
    for (int64_t k = 0; k < whole; k += E::STEP)
#pragma GCC unroll 4
        for (int n = 0; n < WIDE; n++) {
            const typename E::Weights w(row[n] + k);
            if (M <= 2) __builtin_prefetch(ahead(n, k));
#pragma GCC unroll 6
            for (int m = 0; m < M; m++) sum[m][n] = w.add(sum[m][n], x + m * step + k);
        }
    if constexpr (!EVEN)
#pragma GCC unroll 4
        for (int n = 0; n < WIDE; n++) {
            const typename E::Weights w(d.last + std::min(output + n, d.outputs - 1) * E::STEP);
#pragma GCC unroll 6
            for (int m = 0; m < M; m++) sum[m][n] = w.add(sum[m][n], x + m * step + whole);
        }
    for (int m = 0; m < M; m++)
        for (int n = 0; n < WIDE && output + n < d.outputs; n++)
            E::store(y + m * d.outputs + output + n, sum_lanes(sum[m][n]));
}

template <bool EVEN, class E>
void dense_rows(const Dense<Value<E>>& d, int64_t rows, int64_t output, const Activation<E>* x, Value<E>* y) {
    constexpr int HIGH = E::HIGH, ACROSS = E::ACROSS, ALONE = E::ALONE_ACROSS;
    switch (rows) {
        case 1:
            for (int n = 0; n < ACROSS && output + n < d.outputs; n += ALONE) dense_tile<1, ALONE, EVEN, E>(d, output + n, x, y);
            return;
        case 2: return dense_tile<2, ACROSS, EVEN, E>(d, output, x, y);
        case 3: return dense_tile<3, ACROSS, EVEN, E>(d, output, x, y);
        case 4: return dense_tile<std::min(HIGH, 4), ACROSS, EVEN, E>(d, output, x, y);
        case 5: return dense_tile<std::min(HIGH, 5), ACROSS, EVEN, E>(d, output, x, y);
        default: return dense_tile<HIGH, ACROSS, EVEN, E>(d, output, x, y);
    }
}

template <class E> bool dense_vectors(const Dense<Value<E>>& d, int threads) {
    constexpr int64_t STEP = E::STEP, ACROSS = E::ACROSS;
    const int64_t step = row_size<E>(d.inputs), uneven = step > d.inputs ? d.outputs : 0;
    const size_t size = size_t(d.rows * step) * sizeof(Activation<E>), more = size_t(uneven * STEP) * sizeof(Value<E>);
    Activation<E>* x = static_cast<Activation<E>*>(aligned_alloc(64, (size + more + 63) & ~size_t(63)));
    if (!x) return false;
    Value<E>* last = reinterpret_cast<Value<E>*>(x + d.rows * step);
    Dense<Value<E>> padded = d;
    padded.last = uneven ? last : nullptr;
    const Tiling tiling(d.rows, E::HIGH);
    const int64_t parts = tiling.parts(step * int64_t(sizeof *x)), panels = (d.outputs + ACROSS - 1) / ACROSS;
    const auto expand = [&](int64_t m) { expand_row<E>(d.x + m * d.inputs, d.inputs, x + m * step); };
    const auto multiply = [&](int64_t i) {
        for (int64_t t = tiling.tiles * (i / panels) / parts; t < tiling.tiles * (i / panels + 1) / parts; t++) {
            const int64_t start = tiling.first(t), high = tiling.first(t + 1) - start;
            const int64_t output = i % panels * ACROSS;
            if (uneven) dense_rows<false, E>(padded, high, output, x + start * step, d.y + start * d.outputs);
            else dense_rows<true, E>(d, high, output, x + start * d.inputs, d.y + start * d.outputs);
        }
    };
    if (threads == 1) {  // not a team of one thread: products of heads are smaller than the start of a team
        for (int64_t m = 0; m < d.rows; m++) expand(m);
        for (int64_t n = 0; n < uneven; n++) take_last<E>(d.w + n * d.inputs, d.inputs, last + n * STEP);
        for (int64_t i = 0; i < parts * panels; i++) multiply(i);
    } else {
#pragma omp parallel num_threads(threads)
        {
#pragma omp for schedule(static)
            for (int64_t m = 0; m < d.rows; m++) expand(m);
#pragma omp for schedule(static)
            for (int64_t n = 0; n < uneven; n++) take_last<E>(d.w + n * d.inputs, d.inputs, last + n * STEP);
#pragma omp for schedule(guided)
            for (int64_t i = 0; i < parts * panels; i++) multiply(i);
        }
    }
    free(x);
    return true;
}

// ---- AMX: rows of the weight are rows of a tile, in place; rows of x are its columns ----

#if AMX
constexpr int64_t TILE_OUTPUTS = 2 * ROWS;

// Tiles t and, before `last`, t + 1 of rows times OUTPUTS, 32 or half of it, from `output`; the first `skip` outputs have been
// computed.
template <int OUTPUTS> void dense_tiles(const Dense<uint16_t>& d, int64_t output, int64_t skip, const Tiling& tiling, int64_t t, int64_t last, const int32_t* x) {
    alignas(64) float part[4][ROWS][ROWS];
    const int64_t pairs = d.inputs / 2, stride = 2 * d.inputs, start = tiling.first(t), across = tiling.first(t + 1) - start;
    const int64_t beside = t + 1 < last ? tiling.first(t + 2) - start - across : 0;
    const uint16_t *upper = d.w + output * d.inputs, *lower = upper + ROWS * d.inputs;
    const int32_t *first = x + start * pairs, *second = first + across * pairs;
    const auto ask = [&](int64_t k, int64_t ahead) {  // prefetches: data that has been read once stays in the L2 cache
        for (int n = 0; t == 0 && n < OUTPUTS; n++)
            _mm_prefetch(reinterpret_cast<const char*>(upper + n * d.inputs + k) + ahead, _MM_HINT_T1);
    };
    for (int64_t ahead = 0; ahead < std::min(AHEAD / 4, 2 * d.inputs); ahead += 64) ask(0, ahead);
    TILE_ZERO(0);
    TILE_ZERO(1);
    TILE_ZERO(2);
    TILE_ZERO(3);
    for (int64_t k = 0; k < d.inputs; k += INPUTS) {
        ask(k, AHEAD / 4);
        // Six tiles are used, and one operand is loaded twice; packed_tiles.h says why.
        TILE_LOAD(4, upper + k, stride);
        TILE_LOAD(6, first + k / 2 * across, 4 * across);
        TILE_DOT_BF16(0, 4, 6);
        if (beside) {
            TILE_LOAD(6, second + k / 2 * beside, 4 * beside);
            TILE_DOT_BF16(2, 4, 6);
        }
        if (OUTPUTS == ROWS) continue;
        TILE_LOAD(4, lower + k, stride);
        if (beside) {
            TILE_DOT_BF16(3, 4, 6);
            TILE_LOAD(6, first + k / 2 * across, 4 * across);
        }
        TILE_DOT_BF16(1, 4, 6);
    }
    TILE_STORE(part[0], 64, 0);
    TILE_STORE(part[1], 64, 1);
    TILE_STORE(part[2], 64, 2);
    TILE_STORE(part[3], 64, 3);
    for (int64_t m = 0; m < across + beside; m++) {
        const auto* from = m < across ? part : part + 2;
        const int64_t column = m < across ? m : m - across;
        float row[OUTPUTS];
        for (int n = 0; n < OUTPUTS; n++) row[n] = from[n / ROWS][n % ROWS][column];
        store_row(d.y, BF16, (start + m) * d.outputs + output + skip, row + skip, OUTPUTS - skip);
    }
}

template <int OUTPUTS> bool dense_amx(const Dense<uint16_t>& d, int threads) {
    const Tiling tiling(d.rows, ROWS);
    const int64_t pairs = d.inputs / 2, high = (d.rows + tiling.tiles - 1) / tiling.tiles;
    int32_t* x = static_cast<int32_t*>(aligned_alloc(64, size_t(d.rows * pairs * 4 + 127) & ~size_t(63)));  // a column is read past the end
    if (!x) return false;
    const int64_t parts = tiling.parts(2 * d.inputs), panels = (d.outputs + OUTPUTS - 1) / OUTPUTS;
#pragma omp parallel num_threads(threads)
    {
#pragma omp for schedule(static)
        for (int64_t t = 0; t < tiling.tiles; t++)
            place_tile(tiling, t, pairs, [&](int64_t m) { return d.x + (tiling.first(t) + m) * d.inputs; }, x);
        const Tiles tiles(ROWS, 64, 4 * high);
#pragma omp for schedule(guided)
        for (int64_t i = 0; i < parts * panels; i++) {
            const int64_t aligned = i % panels * OUTPUTS, output = std::min(aligned, d.outputs - OUTPUTS);
            const int64_t last = tiling.tiles * (i / panels + 1) / parts;
            for (int64_t t = tiling.tiles * (i / panels) / parts; t < last; t += 2) dense_tiles<OUTPUTS>(d, output, aligned - output, tiling, t, last, x);
        }
    }
    free(x);
    return true;
}
// Needs TILE_OUTPUTS outputs; if there are too few for all threads, each takes half as many at a time, with the same bits.
inline bool dense_amx(const Dense<uint16_t>& d, int threads) {
    return d.outputs < TILE_OUTPUTS * threads ? dense_amx<ROWS>(d, threads) : dense_amx<TILE_OUTPUTS>(d, threads);
}
#endif

}  // namespace
