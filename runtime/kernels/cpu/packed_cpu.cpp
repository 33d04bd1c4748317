// Products of bf16 or fp32 activations with packed weights of 2, 3, 4 or 8 bits on a CPU.
//
// Built at first use by cpu_build.py for the machine at hand, called through ctypes by cpu.py. Knows nothing of Python
// or torch: plain pointers, and as many OpenMP threads as the caller says. Threads share output rows only, and each
// row is summed in a fixed order, so neither a second run nor another number of threads changes a bit.
//
// The layout is in packed_layout.h.
//
// Arithmetic. fp32 activations: exact codes, fp32 sums, scaled once a group. Few rows of bf16: activations become integers
// of 16 bits, as two bytes, in units of a power of two for each segment of 32 to 128 inputs: what lies within 1/128 of the
// largest of its segment keeps all its bits. A segment is summed exactly, then scaled; so a row's result does not depend
// on the rows beside it, nor on which instructions summed it. Many rows of bf16: AMX tiles of bf16 with fp32 sums, the
// scale multiplied into the weight first and rounded, as the reference has it with bf16 scales.

#include "attention.h"
#include "draw.h"
#include "packed_tiles.h"
#include "steps.h"

namespace {

// y[m][0..15] of one row block for M rows of fp32 activations, of which rows past `rows` repeat the last.
template <int B, int M>
void rows_f32(const Weight& w, int64_t row_block, const float* x, int64_t rows, float (*y)[ROWS]) {
    int64_t row[M];
    for (int m = 0; m < M; m++) row[m] = std::min<int64_t>(m, rows - 1) * w.inputs;
    const int64_t groups = w.inputs / w.group, per_group = w.group / INPUTS;
    const uint8_t* block = w.codes + row_block * (w.inputs / INPUTS) * B * 64;
    F8 total[M][2] = {};
    for (int64_t g = 0; g < groups; g++) {
        F8 sum[M][2] = {};
        for (int64_t b = 0; b < per_group; b++, block += B * 64) {
            const float* at = x + (g * per_group + b) * INPUTS;
            __builtin_prefetch(block + AHEAD);
#pragma GCC unroll 16
            for (int r = 0; r < PAIRS; r++)
#pragma GCC unroll 2
                for (int half = 0; half < 2; half++) {
                    const F8 even = pair_codes<B>(block, r, half, 0), odd = pair_codes<B>(block, r, half, 1);
#pragma GCC unroll 4
                    for (int m = 0; m < M; m++) {
                        sum[m][half] += even * at[row[m] + 2 * r];
                        sum[m][half] += odd * at[row[m] + 2 * r + 1];
                    }
                }
        }
        F8 scale[2];
        for (int j = 0; j < ROWS; j++) scale[j / 8][j % 8] = load_scale(w, (row_block * groups + g) * ROWS + j);
        for (int m = 0; m < M; m++)
            for (int half = 0; half < 2; half++) total[m][half] += sum[m][half] * scale[half];
    }
    memcpy(y, total, sizeof total);
}

bool have_amx() {
#if AMX
    // Linux grants the tile registers to a process that asks (ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA).
    static const bool granted = syscall(SYS_arch_prctl, 0x1023, 18) == 0;
    return granted;
#else
    return false;
#endif
}

template <int B> void repack_block(const uint32_t* packed, int64_t words, int64_t rows, int64_t steps, uint16_t* out) {
    for (int64_t k = 0; k < steps; k++, out += B * INPUTS) {
        memset(out, 0, B * 64);
        for (int64_t j = 0; j < rows; j++) {
            const uint32_t* in = packed + j * words + k * B;
#pragma GCC unroll 32
            for (int i = 0; i < INPUTS; i++) {
                const int at = i * B % 32, r = i / 2;
                uint32_t code = in[i * B / 32] >> at;
                if (at + B > 32) code |= in[i * B / 32 + 1] << (32 - at);
                code &= (1u << B) - 1;
                uint16_t* to = out + 2 * j + i % 2;
                if (B == 8) code ^= 0x80;
                if (spread<B>(r))
                    for (int b = 0; b < 3; b++) to[b * INPUTS] |= uint16_t(((code >> b) & 1) << spread_bit_of(r));
                else
                    to[vector_of<B>(r) * INPUTS] |= uint16_t(code << bit_of<B>(r));
            }
        }
    }
}

template <int B> void repack_all(const uint32_t* packed, int64_t words, const Weight& w, int threads) {
    const int64_t steps = w.inputs / INPUTS;
    uint16_t* out = reinterpret_cast<uint16_t*>(const_cast<uint8_t*>(w.codes));
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t n = 0; n < blocks_of(w.rows); n++)
        repack_block<B>(packed + n * ROWS * words, words, std::min<int64_t>(ROWS, w.rows - n * ROWS), steps,
                         out + n * steps * B * INPUTS);
}

