// Products of fp32 matrices whose elements are rounded to bf16, with fp32 sums, for calibration on processors whose bf16 dot
// products run at the rate of fp32 ones, with twice the multiplications. torch rounds its results to bf16 too, or uses AMX only.
// Each sum takes its inputs two at a time, in order, so its bits depend neither on the number of threads nor on other sums.

#include <omp.h>

#include "vectors.h"

#if defined(BF16_DOT) && defined(__AVX512BF16__) && VECTOR == 64
#define ROUNDS 1
#else
#define ROUNDS 0
#endif

#if ROUNDS
namespace {

// A register tile: 24 of 32 registers hold sums. One panel of right operands is ACROSS wide.
constexpr int64_t HIGH = 8, VECTORS = 3, ACROSS = VECTORS * WIDE;
typedef uint32_t Pair;  // two inputs in bf16, the first in the lower half

int64_t parts_of(int64_t size, int64_t part) { return (size + part - 1) / part; }
__mmask16 first_lanes(int64_t count) { return count >= WIDE ? 0xffff : count <= 0 ? 0 : __mmask16((1 << count) - 1); }

struct Memory {
    Pair* pairs;
    explicit Memory(int64_t count) : pairs(static_cast<Pair*>(aligned_alloc(64, size_t(count * 4 + 63) & ~size_t(63)))) {}
    ~Memory() { free(pairs); }
};

// Pairs of neighbours in rows x [rows, inputs]: of WIDE rows from `first`, zeros after the last, to[pair * stride + row].
void pack_rows(const float* x, int64_t rows, int64_t inputs, int64_t first, Pair* to, int64_t stride) {
    for (int64_t k = 0; k < inputs; k += 2 * WIDE) {
        const __mmask16 low = first_lanes(inputs - k), high = first_lanes(inputs - k - WIDE);
        Wide v[WIDE];
        for (int64_t i = 0; i < WIDE; i++) {
            const bool there = first + i < rows;
            const float* at = x + (there ? first + i : 0) * inputs + k;
            const __m512 left = _mm512_maskz_loadu_ps(there ? low : 0, at), right = _mm512_maskz_loadu_ps(there ? high : 0, at + WIDE);
            v[i] = (Wide)_mm512_cvtne2ps_pbh(right, left);
        }
        transpose(v);
        const int64_t count = std::min<int64_t>(WIDE, parts_of(inputs - k, 2));
        for (int64_t pair = 0; pair < count; pair++) memcpy(to + (k / 2 + pair) * stride, &v[pair], sizeof v[pair]);
    }
}

// Pairs of rows of x [rows, columns]: of the columns of a panel, zeros after the last, to[pair * ACROSS + column].
void pack_columns(const float* x, int64_t rows, int64_t columns, int64_t panel, Pair* to) {
    for (int64_t row = 0; row < rows; row += 2)
        for (int64_t v = 0; v < VECTORS; v++, to += WIDE) {
            const int64_t column = panel * ACROSS + v * WIDE;
            const __mmask16 mask = first_lanes(columns - column);
            const float* at = x + row * columns + (mask ? column : 0);
            const __m512 first = _mm512_maskz_loadu_ps(mask, at), second = _mm512_maskz_loadu_ps(row + 1 < rows ? mask : 0, at + (row + 1 < rows ? columns : 0));
            const __m512i low = _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(first));
            const __m512i high = _mm512_slli_epi32(_mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(second)), 16);
            _mm512_storeu_si512(to, _mm512_or_si512(low, high));
        }
}

// HIGH rows, whose pair k is at left[k * step], times a panel, to y [rows, columns] with rows `stride` apart. ADD: y is added to.
template <bool ADD>
inline void multiply_tile(const Pair* left, int64_t step, const Pair* panel, int64_t pairs, float* y, int64_t stride, int64_t rows, int64_t columns) {
    __m512 sum[HIGH][VECTORS] = {};
    if (ADD)
        for (int64_t m = 0; m < std::min(rows, HIGH); m++)
            for (int64_t at = 0; at < std::min(columns, ACROSS); at += WIDE) _mm_prefetch(reinterpret_cast<const char*>(y + m * stride + at), _MM_HINT_T0);
    for (int64_t k = 0; k < pairs; k++, left += step, panel += ACROSS) {
        __m512bh right[VECTORS];
#pragma GCC unroll 3
        for (int64_t v = 0; v < VECTORS; v++) right[v] = (__m512bh)_mm512_load_si512(panel + v * WIDE);
#pragma GCC unroll 8
        for (int64_t m = 0; m < HIGH; m++) {
            const __m512bh x = (__m512bh)_mm512_set1_epi32(int32_t(left[m]));
#pragma GCC unroll 3
            for (int64_t v = 0; v < VECTORS; v++) sum[m][v] = _mm512_dpbf16_ps(sum[m][v], x, right[v]);
        }
    }
#pragma GCC unroll 8
    for (int64_t m = 0; m < HIGH; m++)
#pragma GCC unroll 3
        for (int64_t v = 0; v < VECTORS; v++) {
            const __mmask16 mask = m < rows ? first_lanes(columns - v * WIDE) : 0;
            if (!mask) continue;
            float* at = y + m * stride + v * WIDE;
            _mm512_mask_storeu_ps(at, mask, ADD ? _mm512_add_ps(_mm512_maskz_loadu_ps(mask, at), sum[m][v]) : sum[m][v]);
        }
}

}  // namespace
#endif

