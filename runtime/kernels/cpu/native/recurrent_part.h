// The token mixer of a recurrent layer on few rows of bf16, whole, as layer.h has the other parts: norm, projections, convolution
// and recurrence with their states, gated norm, output product, and the residual addition.

#pragma once

#include "layer.h"
#include "recurrent.h"

namespace {

// The structures are mirrored by layer.py.
struct DeltaPart {
    NormParams norm, head_norm;  // the heads' norm has a bf16 gain
    Linear projection, gates, out;
    ResidualAdd residual;
    const float *weight, *bias, *rate, *dt_bias;  // see Convolution and Delta
    int64_t taps, heads, key_heads, key_dim, value_dim;
    int64_t by_key_head;  // the projections are ordered by key head, and the gates too
    float beta_scale;
};
// Kimi Delta Attention. projection: q, k, v, then z and a where they are whole; gates: b, then the low ranks of a and of z.
struct ChannelDeltaPart {
    NormParams norm, head_norm;
    Linear projection, gates, decay_b, gate_b, out;  // no outputs for a whole a, or a whole z
    ResidualAdd residual;
    const float *weight, *bias, *rate, *dt_bias;
    int64_t taps, heads, head_dim;
    float floor;
};
struct MambaPart {
    NormParams norm, gated_norm;  // the gated norm has a bf16 gain; without one the output is only gated
    Linear projection, out;  // z; x, B and C; steps
    ResidualAdd residual;
    const float *weight, *bias, *rate, *dt_bias, *skip;  // see Convolution and Scan
    int64_t taps, heads, groups, head_dim, state_dim, norm_groups;
    float low, high;
    float multipliers[5];  // of z, x, B, C and steps
};
// Mamba-1. projection: x, z; select: dt, B and C of the convolved x; step: from dt to a step for each channel.
struct SelectivePart {
    NormParams norm, step_norm, key_norm, query_norm;  // the last three of dt, B and C, all or none
    Linear projection, select, step, out;
    ResidualAdd residual;
    const float *weight, *bias, *rate, *dt_bias, *skip;  // see Convolution and Scan
    int64_t taps, channels, state_dim;
};
struct ConvolutionPart {
    NormParams norm;
    Linear projection, out;  // B, C and x concatenated; the output is C * convolution(B * x)
    ResidualAdd residual;
    const float *weight, *bias;
    int64_t channels, taps;
};
struct ParallelMixersPart {  // both read the stream; both outputs are added to it
    AttentionPart attention;
    MambaPart mamba;
};
struct LayerStates {  // the states of one layer, for all slots
    float *inputs, *matrices;  // of the convolution, and of the recurrence
    int64_t slots;
    int64_t draft_offset;  // values of a row that earlier layers store in PassRows::draft_inputs
};

struct MixerCaches {  // of a ParallelMixersPart
    LayerCache attention;
    LayerStates mamba;
};

constexpr int64_t SHARED = 1 << 15;  // values up to which one thread finishes before others are awake

struct RecurrentRun {
    const PassRows& pass;
    const LayerStates& states;
    const Rowwise rowwise;

    bool is_sound() const {
        for (int64_t s = 0; s < pass.sequences; s++) {
            if (pass.slots[s] < 0 || pass.slots[s] >= states.slots || pass.starts[s] > pass.starts[s + 1]) return false;
            for (int64_t other = 0; other < s; other++)
                if (pass.slots[other] == pass.slots[s]) return false;
        }
        return pass.starts[0] == 0 && pass.starts[pass.sequences] == pass.rows;
    }
    Runs runs() const { return {pass.starts, pass.slots, pass.drafts, pass.sequences, BF16}; }
    int threads_for(int64_t values) const { return values <= SHARED ? 1 : rowwise.threads; }

    // y = the convolution of x [rows, channels], rows `stride` apart, for all sequences.
    void convolve(const float* weight, const float* bias, int64_t channels, int64_t taps, const uint16_t* x, int64_t stride,
                  bool silu, uint16_t* y) const {
        const Convolution c{x, weight, bias, states.inputs, y, stride, channels, taps, silu};
        convolve_rows<uint16_t>(runs(), c, threads_for(rowwise.rows * channels));
    }

