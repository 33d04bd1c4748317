// Few rows of bf16 times packed weights in one parallel region: a linear of several products, or the experts of a token. A
// barrier takes as long as reading 100 kB, so there are as few as possible.

#pragma once

#include <atomic>
#include <type_traits>
#include <vector>

#include "products/one_byte.h"

// y[0] to y[rows - 1]: the 16 outputs of one row block, for up to FEW rows of integers with adjacent units. Defined in
// few_rows_cpu.cpp; for up to BYTE_PART rows of 8-bit activations in one_byte_cpu.cpp.
void few_rows(const Weight& w, int64_t row_block, const Bytes& x, int64_t rows, float (*y)[16]);
void few_byte_rows(const Weight& w, int64_t row_block, const Bytes& x, int64_t rows, float (*y)[16]);

namespace {

// Memory of one call, freed at its end.
struct Memory {
    char* at;
    explicit Memory(int64_t bytes) : at(static_cast<char*>(aligned_alloc(64, size_t(bytes + 63) & ~size_t(63)))) {}
    ~Memory() { free(at); }
    Memory(const Memory&) = delete;
    Memory& operator=(const Memory&) = delete;
};

inline int64_t rounded_up(int64_t bytes) { return (bytes + 63) / 64 * 64; }

// Calls use(kind of the weight's codes, as a type).
template <class Use> auto by_bits(const Weight& w, Use use) {
    switch (w.kind) {
        case E2M1: return use(std::integral_constant<int, E2M1>());
        case IQ4: return use(std::integral_constant<int, IQ4>());
        case 2: return use(std::integral_constant<int, 2>());
        case 3: return use(std::integral_constant<int, 3>());
        case 4: return use(std::integral_constant<int, 4>());
        case 5: return use(std::integral_constant<int, 5>());
        case 6: return use(std::integral_constant<int, 6>());
        default: return use(std::integral_constant<int, 8>());
    }
}

// Rows up to which bytes in registers beat a panel; without dot products of bytes a panel is better from few rows.
#if WIDTH == 64
constexpr int64_t FEW = 8;
#elif WIDTH == 16 || (WIDTH && defined(__AVXVNNI__))
constexpr int64_t FEW = 4;
#elif WIDTH
constexpr int64_t FEW = 2;
#else
constexpr int64_t FEW = 0;
#endif
constexpr int64_t OWN = std::min<int64_t>(FEW, 4);  // up to this many rows, each thread converts all rows itself
// The same with 8-bit activations. More than BYTE_PART rows are multiplied in parts, each of which unpacks the codes again, from the
// L1 cache; with AVX-512 VNNI that is faster than a panel up to 16 rows.
#if WIDTH == 64
constexpr int64_t BYTE_PART = 14, BYTE_FEW = 16;
#else
constexpr int64_t BYTE_PART = FEW, BYTE_FEW = FEW;
#endif
inline int64_t few_limit(const Weight& w) { return w.activations == 8 ? BYTE_FEW : FEW; }
#if WIDTH
// Rows of activations as integers in bytes, in memory of the caller.
struct IntegerRows {
    int64_t inputs;
    Cut cut;
    Bytes bytes;

    static int64_t size(int64_t rows, int64_t inputs, const Cut& cut) {
        return rounded_up(rows * 2 * (inputs + 64)) + 3 * rounded_up(rows * inputs / cut.segment * 4);
    }
    IntegerRows(char* memory, int64_t rows, int64_t inputs, const Cut& cut) : inputs(inputs), cut(cut) {
        const int64_t room = rounded_up(rows * 2 * (inputs + 64)), notes = rounded_up(rows * inputs / cut.segment * 4);
        const Units units{reinterpret_cast<float*>(memory + room), reinterpret_cast<int32_t*>(memory + room + notes),
                          reinterpret_cast<float*>(memory + room + 2 * notes), 1, rows};
        bytes = {reinterpret_cast<int8_t*>(memory), cut.one_byte ? rows : inputs + 64, units};
    }
    // Converts x [inputs] to row `row`.
    void make(const uint16_t* x, int64_t row) const {
        const Units units = bytes.units.from(row);
        if (cut.one_byte) return make_fours(x, row, units);
        int8_t* high = const_cast<int8_t*>(bytes.bytes) + row * 2 * bytes.stride;
        for (int64_t i = 0; i < inputs; i += SPAN) {
            const int64_t count = std::min(SPAN, inputs - i), at = i / cut.segment * units.segment;
            int16_t integers[SPAN];
            make_integers(x + i, count, cut, 0, integers, {units.unit + at, units.sum + at, units.shift + at, 0, units.segment});
            cut_bytes(integers, count, high + i, high + bytes.stride + i);
        }
    }
    Bytes from(int64_t row) const {
        return {bytes.bytes + row * (cut.one_byte ? 4 : 2 * bytes.stride), bytes.stride, bytes.units.from(row)};
    }

private:
    // The sums are negative: those of numbers that count from 0 start with them.
    void make_fours(const uint16_t* x, int64_t row, const Units& units) const {
        int8_t* const first = const_cast<int8_t*>(bytes.bytes);
        const int64_t rows = bytes.stride;
        if (rows == 1) return make_bytes(x, inputs, cut, -1, first, units);
        int8_t* const own = first + (rows + row) * inputs;
        make_bytes(x, inputs, cut, -1, own, units);
        for (int64_t four = 0; four < inputs / 4; four++) memcpy(first + 4 * (four * rows + row), own + 4 * four, 4);
    }
};

struct FewProduct {  // some rows times a weight
    const Weight* weight;
    int64_t first, count;  // first row, and number of rows, at most few_limit
    uint16_t* y;  // [count, w.rows], rows `stride` apart
    int64_t stride;
};

// The row blocks of several products, shared among threads: each takes a part of the remaining blocks until none remain.
class FewBlocks {
    const std::vector<FewProduct>& products;
    std::vector<int64_t> starts;  // index of the first block of each product, and the end
    const int64_t threads;
    std::atomic<int64_t> next{0};

public:
    struct Share {
        int64_t first, last;
        size_t product;  // the product of `first`, or an earlier one
    };

