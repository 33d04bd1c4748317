// Latent attention on few rows of bf16, whole, as layer.h has the other parts. Included by packed_cpu.cpp.

#pragma once

#include "attention/latent_task.h"
#include "layer.h"
#include "products/heads.h"

namespace {

struct LatentPart {  // mirrored by layer.py
    NormParams norm, q_norm, kv_norm;
    // inputs: the query's projection, latent, unrotated shared key; q_b, gate: no products where there is none
    Linear inputs, q_b, gate, o;  // gate: a value for each head, whose sigmoid multiplies the head's output
    ResidualAdd residual;
    const uint16_t *keys, *values;  // kv_b by heads: [heads, rank, nope] and [heads, value, rank]
    int64_t heads, rank, nope, rope, value;
    int64_t rotates, interleaved, portable;  // portable: see Attention
    float scale;
};

constexpr int64_t SHORT = 256;  // positions: one chunk of attention, which threads cannot share

struct LatentRun {
    const LatentPart& part;
    const PassRows& pass;
    const LayerCache& cache;
    const Rowwise rowwise;

    int64_t head_size() const { return part.nope + part.rope; }

    // The first `count` values of each group of `size` from `first`, rows `stride` apart, to [rows, groups, count].
    void gather(const uint16_t* x, int64_t stride, int64_t groups, int64_t size, int64_t first, int64_t count, uint16_t* to) const {
        rowwise.each([&](int64_t row) {
            for (int64_t g = 0; g < groups; g++)
                memcpy(to + (row * groups + g) * count, x + row * stride + g * size + first, size_t(count) * 2);
        });
    }
    // Rotates `count` vectors of each row, x [rows, count, rope], to `to`.
    const uint16_t* rotate(const int64_t* at, const uint16_t* x, int64_t count, uint16_t* to) const {
        if (!part.rotates) return x;
        const Rotation& tables = pass.rotations[cache.rotation];
        const int64_t half = part.rope / 2, width = count * part.rope;
        rowwise.each([&](int64_t row) {
            const RotateTask<uint16_t> r{x + row * width, tables.cos + at[row] * half, tables.sin + at[row] * half, to + row * width, 1, 1, count,
                             part.rope, half, 0, width, int32_t(part.interleaved)};
            rotate_token(r, 0, 0);
        });
        return to;
    }

    // The queries [rows, heads, head_size], rows `stride` apart; null without memory.
    const uint16_t* queries(const int64_t* at, const uint16_t* projected, int64_t& stride, uint16_t* spare, Scratch& scratch) const {
        const int64_t rows = rowwise.rows, width = part.heads * head_size();
        const uint16_t* query = projected;
        if (part.q_b.count) {
            uint16_t *low = scratch.take(rows * part.q_norm.size), *whole = scratch.take(rows * width);
            rowwise.norm(part.q_norm, projected, part.q_norm.size, stride, low);
            if (!rowwise.multiply(part.q_b, low, whole, spare)) return nullptr;
            query = whole, stride = width;
        }
        const uint16_t* scale = part.rotates ? pass.rotations[cache.rotation].scale : nullptr;
        if (!scale) return query;
        uint16_t* to = scratch.take(rows * width);
        rowwise.each([&](int64_t row) {
            for (int64_t i = 0; i < width; i += WIDE) put(to + row * width + i, wide(query + row * stride + i) * from_bf16(scale[at[row]]));
        });
        stride = width;
        return to;
    }

    void store(const LatentTask& t, const uint16_t* x, void* data, void* scales, int64_t size, float* vector) const {
        AttentionRun::store(latent_view(t, nullptr, data, scales, size), x, size, data, scales, vector);
    }

    // One token of a short text: each thread computes some heads, from the first product to the last. The threads then wait for
    // each other once instead of four times; in return, each lays out the keys.
    int attend_by_heads(const HeadProduct& into, const LatentTask& task, const HeadProduct& from) const {
        std::atomic<int> failed{0};
        const int64_t shares = std::min<int64_t>(rowwise.threads, part.heads);
#pragma omp parallel for num_threads(shares) schedule(static, 1) if (shares > 1)
        for (int64_t share = 0; share < shares; share++) {
            const int64_t first = part.heads * share / shares, last = part.heads * (share + 1) / shares;
            LatentTask some = task;
            some.query = static_cast<const uint16_t*>(task.query) + first * part.rank;
            some.rotated_query = static_cast<const uint16_t*>(task.rotated_query) + first * part.rope;
            some.out = static_cast<uint16_t*>(task.out) + first * part.rank;
            some.heads = last - first;
            for (int64_t head = first; head < last; head++)
                if (!multiply_head_of(into, head)) failed = 1;
            if (const int status = attend_latent(&some, 1)) failed = status;
            for (int64_t head = first; head < last; head++)
                if (!multiply_head_of(from, head)) failed = 1;
        }
        return failed;
    }