// Whether the functions below compute; if not, they return 2.
EXPORT int rounded_products() { return ROUNDS; }

// y [rows, outputs] = x [rows, inputs] times w [outputs, inputs], transposed, or, where `by_inputs`, w [inputs, outputs]. Returns 1 if
// there is no memory.
EXPORT int rounded_matmul(const float* x, int64_t rows, int64_t inputs, const float* w, int64_t outputs, float* y, int by_inputs, int threads) {
#if ROUNDS
    const int64_t pairs = parts_of(inputs, 2), groups = parts_of(rows, WIDE), panels = parts_of(outputs, ACROSS);
    // Each thread packs a panel of w at a time, which then stays in its cache. Few panels are shared by several threads.
    const int64_t parts = std::min(groups, parts_of(2 * threads, panels));
    const Memory left(groups * pairs * WIDE), right(threads * pairs * ACROSS);
    if (!left.pairs || !right.pairs) return 1;
#pragma omp parallel num_threads(threads)
    {
        Pair* panel = right.pairs + omp_get_thread_num() * pairs * ACROSS;
#pragma omp for schedule(static)
        for (int64_t g = 0; g < groups; g++) pack_rows(x, rows, inputs, g * WIDE, left.pairs + g * pairs * WIDE, WIDE);
#pragma omp for schedule(dynamic)
        for (int64_t task = 0; task < panels * parts; task++) {
            const int64_t column = task / parts * ACROSS, part = task % parts;
            if (by_inputs) pack_columns(w, inputs, outputs, task / parts, panel);
            else
                for (int64_t v = 0; v < ACROSS; v += WIDE) pack_rows(w, outputs, inputs, column + v, panel + v, ACROSS);
            for (int64_t row = groups * part / parts * WIDE; row < std::min(rows, groups * (part + 1) / parts * WIDE); row += HIGH)
                multiply_tile<false>(left.pairs + row / WIDE * pairs * WIDE + row % WIDE, WIDE, panel, pairs, y + row * outputs + column, outputs, rows - row, outputs - column);
        }
    }
    return 0;
#else
    return 2;
#endif
}

// sums [m, n] += a [rows, m], transposed, times b [rows, n]; of each strip of `strip` rows of sums at least the columns up to the
// strip's end, which is all where `strip` is m. Returns 1 if there is no memory.
EXPORT int rounded_outer(const float* a, int64_t m, const float* b, int64_t n, int64_t rows, float* sums, int64_t strip, int threads) {
#if ROUNDS
    const int64_t pairs = parts_of(rows, 2), lefts = parts_of(m, ACROSS), panels = parts_of(n, ACROSS), size = pairs * ACROSS;
    const Memory left(lefts * size), other(a == b ? 0 : panels * size);
    if (!left.pairs || !other.pairs) return 1;
    Pair* right = a == b ? left.pairs : other.pairs;
#pragma omp parallel num_threads(threads)
    {
#pragma omp for schedule(static)
        for (int64_t p = 0; p < lefts; p++) pack_columns(a, rows, m, p, left.pairs + p * size);
#pragma omp for schedule(static)
        for (int64_t p = 0; p < panels; p++)
            if (a != b) pack_columns(b, rows, n, p, right + p * size);
#pragma omp for schedule(dynamic) collapse(2)
        for (int64_t l = 0; l < lefts; l++)
            for (int64_t p = 0; p < panels; p++)
                for (int64_t row = l * ACROSS; row < std::min(m, (l + 1) * ACROSS); row += HIGH) {
                    const int64_t last = std::min(row + HIGH, m) - 1, column = p * ACROSS;
                    if (strip < m && column >= (last / strip + 1) * strip) continue;
                    multiply_tile<true>(left.pairs + l * size + row % ACROSS, ACROSS, right + p * size, pairs, sums + row * n + column, n, m - row, n - column);
                }
    }
    return 0;
#else
    return 2;
#endif
}
