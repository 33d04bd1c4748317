// Few rows of bf16 times packed weights in one parallel region: a linear of several products, or the experts of a token. A
// barrier takes as long as reading 100 kB, so there are as few as possible.

#pragma once

#include <atomic>
#include <type_traits>
#include <vector>

#include "products/one_byte.h"

namespace {

// Rows of 16-bit integers and of bytes, and row blocks, that are multiplied at a time: with 32 vector registers 20 or 24 are sums. Row
// blocks side by side share the loads of activations. Up to LONG_PART rows of bytes are multiplied at a time by codes of LONG_BITS or
// more, of one row block: memory is their limit. With AVX2 these are codes of 4 bits or more: panels of 7 or 8 rows were up to a fifth
// slower. Only experts have several rows of 16-bit integers there (FEW is 1): larger parts of these took much of the time of compiling.
#if WIDTH == 64
constexpr int PART = 5, BYTE_PART = ZEN5 ? 6 : PART, LONG_PART = ZEN5 ? 9 : BYTE_PART, SIDE = 2;
#elif WIDTH == 32
constexpr int PART = 4, BYTE_PART = VECTOR == 64 ? 8 : 6, LONG_PART = 8, SIDE = 1;
#elif WIDTH
constexpr int PART = 4, BYTE_PART = PART, LONG_PART = PART, SIDE = 1;
#else
constexpr int PART = 1, BYTE_PART = PART, LONG_PART = PART, SIDE = 1;
#endif
#if WIDTH == 32 && VECTOR == 32 && !defined(__AVXVNNI__)
constexpr int LONG_BITS = 4;
#else
constexpr int LONG_BITS = 6;
#endif
constexpr int ALONG = SIDE * ROWS;  // outputs of the row blocks side by side

}  // namespace

// y [rows][ALONG]: the outputs of SIDE row blocks from `row_block`, for up to PART, BYTE_PART or LONG_PART rows of integers with adjacent
// units. Those of row blocks after the last are undefined. `once`: no other rows read these codes. Defined in few_rows_cpu.cpp; for 8-bit
// activations in few_byte_rows_cpu.cpp.
void few_rows(const Weight& w, int64_t row_block, const Bytes& x, int64_t rows, bool once, float* y);
void few_byte_rows(const Weight& w, int64_t row_block, const Bytes& x, int64_t rows, bool once, float* y);

namespace {

// How many row blocks M rows are multiplied by at a time. Side by side they take fewer instructions, but memory reads one stream faster:
// it is the limit of few rows and long codes.
template <int B, int M> constexpr int AT_ONCE = 4 * M > STORED<B> && M <= BYTE_PART ? SIDE : 1;

// Calls use(how many row blocks, the first, its results) for SIDE row blocks from `row_block`: AT_ONCE at a time, or one where memory
// is the limit. On Zen 5 that is whenever the codes are read once.
template <int B, int M, class Use> void each_at_once(const Weight& w, int64_t row_block, bool once, float* y, Use use) {
    const auto each = [&](auto at_once) {
        for (int n = 0; n < SIDE && row_block + n < blocks_of(w.rows); n += at_once.value) use(at_once, row_block + n, y + n * ROWS);
    };
    // On Zen 5 one or two rows are never a part of more rows, so they read the codes once; this avoids an instance.
    constexpr bool MAY_READ_AGAIN = !ZEN5 || M > 2;
    if (!MAY_READ_AGAIN || (ZEN5 && once)) return each(std::integral_constant<int, 1>());
    if constexpr (MAY_READ_AGAIN) each(std::integral_constant<int, AT_ONCE<B, M>>());
}

// The codes of N row blocks side by side, read block by block.
template <int B, int N> struct CodeStreams {
    static constexpr int64_t SIZE = STORED<B> * 64;  // of a block
    static constexpr int64_t ALONE_AHEAD = STORED<B> == 8 ? BYTE_CODES_AHEAD : FAR_AHEAD;  // of one row block; 0: nothing is prefetched
    const uint8_t *block, *next;  // what is read, and what is prefetched
    int64_t apart, groups;  // bytes and groups from a row block to the next; 0 if there is none: the last one is multiplied twice

    CodeStreams(const Weight& w, int64_t row_block) {
        const int64_t bytes = w.inputs / INPUTS * SIZE;
        const bool more = row_block + 1 < blocks_of(w.rows);
        block = w.codes + row_block * bytes, next = block + (N > 1 ? N * bytes : ALONE_AHEAD);
        apart = more ? bytes : 0, groups = more ? w.inputs / w.group : 0;
    }
    const uint8_t* at(int n) const { return block + n * apart; }
    // One row block: straight to L1; in two steps, through L2, it was up to a fifth slower. Several: the next ones in the order of memory,
    // to L2, since prefetching each row block ahead was slower than one at a time.
    inline __attribute__((always_inline)) void prefetch() const {
        if constexpr (N == 1 && !ALONE_AHEAD) return;
#pragma GCC unroll 16
        for (int64_t i = 0; i < N * SIZE; i += 64) N > 1 ? __builtin_prefetch(next + i, 0, 2) : __builtin_prefetch(next + i);
    }
    void skip(int64_t blocks) { block += blocks * SIZE, next += blocks * N * SIZE; }
};

// Scales and offsets of the spans of N row blocks side by side, in order.
template <int B, int N> struct SpanScales {
    const Weight& w;
    const int64_t row_block, spans, apart;  // spans in a group; groups from a row block to the next
    int64_t at, left;  // index of the group, and its spans that are left
    GroupScales now[N];
    typedef std::conditional_t<B == E2M1, RowFactors, Factors> FactorsOf;
    FactorsOf factors[N];

    SpanScales(const Weight& w, int64_t row_block, int64_t span, int64_t apart)
        : w(w), row_block(row_block), spans(w.group / span), apart(apart), at(row_block * (w.inputs / w.group)), left(spans) {
        read(0);
    }
    // Moves to the span at `input`, the next one.
    inline __attribute__((always_inline)) void advance(int64_t input) {
        if (--left || input == w.inputs) return;
        left = spans, at++;
        read(input);
    }

private:
    inline __attribute__((always_inline)) void read(int64_t input) {
#pragma GCC unroll 2
        for (int n = 0; n < N; n++) {
            if (w.factors && input % SUPER_BLOCK == 0) factors[n] = FactorsOf(w, row_block + (apart ? n : 0), input);
            now[n] = w.factors ? GroupScales(w, at + n * apart, factors[n]) : GroupScales(w, at + n * apart);
        }
    }
};

// The count of a loop whose body is long, which GCC would copy: compiling takes half as long.
inline int not_unrolled(int count) {
    if (count > 1) asm("" : "+r"(count));
    return count;
}

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
        case IQ3_XXS: return use(std::integral_constant<int, IQ3_XXS>());
        case IQ3_S: return use(std::integral_constant<int, IQ3_S>());
        case IQ2: return use(std::integral_constant<int, IQ2>());
        case IQ1: return use(std::integral_constant<int, IQ1>());
        case 2: return use(std::integral_constant<int, 2>());
        case 3: return use(std::integral_constant<int, 3>());
        case 4: return use(std::integral_constant<int, 4>());
        case 5: return use(std::integral_constant<int, 5>());
        case 6: return use(std::integral_constant<int, 6>());
        default: return use(std::integral_constant<int, 8>());
    }
}

