// Whole layer parts on few rows of bf16: from the residual stream to the residual stream. chain.h runs many in one call.
//
// They compute what the parts in runtime/layers compute product by product, with the same operations rounded in the same places:
// the bits are the same. For one token of a small model, separate calls took a quarter (per operation) to half (per part) of the
// time.

#pragma once

#include "attention/attention_task.h"
#include "rowwise.h"

namespace {

// The structures are mirrored by layer.py.
struct AttentionPart {
    NormParams norm, q_norm, k_norm, v_norm;
    Linear qkv, o;
    ResidualAdd residual;
    const float* sinks;  // see Attention
    int64_t heads, kv_heads, head_dim, half, window;  // half: rotated pairs of a head, 0 for none
    float scale, softcap;
    int32_t interleaved, norms_rotated, makes_keys, makes_values;
    int64_t gated;  // after the query of each head the product has as many values, which gate the head's output
    int64_t portable;  // see Attention
};
struct FeedForward {  // an MLP by itself
    Linear gate_up, down;
    int64_t size;
    int32_t gate_type;
    float gate_scale;  // of the gate, before its activation
};
struct MlpPart {
    NormParams norm;
    FeedForward feed;
    ResidualAdd residual;
};
struct ParallelPart {  // both read the output of the first one's norm; both outputs are added to the stream
    AttentionPart attention;
    MlpPart mlp;
};
struct PerLayerPart {  // adds the per-layer input of each token, through a gate
    NormParams norm;
    Linear gate, projection;
    ResidualAdd residual;
    int64_t offset, size, gate_type;  // offset: of this layer in a row of per_layer_inputs
};
struct Rotation {  // a kind of rotation: cosines and sines [rows, half] of a pass, or of all positions
    const uint16_t *cos, *sin;
    const uint16_t* scale;  // factors of the queries by position, or null
};
struct PassRows {  // see Attention
    const int32_t *starts, *lengths, *table;
    const int32_t* window_table;  // of layers with a sliding window
    const int32_t* slots;   // [sequences]: slot of the states of recurrent layers
    const uint8_t* drafts;  // [sequences]: the pass has draft tokens of the sequence, so its states must not change yet
    const Rotation* rotations;  // one for each kind of rotary embedding that the layers use
    const uint16_t* per_layer_inputs;  // [rows, layers * size], rows per_layer_stride apart (Gemma 3n and 4), or null
    uint16_t* draft_inputs;  // inputs of draft tokens, by which recurrent states advance once accepted; null: no drafts
    int64_t rows, sequences, table_width, per_layer_stride;
    int64_t by_position;  // whether rotations hold all positions, not only those of the pass
};
struct LayerCache {  // the keys and values of one attention layer, and the index of its rotation in PassRows::rotations
    void *keys, *values;
    void *key_scales, *value_scales;  // see Attention, as the strides
    int64_t blocks, block_size, block_stride, head_stride;
    int64_t cache_type, rotation;  // rotation: negative for none
    int64_t windowed;  // it has the blocks of PassRows::window_table
    const int32_t* table(const PassRows& pass) const { return windowed ? pass.window_table : pass.table; }
};

// Writes for each row the row of the rotation tables that holds its position.
inline void rotary_rows(const PassRows& pass, int64_t* at) {
    for (int64_t s = 0; s < pass.sequences; s++)
        for (int64_t row = pass.starts[s]; row < pass.starts[s + 1]; row++)
            at[row] = pass.by_position ? pass.lengths[s] - pass.starts[s + 1] + row : row;
}

struct AttentionRun {
    const AttentionPart& part;
    const PassRows& pass;
    const LayerCache& cache;
    const Rowwise rowwise;

    // Rotates `count` heads of each row of x, rows `stride` apart, to [rows, count, head_dim].
    void rotate(const int64_t* at, const uint16_t* x, int64_t count, int64_t stride, uint16_t* to) const {
        const Rotation& tables = pass.rotations[cache.rotation];
        rowwise.each([&](int64_t row) {
            const uint16_t *cos = tables.cos + at[row] * part.half, *sin = tables.sin + at[row] * part.half;
            const RotateTask<uint16_t> r{x + row * stride, cos, sin, to + row * count * part.head_dim, 1, 1, count, part.head_dim, part.half, 0,
                             stride, part.interleaved};
            rotate_token(r, 0, 0);
        });
    }

