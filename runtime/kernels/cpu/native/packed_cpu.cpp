// Products of bf16 or fp32 activations with weights on a CPU: packed weights of 2, 3, 4, 5, 6 or 8 bits, and dense bf16.
//
// Compiled at first use by build.py, called through ctypes by matmul.py: plain pointers, and as many OpenMP threads as the caller
// says.
//
// Arithmetic. bf16 activations become 16-bit integers in units of a power of two for each span of 16 to 128 inputs; values within
// 1/128 of the largest of their span keep all their bits. A span is one segment of one group; with super-blocks it is several,
// and codes are multiplied by the integer scales of their groups. The products of a span with the codes are summed exactly, then
// scaled and added in fp32, span by span. fp32 activations: exact codes, fp32 sums of a segment, input by input, scaled and added
// likewise. Integer sums are the same whatever multiplies them, so few rows (bytes, unpacked in registers), many rows (words,
// unpacked to a panel) and AMX (bytes, in tiles) have one arithmetic: the bits of a row depend on neither the other rows nor the
// number of threads. The layout is in packed_layout.h.

#include <cmath>
#include <vector>

#include "products/portable_dense.h"
#include "draw.h"
#include "layer.h"
#include "products/few_rows.h"
#include "products/heads.h"
#include "products/packed_repack.h"
#include "recurrent.h"
#include "steps.h"
#include "products/table.h"

// Defined in byte_panels_cpu.cpp.
bool multiply_byte_rows(const Weight& w, const uint16_t* x, int64_t rows, uint16_t* y, int threads);