template <int B> void dequantize_all(const Weight& w, int64_t first, int64_t count, void* out, int32_t type, int threads) {
    const int64_t steps = w.inputs / INPUTS, groups = w.inputs / w.group, per_group = w.group / INPUTS;
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t n = 0; n < (count + ROWS - 1) / ROWS; n++) {
        const int64_t row_block = first / ROWS + n, rows = std::min<int64_t>(ROWS, count - n * ROWS);
        for (int64_t k = 0; k < steps; k++) {
            const uint8_t* block = w.codes + (row_block * steps + k) * B * 64;
            const int64_t scales = (row_block * groups + k / per_group) * ROWS, to = n * ROWS * w.inputs + k * INPUTS;
#if BF16_DOT
            if (type == BF16) {
                alignas(64) uint32_t pairs[PAIRS][ROWS];
                const __m512 scale = _mm512_mul_ps(load_scales(w, scales), _mm512_set1_ps(UNIT<B>));
                decode_scaled<B>(block, load_table<B>(), scale, [&](int r, __m512i pair) { _mm512_store_si512(pairs[r], pair); });
                uint32_t* at = reinterpret_cast<uint32_t*>(static_cast<uint16_t*>(out) + to);
                for (int64_t j = 0; j < rows; j++)
                    for (int r = 0; r < PAIRS; r++) at[j * w.inputs / 2 + r] = pairs[r][j];
                continue;
            }
#endif
            F8 values[INPUTS][2];
#pragma GCC unroll 16
            for (int r = 0; r < PAIRS; r++)
                for (int half = 0; half < 2; half++)
                    for (int p = 0; p < 2; p++) values[2 * r + p][half] = pair_codes<B>(block, r, half, p);
            for (int64_t j = 0; j < rows; j++) {
                const float scale = load_scale(w, scales + j);
                for (int i = 0; i < INPUTS; i++) store(out, type, to + j * w.inputs + i, values[i][j / 8][j % 8] * scale);
            }
        }
    }
}

inline void store_block(const Weight& w, int64_t row_block, const float (*part)[ROWS], int64_t rows, void* y, int32_t type) {
    const int64_t row = row_block * ROWS, count = std::min<int64_t>(ROWS, w.rows - row);
    for (int64_t m = 0; m < rows; m++)
        for (int64_t j = 0; j < count; j++) store(y, type, m * w.rows + row + j, part[m][j]);
}

template <int B> void matmul_f32(const Weight& w, const float* x, int64_t rows, float* y, int threads) {
#pragma omp parallel for num_threads(threads) schedule(guided)
    for (int64_t n = 0; n < blocks_of(w.rows); n++)
        for (int64_t m = 0; m < rows; m += 4) {
            float part[4][ROWS];
            const int64_t count = std::min<int64_t>(4, rows - m);
            if (count == 1) rows_f32<B, 1>(w, n, x + m * w.inputs, count, part);
            else rows_f32<B, 4>(w, n, x + m * w.inputs, count, part);
            store_block(w, n, part, count, y + m * w.rows, F32);
        }
}

#if WIDTH
template <int B> void few_rows(const Weight& w, int64_t row_block, const Integers& x, int64_t rows, float (*y)[ROWS]) {
    if (rows == 1) rows_int<B, 1>(w, row_block, x, rows, y);
    else if (rows == 2) rows_int<B, 2>(w, row_block, x, rows, y);
    else if (rows <= 4) rows_int<B, 4>(w, row_block, x, rows, y);
    else rows_int<B, 8>(w, row_block, x, rows, y);
}