    // Stores the first `width` values of rows `stride` apart after this layer's first `before` values, if the pass has drafts.
    void store_draft_inputs(const uint16_t* x, int64_t stride, int64_t width, int64_t before) const {
        uint16_t* to = pass.draft_inputs ? pass.draft_inputs + rowwise.rows * (states.draft_offset + before) : nullptr;
        for (int64_t row = 0; to && row < rowwise.rows; row++) memcpy(to + row * width, x + row * stride, size_t(width) * 2);
    }

    // The whole part, from the stream x to out. Returns 0; 1: no memory; 2: slots out of range.
    template <class Part> int run(const Part& part, const uint16_t* x, uint16_t* out) const {
        const int64_t values = rowwise.rows * part.residual.hidden;
        Scratch scratch(2 * values);
        if (!scratch.at) return 1;
        uint16_t *output = scratch.take(values), *spare = scratch.take(values);
        if (const int failed = compute(part, x, output)) return failed;
        rowwise.add(part.residual, x, output, spare, out);
        return 0;
    }

    // Computes the part without its residual addition: `output` [rows, hidden] of the stream x. Returns as above.
    int compute(const DeltaPart& part, const uint16_t* x, uint16_t* output) const {
        const int64_t rows = rowwise.rows, hidden = part.residual.hidden, keys = part.key_heads * part.key_dim;
        const int64_t values = part.heads * part.value_dim, channels = 2 * keys + values, inputs = 2 * (keys + part.heads);
        const int64_t widest = std::max({part.projection.outputs, part.gates.outputs, hidden});
        if (!is_sound()) return 2;
        Scratch scratch(rows * (widest + hidden + 2 * (part.projection.outputs + part.gates.outputs) + channels + 2 * inputs + 2 * values));
        if (!scratch.at) return 1;
        uint16_t* spare = scratch.take(rows * widest);
        const uint16_t* input = rowwise.norm_input(part.norm, x, scratch.take(rows * hidden));
        uint16_t *projected = scratch.take(rows * part.projection.outputs), *gates = scratch.take(rows * part.gates.outputs);
        if (!rowwise.multiply(part.projection, input, projected, spare) || !rowwise.multiply(part.gates, input, gates, spare)) return 1;
        if (part.by_key_head) {
            const int64_t copies = part.heads / part.key_heads, width = copies * part.value_dim;
            uint16_t *other = scratch.take(rows * part.projection.outputs), *others = scratch.take(rows * part.gates.outputs);
            rowwise.regroup(projected, part.projection.outputs, part.key_heads, {part.key_dim, part.key_dim, width, width}, other);
            rowwise.regroup(gates, part.gates.outputs, part.key_heads, {copies, copies}, others);
            projected = other, gates = others;
        }
        store_draft_inputs(projected, part.projection.outputs, channels, 0);
        store_draft_inputs(gates, part.gates.outputs, part.gates.outputs, channels);
        uint16_t *mixed = scratch.take(rows * channels), *read = scratch.take(rows * values), *normed = scratch.take(rows * values);
        convolve(part.weight, part.bias, channels, part.taps, projected, part.projection.outputs, true, mixed);
        const Delta d{mixed, gates, part.rate, part.dt_bias, states.matrices, reinterpret_cast<float*>(scratch.take(2 * rows * inputs)),
                      read, part.gates.outputs, part.heads, part.key_heads, part.key_dim, part.value_dim, part.beta_scale, 0.0f, 0};
        delta_rows<uint16_t>(runs(), d, threads_for(rows * values * part.key_dim));
        const GatedNorm n{read, part.head_norm.gain, projected + channels, normed, rows, part.heads, part.value_dim,
                          part.projection.outputs, part.head_norm.eps, 1};
        gated_norm_rows<uint16_t>(n, threads_for(rows * values));
        return rowwise.multiply(part.out, normed, output, spare) ? 0 : 1;
    }