    // `count` heads of each row of the first product, from `x` on, normed and rotated: [rows, count, head_dim].
    const uint16_t* rotated(const int64_t* at, const uint16_t* x, int64_t count, const NormParams& gain, Scratch& scratch) const {
        const int64_t width = count * part.head_dim;
        int64_t stride = part.qkv.outputs;
        const auto normed = [&] {
            uint16_t* to = scratch.take(rowwise.rows * width);
            rowwise.norm(gain, x, width, stride, to);
            x = to, stride = width;
        };
        if (gain.gain && !part.norms_rotated) normed();
        if (part.half) {
            uint16_t* to = scratch.take(rowwise.rows * width);
            rotate(at, x, count, stride, to);
            x = to, stride = width;
        }
        if (gain.gain && part.norms_rotated) normed();
        if (stride == width) return x;
        uint16_t* to = scratch.take(rowwise.rows * width);
        for (int64_t row = 0; row < rowwise.rows; row++) memcpy(to + row * width, x + row * stride, size_t(width) * 2);
        return to;
    }

    // Converts a vector of one head to int8 codes and returns their scale, rounded as in runtime/cache/kv_cache.py.
    static float make_codes(const uint16_t* x, int64_t size, int8_t* codes) {
        float largest = 0;
        bool finite = true;
        for (int64_t i = 0; i < size; i++) {
            const float magnitude = fabsf(from_bf16(x[i]));
            largest = std::max(largest, magnitude);
            finite &= magnitude <= __FLT_MAX__;
        }
        if (!finite) {
            memset(codes, 0, size_t(size));
            return __builtin_nanf("");
        }
        const float scale = largest / 127, step = std::max(scale, __FLT_MIN__);
        for (int64_t i = 0; i < size; i++)
            codes[i] = int8_t(std::min(std::max(rintf(from_bf16(x[i]) / step), -127.0f), 127.0f));
        return scale;
    }

    // Stores the heads of each row of x, rows `stride` apart, in the cache. vector: memory for one head.
    static void store(const Attention& a, const uint16_t* x, int64_t stride, void* data, void* scales, float* vector) {
        for (int64_t s = 0; s < a.sequences; s++)
            for (int64_t row = a.starts[s]; row < a.starts[s + 1]; row++) {
                const int64_t position = a.lengths[s] - a.starts[s + 1] + row;
                const int64_t block = a.table[s * a.table_width + position / a.block_size];
                for (int64_t head = 0; head < a.kv_heads; head++) {
                    const int64_t at = block * a.block_stride + head * a.head_stride + position % a.block_size, first = at * a.head_dim;
                    const uint16_t* from = x + row * stride + head * a.head_dim;
                    if (a.cache_type == CACHE_INT4) {
                        widen(from, BF16, 0, a.head_dim, vector);
                        pack_vector(vector, a.head_dim, static_cast<uint8_t*>(data) + first / 2,
                                    static_cast<uint16_t*>(scales) + at * int4_groups(a.head_dim));
                    } else if (scales) static_cast<float*>(scales)[at] = make_codes(from, a.head_dim, static_cast<int8_t*>(data) + first);
                    else memcpy(static_cast<uint16_t*>(data) + first, from, size_t(a.head_dim) * 2);
                }
            }
    }

    // Reorders queries and gates, which alternate by head in each row of `projected`: all queries, then all gates.
    void split_gates(uint16_t* projected, Scratch& scratch) const {
        const int64_t width = 2 * part.heads * part.head_dim;
        uint16_t* ordered = scratch.take(rowwise.rows * width);
        rowwise.regroup(projected, part.qkv.outputs, part.heads, {part.head_dim, part.head_dim}, ordered);
        for (int64_t row = 0; row < rowwise.rows; row++)
            memcpy(projected + row * part.qkv.outputs, ordered + row * width, size_t(width) * 2);
    }

