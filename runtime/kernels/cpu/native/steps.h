// Elementwise operations between the products: norm and activation in bf16 or fp32, rotation in bf16, rounded wherever torch
// rounds. A row's bits do not depend on the other rows. torch's fp32 activations do: threads split its rows anywhere, and the
// values left over at the end of a vector loop are computed by other code.

#pragma once

#include "vectors.h"

namespace {

// Rounds to bf16, to nearest, ties to even; NaN stays NaN.
template <class V> inline V rounded(V v) {
    if constexpr (sizeof v > VECTOR) return in_parts([](Floats part) { return rounded(part); }, v);
    typedef uint32_t Bits __attribute__((vector_size(sizeof(V))));
    const Bits word = (Bits)v, near = word + 0x7fff + ((word >> 16) & 1);
    return (V)((v != v ? word | 0x400000 : near) & 0xffff0000);
}

inline void store16(uint16_t* at, V16 v) {
    for (int i = 0; i < LANE; i += WIDE) put(at + i, wide(reinterpret_cast<const float*>(&v) + i));
}
inline void store16(float* at, V16 v) { memcpy(at, &v, 64); }

// Adds row `more` to row `at`.
inline void add_row(uint16_t* at, const uint16_t* more, int64_t size) {
    for (int64_t i = 0; i < size; i += WIDE) put(at + i, wide(at + i) + wide(more + i));
}

// Multiplies a row by a number.
inline void scale_row(uint16_t* at, float by, int64_t size) {
    if (by == 1) return;
    int64_t i = 0;
    for (; i + WIDE <= size; i += WIDE) put(at + i, wide(at + i) * by);
    for (; i < size; i++) at[i] = to_bf16(from_bf16(at[i]) * by);
}

inline float number(float x) { return x; }
inline float number(uint16_t x) { return from_bf16(x); }

struct Norm {  // mirrored by build.py
    const void* x;      // [rows, size] of type; size is a multiple of 16
    const void* gain;   // [size] of gain_type
    const void* bias;   // likewise, added last, or null; only if centred
    void* y;            // as x
    int64_t rows, size;
    float eps;
    int32_t type, gain_type;  // F32 with BF16 activations: a gain of 1 + w, where w is exact in bf16 and 1 + w is not
    int32_t centred;          // LayerNorm: the mean is subtracted first
};

// (x - mean) / sqrt(variance + eps) * gain + bias of a row, rounded once (arXiv 1607.06450).
template <class T, class Gain> inline void centred_row(const Norm& n, const T* x, const Gain* gain, T* y) {
    V16 all = {}, sum = {};
    for (int64_t i = 0; i < n.size; i += LANE) all += load16(x + i);
    const float mean = sum_of(all) / float(n.size);
    for (int64_t i = 0; i < n.size; i += LANE) {
        const V16 v = load16(x + i) - mean;
        sum += v * v;
    }
    const float root = 1.0f / sqrtf(sum_of(sum) / float(n.size) + n.eps);
    const Gain* bias = static_cast<const Gain*>(n.bias);
    for (int64_t i = 0; i < n.size; i += WIDE) {
        const Wide v = (wide(x + i) - mean) * root * wide(gain + i);
        put(y + i, bias ? v + wide(bias + i) : v);
    }
}

// x / sqrt(mean of x^2 + eps) * gain of a row, rounded once (RMSNorm).
template <class T, class Gain> inline void norm_row(const Norm& n, int64_t row, const T* all, const Gain* gain) {
    const T* x = all + row * n.size;
    T* y = static_cast<T*>(n.y) + row * n.size;
    if (n.centred) return centred_row(n, x, gain, y);
    V16 sum = {};
    for (int64_t i = 0; i < n.size; i += LANE) {
        const V16 v = load16(x + i);
        sum += v * v;
    }
    const float root = 1.0f / sqrtf(sum_of(sum) / float(n.size) + n.eps);
    for (int64_t i = 0; i < n.size; i += WIDE) put(y + i, wide(x + i) * root * wide(gain + i));
}
inline void norm_row(const Norm& n, int64_t row) {
    const float* gain = static_cast<const float*>(n.gain);
    if (n.type == F32) return norm_row(n, row, static_cast<const float*>(n.x), gain);
    const uint16_t* x = static_cast<const uint16_t*>(n.x);
    if (n.gain_type == F32) return norm_row(n, row, x, gain);
    norm_row(n, row, x, static_cast<const uint16_t*>(n.gain));
}

// Mirrored by elementwise.py; RELU_SQUARE, GELU_TANH_ALONE and GELU_ALONE have no gate.
enum GateType : int32_t {
    SILU, GELU_TANH, RELU_SQUARE, SWIGLU_CLAMPED, GATED_RELU_SQUARE, GELU_TANH_ALONE, SWIGLU_HALVES, GELU_ALONE
};
inline int64_t gate_inputs(int32_t gate_type, int64_t size) {
    const bool alone = gate_type == RELU_SQUARE || gate_type == GELU_TANH_ALONE || gate_type == GELU_ALONE;
    return alone ? size : 2 * size;
}

// x / (1 + e^-z), with one exponential for either sign of z.
template <class V> inline V times_sigmoid(V x, V z) {
    if constexpr (sizeof x > VECTOR) return in_parts([](Floats a, Floats b) { return times_sigmoid(a, b); }, x, z);
    const V zero = {};
    const auto below = z < 0;
    const V power = exponential(below ? z : -z);
    return x * (below ? power : zero + 1.0f) / (power + 1.0f);
}

// GELU by the tanh approximation (arXiv 1606.08415): (1 + tanh u) / 2 is the sigmoid of 2 u, which is exact where tanh u is near
// -1.
inline Wide gelu_tanh(Wide x) { return times_sigmoid(x, x * (1.595769122f + 0.07135481627f * (x * x))); }
// GELU: x times the normal distribution, whose tail is erfc(|x| / sqrt 2) / 2. Numerical Recipes' Chebyshev fit of erfc has a
// relative error of 1.2e-7, so the small values of negative x are as exact as the others.
template <class V> inline V gelu(V x) {
    if constexpr (sizeof x > VECTOR) return in_parts([](Floats part) { return gelu(part); }, x);
    const V zero = {}, z = (x < 0 ? -x : x) * 0.7071067812f, t = 1.0f / (1.0f + 0.5f * z);
    V fit = zero + 0.17087277f;
    for (const float next : {-0.82215223f, 1.48851587f, -1.13520398f, 0.27886807f, -0.18628806f, 0.09678418f, 0.37409196f,
                             1.00002368f, -1.26551223f})
        fit = fit * t + next;
    const V tail = 0.5f * t * exponential(fit - z * z);
    return x * (x < 0 ? tail : 1.0f - tail);
}

template <class V> inline V rounded_as(V v, const uint16_t*) { return rounded(v); }
template <class V> inline V rounded_as(V v, const float*) { return v; }

// active(gate) * up of a row, each of `size`, a multiple of 16.
template <class T, class Active> inline void gate_row(const T* gate, const T* up, int64_t size, T* y, Active active) {
    for (int64_t i = 0; i < size; i += WIDE) put(y + i, rounded_as(active(wide(gate + i)), y) * wide(up + i));
}
template <class V> inline V silu(V v) { return times_sigmoid(v, v); }
// ReLU(x)^2; NaN stays NaN.
template <class V> inline V relu_square(V v) {
    if constexpr (sizeof v > VECTOR) return in_parts([](Floats part) { return relu_square(part); }, v);
    const V none = {}, positive = v <= 0 ? none : v;
    return positive * positive;
}
// active(x) of a row without a gate.
template <class T, class Active> inline void activate_row(const T* x, int64_t size, T* y, Active active) {
    for (int64_t i = 0; i < size; i += WIDE) put(y + i, active(wide(x + i)));
}
// (up + 1) * gate * sigmoid(1.702 gate) of gpt-oss, with gate <= 7 and -7 <= up <= 7. NaN stays NaN.
template <class V, class T> inline V clamped_swiglu(V gate, V up, const T* x) {
    if constexpr (sizeof gate > VECTOR) return in_parts([x](Floats a, Floats b) { return clamped_swiglu(a, b, x); }, gate, up);
    const V one = V{} + 1.0f, most = V{} + 7.0f;
    const V low = gate > most ? most : gate, within = up > most ? most : up < -most ? -most : up;
    const V open = rounded_as(times_sigmoid(one, rounded_as(low * 1.702f, x)), x);
    return rounded_as(within + 1.0f, x) * rounded_as(low * open, x);
}
// Adjacent pairs, their first and their second values.
inline void load_pairs(const uint16_t* at, Wide& first, Wide& second) {
    WideBits pairs;
    memcpy(&pairs, at, sizeof pairs);
    first = (Wide)(pairs << 16);
    second = (Wide)(pairs & 0xffff0000);
}
inline void load_pairs(const float* at, Wide& first, Wide& second) {
    for (int i = 0; i < WIDE; i++) first[i] = at[2 * i], second[i] = at[2 * i + 1];
}

// clamped_swiglu of a row in which gate and up alternate, and of one in which they are halves.
template <class T> inline void clamped_row(const T* x, int64_t size, T* y) {
    for (int64_t i = 0; i < size; i += WIDE) {
        Wide gate, up;
        load_pairs(x + 2 * i, gate, up);
        put(y + i, clamped_swiglu(gate, up, x));
    }
}
template <class T> inline void clamped_halves(const T* x, int64_t size, T* y) {
    for (int64_t i = 0; i < size; i += WIDE) put(y + i, clamped_swiglu(wide(x + i), wide(x + size + i), x));
}
template <class T> inline void gate_row(int32_t gate_type, const T* x, int64_t size, T* y) {
    if (gate_type == SWIGLU_CLAMPED) return clamped_row(x, size, y);
    if (gate_type == SWIGLU_HALVES) return clamped_halves(x, size, y);
    if (gate_type == RELU_SQUARE) return activate_row(x, size, y, relu_square<Wide>);
    if (gate_type == GELU_TANH_ALONE) return activate_row(x, size, y, gelu_tanh);
    if (gate_type == GELU_ALONE) return activate_row(x, size, y, gelu<Wide>);
    if (gate_type == GATED_RELU_SQUARE) return gate_row(x, x + size, size, y, relu_square<Wide>);
    if (gate_type == GELU_TANH) return gate_row(x, x + size, size, y, gelu_tanh);
    gate_row(x, x + size, size, y, silu<Wide>);
}
inline void gate_row(int32_t gate_type, int32_t type, const void* x, int64_t row, int64_t size, void* y) {
    const int64_t from = row * gate_inputs(gate_type, size);
    if (type == F32) gate_row(gate_type, static_cast<const float*>(x) + from, size, static_cast<float*>(y) + row * size);
    else gate_row(gate_type, static_cast<const uint16_t*>(x) + from, size, static_cast<uint16_t*>(y) + row * size);
}

// The sigmoid of a gate, rounded to its type.
template <class T> inline Wide sigmoid_of(Wide gate, const T* x) { return rounded_as(times_sigmoid(Wide{} + 1.0f, gate), x); }

// x [size], a multiple of 16, times the rounded sigmoid of `gate`.
template <class T> inline void weigh_row(const T* x, T gate, int64_t size, T* y) {
    const Wide weight = sigmoid_of(spread(number(gate)), x);
    for (int64_t i = 0; i < size; i += WIDE) put(y + i, wide(x + i) * weight);
}
// The same with a gate for each value.
template <class T> inline void weigh_row(const T* x, const T* gates, int64_t size, T* y) {
    for (int64_t i = 0; i < size; i += WIDE) put(y + i, wide(x + i) * sigmoid_of(wide(gates + i), x));
}
// Row `row` of x [rows, size], by gates [rows, size] if `each` value has one, else [rows].
template <class T> inline void weigh_row(const T* x, const T* gates, int64_t row, int64_t size, bool each, T* y) {
    if (each) weigh_row(x + row * size, gates + row * size, size, y + row * size);
    else weigh_row(x + row * size, gates[row], size, y + row * size);
}

template <class T> struct RotateTask {  // mirrored by build.py
    const T* x;  // [sequences, tokens, heads, head_dim], strides in elements
    const T *cos, *sin;  // [tokens, half]; half is a multiple of 16
    T* out;  // as x, contiguous
    int64_t sequences, tokens, heads, head_dim, half, sequence_stride, token_stride;
    int32_t interleaved;  // pairs are (2i, 2i + 1) in x, not (i, i + half); in out they are (i, i + half)
};

// A product rounded to the type of x as torch rounds it, before anything is added.
inline Wide product_of(Wide a, Wide b, const uint16_t*) { return rounded(a * b); }
inline Wide product_of(Wide a, Wide b, const float*) {
    Wide product = a * b;
    asm("" : "+m"(product));  // no fused addition
    return product;
}

// Rotates the first 2 * half values of each head and copies the rest.
template <class T> inline void rotate_token(const RotateTask<T>& r, int64_t sequence, int64_t token) {
    const T* x = r.x + sequence * r.sequence_stride + token * r.token_stride;
    T* out = r.out + (sequence * r.tokens + token) * r.heads * r.head_dim;
    for (int64_t head = 0; head < r.heads; head++, x += r.head_dim, out += r.head_dim) {
        for (int64_t i = 0; i < r.half; i += WIDE) {
            Wide first = wide(x + i), second = wide(x + r.half + i);
            if (r.interleaved) load_pairs(x + 2 * i, first, second);
            const Wide c = wide(r.cos + token * r.half + i), s = wide(r.sin + token * r.half + i);
            put(out + i, product_of(first, c, x) - product_of(second, s, x));
            put(out + r.half + i, product_of(second, c, x) + product_of(first, s, x));
        }
        memcpy(out + 2 * r.half, x + 2 * r.half, size_t(r.head_dim - 2 * r.half) * sizeof(T));
    }
}

}  // namespace
