// Greedy decoding of several tokens in one call: passes of one token per sequence, each over the tokens that the previous pass
// chose. Between the passes of a small model a caller takes half as long as the passes themselves. Included by packed_cpu.cpp
// after chain.h.

#pragma once

#include <algorithm>
#include <vector>

#include "chain.h"
#include "draw.h"

namespace {

// The structure is mirrored by layer.py.
struct Loop {
    const uint16_t* embedding;  // [vocab, hidden]; a row is multiplied by embedding_scale
    int64_t hidden, choices;    // choices: the head's first logits, those of real tokens
    const int64_t* stops;       // [stop_count]: the loop ends after a pass that chose one
    int64_t stop_count;
    float embedding_scale, logit_scale;
};

inline void embed(const Loop& loop, int64_t token, uint16_t* x) {
    const uint16_t* row = loop.embedding + token * loop.hidden;
    if (loop.embedding_scale == 1) memcpy(x, row, size_t(loop.hidden) * 2);
    else for (int64_t i = 0; i < loop.hidden; i += WIDE) put(x + i, wide(row + i) * loop.embedding_scale);
}

// `likeliest` of bf16 logits, which are scaled in fp32.
inline int64_t choose(const Loop& loop, const uint16_t* logits) {
    const float scale = loop.logit_scale;
    return likeliest_of(loop.choices, [=](int64_t i) { return wide(logits + i) * scale; },
                        [=](int64_t i) { return from_bf16(logits[i]) * scale; });
}

// tokens [passes + 1, sequences]: row 0 is the input of the first pass; each pass writes the next row, -1 if a logit is NaN or
// infinite, which ends the loop as a stop does. `done`: the number of passes run. Returns 0, or the error of run_chain.
inline int run_loop(const Step* steps, int64_t count, const PassRows& first, const Head& head, const Loop& loop, int64_t passes,
                    int64_t* tokens, int64_t* done, int threads) {
    const int64_t rows = first.sequences, outputs = head.product.outputs;
    Scratch scratch(2 * rows * loop.hidden + rows * outputs);
    if (!scratch.at) return 1;
    uint16_t *x = scratch.take(rows * loop.hidden), *out = scratch.take(rows * loop.hidden), *logits = scratch.take(rows * outputs);
    std::vector<int32_t> lengths(first.lengths, first.lengths + rows);
    PassRows pass = first;
    pass.lengths = lengths.data();
    const auto ends = [&](int64_t token) {
        return token < 0 || std::find(loop.stops, loop.stops + loop.stop_count, token) != loop.stops + loop.stop_count;
    };
    for (bool ended = false; *done < passes && !ended; ++*done) {
        int64_t *current = tokens + *done * rows, *next = current + rows;
        for (int64_t row = 0; row < rows; row++) embed(loop, current[row], x + row * loop.hidden);
        if (const int failed = run_chain(steps, count, pass, threads, x, out)) return failed;
        if (multiply_head(head, {rows, threads}, out, logits)) return 1;
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1 && rows > 1)
        for (int64_t row = 0; row < rows; row++) next[row] = choose(loop, logits + row * outputs);
        ended = std::any_of(next, next + rows, ends);
        for (int32_t& length : lengths) length++;
    }
    return 0;
}

}  // namespace