    // Queries [rows, width] times the factors of their positions, if there are any.
    const uint16_t* scaled(const int64_t* at, const uint16_t* x, int64_t width, Scratch& scratch) const {
        const uint16_t* scale = cache.rotation >= 0 ? pass.rotations[cache.rotation].scale : nullptr;
        if (!scale) return x;
        uint16_t* to = scratch.take(rowwise.rows * width);
        rowwise.each([&](int64_t row) {
            for (int64_t i = row * width; i < (row + 1) * width; i += WIDE) put(to + i, wide(x + i) * from_bf16(scale[at[row]]));
        });
        return to;
    }

    // Computes the part without its norm and residual addition, both sides [rows, hidden]. Returns 0; 1: no memory; 2: lengths or
    // blocks out of range.
    int compute(const uint16_t* input, uint16_t* output) const {
        const int64_t rows = rowwise.rows, queries = part.heads * part.head_dim, keys = part.kv_heads * part.head_dim;
        const int64_t widest = std::max(part.qkv.outputs, part.residual.hidden);
        Scratch scratch(rows * (widest + part.qkv.outputs + 3 * (queries + 2 * keys) + (2 + 2 * part.gated) * queries + 4) + 2 * part.head_dim);
        if (!scratch.at) return 1;
        uint16_t *spare = scratch.take(rows * widest), *projected = scratch.take(rows * part.qkv.outputs);
        if (!rowwise.multiply(part.qkv, input, projected, spare)) return 1;
        if (part.gated) split_gates(projected, scratch);
        uint16_t* attended = scratch.take(rows * queries);
        Attention a{nullptr, cache.keys, cache.values, cache.key_scales, cache.value_scales, part.sinks, attended, pass.starts,
                    pass.lengths, cache.table(pass), pass.sequences, pass.table_width, cache.blocks, cache.block_size, cache.block_stride,
                    cache.head_stride, part.kv_heads, part.heads / part.kv_heads, part.head_dim, part.window, part.scale,
                    part.softcap, BF16, int32_t(cache.cache_type), BF16, int32_t(part.portable)};
        if (!is_sound(a) || pass.starts[pass.sequences] != rows) return 2;
        int64_t* at = reinterpret_cast<int64_t*>(scratch.take(4 * rows));
        rotary_rows(pass, at);
        a.query = scaled(at, rotated(at, projected, part.heads, part.q_norm, scratch), queries, scratch);
        const uint16_t* gates = projected + queries;
        if (part.makes_keys) {
            const uint16_t *key = part.gated ? gates + queries : gates, *value = part.makes_values ? key + keys : key;
            int64_t stride = part.qkv.outputs;
            float* vector = reinterpret_cast<float*>(scratch.take(2 * part.head_dim));
            store(a, rotated(at, key, part.kv_heads, part.k_norm, scratch), keys, cache.keys, cache.key_scales, vector);
            if (part.v_norm.gain) {
                uint16_t* normed = scratch.take(rows * keys);
                rowwise.norm(part.v_norm, value, keys, stride, normed);
                value = normed, stride = keys;
            }
            store(a, value, stride, cache.values, cache.value_scales, vector);
        }
        if (const int failed = attend(&a, rowwise.threads)) return failed;
        if (part.gated)
            rowwise.each([&](int64_t row) {
                uint16_t* to = attended + row * queries;
                weigh_row(to, gates + row * part.qkv.outputs, queries, to);
            });
        return rowwise.multiply(part.o, attended, output, spare) ? 0 : 1;
    }