    // Returns as above.
    int compute(const ChannelDeltaPart& part, const uint16_t* x, uint16_t* output) const {
        const int64_t rows = rowwise.rows, hidden = part.residual.hidden, values = part.heads * part.head_dim, channels = 3 * values;
        const int64_t width = part.projection.outputs, low = part.gates.outputs, steps_width = part.heads + values;
        const int64_t widest = std::max({width, low, values, hidden}), inputs = 3 * values + part.heads;
        if (!is_sound()) return 2;
        Scratch scratch(rows * (2 * widest + hidden + width + low + 4 * values + steps_width + channels + 2 * inputs));
        if (!scratch.at) return 1;
        uint16_t *spare = scratch.take(rows * widest), *narrow = scratch.take(rows * widest);
        const uint16_t* input = rowwise.norm_input(part.norm, x, scratch.take(rows * hidden));
        uint16_t *projected = scratch.take(rows * width), *gates = scratch.take(rows * low), *steps = scratch.take(rows * steps_width);
        if (!rowwise.multiply(part.projection, input, projected, spare) || !rowwise.multiply(part.gates, input, gates, spare)) return 1;
        const auto copy = [&](const uint16_t* from, int64_t stride, int64_t count, uint16_t* to, int64_t to_stride) {
            for (int64_t row = 0; row < rows; row++) memcpy(to + row * to_stride, from + row * stride, size_t(count) * 2);
        };
        int64_t first = part.heads;  // of the next low rank
        const auto raise = [&](const Linear& linear, uint16_t* to) {
            const int64_t rank = linear.parts[0].inputs;
            copy(gates + first, low, rank, narrow, rank);
            first += rank;
            return rowwise.multiply(linear, narrow, to, spare);
        };
        uint16_t *raised_decay = scratch.take(rows * values), *raised_gate = scratch.take(rows * values);
        const bool low_decay = part.decay_b.outputs, low_gate = part.gate_b.outputs;
        if (low_decay && !raise(part.decay_b, raised_decay)) return 1;
        if (low_gate && !raise(part.gate_b, raised_gate)) return 1;
        copy(gates, low, part.heads, steps, steps_width);
        const uint16_t* whole_decay = projected + channels + (low_gate ? 0 : values);
        copy(low_decay ? raised_decay : whole_decay, low_decay ? values : width, values, steps + part.heads, steps_width);
        store_draft_inputs(projected, width, channels, 0);
        store_draft_inputs(steps, steps_width, steps_width, channels);
        uint16_t *mixed = scratch.take(rows * channels), *read = scratch.take(rows * values), *normed = scratch.take(rows * values);
        convolve(part.weight, part.bias, channels, part.taps, projected, width, true, mixed);
        const Delta d{mixed, steps, part.rate, part.dt_bias, states.matrices, reinterpret_cast<float*>(scratch.take(2 * rows * inputs)),
                      read, steps_width, part.heads, part.heads, part.head_dim, part.head_dim, 1.0f, part.floor, 1};
        delta_rows<uint16_t>(runs(), d, threads_for(rows * values * part.head_dim));
        const GatedNorm n{read, part.head_norm.gain, low_gate ? raised_gate : projected + channels, normed, rows, part.heads,
                          part.head_dim, low_gate ? values : width, part.head_norm.eps, 0};
        gated_norm_rows<uint16_t>(n, threads_for(rows * values));
        return rowwise.multiply(part.out, normed, output, spare) ? 0 : 1;
    }

    // Multiplies the parts of each row of the projection by their multipliers.
    void scale_parts(const MambaPart& part, uint16_t* projected) const {
        const int64_t inner = part.heads * part.head_dim, group = part.groups * part.state_dim;
        const int64_t widths[] = {inner, inner, group, group, part.heads};
        rowwise.each([&](int64_t row) {
            uint16_t* at = projected + row * part.projection.outputs;
            for (int i = 0; i < 5; at += widths[i++]) scale_row(at, part.multipliers[i], widths[i]);
        });
    }