namespace {

enum class Path { BYTES, WORDS, TILES };

inline Path path_of(const Weight& w, int64_t rows) {
    if (rows <= few_limit(w)) return Path::BYTES;
    // Sums leave the tiles at the end of each segment: with the shortest segments, and those of super-blocks, words are cheaper.
    return cut_of(w).segment >= INPUTS && !cut_of(w).levels() && have_amx() ? Path::TILES : Path::WORDS;
}

// False: no memory.
template <int B> bool matmul_bf16(const Weight& w, const uint16_t* x, int64_t rows, uint16_t* y, int threads) {
    const Path path = path_of(w, rows);
#if WIDTH
    if (path == Path::BYTES) {
        std::vector<const uint16_t*> each;
        for (int64_t m = 0; m < rows; m++) each.push_back(x + m * w.inputs);
        return multiply_few({{&w, 0, rows, y, w.rows}}, each, threads);
    }
#endif
    if (w.activations == 8) return multiply_byte_rows(w, x, rows, y, threads);
    const Cut cut = cut_of(w);
    const int64_t segments = w.inputs / cut.segment, steps = w.inputs / 2;
    const Tiling tiling(rows, path == Path::TILES ? ROWS : HIGH);
    // A row has 2 bytes per input; a tile may read one row past the end.
    const int64_t room = rounded_up((rows + 1) * 2 * w.inputs + 64);
    const int64_t notes = rounded_up(rows * segments * 4);
    const int64_t per_thread = (path == Path::WORDS ? tiling.high : 1) * rounded_up(2 * w.inputs);
    const int64_t totals = rounded_up(tiling.together(2 * w.inputs) * tiling.high * 2 * ROWS * 4);
    const Memory memory(room + 3 * notes + threads * (per_thread + totals));
    if (!memory.at) return false;
    const Units units{reinterpret_cast<float*>(memory.at + room), reinterpret_cast<int32_t*>(memory.at + room + notes),
                      reinterpret_cast<float*>(memory.at + room + 2 * notes), 1, rows};
    int next = 0;
#pragma omp parallel num_threads(threads)
    {
        int self;
#pragma omp atomic capture
        self = next++;
        char* private_memory = memory.at + room + 3 * notes + self * (per_thread + totals);
        int16_t* integers = reinterpret_cast<int16_t*>(private_memory);
        float* total = reinterpret_cast<float*>(private_memory + per_thread);
        if (path == Path::WORDS) {
#pragma omp for schedule(static)
            for (int64_t t = 0; t < tiling.tiles; t++) {
                const int64_t start = tiling.first(t);
                for (int64_t m = start; m < tiling.first(t + 1); m++) {
                    int16_t* row = integers + (m - start) * w.inputs;
                    make_integers(x + m * w.inputs, w.inputs, cut, m, row, units);
                    IntegerPanel::arrange(row, w.inputs);
                }
                place_tile(tiling, t, steps, [&](int64_t m) { return integers + m * w.inputs; }, reinterpret_cast<int32_t*>(memory.at));
            }
            each_panel(w, tiling, 2 * w.inputs, PANEL_BLOCKS, [&](int64_t first, int64_t last, int64_t row_block) {
                multiply_panel<IntegerPanel, B>(w, row_block, tiling, first, last, reinterpret_cast<const int32_t*>(memory.at),
                                                units, total, y, BF16);
            });
        }
#if AMX
        if (path == Path::TILES) {
#pragma omp for schedule(static)
            for (int64_t m = 0; m < rows; m++) {
                make_integers(x + m * w.inputs, w.inputs, cut, m, integers, units);
                place_bytes(tiling, m, w.inputs, cut.segment, tile_width(w), integers, reinterpret_cast<int8_t*>(memory.at));
            }
            const Tiles tiles((rows + tiling.tiles - 1) / tiling.tiles, tile_width(w), 64);
            each_panel(w, tiling, 2 * w.inputs, TILE_BLOCKS, [&](int64_t first, int64_t last, int64_t row_block) {
                by_segment(w, [&](auto parts, auto offsets) {
                    multiply_tiles<parts.value, offsets.value>(w, unpack_bytes<B>, row_block, tiling, first, last,
                                                               reinterpret_cast<const int8_t*>(memory.at), units, total, y);
                });
            });
        }
#endif
    }
    return true;
}

template <int B> bool matmul_f32(const Weight& w, const float* x, int64_t rows, float* y, int threads) {
    const int64_t segment = cut_of(w).segment, segments = w.inputs / segment;
    const Tiling tiling(rows, HIGH);
    const int64_t room = rounded_up(rows * w.inputs * 4), notes = rounded_up(rows * segments * 4);
    const int64_t totals = rounded_up(tiling.together(4 * w.inputs) * HIGH * PANEL * 4);
    const Memory memory(room + notes + threads * totals);
    if (!memory.at) return false;
    int32_t* placed = reinterpret_cast<int32_t*>(memory.at);
    const Units units{nullptr, nullptr, reinterpret_cast<float*>(memory.at + room), 1, rows};
    int next = 0;
#pragma omp parallel num_threads(threads)
    {
        int self;
#pragma omp atomic capture
        self = next++;
#pragma omp for schedule(static)
        for (int64_t t = 0; t < tiling.tiles; t++) {
            const int64_t start = tiling.first(t);
            for (int64_t m = start; m < tiling.first(t + 1); m++)
                for (int64_t s = 0; s < segments; s++) {
                    float sum = 0;
                    for (int64_t i = 0; i < segment; i++) sum += x[m * w.inputs + s * segment + i];
                    units.shift[m * units.row + s * units.segment] = sum;
                }
            place_tile(tiling, t, w.inputs, [&](int64_t m) { return x + (start + m) * w.inputs; }, placed);
        }
        float* total = reinterpret_cast<float*>(memory.at + room + notes + self * totals);
        each_panel(w, tiling, 4 * w.inputs, PANEL_BLOCKS, [&](int64_t first, int64_t last, int64_t row_block) {
            multiply_panel<FloatPanel, B>(w, row_block, tiling, first, last, placed, units, total, y, F32);
        });
    }
    return true;
}

inline bool dense_any(const Dense<float>& d, bool portable, int threads) {
    return portable ? dense_vectors<Portable<float>>(d, threads) : dense_vectors<Element<float>>(d, threads);
}
inline bool dense_any(const Dense<uint16_t>& d, bool portable, int threads) {
    if (portable) return dense_vectors<Portable<uint16_t>>(d, threads);
#if AMX
    if (have_amx() && d.outputs >= TILE_OUTPUTS && d.inputs % INPUTS == 0) return dense_amx(d, threads);
#endif
    return dense_vectors<Element<uint16_t>>(d, threads);
}

}  // namespace

#include "products/experts.h"
#include "experts_part.h"
#include "chain.h"
#include "loop.h"

