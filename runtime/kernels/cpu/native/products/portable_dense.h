// Dense products with the same bits on every processor, in the vectors of dense.h: each output has 16 sums of exact products,
// whatever the length of a vector. Sum i takes the inputs 32 k + 2 i and 32 k + 2 i + 1 of bf16, and 16 k + i of fp32, in order, by
// fused multiply-adds. In the end sum i is added to sum i + 8, then to i + 4, i + 2 and i + 1.

#pragma once

#include "products/dense.h"

namespace {

struct SixteenSums {
    struct Sum {
        Floats part[PARTS];
    };
    static constexpr int ACROSS = VECTOR == 64 ? 4 : 2, HIGH = VECTOR == 64 ? 6 : 3, ALONE_ACROSS = ACROSS;
    static constexpr int64_t SUMS = PARTS * LANES;
};
inline float sum_lanes(SixteenSums::Sum v) {
    for (int half = PARTS / 2; half; half /= 2)
        for (int i = 0; i < half; i++) v.part[i] += v.part[i + half];
    return sum_lanes(v.part[0]);
}

template <class T> struct Portable;
template <> struct Portable<uint16_t> : SixteenSums {
    typedef uint16_t Value;
    typedef float Activation;
    static constexpr int STEP = 2 * SUMS;
    static void store(uint16_t* to, float value) { *to = to_bf16(value); }
    static void expand(const uint16_t* x, int64_t inputs, float* to) {
        for (int64_t i = 0; i < inputs; i += STEP)
            for (int64_t j = 0; j < SUMS; j++)
                to[i + j] = from_bf16(x[i + 2 * j]), to[i + SUMS + j] = from_bf16(x[i + 2 * j + 1]);
    }
    struct Weights {
        Floats even[PARTS], odd[PARTS];
        explicit Weights(const uint16_t* w) {
            for (int i = 0; i < PARTS; i++) {
                const Ints pairs = load_vector<Ints>(w + i * 2 * LANES);
                even[i] = (Floats)(pairs << 16), odd[i] = (Floats)(pairs & int32_t(0xffff0000));
            }
        }
        Sum add(Sum sum, const float* x) const {
            for (int i = 0; i < PARTS; i++) {
                sum.part[i] = fused(even[i], load_vector<Floats>(x + i * LANES), sum.part[i]);
                sum.part[i] = fused(odd[i], load_vector<Floats>(x + SUMS + i * LANES), sum.part[i]);
            }
            return sum;
        }
    };
};
template <> struct Portable<float> : SixteenSums {
    typedef float Value, Activation;
    static constexpr int STEP = SUMS;
    static void store(float* to, float value) { *to = value; }
    static void expand(const float* x, int64_t inputs, float* to) { memcpy(to, x, size_t(inputs) * sizeof *x); }
    struct Weights {
        Floats values[PARTS];
        explicit Weights(const float* w) {
            for (int i = 0; i < PARTS; i++) values[i] = load_vector<Floats>(w + i * LANES);
        }
        Sum add(Sum sum, const float* x) const {
            for (int i = 0; i < PARTS; i++) sum.part[i] = fused(values[i], load_vector<Floats>(x + i * LANES), sum.part[i]);
            return sum;
        }
    };
};

}  // namespace
