// Repacks the stored words to the layout, and decodes the layout to a dense weight.

#pragma once

#include "products/packed_scales.h"

namespace {

template <int B> void repack_block(const uint32_t* packed, int64_t words, int64_t rows, int64_t steps, uint16_t* out) {
    for (int64_t k = 0; k < steps; k++, out += B * INPUTS) {
        memset(out, 0, B * 64);
        for (int64_t j = 0; j < rows; j++) {
            const uint32_t* in = packed + j * words + k * B;
#pragma GCC unroll 32
            for (int i = 0; i < INPUTS; i++) {
                const int at = i * B % 32, q = i / 4, h = i / 2 % 2;
                uint32_t code = in[i * B / 32] >> at;
                if (at + B > 32) code |= in[i * B / 32 + 1] << (32 - at);
                each_field<B>([&](auto bits, int first, int place) {
                    constexpr int P = bits.value;
                    const uint32_t field = (code >> place) & field_mask<P>;
                    out[(first + q * P / 8) * INPUTS + 2 * j + i % 2] |= uint16_t(field << (8 * h + P * (q % (8 / P))));
                });
            }
        }
    }
}

typedef uint32_t Quad __attribute__((vector_size(16), aligned(4)));

// If a field is a whole code of 4 or 8 bits, a stored word becomes a lane: only the order of its codes changes.
template <int B> Quad reorder(Quad codes) {
    if constexpr (B == 8) return (codes & 0xff0000ffu) | (codes >> 8 & 0xff00u) | (codes & 0xff00u) << 8;
    const Quad even = codes & 0x0f0f0f0fu, odd = codes >> 4 & 0x0f0f0f0fu;
    return ((even | even >> 12) & 0xffffu) | (odd | odd >> 12) << 16;
}

// repack_block for such codes: four words of four rows at a time are transposed.
template <int B> void repack_words(const uint32_t* packed, int64_t words, int64_t rows, int64_t steps, uint32_t* out) {
    for (int64_t at = 0; at < steps * B; at += 4, out += 4 * ROWS)
        for (int64_t j = 0; j < ROWS; j += 4) {
            Quad row[4] = {};
            for (int i = 0; i < 4; i++)
                if (j + i < rows) row[i] = reorder<B>(load_vector<Quad>(packed + (j + i) * words + at));
            const Quad low01 = __builtin_shuffle(row[0], row[1], Quad{0, 4, 1, 5}), high01 = __builtin_shuffle(row[0], row[1], Quad{2, 6, 3, 7});
            const Quad low23 = __builtin_shuffle(row[2], row[3], Quad{0, 4, 1, 5}), high23 = __builtin_shuffle(row[2], row[3], Quad{2, 6, 3, 7});
            const Quad transposed[4] = {__builtin_shuffle(low01, low23, Quad{0, 1, 4, 5}), __builtin_shuffle(low01, low23, Quad{2, 3, 6, 7}),
                                    __builtin_shuffle(high01, high23, Quad{0, 1, 4, 5}), __builtin_shuffle(high01, high23, Quad{2, 3, 6, 7})};
            for (int i = 0; i < 4; i++) memcpy(out + i * ROWS + j, &transposed[i], sizeof transposed[i]);
        }
}

template <int B> void repack_all(const uint32_t* packed, int64_t words, const Weight& w, int threads) {
    const int64_t steps = w.inputs / INPUTS;
    uint16_t* out = reinterpret_cast<uint16_t*>(const_cast<uint8_t*>(w.codes));
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t n = 0; n < blocks_of(w.rows); n++) {
        const uint32_t* from = packed + n * ROWS * words;
        const int64_t rows = std::min<int64_t>(ROWS, w.rows - n * ROWS);
        uint16_t* to = out + n * steps * B * INPUTS;
        if constexpr (B == 4 || B == 8) repack_words<B>(from, words, rows, steps, reinterpret_cast<uint32_t*>(to));
        else repack_block<B>(from, words, rows, steps, to);
    }
}

// Codes of a block as signed floats, [inputs][rows].
template <int B> void block_floats(const uint8_t* block, float (*to)[ROWS]) {
    for (int r = 0; r < PAIRS; r++)
        for (int part = 0; part < PARTS; part++) {
            const Ints codes = (Ints)pair_of<B>(block, r, part);
            const Floats even = __builtin_convertvector((codes & 0xffff) - ZERO<B>, Floats);
            const Floats odd = __builtin_convertvector((codes >> 16) - ZERO<B>, Floats);
            memcpy(to[2 * r] + part * LANES, &even, sizeof even);
            memcpy(to[2 * r + 1] + part * LANES, &odd, sizeof odd);
        }
}

template <int B> void dequantize_all(const Weight& w, void* out, int32_t type, int threads) {
    const int64_t steps = w.inputs / INPUTS;
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t n = 0; n < blocks_of(w.rows); n++)
        for (int64_t k = 0; k < steps; k++) {
            alignas(64) float values[INPUTS][ROWS], transposed[ROWS][INPUTS];
            block_floats<B>(w.codes + (n * steps + k) * STORED<B> * 64, values);
            for (int first = 0; first < INPUTS; first += 16) {  // group sizes are multiples of 16 inputs
                const GroupScales group = scales_at(w, n, k * INPUTS + first);
                for (int i = first; i < first + 16; i++)
                    for (int j = 0; j < ROWS; j++) {
                        float value = values[i][j] * group.scale[j / LANES][j % LANES];
                        asm("" : "+m"(value));  // the reference rounds the product before it adds: no fused addition
                        transposed[j][i] = w.offsets ? value + group.offset[j / LANES][j % LANES] : value;
                    }
            }
            for (int64_t j = 0; j < std::min<int64_t>(ROWS, w.rows - n * ROWS); j++)
                store_row(out, type, (n * ROWS + j) * w.inputs + k * INPUTS, transposed[j], INPUTS);
        }
}

}  // namespace