// False: no memory.
template <int B> bool matmul_int(const Weight& w, const uint16_t* x, int64_t rows, uint16_t* y, int threads) {
    const int64_t segment = segment_of(w), segments = w.inputs / segment, stride = w.inputs + 64;
    const bool tiled = rows >= TILED && have_amx();
    const int64_t most = tiled ? 16 : 8, bytes = rows * 2 * stride, notes = rows * segments * 4;
    int8_t* memory = static_cast<int8_t*>(aligned_alloc(64, size_t(bytes + 2 * notes + 63) & ~size_t(63)));
    if (!memory) return false;
    const Integers all{memory, stride, reinterpret_cast<float*>(memory + bytes),
                       reinterpret_cast<int32_t*>(memory + bytes + notes), segments};
#pragma omp parallel num_threads(threads)
    {
#pragma omp for schedule(static)
        for (int64_t i = 0; i < rows * segments; i++)
            make_integers<B>(x + i * segment, segment, all.bytes + i / segments * 2 * stride + i % segments * segment, stride,
                             all.units + i, all.zeros + i);
        for (int64_t m = 0; m < rows; m += most) {
            const int64_t count = std::min(most, rows - m), s = m * segments;
            const Integers some{all.bytes + m * 2 * stride, stride, all.units + s, all.zeros + s, segments};
            float part[ROWS][ROWS];
#if AMX
            if (tiled) {
                const Tiles tiles(std::min<int64_t>(2 * count, 16), std::max<int64_t>(2 * count - 16, 0),
                                  std::min<int64_t>(segment, 64));
#pragma omp for schedule(guided) nowait
                for (int64_t n = 0; n < blocks_of(w.rows); n++) {
                    rows_tiles<B>(w, n, some, count, part);
                    store_block(w, n, part, count, y + m * w.rows, BF16);
                }
                continue;
            }
#endif
#pragma omp for schedule(guided) nowait
            for (int64_t n = 0; n < blocks_of(w.rows); n++) {
                few_rows<B>(w, n, some, count, part);
                store_block(w, n, part, count, y + m * w.rows, BF16);
            }
        }
    }
    free(memory);
    return true;
}
#endif

#if AMX
// Many rows: activations rearranged into tiles once, the weight two row blocks at a time. False: no memory.
template <int B> bool matmul_many(const Weight& w, const uint16_t* x, int64_t rows, uint16_t* y, int threads) {
    const int64_t steps = w.inputs / INPUTS, row_tiles = 2 * ((rows + 2 * ROWS - 1) / (2 * ROWS)), panel = 2 * steps * TILE;
    uint16_t* a = static_cast<uint16_t*>(aligned_alloc(64, size_t(row_tiles * steps * TILE + threads * panel) * 2));
    if (!a) return false;
    uint16_t* panels = a + row_tiles * steps * TILE;
    int next = 0;
#pragma omp parallel num_threads(threads)
    {
        int self;
#pragma omp atomic capture
        self = next++;
        uint16_t* b = panels + self * panel;
        const Tiles tiles(16, 16, 64);
#pragma omp for schedule(static)
        for (int64_t t = 0; t < row_tiles * ROWS; t++)
            for (int64_t k = 0; k < steps; k++) {
                uint16_t* to = a + ((t / ROWS * steps + k) * ROWS + t % ROWS) * INPUTS;
                if (t < rows) memcpy(to, x + t * w.inputs + k * INPUTS, 64);
                else memset(to, 0, 64);
            }
#pragma omp for schedule(dynamic, 1)
        for (int64_t n = 0; n < blocks_of(w.rows); n += 2) {
            make_panel<B>(w, n, b);
            for (int64_t m = 0; m < rows; m += 2 * ROWS)
                multiply_panel(w, a + m / ROWS * steps * TILE, b, y + m * w.rows, rows - m, n * ROWS);
        }
    }
    free(a);
    return true;
}
#endif

// 0: done; 1: no memory; 2: bf16 is not taken here.
template <int B> int matmul_any(const Weight& w, const void* x, int32_t type, int64_t rows, void* y, int threads) {
    if (type == F32) {
        matmul_f32<B>(w, static_cast<const float*>(x), rows, static_cast<float*>(y), threads);
        return 0;
    }
#if WIDTH
    const uint16_t* at = static_cast<const uint16_t*>(x);
    uint16_t* to = static_cast<uint16_t*>(y);
#if AMX
    if (rows >= MANY && have_amx()) return matmul_many<B>(w, at, rows, to, threads) ? 0 : 1;
#endif
    return matmul_int<B>(w, at, rows, to, threads) ? 0 : 1;
#else
    return 2;
#endif
}

}  // namespace

#define EXPORT extern "C" __attribute__((visibility("default")))

// Bit 0: packed_matmul takes bf16; bit 1: many rows of it in AMX tiles; bit 2: dense_matmul works.
EXPORT int packed_features() {
    int features = have_amx() ? 2 : 0;
#if WIDTH
    features |= 1;
#endif
#if BF16_DOT
    features |= 4;
#endif
    return features;
}

