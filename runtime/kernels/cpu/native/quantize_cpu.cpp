// Rounding weights to a symmetric grid: the search for scales, the codes, their packing into words, and the error, in one pass.
//
// Computes bit for bit what quant/rounding/grid.py computes in torch: the same operations in the same order, each rounded
// (compiled with -ffp-contract=off), and sums in torch's order. Called through ctypes by rounding.py. Rows are independent, so
// the number of threads does not matter.

#include <vector>

#include "torch_vectors.h"

namespace {

struct Rounding {  // mirrored by build.py
    const void* weight;       // [rows, inputs] of weight_type
    const float* importance;  // [inputs], or null
    const float* factors;     // candidate scales are these times the largest weight of a group
    void* scales;             // [rows, inputs / group] of scale_type: written by a search, else read
    uint8_t* codes;           // [rows, inputs], or null
    double* sums;             // [rows, 2]: squared error, squared weights; or null
    int64_t rows, inputs, group, factor_count, refits;
    int32_t weight_type, scale_type, bits, search;
    float divisor;            // the first scale is the largest weight (ABSMAX: its magnitude) divided by this
    float smallest, largest;  // bounds of a scale's magnitude
    float limit;              // largest magnitude of a weight
};
enum Search : int32_t { GIVEN = 0, ABSMAX = 1, LEAST_SQUARES = 2 };

// A group of weights, and how levels are computed: by division, or by multiplication if no level is near a tie.
struct Group {
    const float* x;
    const float* importance;
    int64_t size;
    float half;

