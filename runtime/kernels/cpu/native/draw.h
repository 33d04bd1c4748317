// A softmax of one row of logits and a token drawn from it, in two passes over memory that is warm.

#pragma once

#include <algorithm>
#include <vector>

#include "vectors.h"

namespace {

// The first of the largest of logits [n], -1 where that is no number: NaN, infinity, or -inf for all.
inline int64_t likeliest(const float* logits, int64_t n) {
    const float none = -__builtin_inff();
    const int64_t whole = n / LANE * LANE;
    V16 most = V16{} + none;
    I16 odd = {};
    for (int64_t i = 0; i < whole; i += LANE) {
        const V16 x = load16(logits + i);
        most = x > most ? x : most;
        odd |= x != x;
    }
    float largest = none;
    bool number = true;
    for (int64_t lane = 0; lane < LANE; lane++) {
        number &= !odd[lane];
        largest = std::max(largest, most[lane]);
    }
    for (int64_t i = whole; i < n; i++) {
        number &= logits[i] == logits[i];
        largest = std::max(largest, logits[i]);
    }
    if (!number || largest == none || largest == -none) return -1;
    return std::find(logits, logits + n, largest) - logits;
}

// Probabilities of logits [n] (-inf: none) to `out`, and the token at which their running sum in fp64 passes `number`, a
// share of the whole from 0 to a little below 1. n where a logit is NaN or infinity, or where all are -inf.
inline int64_t softmax_draw(const float* logits, int64_t n, double number, float* out) {
    typedef double D16 __attribute__((vector_size(128), aligned(64)));
    constexpr int64_t BLOCK = 256;
    const float none = -__builtin_inff();
    const int64_t whole = n / LANE * LANE;
    V16 tail = V16{} + none;
    memcpy(&tail, logits + whole, (n - whole) * sizeof(float));
    V16 most = tail;
    I16 odd = tail != tail;
    for (int64_t i = 0; i < whole; i += LANE) {
        const V16 x = load16(logits + i);
        most = x > most ? x : most;
        odd |= x != x;
    }
    float largest = none;
    for (int64_t lane = 0; lane < LANE; lane++) {
        if (odd[lane]) return n;
        largest = std::max(largest, most[lane]);
    }
    if (largest == none || largest == -none) return n;
    std::vector<double> sums((n + BLOCK - 1) / BLOCK);
    double total = 0;
    for (int64_t first = 0; first < n; first += BLOCK) {
        D16 sum = {};
        for (int64_t i = first; i < std::min(first + BLOCK, whole); i += LANE) {
            const V16 weight = exponential(load16(logits + i) - largest);
            memcpy(out + i, &weight, 64);
            sum += __builtin_convertvector(weight, D16);
        }
        if (first + BLOCK >= n) {
            const V16 weight = exponential(tail - largest);
            memcpy(out + whole, &weight, (n - whole) * sizeof(float));
            sum += __builtin_convertvector(weight, D16);
        }
        for (int64_t lane = 0; lane < LANE; lane++) total += sum[lane];
        sums[first / BLOCK] = total;
    }
    const double place = number * total;
    const int64_t block = std::upper_bound(sums.begin(), sums.end(), place) - sums.begin();
    int64_t token = block * BLOCK, last = token;
    double before = block ? sums[block - 1] : 0;
    for (; token < std::min(block * BLOCK + BLOCK, n); token++) {
        if (out[token] > 0) last = token;  // by rounding the sum may end below the block's
        before += out[token];
        if (before > place) break;
    }
    token = last;
    const float scale = float(1 / total);
    for (int64_t i = 0; i < n; i++) out[i] *= scale;
    return token;
}

}  // namespace
