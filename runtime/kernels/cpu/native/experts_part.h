// A layer's experts on few rows of bf16, whole, as layer.h has the other parts: norm, router, choice, the experts' products, the
// weighted sum, the shared expert, and the residual addition. Included by packed_cpu.cpp after experts.h.

#pragma once

#include "layer.h"

namespace {

// The structures are mirrored by layer.py.
struct ExpertProduct {
    const void* const* weights;  // [experts], as in Routed; read once an expert is ready
    const uint16_t* const* biases;  // [experts]: [outputs], or null; likewise
    int64_t outputs, inputs;
    int64_t stored;
};
// Loads some of the experts `hit`, sets their entries of `ready` and returns their number, or 0 on failure. Their weights stay in
// memory, at the addresses in both products, until the call for the next `piece`.
typedef int64_t (*Fetch)(int64_t piece, const int32_t* hit, int64_t hits, uint8_t* ready);

struct ExpertsPart {
    NormParams norm;  // for all of those below that have none of their own
    NormParams router_norm, expert_norm, expert_output_norm, shared_norm, shared_output_norm;
    Linear router;
    ExpertProduct gate_up, down;
    FeedForward shared;  // no outputs: there is none
    Linear shared_gate;  // one output, or none
    ResidualAdd residual;
    const float* scales;  // [experts]: factors of the weights, or null
    Choice choice;
    int64_t experts, size, gate_type;
    Fetch fetch;  // null: all experts are in memory
};

struct ExpertsRun {
    const ExpertsPart& part;
    const Rowwise rowwise;

    // Routes rows [rows, hidden] into `r`, whose arrays are taken from `scratch`; returns the number of hit experts, or -1
    // without memory.
    int64_t choose(const uint16_t* x, Scratch& scratch, Routing& r) const {
        const int64_t rows = rowwise.rows, count = rows * part.experts, pairs = rows * part.choice.top;
        uint16_t *rounded = scratch.take(count), *spare = scratch.take(count);
        const auto words = [&](int64_t size) { return reinterpret_cast<int32_t*>(scratch.take(2 * size)); };
        float* scores = reinterpret_cast<float*>(words(count));
        r = {scores, reinterpret_cast<float*>(words(pairs)), words(pairs), words(pairs), words(pairs), words(part.experts),
             words(part.experts + 1), rows, part.experts, part.choice};
        if (!rowwise.multiply(part.router, x, rounded, spare)) return -1;
        rowwise.each([&](int64_t row) {
            for (int64_t i = row * part.experts; i < (row + 1) * part.experts; i++) scores[i] = from_bf16(rounded[i]);
            choose_experts(r, row);
            for (int64_t i = row * r.choice.top; part.scales && i < (row + 1) * r.choice.top; i++) r.weights[i] *= part.scales[r.chosen[i]];
        });
        return sort_pairs(r);
    }

    struct Pair {
        int32_t at, expert;
    };
    // Operands of `product` for the experts of `weights`: pair p reads row tokens[p] or p of x and writes row p of y [pairs,
    // outputs].
    Routed routed(const ExpertProduct& product, const Routing& r, const std::vector<const void*>& weights, const int32_t* tokens,
                  const uint16_t* x, uint16_t* y) const {
        return {weights.data(), r.starts, tokens, x, y, int64_t(weights.size()), tokens ? rowwise.rows : rowwise.rows * part.choice.top,
                product.inputs, product.outputs, BF16, int32_t(product.stored)};
    }

    static void add_bias(const ExpertProduct& product, const Pair& pair, uint16_t* y) {
        if (const uint16_t* bias = product.biases[pair.expert]) add_row(y + pair.at * product.outputs, bias, product.outputs);
    }

    // Both products of the experts in `up` and `down`, with `between` for each of their pairs. Returns false without memory.
    template <class Between> bool multiply_both(const Routed& up, const Routed& down, Between between, int64_t pairs) const {
#if WIDTH
        FewExperts first(up), second(down);
        if (first.add_all() && second.add_all())
            return first.rows.empty() || multiply_few_twice(first.products, first.rows, second.products, second.rows, rowwise.threads, between);
#endif
        if (!multiply_routed(up, rowwise.threads)) return false;
        Rowwise{pairs, rowwise.threads}.each(between);
        return multiply_routed(down, rowwise.threads);
    }