// Rows up to which codes unpacked in registers beat a panel: of 16-bit integers, of bytes, and of bytes times codes of 8 bits and of
// LONG_BITS or more. More than PART rows are multiplied in parts, each of which unpacks the codes again, from the first caches. AMD's
// processors unpack them next to the dot products; Intel's have the same ports for both.
#if WIDTH == 64 && defined(BF16_DOT)
constexpr int64_t FEW = 128, BYTE_FEW = ZEN5 ? 24 : 128, BYTE_CODES_FEW = BYTE_FEW;
#elif WIDTH == 64
constexpr int64_t FEW = 8, BYTE_FEW = 16, BYTE_CODES_FEW = 16;
#elif WIDTH == 32 && VECTOR == 64
constexpr int64_t FEW = 1, BYTE_FEW = 24, BYTE_CODES_FEW = 12;
#elif WIDTH == 32 && defined(__AVXVNNI__)
constexpr int64_t FEW = 4, BYTE_FEW = BYTE_PART, BYTE_CODES_FEW = 12;
#elif WIDTH == 32
constexpr int64_t FEW = 1, BYTE_FEW = BYTE_PART, BYTE_CODES_FEW = 12;
#elif WIDTH
constexpr int64_t FEW = PART, BYTE_FEW = PART, BYTE_CODES_FEW = PART;
#else
constexpr int64_t FEW = 0, BYTE_FEW = 0, BYTE_CODES_FEW = 0;
#endif
constexpr int64_t LONG_FEW = LONG_BITS == 4 ? LONG_PART : BYTE_FEW;
inline int64_t few_limit(const Weight& w) {
    if (w.activations == 8) return w.bits == 8 ? BYTE_CODES_FEW : w.bits >= LONG_BITS ? LONG_FEW : BYTE_FEW;
    return ZEN5 && (w.bits > 4 || w.scale_type == I8) ? 24 : FEW;
}
constexpr int64_t EXPERT_ROWS = 16;  // of an expert that is multiplied together with others: threads share row blocks, not rows
constexpr int64_t ROWS_FOR_EACH = 4;  // up to this many rows, each thread converts all rows itself
#if WIDTH
// Rows of activations as integers in bytes, in memory of the caller.
struct IntegerRows {
    int64_t inputs;
    Cut cut;
    Bytes bytes;