    template <class V> V clamped(V ratio) const { return smaller(larger(ratio, spread_to<V>(-half)), spread_to<V>(half - 1)); }
    template <class V> V level(V value, V scale) const { return (clamped<V>(value / scale) + MAGIC) - MAGIC; }
};

template <class V> inline V weighed(V term, const Group& g, int64_t i) { return g.importance ? term * read<V>(g.importance + i) : term; }

// `Size`, if not 0, is the size of the group, known at compile time.
template <int64_t Size> float error_exact(const Group& g, float scale) {
    return sum_as_torch(Size ? Size : g.size, [&](int64_t i, auto kind) {
        using V = decltype(kind);
        const V x = read<V>(g.x + i), s = spread_to<V>(scale), lost = g.level<V>(x, s) * s - x;
        return weighed<V>(lost * lost, g, i);
    });
}

// Whether multiplying by the inverse of a scale gives the same levels as dividing, except near a tie.
inline bool invertible(float scale) {
    const float magnitude = scale < 0 ? -scale : scale;
    return magnitude > 0x1p-100f && magnitude < 0x1p100f;
}

// Levels by multiplication, which differs from the quotient by less than 2^-22 of it; `away` is the distance from the level.
inline Wide quick_level(const Group& g, Wide x, Wide inverse, Wide& away) {
    const Wide ratio = g.clamped<Wide>(x * inverse), level = (ratio + MAGIC) - MAGIC, least = ratio - level;
    away = larger(least, -least);
    return level;
}
inline float near_tie(const Group& g) { return 0.5f - g.half * 0x1p-21f; }  // beyond this distance, division may give another level

template <int64_t Size> float error_of(const Group& g, float scale) {
    if (!invertible(scale) || g.size % 32) return error_exact<Size>(g, scale);
    const Wide inverse = spread(1 / scale), s = spread(scale);
    Wide worst = {};
    const float error = sum_as_torch(Size ? Size : g.size, [&](int64_t i, auto kind) {
        using V = decltype(kind);
        if constexpr (std::is_same_v<V, Wide>) {
            Wide away;
            const Wide x = read<Wide>(g.x + i), lost = quick_level(g, x, inverse, away) * s - x;
            worst = larger(worst, away);
            return weighed<V>(lost * lost, g, i);
        } else {
            return V{};
        }
    });
    return any(worst > near_tie(g)) ? error_exact<Size>(g, scale) : error;
}

// The scale of least squared error for the levels that `scale` gives.
float refitted(const Group& g, float scale) {
    auto part = [&](auto combine) {
        return sum_as_torch(g.size, [&](int64_t i, auto kind) {
            using V = decltype(kind);
            const V x = read<V>(g.x + i), level = g.level<V>(x, spread_to<V>(scale));
            return combine(weighed<V>(level, g, i), level, x);
        });
    };
    const float norm = part([](auto weighted, auto level, auto) { return weighted * level; });
    const float product = part([](auto weighted, auto, auto x) { return weighted * x; });
    return norm > 0 ? product / norm : scale;
}

inline float loaded(const void* from, int32_t type, int64_t index) {
    if (type == F32) return static_cast<const float*>(from)[index];
    const uint16_t bits = static_cast<const uint16_t*>(from)[index];
    return type == BF16 ? from_bf16(bits) : from_f16(bits);
}

// Rounds a scale to its stored type.
inline float storable(const Rounding& r, float scale) {
    const float magnitude = smaller(larger(scale < 0 ? -scale : scale, r.smallest), r.largest);
    float value = scale < 0 ? -magnitude : magnitude;
    if (r.scale_type == BF16) return from_bf16(to_bf16(value));
    return r.scale_type == F16 ? from_f16(to_f16(value)) : value;
}

template <int64_t Size> float least_squares(const Rounding& r, const Group& g, float extreme) {
    float best = storable(r, extreme / r.divisor), least = error_of<Size>(g, best);
    auto consider = [&](float scale) {
        const float error = error_of<Size>(g, scale);
        if (error < least) best = scale, least = error;
    };
    for (int64_t i = 0; i < r.factor_count; i++) consider(storable(r, extreme * r.factors[i]));
    for (int64_t i = 0; i < r.refits; i++) consider(storable(r, refitted(g, best)));
    return best;
}

// NaN if a weight is not finite or above the limit.
float find_scale(const Rounding& r, const Group& g) {
    Wide largest = {};
    WideInt inside = WideInt{} - 1;
    int64_t i = 0;
    for (; i + WIDE <= g.size; i += WIDE) {
        const Wide x = read<Wide>(g.x + i), magnitude = larger(x, -x);
        inside &= magnitude <= r.limit;
        largest = larger(largest, magnitude);
    }
    if (any(~inside)) return __builtin_nanf("");
    float most = greatest(largest);
    for (; i < g.size; i++) {
        const float magnitude = larger(g.x[i], -g.x[i]);
        if (!(magnitude <= r.limit)) return __builtin_nanf("");
        most = larger(most, magnitude);
    }
    if (r.search == ABSMAX) return storable(r, most / r.divisor);
    const float* first = g.x;  // the weight of largest magnitude
    while (larger(*first, -*first) != most) first++;
    const float extreme = *first;
    switch (g.size) {
        case 32: return least_squares<32>(r, g, extreme);
        case 64: return least_squares<64>(r, g, extreme);
        case 128: return least_squares<128>(r, g, extreme);
        default: return least_squares<0>(r, g, extreme);
    }
}

// Squared error and squared weights of a row.
struct Squares {
    Doubles lost[2], all[2];
    double rest_lost, rest_all;