    // The outputs of the experts that are ready for x [rows, hidden], to `pair_outputs` [pairs, outputs]. Returns false without
    // memory.
    bool feed(const Routing& r, const std::vector<uint8_t>& ready, const uint16_t* x, uint16_t* both, uint16_t* activated, uint16_t* pair_outputs) const {
        std::vector<Pair> pairs;
        std::vector<const void*> up(ready.size()), down(ready.size());
        for (size_t i = 0; i < ready.size(); i++) {
            if (!ready[i]) continue;
            up[i] = part.gate_up.weights[r.hit[i]], down[i] = part.down.weights[r.hit[i]];
            for (int32_t p = r.starts[i]; p < r.starts[i + 1]; p++) pairs.push_back({p, r.hit[i]});
        }
        const auto between = [&](int64_t i) {
            const Pair& pair = pairs[size_t(i)];
            add_bias(part.gate_up, pair, both);
            gate_row(int32_t(part.gate_type), both + pair.at * part.gate_up.outputs, part.size, activated + pair.at * part.size);
        };
        if (!multiply_both(routed(part.gate_up, r, up, r.pairs, x, both), routed(part.down, r, down, nullptr, activated, pair_outputs), between,
                           int64_t(pairs.size())))
            return false;
        Rowwise{int64_t(pairs.size()), rowwise.threads}.each([&](int64_t i) { add_bias(part.down, pairs[size_t(i)], pair_outputs); });
        return true;
    }

    // `feed` for all hit experts: in one call, or piece by piece as they are loaded. Returns 0; 1: no memory; 3: loading failed.
    int feed_all(const Routing& r, int64_t hits, const uint16_t* x, uint16_t* both, uint16_t* activated, uint16_t* pair_outputs) const {
        if (!part.fetch) return feed(r, std::vector<uint8_t>(size_t(hits), 1), x, both, activated, pair_outputs) ? 0 : 1;
        for (int64_t piece = 0, left = hits; left > 0; piece++) {
            std::vector<uint8_t> ready(size_t(hits), 0);
            const int64_t count = part.fetch(piece, r.hit, hits, ready.data());
            if (count <= 0) return 3;
            if (!feed(r, ready, x, both, activated, pair_outputs)) return 1;
            left -= count;
        }
        return 0;
    }

    // x [rows, hidden], or its norm in memory of `scratch`.
    const uint16_t* normed(const NormParams& gain, const uint16_t* x, Scratch& scratch) const {
        return gain.gain ? rowwise.norm_input(gain, x, scratch.take(rowwise.rows * part.residual.hidden)) : x;
    }

    // The output of the shared expert for x [rows, hidden], times the sigmoid of its gate if it has one; null without memory.
    const uint16_t* shared_output(const uint16_t* x, Scratch& scratch) const {
        uint16_t* output = scratch.take(rowwise.rows * part.residual.hidden);
        if (!feed_forward(part.shared, rowwise, normed(part.shared_norm, x, scratch), scratch, output)) return nullptr;
        if (part.shared_output_norm.gain) rowwise.norm(part.shared_output_norm, output, part.residual.hidden, part.residual.hidden, output);
        if (!part.shared_gate.outputs) return output;
        uint16_t *gate = scratch.take(rowwise.rows), *spare = scratch.take(rowwise.rows);
        if (!rowwise.multiply(part.shared_gate, x, gate, spare)) return nullptr;
        rowwise.each([&](int64_t row) {
            uint16_t* at = output + row * part.residual.hidden;
            weigh_row(at, gate[row], part.residual.hidden, at);
        });
        return output;
    }

    // Returns 0; 1: no memory; 3: an expert could not be loaded.
    int run(const uint16_t* x, uint16_t* out) const {
        const int64_t rows = rowwise.rows, values = rows * part.residual.hidden, pairs = rows * part.choice.top;
        Scratch scratch(8 * values + feed_forward_scratch(part.shared, rows) + 4 * rows + (4 * rows + 4) * (part.experts + 1) + 8 * pairs +
                        pairs * (part.gate_up.outputs + part.size + part.down.outputs));
        if (!scratch.at) return 1;
        const uint16_t* input = normed(part.norm, x, scratch);
        const uint16_t* shared = nullptr;
        if (part.shared.size && !(shared = shared_output(input, scratch))) return 1;
        Routing r;
        const int64_t hits = choose(normed(part.router_norm, input, scratch), scratch, r);
        if (hits < 0) return 1;
        uint16_t *both = scratch.take(pairs * part.gate_up.outputs), *activated = scratch.take(pairs * part.size);
        uint16_t *pair_outputs = scratch.take(pairs * part.down.outputs), *output = scratch.take(values);
        if (const int failed = feed_all(r, hits, normed(part.expert_norm, input, scratch), both, activated, pair_outputs)) return failed;
        const WeightedSum sum{pair_outputs, r.places, r.weights, output, rows, part.choice.top, part.residual.hidden, BF16};
        rowwise.each([&](int64_t row) {
            sum_token<uint16_t>(sum, row);
        });
        if (part.expert_output_norm.gain) rowwise.norm(part.expert_output_norm, output, sum.size, sum.size, output);
        if (shared) rowwise.each([&](int64_t row) { add_row(output + row * sum.size, shared + row * sum.size, sum.size); });
        rowwise.add(part.residual, x, output, scratch.take(values), out);
        return 0;
    }
};

}  // namespace
