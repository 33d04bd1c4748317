// The factors of sums of codes, and how inputs are cut for them: scales, offsets, and the factors of super-blocks.

#pragma once

#include "products/packed_layout.h"

namespace {

// How inputs are cut for integer products.
//
// A segment is a part of a group. The activations of a span, one segment or several, have one unit, and their products with
// signed codes are summed before scaling; with super-blocks, codes are first multiplied by the integer scales of their groups.
//
// With 8-bit activations each segment has a unit of its own, and the scaled sums of a span are added before they are multiplied by
// the scale that the span shares.
struct Cut {
    int64_t segment, span;
    int32_t less;  // bits fewer than 15 of an activation, so that the largest sums of a span fit 32 bits
    bool one_byte = false;
    bool operator==(const Cut& other) const {
        return segment == other.segment && span == other.span && less == other.less && one_byte == other.one_byte;
    }
    bool levels() const { return span > segment; }
};

constexpr int64_t SPAN = 128;  // the longest
constexpr int64_t BYTE_SEGMENT = 32;  // inputs that share the unit of 8-bit activations; 16 in groups of 16

// The group size of B-bit codes in super-blocks; 0 if there are none.
template <int B> constexpr int LEVELS = B == 4 || B == 5 ? 32 : B == 2 || B == 3 || B == 6 ? 16 : 0;

inline Cut cut_of(const Weight& w) {
    const int64_t segment = std::min(SPAN, w.group & -w.group);  // the largest power of two, up to SPAN, that divides the group
    // Values of tables times integer scales would leave activations too few bits: each group is scaled.
    if (!w.factors || w.kind > 16) return {segment, segment, 0};
    // Integer scales are below 64 with offsets, else at least -128. Times codes that is 2^9 at most, but 2^10 with 5 bits and
    // 2^12 with 6; a span of 15-bit activations may have 2^16.
    const int64_t largest = (w.offsets ? 64 : 128) << (w.bits - 1);
    return {segment, largest <= 512 ? SPAN : SPAN / 2, largest <= 1024 ? 0 : 2};
}

// The same for activations of one byte.
inline Cut byte_cut_of(const Weight& w) {
    const int64_t span = cut_of(w).segment;
    return {std::min(span, BYTE_SEGMENT), span, 0, true};
}

// The cut of bf16 activations for the precision that they have with this weight.
inline Cut row_cut_of(const Weight& w) { return w.activations == 8 ? byte_cut_of(w) : cut_of(w); }

// The factors of scales and offsets of the rows of a block in a super-block.
struct Factors {
    Floats scale[PARTS], offset[PARTS];

    Factors() = default;
    Factors(const Weight& w, int64_t row_block, int64_t input) {
        const auto* from = static_cast<const uint16_t*>(w.factors);
        from += (row_block * (w.inputs / SUPER_BLOCK) + input / SUPER_BLOCK) * (w.offsets ? 2 : 1) * ROWS;
#pragma GCC unroll 4
        for (int part = 0; part < PARTS; part++) {
            scale[part] = widen(from, part * LANES, F16) * w.unit;
            offset[part] = w.offsets ? widen(from + ROWS, part * LANES, F16) : Floats{};
        }
    }
};

// The factors of the E4M3 scales of the rows of a block: each is the sum of two, because it may be the inverse of an fp32.
struct RowFactors {
    Floats high[PARTS], low[PARTS];

    RowFactors() = default;
    RowFactors(const Weight& w, int64_t row_block, int64_t) {
        const auto* from = static_cast<const float*>(w.factors) + row_block * 2 * ROWS;
#pragma GCC unroll 4
        for (int part = 0; part < PARTS; part++) {
            high[part] = widen(from, part * LANES, F32) * w.unit;
            low[part] = widen(from + ROWS, part * LANES, F32) * w.unit;
        }
    }
};

// Scale and offset of the rows of a block in one group, with index `place` among the groups of all row blocks.
struct GroupScales {
    Floats scale[PARTS], offset[PARTS];  // zero without offsets

    GroupScales() = default;
    GroupScales(const Weight& w, int64_t at) {
#pragma GCC unroll 4
        for (int part = 0, j = 0; part < PARTS; part++, j += LANES) {
            scale[part] = widen(w.scales, at * ROWS + j, w.scale_type);
            offset[part] = w.offsets ? widen(w.offsets, at * ROWS + j, F32) : Floats{};
        }
    }

    // With super-blocks. With offsets, levels count from zero there and codes from half their range: 2^(bits-1) scales are part
    // of the offset. Products of a byte and an fp16 are exact in fp32, so each is rounded once, as in the reference.
    GroupScales(const Weight& w, int64_t at, const Factors& factors) {
        const Floats half = spread_lanes(float(1 << (w.bits - 1)));
#pragma GCC unroll 4
        for (int part = 0, j = 0; part < PARTS; part++, j += LANES) {
            scale[part] = widen(w.scales, at * ROWS + j, I8) * factors.scale[part];
            offset[part] = w.offsets ? fused(widen(w.offsets, at * ROWS + j, I8), factors.offset[part], half * scale[part]) : Floats{};
        }
    }

    // With E4M3 scales: the product with the sum of both factors, rounded once.
    GroupScales(const Weight& w, int64_t at, const RowFactors& factors) {
#pragma GCC unroll 4
        for (int part = 0, j = 0; part < PARTS; part++, j += LANES) {
            const Floats number = widen(w.scales, at * ROWS + j, E4M3);
            scale[part] = fused(number, factors.high[part], number * factors.low[part]);
            offset[part] = Floats{};
        }
    }
};

// Scale and offset at `input` of a row block, of any weight.
inline GroupScales scales_at(const Weight& w, int64_t row_block, int64_t input) {
    const int64_t at = row_block * (w.inputs / w.group) + input / w.group;
    if (w.scale_type == E4M3) return GroupScales(w, at, RowFactors(w, row_block, input));
    return w.factors ? GroupScales(w, at, Factors(w, row_block, input)) : GroupScales(w, at);
}

}  // namespace