// From the words on disk, int32 [rows, words], to w->codes (64-byte aligned, room for whole blocks).
EXPORT void packed_repack(const Weight* w, const uint32_t* packed, int64_t words, int threads) {
    if (w->bits == 8) repack_all<8>(packed, words, *w, threads);
    else if (w->bits == 4) repack_all<4>(packed, words, *w, threads);
    else if (w->bits == 3) repack_all<3>(packed, words, *w, threads);
    else repack_all<2>(packed, words, *w, threads);
}

// Rows [first, first + count) of the weight to out [count, inputs] of `type`; `first` is a multiple of 16.
EXPORT void packed_dequantize(const Weight* w, int64_t first, int64_t count, void* out, int32_t type, int threads) {
    if (w->bits == 8) dequantize_all<8>(*w, first, count, out, type, threads);
    else if (w->bits == 4) dequantize_all<4>(*w, first, count, out, type, threads);
    else if (w->bits == 3) dequantize_all<3>(*w, first, count, out, type, threads);
    else dequantize_all<2>(*w, first, count, out, type, threads);
}

// x [rows, inputs] to y [rows, w->rows], both of `type`: F32, or BF16 where packed_features has bit 0.
// 0: done; 1: no memory for rearranged activations; 2: BF16 is not taken.
EXPORT int packed_matmul(const Weight* w, const void* x, int32_t type, int64_t rows, void* y, int threads) {
    if (w->bits == 8) return matmul_any<8>(*w, x, type, rows, y, threads);
    if (w->bits == 4) return matmul_any<4>(*w, x, type, rows, y, threads);
    if (w->bits == 3) return matmul_any<3>(*w, x, type, rows, y, threads);
    return matmul_any<2>(*w, x, type, rows, y, threads);
}

// bf16 weight [outputs, inputs] as torch has it, times 1 to 4 rows of bf16; inputs a multiple of 32. Needs bit 2.
EXPORT void dense_matmul(const uint16_t* w, int64_t outputs, int64_t inputs, const uint16_t* x, int64_t rows, uint16_t* y,
                         int threads) {
#if BF16_DOT
#pragma omp parallel for num_threads(threads) schedule(guided)
    for (int64_t n = 0; n < outputs; n++) {
        float sum[4];
        if (rows == 1) dense_row<1>(w + n * inputs, inputs, x, sum);
        else if (rows == 2) dense_row<2>(w + n * inputs, inputs, x, sum);
        else if (rows == 3) dense_row<3>(w + n * inputs, inputs, x, sum);
        else dense_row<4>(w + n * inputs, inputs, x, sum);
        for (int64_t m = 0; m < rows; m++) y[m * outputs + n] = to_bf16(sum[m]);
    }
#else
    (void)w, (void)outputs, (void)inputs, (void)x, (void)rows, (void)y, (void)threads;
#endif
}

// A ragged batch of queries against a cache in blocks, as attention.h says; head_dim is a multiple of 16. 0: done; 1: no
// memory; 2: lengths or blocks that cannot be.
EXPORT int attend(const Attention* a, int threads) { return attend_any(*a, threads, have_amx()); }

// As softmax_draw in draw.h.
EXPORT int64_t draw(const float* logits, int64_t n, double number, float* out) { return softmax_draw(logits, n, number, out); }

// As norm_rows, gate_rows and rotate_rows in steps.h.
EXPORT void norm(const uint16_t* x, int64_t rows, int64_t size, const uint16_t* gain, float eps, uint16_t* y) {
    norm_rows(x, rows, size, gain, eps, y);
}
EXPORT void gate(const uint16_t* x, int64_t rows, int64_t size, uint16_t* y) { gate_rows(x, rows, size, y); }
EXPORT void rotate(const Rotation* r) { rotate_rows(*r); }

// Reads `bytes` (a multiple of 64) with all threads, for the time it takes; returns their sum as 32-bit words.
EXPORT int64_t read_memory(const uint8_t* at, int64_t bytes, int threads) {
    int64_t total = 0;
#pragma omp parallel for num_threads(threads) schedule(static) reduction(+ : total)
    for (int64_t page = 0; page < bytes; page += 1 << 16) {
        I8 sum[2] = {};
        for (int64_t i = page; i < std::min<int64_t>(page + (1 << 16), bytes); i += 64) {
            __builtin_prefetch(at + i + AHEAD);
            I8 lanes[2];
            memcpy(lanes, at + i, 64);
            sum[0] += lanes[0];
            sum[1] += lanes[1];
        }
        for (int lane = 0; lane < 8; lane++) total += sum[0][lane] + sum[1][lane];
    }
    return total;
}
