// Softmax of a row of logits and a draw from it, in two passes over memory that is in the cache.

#pragma once

#include <algorithm>
#include <vector>

#include "vectors.h"

namespace {

// The largest of n logits; -inf if one is NaN or +inf. some(i): WIDE logits from i; one(i): one.
template <class Some, class One> inline float largest_of(int64_t n, Some some, One one) {
    const float none = -__builtin_inff();
    Wide most = spread(none);
    WideInt odd = {};
    int64_t i = 0;
    for (; i + WIDE <= n; i += WIDE) {
        const Wide x = some(i);
        most = larger(x, most);
        odd |= (WideInt)in_parts([](Floats part) { return (Floats)(part != part); }, x);
    }
    float largest = none;
    bool number = true;
    for (int lane = 0; lane < WIDE; lane++) {
        number &= !odd[lane];
        largest = std::max(largest, most[lane]);
    }
    for (; i < n; i++) {
        number &= one(i) == one(i);
        largest = std::max(largest, one(i));
    }
    return number && largest != -none ? largest : none;
}

// The index of the first of the largest of n logits; -1 if a logit is NaN or +inf, or all are -inf.
template <class Some, class One> inline int64_t likeliest_of(int64_t n, Some some, One one) {
    const float largest = largest_of(n, some, one);
    if (largest == -__builtin_inff()) return -1;
    int64_t first = 0;
    while (one(first) != largest) first++;
    return first;
}
inline int64_t likeliest(const float* logits, int64_t n) {
    return likeliest_of(n, [=](int64_t i) { return wide(logits + i); }, [=](int64_t i) { return logits[i]; });
}

// Writes the softmax of logits [n] (-inf: excluded) to `out` and returns the token at which its running fp64 sum passes `number`,
// a share of the total from 0 to just below 1; n if a logit is NaN or infinite, or all are -inf.
inline int64_t softmax_draw(const float* logits, int64_t n, double number, float* out) {
    typedef double D16 __attribute__((vector_size(128), aligned(64)));
    constexpr int64_t BLOCK = 256;
    const float none = -__builtin_inff();
    const float largest = largest_of(n, [=](int64_t i) { return wide(logits + i); }, [=](int64_t i) { return logits[i]; });
    if (largest == none) return n;
    const int64_t whole = n / LANE * LANE;
    V16 tail = V16{} + none;
    memcpy(&tail, logits + whole, (n - whole) * sizeof(float));
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
        if (out[token] > 0) last = token;  // rounding may end the sum below the block's
        before += out[token];
        if (before > place) break;
    }
    token = last;
    const float scale = float(1 / total);
    for (int64_t i = 0; i < n; i++) out[i] *= scale;
    return token;
}

}  // namespace