    // Returns as above.
    int compute(const MambaPart& part, const uint16_t* x, uint16_t* output) const {
        const int64_t rows = rowwise.rows, hidden = part.residual.hidden, inner = part.heads * part.head_dim;
        const int64_t channels = inner + 2 * part.groups * part.state_dim, inputs = 2 * (part.groups * part.state_dim + part.heads);
        const int64_t width = part.projection.outputs, widest = std::max(width, hidden);
        if (!is_sound()) return 2;
        Scratch scratch(rows * (widest + hidden + width + channels + 2 * inputs + 2 * inner));
        if (!scratch.at) return 1;
        uint16_t *spare = scratch.take(rows * widest), *projected = scratch.take(rows * width);
        const uint16_t* input = rowwise.norm_input(part.norm, x, scratch.take(rows * hidden));
        if (!rowwise.multiply(part.projection, input, projected, spare)) return 1;
        scale_parts(part, projected);
        const uint16_t *mixed = projected + inner, *steps = mixed + channels;
        store_draft_inputs(mixed, width, channels, 0);
        store_draft_inputs(steps, width, part.heads, channels);
        uint16_t *convolved = scratch.take(rows * channels), *read = scratch.take(rows * inner), *normed = scratch.take(rows * inner);
        convolve(part.weight, part.bias, channels, part.taps, mixed, width, true, convolved);
        const Scan s{convolved, steps, part.rate, part.dt_bias, part.skip, states.matrices,
                     reinterpret_cast<float*>(scratch.take(2 * rows * inputs)), read, width, part.heads, part.groups, part.head_dim,
                     part.state_dim, part.low, part.high, 0};
        scan_rows<uint16_t>(runs(), s, threads_for(rows * inner * part.state_dim));
        const GroupNorm n{read, part.gated_norm.gain, projected, normed, rows, part.norm_groups, inner / part.norm_groups, width,
                          part.gated_norm.eps};
        if (part.gated_norm.gain) group_norm_rows<uint16_t>(n, threads_for(rows * inner));
        else rowwise.each([&](int64_t row) { gate_row(projected + row * width, read + row * inner, inner, normed + row * inner, silu<Wide>); });
        return rowwise.multiply(part.out, normed, output, spare) ? 0 : 1;
    }

    // Returns as above.
    int compute(const SelectivePart& part, const uint16_t* x, uint16_t* output) const {
        const int64_t rows = rowwise.rows, hidden = part.residual.hidden, channels = part.channels, states_width = part.state_dim;
        const int64_t width = part.projection.outputs, selected_width = part.select.outputs, rank = selected_width - 2 * states_width;
        const int64_t row_width = channels + 2 * states_width, inputs = 2 * (states_width + 1);
        const int64_t widest = std::max({width, selected_width, hidden});
        if (!is_sound()) return 2;
        Scratch scratch(rows * (widest + hidden + width + 4 * channels + selected_width + rank + row_width + 2 * states_width + 2 * inputs));
        if (!scratch.at) return 1;
        uint16_t *spare = scratch.take(rows * widest), *projected = scratch.take(rows * width);
        const uint16_t* input = rowwise.norm_input(part.norm, x, scratch.take(rows * hidden));
        if (!rowwise.multiply(part.projection, input, projected, spare)) return 1;
        store_draft_inputs(projected, width, channels, 0);
        uint16_t *convolved = scratch.take(rows * channels), *selected = scratch.take(rows * selected_width);
        convolve(part.weight, part.bias, channels, part.taps, projected, width, true, convolved);
        if (!rowwise.multiply(part.select, convolved, selected, spare)) return 1;
        // A part of each row of `selected` from `first`, normed, to y [rows, count].
        const auto take = [&](const NormParams& norm, int64_t first, int64_t count, uint16_t* y) {
            if (norm.gain) return rowwise.norm(norm, selected + first, count, selected_width, y);
            for (int64_t row = 0; row < rows; row++) memcpy(y + row * count, selected + row * selected_width + first, size_t(count) * 2);
        };
        uint16_t *low = scratch.take(rows * rank), *steps = scratch.take(rows * channels), *scanned = scratch.take(rows * row_width);
        uint16_t *keys = scratch.take(rows * states_width), *queries = scratch.take(rows * states_width);
        take(part.step_norm, 0, rank, low);
        take(part.key_norm, rank, states_width, keys);
        take(part.query_norm, rank + states_width, states_width, queries);
        if (!rowwise.multiply(part.step, low, steps, spare)) return 1;
        rowwise.each([&](int64_t row) {
            uint16_t* to = scanned + row * row_width;
            memcpy(to, convolved + row * channels, size_t(channels) * 2);
            memcpy(to + channels, keys + row * states_width, size_t(states_width) * 2);
            memcpy(to + channels + states_width, queries + row * states_width, size_t(states_width) * 2);
        });
        uint16_t *read = scratch.take(rows * channels), *gated = scratch.take(rows * channels);
        const Scan s{scanned, steps, part.rate, part.dt_bias, part.skip, states.matrices,
                     reinterpret_cast<float*>(scratch.take(2 * rows * inputs)), read, channels, 1, 1, channels, states_width, 0.0f,
                     INFINITY, 1};
        scan_rows<uint16_t>(runs(), s, threads_for(rows * channels * states_width));
        rowwise.each([&](int64_t row) {
            gate_row(projected + row * width + channels, read + row * channels, channels, gated + row * channels, silu<Wide>);
        });
        return rowwise.multiply(part.out, gated, output, spare) ? 0 : 1;
    }

