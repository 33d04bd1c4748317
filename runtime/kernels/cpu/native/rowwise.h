// Products, norms and sums of a few rows of bf16, of which layer parts are made.

#pragma once

#include <math.h>

#include "products/few_rows.h"
#include "products/packed_tiles.h"
#include "products/table.h"
#include "steps.h"

// Defined in packed_cpu.cpp.
EXPORT int packed_matmul(const Weight*, const void*, int32_t, int64_t, void*, int);
EXPORT int dense_matmul(int32_t, const void*, int64_t, int64_t, const void*, int64_t, void*, int, int);

namespace {

// The structures are mirrored by layer.py.
struct Product {
    // One of these, the others are null.
    const Weight* packed;
    const uint16_t* dense;  // [outputs, inputs]
    const TableWeight* table;
    int64_t outputs, inputs;
    int64_t portable;  // of `dense`: see portable_dense.h
};
constexpr int64_t MAX_PRODUCTS = 3;
struct Linear {
    Product parts[MAX_PRODUCTS];  // outputs are concatenated
    int64_t count, outputs;
    const uint16_t* bias;  // [outputs], or null
};
struct NormParams {  // of a norm over `size` values
    const void *gain, *bias;  // no gain: no norm; bias: see Norm
    int64_t size;
    float eps;
    int32_t type, centred;
};
struct ResidualAdd {  // stream = (stream + norm(output of a part) * multiplier) * scalar
    NormParams norm;
    const uint16_t* scalar;  // [1], or null
    int64_t hidden;
    float multiplier;
};

constexpr int64_t ALONE = 16;  // rows up to which one thread finishes before others are awake

// Memory of one part, allocated once and handed out in pieces.
struct Scratch {
    char *at, *next;
    explicit Scratch(int64_t values) : at(static_cast<char*>(aligned_alloc(64, size_t(values * 2 + 64 * 32 + 63) & ~size_t(63)))), next(at) {}
    ~Scratch() { free(at); }
    Scratch(const Scratch&) = delete;
    Scratch& operator=(const Scratch&) = delete;
    uint16_t* take(int64_t values) {
        uint16_t* piece = reinterpret_cast<uint16_t*>(next);
        next += (values * 2 + 63) / 64 * 64;
        return piece;
    }
};

struct Rowwise {
    int64_t rows;
    int threads;

    template <class Each> void each(Each each_row) const {
#pragma omp parallel for num_threads(threads) schedule(static) if (rows > ALONE && threads > 1)
        for (int64_t row = 0; row < rows; row++) each_row(row);
    }

    // Whether all products are packed and can be multiplied in one parallel region.
    bool can_share(const Linear& linear) const {
        for (int64_t i = 0; i < linear.count; i++)
            if (!linear.parts[i].packed || !(row_cut_of(*linear.parts[i].packed) == row_cut_of(*linear.parts[0].packed))) return false;
        return rows <= few_limit(*linear.parts[0].packed);
    }

    // y [rows, outputs]; `spare` is as large, for several products. Returns false without memory.
    bool multiply(const Linear& linear, const uint16_t* x, uint16_t* y, uint16_t* spare) const {
        if (!(can_share(linear) ? multiply_shared(linear, x, y) : multiply_separately(linear, x, y, spare))) return false;
        if (linear.bias) each([&](int64_t row) { add_row(y + row * linear.outputs, linear.bias, linear.outputs); });
        return true;
    }

    bool multiply_shared(const Linear& linear, const uint16_t* x, uint16_t* y) const {
#if WIDTH
        std::vector<FewProduct> products;
        std::vector<const uint16_t*> each_row;
        for (int64_t row = 0; row < rows; row++) each_row.push_back(x + row * linear.parts[0].inputs);
        for (int64_t i = 0, column = 0; i < linear.count; column += linear.parts[i++].outputs)
            products.push_back({linear.parts[i].packed, 0, rows, y + column, linear.outputs});
        return multiply_few(products, each_row, threads);
#else
        return false;  // FEW is 0
#endif
    }