    static void add(Doubles (&sums)[2], Wide v) {
        const Wide square = v * v;
        Half halves[2];
        memcpy(halves, &square, sizeof halves);
        for (int k = 0; k < 2; k++) sums[k] += __builtin_convertvector(halves[k], Doubles);
    }
    static double total(const Doubles (&sums)[2], double rest) {
        for (int lane = 0; lane < WIDE / 2; lane++) rest += sums[0][lane] + sums[1][lane];
        return rest;
    }
};

// Codes of a group to `codes`, if not null, and the squared error to `squares`.
void round_group(const Group& group, float scale, uint8_t* codes, Squares& squares) {
    const Group g = group;  // a local copy: the compiler knows that storing codes does not change it
    Squares sums = squares;
    const bool quick = invertible(scale);
    const Wide s = spread(scale), inverse = spread(1 / scale);
    int64_t i = 0;
    for (; i + WIDE <= g.size; i += WIDE) {
        const Wide x = read<Wide>(g.x + i);
        Wide away, level;
        if (quick) level = quick_level(g, x, inverse, away);
        if (!quick || any(away > near_tie(g))) level = g.level<Wide>(x, s);
        if (codes) put_bytes(codes + i, level + g.half);
        sums.add(sums.lost, level * s - x);
        sums.add(sums.all, x);
    }
    for (; i < g.size; i++) {
        const float level = g.level<float>(g.x[i], scale), away = level * scale - g.x[i];
        if (codes) codes[i] = uint8_t(level + g.half);
        sums.rest_lost += away * away, sums.rest_all += g.x[i] * g.x[i];
    }
    squares = sums;
}

// Returns false if a weight is not finite or too large.
bool round_row(const Rounding& r, int64_t row, float* x) {
    const int64_t from = row * r.inputs;
    int64_t done = 0;
    for (; done + WIDE <= r.inputs; done += WIDE) {
        put(x + done, wide(r.weight, from + done, r.weight_type));
    }
    for (; done < r.inputs; done++) x[done] = loaded(r.weight, r.weight_type, from + done);
    Squares squares = {};
    const int64_t groups = r.inputs / r.group;
    for (int64_t n = 0; n < groups; n++) {
        const int64_t start = n * r.group, place = row * groups + n;
        const Group g{x + start, r.importance ? r.importance + start : nullptr, r.group, float(1 << (r.bits - 1))};
        if (r.search != GIVEN) {
            const float scale = find_scale(r, g);
            if (scale != scale) return false;
            store(r.scales, r.scale_type, place, scale);
        }
        if (r.codes || r.sums)
            round_group(g, loaded(r.scales, r.scale_type, place), r.codes ? r.codes + row * r.inputs + start : nullptr, squares);
    }
    if (r.sums) {
        r.sums[2 * row] = Squares::total(squares.lost, squares.rest_lost);
        r.sums[2 * row + 1] = Squares::total(squares.all, squares.rest_all);
    }
    return true;
}

struct Columns {  // mirrored by build.py
    const float* residual;  // [columns, rows], as are scales, before, codes and shifts
    const float* matrix;    // [columns, columns], transposed
    const float* scales;
    const uint8_t* before;  // codes to be moved, or null
    uint8_t* codes;
    float* shifts;
    int64_t columns, rows;
    float half;
};
constexpr int64_t MAX_COLUMNS = 128, VECTORS = 4, TILE = VECTORS * WIDE, SOON = 6;

// TILE rows from `first`; the shifts of all columns stay in the L1 cache.
void solve_rows(const Columns& c, int64_t first) {
    alignas(64) float shifts[MAX_COLUMNS][TILE];
    for (int64_t i = 0; i < c.columns; i++) {
        const int64_t place = i * c.rows + first;
        const float *matrix = c.matrix + i * c.columns, pivot = matrix[i];
        for (int64_t line = 0, ahead = place + SOON * c.rows; line < TILE && i + SOON < c.columns; line += 16) {
            __builtin_prefetch(c.residual + ahead + line);
            __builtin_prefetch(c.scales + ahead + line);
            __builtin_prefetch(c.shifts + ahead + line, 1);
            if (!line) __builtin_prefetch(c.codes + ahead, 1);
            if (!line && c.before) __builtin_prefetch(c.before + ahead);
        }
        Wide value[VECTORS];
        for (int64_t v = 0; v < VECTORS; v++) value[v] = read<Wide>(c.residual + place + v * WIDE);
        for (int64_t j = 0; j < i; j++)
            for (int64_t v = 0; v < VECTORS; v++) value[v] -= spread(matrix[j]) * read<Wide>(shifts[j] + v * WIDE);
        for (int64_t v = 0, at = place; v < VECTORS; v++, at += WIDE) {
            const Group g{nullptr, nullptr, 0, c.half};
            const Wide scale = read<Wide>(c.scales + at);
            Wide level, shift;
            if (c.before) {
                const Wide old = from_bytes(c.before + at) - c.half;
                level = (g.clamped<Wide>(value[v] / pivot / scale + old) + MAGIC) - MAGIC;
                shift = (level - old) * scale;
            } else {
                level = g.level<Wide>(value[v], scale);
                shift = (value[v] - level * scale) / pivot;
            }
            put(shifts[i] + v * WIDE, shift);
            put(c.shifts + at, shift);
            put_bytes(c.codes + at, level + c.half);
        }
    }
}

// The last rows, fewer than TILE, in a padded copy.
void solve_last(const Columns& c, int64_t first) {
    const size_t size = size_t(c.columns * TILE), count = size_t(c.rows - first);
    std::vector<float> residual(size, 0.0f), scales(size, 1.0f), shifts(size);
    std::vector<uint8_t> before(size, 0), codes(size);
    const auto each = [&](auto use) {
        for (int64_t i = 0; i < c.columns; i++) use(i * c.rows + first, i * TILE);
    };
    each([&](int64_t from, int64_t to) {
        memcpy(&residual[to], c.residual + from, count * 4);
        memcpy(&scales[to], c.scales + from, count * 4);
        if (c.before) memcpy(&before[to], c.before + from, count);
    });
    solve_rows({residual.data(), c.matrix, scales.data(), c.before ? before.data() : nullptr, codes.data(), shifts.data(), c.columns, TILE, c.half}, 0);
    each([&](int64_t to, int64_t from) {
        memcpy(c.codes + to, &codes[from], count);
        memcpy(c.shifts + to, &shifts[from], count * 4);
    });
}

// Eight codes, a byte each, to the low 8 * bits bits: adjacent codes are joined in pairs, then fours, then eights.
inline uint64_t squeezed(uint64_t codes, int bits) {
    constexpr uint64_t ONE = 0x00ff00ff00ff00ff, TWO = 0x0000ffff0000ffff, FOUR = 0x00000000ffffffff;
    codes = (codes & ONE) | (codes >> 8 & ONE) << bits;
    codes = (codes & TWO) | (codes >> 16 & TWO) << 2 * bits;
    return (codes & FOUR) | codes >> 32 << 4 * bits;
}

}  // namespace