    static int64_t stride(int64_t inputs) { return inputs + 64; }  // rows a power of two apart would share a few cache lines
    // Bytes of all integers, and of one of the three arrays of `Units`.
    static int64_t integer_bytes(int64_t rows, int64_t inputs, const Cut& cut) { return rounded_up(rows * (cut.one_byte ? 1 : 2) * stride(inputs)); }
    static int64_t unit_bytes(int64_t rows, int64_t inputs, const Cut& cut) { return rounded_up(rows * inputs / cut.segment * 4); }
    static int64_t size(int64_t rows, int64_t inputs, const Cut& cut) {
        return integer_bytes(rows, inputs, cut) + 3 * unit_bytes(rows, inputs, cut);
    }

    IntegerRows(char* memory, int64_t rows, int64_t inputs, const Cut& cut) : inputs(inputs), cut(cut) {
        char* const unit = memory + integer_bytes(rows, inputs, cut);
        char* const sum = unit + unit_bytes(rows, inputs, cut);
        char* const shift = sum + unit_bytes(rows, inputs, cut);
        const Units units{reinterpret_cast<float*>(unit), reinterpret_cast<int32_t*>(sum), reinterpret_cast<float*>(shift), 1, rows};
        bytes = {reinterpret_cast<int8_t*>(memory), stride(inputs), units};
    }
    // Converts x [inputs] to row `row`. The sums of one byte are negative: those of numbers that count from 0 start with them.
    void make(const uint16_t* x, int64_t row) const {
        const Units units = bytes.units.from(row);
        int8_t* const to = const_cast<int8_t*>(from(row).bytes);
        if (cut.one_byte) return make_bytes(x, inputs, cut, -1, to, units);
        for (int64_t i = 0; i < inputs; i += SPAN) {
            const int64_t count = std::min(SPAN, inputs - i), at = i / cut.segment * units.segment;
            int16_t integers[SPAN];
            make_integers(x + i, count, cut, 0, integers, {units.unit + at, units.sum + at, units.shift + at, 0, units.segment});
            cut_bytes(integers, count, to + i, to + bytes.stride + i);
        }
    }
    Bytes from(int64_t row) const { return {bytes.bytes + row * (cut.one_byte ? 1 : 2) * bytes.stride, bytes.stride, bytes.units.from(row)}; }
};

struct FewProduct {  // some rows times a weight
    const Weight* weight;
    int64_t first, count;  // first row, and number of rows, at most few_limit
    uint16_t* y;  // [count, w.rows], rows `stride` apart
    int64_t stride;
};

// In how many parts the rows of a product are multiplied.
inline int64_t parts_of(const FewProduct& product, bool one_byte) {
    if (one_byte && product.weight->bits >= LONG_BITS && product.count <= LONG_PART) return 1;
    const int64_t most = one_byte ? BYTE_PART : PART;
    return (product.count + most - 1) / most;
}

// The row blocks of several products, SIDE at a time, shared among threads: each takes a part of the remaining ones until none
// remain.
class FewBlocks {
    const std::vector<FewProduct>& products;
    std::vector<int64_t> starts;  // index of the first of each product, and the end
    const int64_t threads;
    std::atomic<int64_t> next{0};

public:
    struct Share {
        int64_t first, last;
        size_t product;  // the product of `first`, or an earlier one
    };

    FewBlocks(const std::vector<FewProduct>& products, int threads) : products(products), starts(1, 0), threads(threads) {
        for (const FewProduct& product : products) starts.push_back(starts.back() + (blocks_of(product.weight->rows) + SIDE - 1) / SIDE);
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
        const uint8_t* codes = w.codes + (share.first - starts[share.product]) * SIDE * size;
        for (int64_t i = 0; i < std::min(FAR_AHEAD, size); i += 64) __builtin_prefetch(codes + i);
        return true;
    }

    // Multiplies the blocks that the thread has taken, if any, then takes more until none remain.
    void multiply(bool taken, Share share, const IntegerRows& x) {
        for (; taken; taken = take(share))
            for (int64_t i = share.first; i < share.last; i++) {
                while (i >= starts[share.product + 1]) share.product++;
                const FewProduct& product = products[share.product];
                const int64_t n = (i - starts[share.product]) * SIDE, parts = parts_of(product, x.cut.one_byte);
                const int64_t width = std::min<int64_t>(ALONG, product.weight->rows - n * ROWS);
                for (int64_t p = 0; p < parts; p++) {
                    const int64_t start = product.count * p / parts, count = product.count * (p + 1) / parts - start;
                    float part[LONG_PART * ALONG];
                    (x.cut.one_byte ? few_byte_rows : few_rows)(*product.weight, n, x.from(product.first + start), count, parts == 1, part);
                    for (int64_t m = 0; m < count; m++) store_row(product.y, BF16, (start + m) * product.stride + n * ROWS, part + m * ALONG, width);
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
        : x(x), inputs(products[0].weight->inputs), cut(row_cut_of(*products[0].weight)), memory((rows() <= ROWS_FOR_EACH ? threads : 1) * size()),
          blocks(products, threads) {}
    bool has_memory() const { return memory.at; }

    // Run by thread `self` of a region. Each converts all rows itself: for few rows that is faster than waiting for others.
    void multiply(int self) {
        if (rows() > ROWS_FOR_EACH) return multiply_shared([](int64_t) {});
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