    // Returns as above.
    int compute(const ConvolutionPart& part, const uint16_t* x, uint16_t* output) const {
        const int64_t rows = rowwise.rows, hidden = part.residual.hidden, channels = part.channels, width = 3 * channels;
        const int64_t widest = std::max(width, hidden);
        if (!is_sound()) return 2;
        Scratch scratch(rows * (widest + hidden + width + 2 * channels));
        if (!scratch.at) return 1;
        uint16_t *spare = scratch.take(rows * widest), *projected = scratch.take(rows * width);
        const uint16_t* input = rowwise.norm_input(part.norm, x, scratch.take(rows * hidden));
        if (!rowwise.multiply(part.projection, input, projected, spare)) return 1;
        uint16_t *mixed = scratch.take(rows * channels), *read = scratch.take(rows * channels);
        const auto multiplied = [&](int64_t first, const uint16_t* by, int64_t stride, uint16_t* y) {
            rowwise.each([&](int64_t row) {
                const uint16_t* gate = projected + row * width + first;
                for (int64_t i = 0; i < channels; i += WIDE) put(y + row * channels + i, wide(gate + i) * wide(by + row * stride + i));
            });
        };
        multiplied(0, projected + 2 * channels, width, mixed);
        store_draft_inputs(mixed, channels, channels, 0);
        convolve(part.weight, part.bias, channels, part.taps, mixed, channels, false, read);
        multiplied(channels, read, channels, mixed);
        return rowwise.multiply(part.out, mixed, output, spare) ? 0 : 1;
    }
};

// Returns 0; 1: no memory; 2: lengths, blocks or slots out of range.
inline int run_mixers(const ParallelMixersPart& part, const PassRows& pass, const MixerCaches& caches, const Rowwise& rowwise,
                      const uint16_t* x, uint16_t* out) {
    const AttentionPart& attention = part.attention;
    const int64_t values = rowwise.rows * attention.residual.hidden;
    Scratch scratch(3 * values);
    if (!scratch.at) return 1;
    uint16_t *spare = scratch.take(values), *attended = scratch.take(values), *mixed = scratch.take(values);
    const uint16_t* input = rowwise.norm_input(attention.norm, x, spare);
    if (const int failed = AttentionRun{attention, pass, caches.attention, rowwise}.compute(input, attended)) return failed;
    if (const int failed = RecurrentRun{pass, caches.mamba, rowwise}.compute(part.mamba, x, mixed)) return failed;
    rowwise.add(attention.residual, x, attended, spare, out);
    rowwise.add(part.mamba.residual, out, mixed, spare, out);
    return 0;
}

}  // namespace