// The instruction set used for integer products.
EXPORT const char* packed_isa() {
#if defined(__AVX512VNNI__) && VECTOR == 64
    return have_amx() ? "amx" : "avx512vnni";
#elif VECTOR == 64
    return "avx512";
#elif VECTOR == 32 && defined(__AVXVNNI__)
    return "avxvnni";
#elif VECTOR == 32
    return "avx2";
#elif defined(__ARM_FEATURE_DOTPROD)
    return "dotprod";
#else
    return "plain";
#endif
}

// Repacks the stored words, int32 [rows, words], to w->codes (64-byte aligned, with room for whole blocks).
EXPORT void packed_repack(const Weight* w, const uint32_t* packed, int64_t words, int threads) {
    by_bits(*w, [&](auto bits) { repack_all<STORED<bits.value>>(packed, words, *w, threads); });
}

// Decodes the weight to out [rows, inputs] of `type`, rounded as the reference does.
EXPORT void packed_dequantize(const Weight* w, void* out, int32_t type, int threads) {
    by_bits(*w, [&](auto bits) { dequantize_all<bits.value>(*w, out, type, threads); });
}

// x [rows, inputs] to y [rows, w->rows], both of `type`, F32 or BF16. Returns 0, or 1 without memory for rearranged activations.
EXPORT int packed_matmul(const Weight* w, const void* x, int32_t type, int64_t rows, void* y, int threads) {
    return by_bits(*w, [&](auto bits) {
        constexpr int B = bits.value;
        if (type == F32) return matmul_f32<B>(*w, static_cast<const float*>(x), rows, static_cast<float*>(y), threads) ? 0 : 1;
        return matmul_bf16<B>(*w, static_cast<const uint16_t*>(x), rows, static_cast<uint16_t*>(y), threads) ? 0 : 1;
    });
}

// Dense weight [outputs, inputs] in torch's layout times rows x, both of `type`, F32 or BF16; by portable_dense.h if `portable`.
// Returns 0, or 1 without memory.
EXPORT int dense_matmul(int32_t type, const void* w, int64_t outputs, int64_t inputs, const void* x, int64_t rows, void* y,
                        int portable, int threads) {
    const auto multiply = [&](auto value) {
        using T = decltype(value);
        const Dense<T> d{static_cast<const T*>(w), static_cast<const T*>(x), outputs, inputs, rows, static_cast<T*>(y)};
        return dense_any(d, portable, threads) ? 0 : 1;
    };
    return type == F32 ? multiply(float()) : multiply(uint16_t());
}

// Returns 0, or 1 without memory.
EXPORT int head_product(const HeadProduct* h, int threads) { return multiply_heads(*h, threads) ? 0 : 1; }

// multiply_routed, choose_experts with sort_pairs, and sum_token of experts.h, for all tokens. Return 0, or 1 without memory.
EXPORT int experts_matmul(const Routed* r, int threads) { return multiply_routed(*r, threads) ? 0 : 1; }
EXPORT int64_t experts_route(const Routing* r, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1)
    for (int64_t token = 0; token < r->tokens; token++) choose_experts(*r, token);
    return sort_pairs(*r);
}
EXPORT void experts_sum(const WeightedSum* s, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1)
    for (int64_t token = 0; token < s->tokens; token++)
        s->type == F32 ? sum_token<float>(*s, token) : sum_token<uint16_t>(*s, token);
}

// likeliest of draw.h for each of `rows` rows of logits, `stride` apart.
EXPORT void best(const float* logits, int64_t rows, int64_t stride, int64_t n, int64_t* tokens, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1 && rows > 1)
    for (int64_t row = 0; row < rows; row++) tokens[row] = likeliest(logits + row * stride, n);
}

// softmax_draw of draw.h.
EXPORT int64_t draw(const float* logits, int64_t n, double number, float* out) { return softmax_draw(logits, n, number, out); }