    // Computes the part without its norm and residual addition. Returns 0; 1: no memory; 2: lengths or blocks out of range.
    int compute(const uint16_t* input, uint16_t* output) const {
        const int64_t rows = rowwise.rows, heads = part.heads, wide = heads * part.rank, width = heads * head_size();
        const int64_t widest = std::max({part.inputs.outputs, part.q_b.outputs, part.gate.outputs, part.residual.hidden});
        const int64_t turned = heads * part.rope, read = heads * part.value;
        Scratch scratch(rows * (widest + part.inputs.outputs + part.q_norm.size + 2 * width + 2 * turned + 2 * wide + read +
                                part.gate.outputs + part.rank + 2 * part.rope + 4) + 2 * (part.rank + part.rope));
        if (!scratch.at) return 1;
        uint16_t *spare = scratch.take(rows * widest), *projected = scratch.take(rows * part.inputs.outputs);
        uint16_t *inner = scratch.take(rows * wide), *context = scratch.take(rows * wide);
        LatentTask task{inner, nullptr, cache.keys, cache.values, cache.key_scales, cache.value_scales, context, pass.starts, pass.lengths,
                        pass.table, pass.sequences, pass.table_width, cache.blocks, cache.block_size, heads, part.rank, part.rope,
                        part.scale, BF16, int32_t(cache.cache_type), BF16, int32_t(part.portable)};
        if (!is_sound(latent_view(task, nullptr, cache.keys, nullptr, part.rank)) || pass.starts[pass.sequences] != rows) return 2;
        if (!rowwise.multiply(part.inputs, input, projected, spare)) return 1;
        int64_t* at = reinterpret_cast<int64_t*>(scratch.take(4 * rows));
        rotary_rows(pass, at);

        int64_t stride = part.inputs.outputs;
        const uint16_t* query = queries(at, projected, stride, spare, scratch);
        if (!query) return 1;
        uint16_t *rest = scratch.take(rows * turned), *rotated = scratch.take(rows * turned);
        gather(query, stride, heads, head_size(), part.nope, part.rope, rest);
        task.rotated_query = rotate(at, rest, heads, rotated);

        const uint16_t* shared = projected + part.inputs.outputs - part.rank - part.rope;
        uint16_t *latent = scratch.take(rows * part.rank), *key = scratch.take(rows * part.rope), *turn = scratch.take(rows * part.rope);
        rowwise.norm(part.kv_norm, shared, part.rank, part.inputs.outputs, latent);
        gather(shared, part.inputs.outputs, 1, 0, part.rank, part.rope, key);
        float* vector = reinterpret_cast<float*>(scratch.take(2 * std::max(part.rank, part.rope)));
        store(task, latent, cache.keys, cache.key_scales, part.rank, vector);
        store(task, rotate(at, key, 1, turn), cache.values, cache.value_scales, part.rope, vector);

        uint16_t* attended = scratch.take(rows * read);
        const HeadProduct into{query, part.keys, inner, rows, heads, part.nope, part.rank, stride, head_size(), BF16, int32_t(part.portable)};
        const HeadProduct from{context, part.values, attended, rows, heads, part.rank, part.value, wide, part.rank, BF16, int32_t(part.portable)};
        if (rows == 1 && pass.sequences == 1 && pass.lengths[0] <= SHORT) {
            if (const int failed = attend_by_heads(into, task, from)) return failed;
        } else {
            if (!multiply_heads(into, rowwise.threads)) return 1;
            if (const int failed = attend_latent(&task, rowwise.threads)) return failed;
            if (!multiply_heads(from, rowwise.threads)) return 1;
        }
        if (part.gate.count) {
            uint16_t* gates = scratch.take(rows * heads);
            if (!rowwise.multiply(part.gate, input, gates, spare)) return 1;
            rowwise.each([&](int64_t row) {
                for (int64_t i = row * heads; i < (row + 1) * heads; i++)
                    weigh_row(attended + i * part.value, gates[i], part.value, attended + i * part.value);
            });
        }
        return rowwise.multiply(part.o, attended, output, spare) ? 0 : 1;
    }

    // The whole part, from the stream x to out. Returns as above.
    int run(const uint16_t* x, uint16_t* out) const {
        return rowwise.run_part(part.norm, part.residual, x, out, [&](const uint16_t* input, uint16_t* output) { return compute(input, output); });
    }
};

}  // namespace