#define EXPORT extern "C" __attribute__((visibility("default")))

// Writes what is not null. Returns 0; 1: no memory; 2: a weight is not finite, or beyond the limit.
EXPORT int round_weight(const Rounding* r, int threads) {
    int failed = 0;
#pragma omp parallel num_threads(threads) reduction(max : failed)
    {
        float* x = static_cast<float*>(aligned_alloc(64, size_t(r->inputs * 4 + 63) & ~size_t(63)));
        if (!x) failed = 1;
#pragma omp for schedule(static)
        for (int64_t row = 0; row < r->rows; row++)
            if (x && !round_row(*r, row, x)) failed = 2;
        free(x);
    }
    return failed;
}

// solve_block of quant/rounding/columns.py for up to MAX_COLUMNS; each sum is in the order of the columns, on every machine.
EXPORT void solve_columns(const Columns* c, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t first = 0; first < c->rows; first += TILE) first + TILE <= c->rows ? solve_rows(*c, first) : solve_last(*c, first);
}

// Packs codes [rows, inputs] into little-endian words [rows, words], as runtime/quantization/packed_weight.py does.
EXPORT void pack_codes(const uint8_t* codes, int64_t rows, int64_t inputs, int32_t bits, uint32_t* packed, int64_t words,
                       int threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t row = 0; row < rows; row++) {
        const uint8_t* from = codes + row * inputs;
        uint8_t* to = reinterpret_cast<uint8_t*>(packed + row * words);
        int64_t left = words * 4;
        for (int64_t i = 0; i < inputs; i += 8) {
            uint64_t eight = 0;
            memcpy(&eight, from + i, size_t(std::min<int64_t>(8, inputs - i)));
            eight = squeezed(eight, bits);
            const int64_t count = std::min<int64_t>(bits, left);
            memcpy(to, &eight, size_t(count));
            to += count, left -= count;
        }
        memset(to, 0, size_t(left));
    }
}
