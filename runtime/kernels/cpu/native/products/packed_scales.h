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

// The factors of scales and offsets of the rows of a block in a super-block; of E4M3 scales, the same in all of a row, the sum of
// both is the factor, which has more bits than an fp32.
struct Factors {
    Floats scale[PARTS], offset[PARTS];

    Factors() = default;
    Factors(const Weight& w, int64_t row_block, int64_t input) {
        const bool rows = w.scale_type == E4M3, both = rows || w.offsets;
        const int32_t type = rows ? F32 : F16;
        const int64_t place = rows ? row_block : row_block * (w.inputs / SUPER_BLOCK) + input / SUPER_BLOCK, at = place * (1 + both) * ROWS;
#pragma GCC unroll 4
        for (int part = 0, j = 0; part < PARTS; part++, j += LANES) {
            scale[part] = widen(w.factors, at + j, type) * w.unit;
            offset[part] = both ? widen(w.factors, at + ROWS + j, type) * w.unit : Floats{};
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

    // With factors. In super-blocks with offsets, levels count from zero and codes from half their range: 2^(bits-1) scales are part
    // of the offset. Products of a byte and an fp16 are exact in fp32, so each is rounded once, as in the reference.
    GroupScales(const Weight& w, int64_t at, const Factors& factors) {
        if (w.scale_type == E4M3) {
#pragma GCC unroll 4
            for (int part = 0, j = 0; part < PARTS; part++, j += LANES) {
                const Floats number = widen(w.scales, at * ROWS + j, E4M3);
                scale[part] = fused(number, factors.scale[part], number * factors.offset[part]);
                offset[part] = Floats{};
            }
            return;
        }
        const Floats half = spread_lanes(float(1 << (w.bits - 1)));
#pragma GCC unroll 4
        for (int part = 0, j = 0; part < PARTS; part++, j += LANES) {
            scale[part] = widen(w.scales, at * ROWS + j, I8) * factors.scale[part];
            offset[part] = w.offsets ? fused(widen(w.offsets, at * ROWS + j, I8), factors.offset[part], half * scale[part]) : Floats{};
        }
    }
};

// Scale and offset at `input` of a row block, of any weight.
inline GroupScales scales_at(const Weight& w, int64_t row_block, int64_t input) {
    const int64_t at = row_block * (w.inputs / w.group) + input / w.group;
    return w.factors ? GroupScales(w, at, Factors(w, row_block, input)) : GroupScales(w, at);
}

}  // namespace