    // The whole part, from the stream x to out. Returns as above.
    int run(const uint16_t* x, uint16_t* out) const {
        return rowwise.run_part(part.norm, part.residual, x, out, [&](const uint16_t* input, uint16_t* output) { return compute(input, output); });
    }
};

inline int64_t feed_forward_scratch(const FeedForward& f, int64_t rows) {
    return rows * (std::max(f.gate_up.outputs, f.down.outputs) + f.gate_up.outputs + f.size);
}
// x [rows, inputs] through an MLP to `output`, with `feed_forward_scratch` values of `scratch`. Returns false without memory.
inline bool feed_forward(const FeedForward& f, const Rowwise& rowwise, const uint16_t* x, Scratch& scratch, uint16_t* output) {
    const int64_t rows = rowwise.rows;
    uint16_t* spare = scratch.take(rows * std::max(f.gate_up.outputs, f.down.outputs));
    uint16_t *both = scratch.take(rows * f.gate_up.outputs), *activated = scratch.take(rows * f.size);
    if (!rowwise.multiply(f.gate_up, x, both, spare)) return false;
    rowwise.each([&](int64_t row) {
        uint16_t* gate = both + row * f.gate_up.outputs;
        scale_row(gate, f.gate_scale, f.size);
        gate_row(f.gate_type, gate, f.size, activated + row * f.size);
    });
    return rowwise.multiply(f.down, activated, output, spare);
}

// Returns 0, or 1 without memory.
inline int run_mlp(const MlpPart& part, const Rowwise& rowwise, const uint16_t* x, uint16_t* out) {
    const int64_t values = rowwise.rows * part.residual.hidden;
    Scratch scratch(feed_forward_scratch(part.feed, rowwise.rows) + 3 * values);
    if (!scratch.at) return 1;
    const uint16_t* input = rowwise.norm_input(part.norm, x, scratch.take(values));
    uint16_t *output = scratch.take(values), *spare = scratch.take(values);
    if (!feed_forward(part.feed, rowwise, input, scratch, output)) return 1;
    rowwise.add(part.residual, x, output, spare, out);
    return 0;
}

// Returns 0; 1: no memory; 2: lengths or blocks out of range.
inline int run_parallel(const ParallelPart& part, const PassRows& pass, const LayerCache& cache, const Rowwise& rowwise,
                        const uint16_t* x, uint16_t* out) {
    const int64_t values = rowwise.rows * part.attention.residual.hidden;
    Scratch scratch(feed_forward_scratch(part.mlp.feed, rowwise.rows) + 4 * values);
    if (!scratch.at) return 1;
    const uint16_t* input = rowwise.norm_input(part.attention.norm, x, scratch.take(values));
    uint16_t *attended = scratch.take(values), *fed = scratch.take(values), *spare = scratch.take(values);
    if (const int failed = AttentionRun{part.attention, pass, cache, rowwise}.compute(input, attended)) return failed;
    if (!feed_forward(part.mlp.feed, rowwise, input, scratch, fed)) return 1;
    rowwise.add(part.attention.residual, x, attended, spare, out);
    rowwise.add(part.mlp.residual, out, fed, spare, out);
    return 0;
}

// Returns 0, or 1 without memory.
inline int run_per_layer(const PerLayerPart& part, const PassRows& pass, const Rowwise& rowwise, const uint16_t* x, uint16_t* out) {
    const int64_t rows = rowwise.rows, values = rows * part.residual.hidden, size = part.size, widest = std::max(size, part.residual.hidden);
    Scratch scratch(2 * values + rows * (widest + 3 * size));
    if (!scratch.at) return 1;
    uint16_t *spare = scratch.take(rows * widest), *gate = scratch.take(rows * size), *both = scratch.take(2 * rows * size);
    const uint16_t* input = rowwise.norm_input(part.norm, x, scratch.take(values));
    if (!rowwise.multiply(part.gate, input, gate, spare)) return 1;
    rowwise.each([&](int64_t row) {
        uint16_t* at = both + row * 2 * size;
        memcpy(at, gate + row * size, size_t(size) * 2);
        memcpy(at + size, pass.per_layer_inputs + row * pass.per_layer_stride + part.offset, size_t(size) * 2);
        gate_row(int32_t(part.gate_type), at, size, gate + row * size);
    });
    uint16_t* output = scratch.take(values);
    if (!rowwise.multiply(part.projection, gate, output, spare)) return 1;
    rowwise.add(part.residual, x, output, spare, out);
    return 0;
}

}  // namespace