    // x and y in fp32 between. Returns false without memory.
    bool multiply_table(const TableWeight& t, const uint16_t* x, uint16_t* y) const try {
        std::vector<float> inputs(size_t(rows * t.inputs)), outputs(size_t(rows * t.rows));
        for (int64_t i = 0; i < rows * t.inputs; i++) inputs[size_t(i)] = from_bf16(x[i]);
        table_product(t, inputs.data(), rows, outputs.data(), threads);
        for (int64_t i = 0; i < rows * t.rows; i++) y[i] = to_bf16(outputs[size_t(i)]);
        return true;
    } catch (const std::bad_alloc&) {
        return false;
    }
    bool multiply_product(const Product& product, const uint16_t* x, uint16_t* y) const {
        if (product.table) return multiply_table(*product.table, x, y);
        if (product.packed) return !packed_matmul(product.packed, x, BF16, rows, y, threads);
        return !dense_matmul(BF16, product.dense, product.outputs, product.inputs, x, rows, y, int(product.portable), threads);
    }

    bool multiply_separately(const Linear& linear, const uint16_t* x, uint16_t* y, uint16_t* spare) const {
        int64_t column = 0;
        for (int64_t i = 0; i < linear.count; i++) {
            const Product& product = linear.parts[i];
            const bool direct = linear.count == 1 || rows == 1;
            uint16_t* to = direct ? y + column : spare;
            if (!multiply_product(product, x, to)) return false;
            if (!direct)
                for (int64_t row = 0; row < rows; row++)
                    memcpy(y + row * linear.outputs + column, to + row * product.outputs, size_t(product.outputs) * 2);
            column += product.outputs;
        }
        return true;
    }

    // Regroups x, rows `stride` apart, from [groups][all of `widths`] to y [rows][widths][groups].
    void regroup(const uint16_t* x, int64_t stride, int64_t groups, std::initializer_list<int64_t> widths, uint16_t* y) const {
        int64_t all = 0;
        for (const int64_t width : widths) all += width;
        each([&](int64_t row) {
            const uint16_t* from = x + row * stride;
            uint16_t* to = y + row * groups * all;
            int64_t at = 0;
            for (const int64_t width : widths) {
                for (int64_t group = 0; group < groups; group++, to += width) memcpy(to, from + group * all + at, size_t(width) * 2);
                at += width;
            }
        });
    }

    // Norms rows of `width` values, `stride` apart, to y [rows, width]: each run of `size` values separately.
    void norm(const NormParams& gain, const uint16_t* x, int64_t width, int64_t stride, uint16_t* y) const {
        each([&](int64_t row) {
            const Norm n{x + row * stride, gain.gain, gain.bias, y + row * width, width / gain.size, gain.size, gain.eps, BF16, gain.type, gain.centred};
            for (int64_t i = 0; i < n.rows; i++) norm_row(n, i);
        });
    }
    // The input of a part's products: the stream x, or its norm, written to y.
    const uint16_t* norm_input(const NormParams& gain, const uint16_t* x, uint16_t* y) const {
        if (!gain.gain) return x;
        norm(gain, x, gain.size, gain.size, y);
        return y;
    }

    // out = the stream x plus the output of a part, `output`, each [rows, hidden].
    void add(const ResidualAdd& residual, const uint16_t* x, const uint16_t* output, uint16_t* spare, uint16_t* out) const {
        const uint16_t* normed = norm_input(residual.norm, output, spare);
        each([&](int64_t row) {
            for (int64_t i = row * residual.hidden; i < (row + 1) * residual.hidden; i += WIDE) {
                Wide more = wide(normed + i);
                if (residual.multiplier != 1) more = rounded(more * residual.multiplier);
                Wide all = wide(x + i) + more;
                if (residual.scalar) all = rounded(all) * from_bf16(*residual.scalar);
                put(out + i, all);
            }
        });
    }

    // A whole part, from the stream x to out: its norm, `compute(input, output)`, both [rows, hidden], and the residual addition.
    // Returns what `compute` returns; 1: no memory.
    template <class Compute>
    int run_part(const NormParams& gain, const ResidualAdd& residual, const uint16_t* x, uint16_t* out, Compute compute) const {
        const int64_t values = rows * residual.hidden;
        Scratch scratch(2 * values);
        if (!scratch.at) return 1;
        uint16_t *normed = scratch.take(values), *output = scratch.take(values);
        if (const int failed = compute(norm_input(gain, x, normed), output)) return failed;
        add(residual, x, output, normed, out);
        return 0;
    }
};

}  // namespace