// norm_row, gate_row, weigh_row and rotate_token of steps.h, for all rows and tokens.
EXPORT void norm(const Norm* n, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1)
    for (int64_t row = 0; row < n->rows; row++) norm_row(*n, row);
}
EXPORT void gate(int32_t gate_type, int32_t type, const void* x, int64_t rows, int64_t size, void* y, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1)
    for (int64_t row = 0; row < rows; row++) gate_row(gate_type, type, x, row, size, y);
}
EXPORT void weigh(int32_t type, const void* x, const void* gates, int64_t rows, int64_t size, int32_t each, void* y, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1)
    for (int64_t row = 0; row < rows; row++)
        type == F32 ? weigh_row(static_cast<const float*>(x), static_cast<const float*>(gates), row, size, each, static_cast<float*>(y))
                    : weigh_row(static_cast<const uint16_t*>(x), static_cast<const uint16_t*>(gates), row, size, each, static_cast<uint16_t*>(y));
}
template <class T> void rotate_tokens(const RotateTask<T>& r, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1)
    for (int64_t i = 0; i < r.sequences * r.tokens; i++) rotate_token(r, i / r.tokens, i % r.tokens);
}
EXPORT void rotate(int32_t type, const void* task, int threads) {
    if (type == F32) rotate_tokens(*static_cast<const RotateTask<float>*>(task), threads);
    else rotate_tokens(*static_cast<const RotateTask<uint16_t>*>(task), threads);
}

// The residual stream x [rows, hidden] through `count` parts to out, and its rows to logits; see chain.h. Return 0; 1: no memory;
// 2: lengths, blocks or slots out of range.
EXPORT int run_parts(const Step* steps, int64_t count, const PassRows* pass, const uint16_t* x, uint16_t* out, int threads) {
    return run_chain(steps, count, *pass, threads, x, out);
}
EXPORT int run_head(const Head* head, int64_t rows, const uint16_t* x, uint16_t* out, int threads) {
    return multiply_head(*head, {rows, threads}, x, out);
}

// run_loop of loop.h. Returns 0; 1: no memory; 2: lengths or blocks out of range; 3: an expert could not be loaded.
EXPORT int run_passes(const Step* steps, int64_t count, const PassRows* first, const Head* head, const Loop* loop, int64_t passes,
                      int64_t* tokens, int64_t* done, int threads) {
    *done = 0;
    return run_loop(steps, count, *first, *head, *loop, passes, tokens, done, threads);
}

// convolve_channels, delta_columns and gated_norm_row of recurrent.h, for all sequences.
EXPORT void convolve(const Runs* r, const Convolution* c, int threads) {
    r->type == F32 ? convolve_rows<float>(*r, *c, threads) : convolve_rows<uint16_t>(*r, *c, threads);
}
EXPORT void delta_rule(const Runs* r, const Delta* d, int threads) {
    r->type == F32 ? delta_rows<float>(*r, *d, threads) : delta_rows<uint16_t>(*r, *d, threads);
}
EXPORT void state_scan(const Runs* r, const Scan* s, int threads) {
    r->type == F32 ? scan_rows<float>(*r, *s, threads) : scan_rows<uint16_t>(*r, *s, threads);
}
EXPORT void group_norm(const GroupNorm* n, int32_t type, int threads) {
    type == F32 ? group_norm_rows<float>(*n, threads) : group_norm_rows<uint16_t>(*n, threads);
}
EXPORT void gated_norm(const GatedNorm* n, int32_t type, int threads) {
    type == F32 ? gated_norm_rows<float>(*n, threads) : gated_norm_rows<uint16_t>(*n, threads);
}

// table_product and table_unpack of table.h.
EXPORT void table_matmul(const TableWeight* t, const float* x, int64_t rows, float* y, int threads) {
    table_product(*t, x, rows, y, threads);
}
EXPORT void table_dequantize(const TableWeight* t, int64_t first, int64_t count, void* out, int32_t type, int threads) {
    table_unpack(*t, first, count, out, type, threads);
}

// Reads `bytes` (a multiple of 64) with all threads, to be timed by the caller; returns their sum as 32-bit words.
EXPORT int64_t read_memory(const uint8_t* at, int64_t bytes, int threads) {
    int64_t total = 0;
#pragma omp parallel for num_threads(threads) schedule(static) reduction(+ : total)
    for (int64_t page = 0; page < bytes; page += 1 << 16) {
        Ints sum[64 / VECTOR] = {};
        for (int64_t i = page; i < std::min<int64_t>(page + (1 << 16), bytes); i += 64) {
            __builtin_prefetch(at + i + AHEAD);
            for (int v = 0; v < 64 / VECTOR; v++) sum[v] += load_vector<Ints>(at + i + v * VECTOR);
        }
        for (const Ints& one : sum)
            for (int lane = 0; lane < LANES; lane++) total += one[lane];
    }
    return total;
}