    FewBlocks(const std::vector<FewProduct>& products, int threads) : products(products), starts(1, 0), threads(threads) {
        for (const FewProduct& product : products) starts.push_back(starts.back() + blocks_of(product.weight->rows));
    }

    // Takes blocks for a thread and prefetches the beginning of their codes; false if none remain.
    bool take(Share& share) {
        share.first = next.load(std::memory_order_relaxed);
        do {
            if (share.first >= starts.back()) return false;
            share.last = share.first + std::max<int64_t>(1, (starts.back() - share.first) / threads);
        } while (!next.compare_exchange_weak(share.first, share.last, std::memory_order_relaxed));
        while (share.first >= starts[share.product + 1]) share.product++;
        const Weight& w = *products[share.product].weight;
        const int64_t size = w.inputs / INPUTS * w.bits * 64;
        const uint8_t* codes = w.codes + (share.first - starts[share.product]) * size;
        for (int64_t i = 0; i < std::min(FAR_AHEAD, size); i += 64) __builtin_prefetch(codes + i);
        return true;
    }

    // Multiplies the blocks that the thread has taken, if any, then takes more until none remain.
    void multiply(bool taken, Share share, const IntegerRows& x) {
        for (; taken; taken = take(share))
            for (int64_t i = share.first; i < share.last; i++) {
                while (i >= starts[share.product + 1]) share.product++;
                const FewProduct& product = products[share.product];
                const int64_t n = i - starts[share.product];
                const int64_t most = x.cut.one_byte ? BYTE_PART : FEW, parts = (product.count + most - 1) / most;
                const int64_t width = std::min<int64_t>(ROWS, product.weight->rows - n * ROWS);
                for (int64_t p = 0; p < parts; p++) {
                    const int64_t start = product.count * p / parts, count = product.count * (p + 1) / parts - start;
                    float part[BYTE_PART][ROWS];
                    (x.cut.one_byte ? few_byte_rows : few_rows)(*product.weight, n, x.from(product.first + start), count, part);
                    for (int64_t m = 0; m < count; m++) store_row(product.y, BF16, (start + m) * product.stride + n * ROWS, part[m], width);
                }
            }
    }
};

// Converts rows x of products to integers, and shares the row blocks of the products among threads.
class FewStage {
    const std::vector<const uint16_t*>& x;
    const int64_t inputs;
    const Cut cut;
    const Memory memory;
    FewBlocks blocks;

    int64_t rows() const { return int64_t(x.size()); }
    int64_t size() const { return IntegerRows::size(rows(), inputs, cut); }
    IntegerRows integers(int64_t which) const { return {memory.at + which * size(), rows(), inputs, cut}; }

public:
    // The weights have the same inputs and cut.
    FewStage(const std::vector<FewProduct>& products, const std::vector<const uint16_t*>& x, int threads)
        : x(x), inputs(products[0].weight->inputs), cut(row_cut_of(*products[0].weight)), memory((rows() <= OWN ? threads : 1) * size()),
          blocks(products, threads) {}
    bool has_memory() const { return memory.at; }

    // Run by thread `self` of a region. Each converts all rows itself: for few rows that is faster than waiting for others.
    void multiply(int self) {
        if (rows() > OWN) return multiply_shared([](int64_t) {});
        FewBlocks::Share share{};
        if (!blocks.take(share)) return;
        const IntegerRows rows_of_thread = integers(self);
        for (int64_t m = 0; m < rows(); m++) rows_of_thread.make(x[size_t(m)], m);
        blocks.multiply(true, share, rows_of_thread);
    }

    // The same; each thread converts some rows, and calls `before` for them first.
    template <class Before> void multiply_shared(Before before) {
        FewBlocks::Share share{};
        const bool taken = blocks.take(share);  // memory is fetched while threads wait
#pragma omp barrier
        const IntegerRows all = integers(0);
#pragma omp for schedule(static)
        for (int64_t m = 0; m < rows(); m++) {
            before(m);
            all.make(x[size_t(m)], m);
        }
        blocks.multiply(taken, share, all);
    }
};

// Runs a stage on `threads` threads, then `then`. Returns false without memory.
template <class Then> bool multiply_stage(FewStage& stage, int threads, Then then) {
    if (!stage.has_memory()) return false;
    int next = 0;
#pragma omp parallel num_threads(threads)
    {
        int self;
#pragma omp atomic capture
        self = next++;
        stage.multiply(self);
        then();
    }
    return true;
}

// Rows x times all weights, which have the same inputs and cut. Returns false without memory.
inline bool multiply_few(const std::vector<FewProduct>& products, const std::vector<const uint16_t*>& x, int threads) {
    FewStage stage(products, x, threads);
    return multiply_stage(stage, threads, [] {});
}

// Two stages: between(m) computes row m of the second products' input from the outputs of the first.
template <class Between>
bool multiply_few_twice(const std::vector<FewProduct>& first, const std::vector<const uint16_t*>& x, const std::vector<FewProduct>& second,
                        const std::vector<const uint16_t*>& rows, int threads, Between between) {
    FewStage begin(first, x, threads), end(second, rows, threads);
    return end.has_memory() && multiply_stage(begin, threads, [&] { end.multiply_shared(between); });
}
#endif

}  // namespace
