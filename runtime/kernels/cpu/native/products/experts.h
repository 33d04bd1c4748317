// Products of experts: token-expert pairs, sorted by expert, whose rows are multiplied by the weight of their expert. Included by
// packed_cpu.cpp after the products that it uses, with the same arithmetic: the bits of a pair depend on its row and its expert
// only.

#pragma once

namespace {

enum Stored : int32_t { PACKED_WEIGHTS, DENSE_WEIGHTS, TABLE_WEIGHTS, PORTABLE_WEIGHTS };  // mirrored by experts.py

struct Routed {  // mirrored by experts.py
    const void* const* weights;  // of each expert: a Weight, bf16 [outputs, inputs] (also PORTABLE_WEIGHTS), or a TableWeight; null: the expert is skipped
    const int32_t* starts;  // [experts + 1]: expert e has the pairs from starts[e] to starts[e + 1]
    const int32_t* tokens;  // [pairs]: the row of x that a pair reads, or null if pair p reads row p
    const void* x;  // [rows, inputs]
    void* y;  // [pairs, outputs]
    int64_t experts, rows, inputs, outputs;
    int32_t type, stored;  // type of x and y: F32 or BF16; kind of the weights
};

inline const Weight& packed_of(const Routed& r, int64_t expert) { return *static_cast<const Weight*>(r.weights[expert]); }
inline int64_t count_of(const Routed& r, int64_t expert) { return r.starts[expert + 1] - r.starts[expert]; }

// Multiplies the gathered rows of one expert by its weight. Returns false without memory.
inline bool multiply_expert(const Routed& r, int64_t expert, int threads) {
    const int64_t first = r.starts[expert], count = count_of(r, expert), size = r.type == F32 ? 4 : 2, row = r.inputs * size;
    const char* x = static_cast<const char*>(r.x) + (r.tokens ? 0 : first * row);
    const Memory gathered(r.tokens ? rounded_up(count * row) : 64);
    if (!gathered.at) return false;
    for (int64_t p = 0; r.tokens && p < count; p++) memcpy(gathered.at + p * row, x + r.tokens[first + p] * row, size_t(row));
    if (r.tokens) x = gathered.at;
    char* y = static_cast<char*>(r.y) + first * r.outputs * size;
    const auto* words = reinterpret_cast<const uint16_t*>(x);
    auto* out = reinterpret_cast<uint16_t*>(y);
    if (r.stored == DENSE_WEIGHTS || r.stored == PORTABLE_WEIGHTS) {
        const Dense<uint16_t> d{static_cast<const uint16_t*>(r.weights[expert]), words, r.outputs, r.inputs, count, out};
        return dense_any(d, r.stored == PORTABLE_WEIGHTS, threads);
    }
    const Weight& w = packed_of(r, expert);
    return by_bits(w, [&](auto bits) {
        constexpr int B = bits.value;
        if (r.type == F32) return matmul_f32<B>(w, reinterpret_cast<const float*>(x), count, reinterpret_cast<float*>(y), threads);
        return matmul_bf16<B>(w, words, count, out, threads);
    });
}

#if WIDTH
// The operands of multiply_few for experts of few rows: their products, and the rows of x; a single row is shared by all pairs.
struct FewExperts {
    std::vector<FewProduct> products;
    std::vector<const uint16_t*> rows;
    const Routed& r;

    explicit FewExperts(const Routed& r) : r(r) {}
    // Returns false if the expert has more rows, or another cut than the experts before it.
    bool add(int64_t expert) {
        if (r.stored != PACKED_WEIGHTS || r.type != BF16) return false;
        const Weight& w = packed_of(r, expert);
        if (count_of(r, expert) > EXPERT_ROWS || path_of(w, count_of(r, expert)) != Path::BYTES) return false;
        if (!products.empty() && !(row_cut_of(w) == row_cut_of(*products[0].weight))) return false;
        const int64_t start = r.starts[expert], count = count_of(r, expert);
        const bool shares_row = r.tokens && r.rows == 1;
        products.push_back({&w, shares_row ? 0 : int64_t(rows.size()), count, static_cast<uint16_t*>(r.y) + start * r.outputs, r.outputs});
        for (int64_t p = start; p < start + count && !(shares_row && rows.size()); p++)
            rows.push_back(static_cast<const uint16_t*>(r.x) + (r.tokens ? r.tokens[p] : p) * r.inputs);
        return true;
    }
    bool add_all() {
        for (int64_t expert = 0; expert < r.experts; expert++)
            if (r.weights[expert] && !add(expert)) return false;
        return true;
    }
};
#endif

// Experts of one kind of table codes in one parallel region: a task is some rows of the weight of one expert. Returns false
// without memory.
inline bool multiply_tables(const Routed& r, int threads) {
    const int64_t tasks = (r.outputs + TABLE_TASK - 1) / TABLE_TASK, pairs = r.starts[r.experts];
    const void* const* like = std::find_if(r.weights, r.weights + r.experts, [](const void* w) { return w; });
    if (like == r.weights + r.experts) return true;
    const bool shares_row = r.tokens && r.rows == 1;  // all pairs read the one row
    const Memory memory(rounded_up(4 * (shares_row ? 1 : pairs) * r.inputs + 64));
    if (!memory.at) return false;
    float* rows = reinterpret_cast<float*>(memory.at);
#pragma omp parallel num_threads(threads)
    {
#pragma omp for schedule(static)
        for (int64_t p = 0; p < (shares_row ? 1 : pairs); p++) {
            const int64_t from = (r.tokens ? r.tokens[p] : p) * r.inputs;
            by_kind(*static_cast<const TableWeight*>(*like), [&](const auto& codes) {
                for (int64_t i = 0; i < r.inputs; i += LANE)
                    store16(rows + p * r.inputs + i, codes.arrange(r.type == F32 ? load16(static_cast<const float*>(r.x) + from + i)
                                                                                 : load16(static_cast<const uint16_t*>(r.x) + from + i)));
            });
        }
#pragma omp for schedule(guided) nowait
        for (int64_t i = 0; i < r.experts * tasks; i++) {
            const int64_t expert = i / tasks, first = i % tasks * TABLE_TASK, start = r.starts[expert];
            if (!r.weights[expert]) continue;
            const TableWeight& t = *static_cast<const TableWeight*>(r.weights[expert]);
            by_kind(t, [&](const auto& codes) {
                const float* inputs = rows + (shares_row ? 0 : start * r.inputs);
                const int64_t end = std::min(first + TABLE_TASK, r.outputs);
                table_part(t, codes, first, end, inputs, count_of(r, expert), [&](int64_t m, int64_t n, float sum) {
                    const int64_t at = (start + m) * r.outputs + n;
                    if (r.type == F32) static_cast<float*>(r.y)[at] = sum;
                    else static_cast<uint16_t*>(r.y)[at] = to_bf16(sum);
                });
            });
        }
    }
    return true;
}

// Returns false without memory. Packed weights must have the same rows, inputs and group size.
inline bool multiply_routed(const Routed& r, int threads) {
    if (r.stored == TABLE_WEIGHTS) return multiply_tables(r, threads);
    std::vector<int64_t> others;
#if WIDTH
    FewExperts few(r);
#endif
    for (int64_t expert = 0; expert < r.experts; expert++) {
        if (!r.weights[expert]) continue;
#if WIDTH
        if (few.add(expert)) continue;
#endif
        others.push_back(expert);
    }
#if WIDTH
    if (!few.rows.empty() && !multiply_few(few.products, few.rows, threads)) return false;
#endif
    return std::all_of(others.begin(), others.end(), [&](int64_t expert) { return multiply_expert(r, expert, threads); });
}

struct Choice {  // mirrored by experts.py; see RoutingSpec
    const float* correction;  // [experts], or null
    int64_t top, groups, top_groups, group_best;
    float epsilon, scale;
    int32_t normalized, sigmoid;
};

struct Routing {  // mirrored by experts.py
    const float* scores;  // [tokens, experts]
    float* weights;  // [tokens, top]
    int32_t* chosen;  // [tokens, top], highest score first
    int32_t* places;  // [tokens, top]: index of the pair
    int32_t* pairs;  // [tokens * top]: the token of each pair
    int32_t* hit;  // experts that have pairs, in order
    int32_t* starts;  // first pair of each hit expert, and the end
    int64_t tokens, experts;
    Choice choice;
};

// The indices of the `top` largest of `count` values, the lower index first among equals. NaN is never larger than a number.
inline void find_highest(const float* value, int64_t count, int64_t top, int32_t* chosen) {
    for (int64_t j = 0; j < top; j++) {
        int32_t best = -1;
        for (int32_t i = 0; i < count; i++)
            if ((best < 0 || value[i] > value[best]) && std::find(chosen, chosen + j, i) == chosen + j) best = i;
        chosen[j] = best;
    }
}

// Sets the values [experts] of groups that are not selected below all others.
inline void leave_groups(const Choice& choice, std::vector<float>& values) {
    const int64_t size = int64_t(values.size()) / choice.groups;
    std::vector<float> sums(size_t(choice.groups), 0.0f);
    std::vector<int32_t> chosen(size_t(std::max<int64_t>(choice.top_groups, 2)));
    for (int64_t g = 0; g < choice.groups; g++) {
        const float* group = values.data() + g * size;
        find_highest(group, size, choice.group_best, chosen.data());
        sums[size_t(g)] = choice.group_best == 1 ? group[chosen[0]] : group[chosen[0]] + group[chosen[1]];
    }
    find_highest(sums.data(), choice.groups, choice.top_groups, chosen.data());
    for (int64_t g = 0; g < choice.groups; g++)
        if (std::find(chosen.begin(), chosen.begin() + choice.top_groups, int32_t(g)) == chosen.begin() + choice.top_groups)
            std::fill_n(values.data() + g * size, size, -INFINITY);
}

// Without a correction, the scores themselves tell which softmax values are largest, and only those need an exponential.
inline void choose_by_scores(const Routing& r, const float* score, int32_t* chosen, float* weight) {
    const int64_t top = r.choice.top;
    find_highest(score, r.experts, top, chosen);
    float total = 0;
    for (int64_t j = 0; j < top; j++) total += weight[j] = std::exp(score[chosen[j]] - score[chosen[0]]);
    if (!r.choice.normalized) {
        total = 0;
        for (int64_t e = 0; e < r.experts; e++) total += std::exp(score[e] - score[chosen[0]]);
    }
    for (int64_t j = 0; j < top; j++) weight[j] = weight[j] / total * r.choice.scale;
}

inline void choose_by_values(const Routing& r, const float* score, int32_t* chosen, float* weight) {
    const Choice& choice = r.choice;
    std::vector<float> value(size_t(r.experts));
    float highest = -INFINITY, sum = 0;
    for (int64_t e = 0; e < r.experts; e++) highest = std::max(highest, score[e]);
    for (size_t e = 0; e < value.size(); e++) {
        value[e] = choice.sigmoid ? 1 / (1 + std::exp(-score[e])) : std::exp(score[e] - highest);
        sum += value[e];
    }
    if (!choice.sigmoid)
        for (float& share : value) share /= sum;
    std::vector<float> corrected(value);
    for (size_t e = 0; choice.correction && e < value.size(); e++) corrected[e] += choice.correction[e];
    if (choice.groups > 1) leave_groups(choice, corrected);
    find_highest(corrected.data(), r.experts, choice.top, chosen);
    float total = 0;
    for (int64_t j = 0; j < choice.top; j++) total += weight[j] = value[size_t(chosen[j])];
    total = choice.normalized ? total + choice.epsilon : 1;
    for (int64_t j = 0; j < choice.top; j++) weight[j] = weight[j] / total * choice.scale;
}

// The experts of a token, highest score first, and their weights.
inline void choose_experts(const Routing& r, int64_t token) {
    const Choice& choice = r.choice;
    const bool plain = !choice.sigmoid && !choice.correction && choice.groups == 1 && choice.epsilon == 0;
    const float* score = r.scores + token * r.experts;
    (plain ? choose_by_scores : choose_by_values)(r, score, r.chosen + token * choice.top, r.weights + token * choice.top);
}

// Counting sort of the pairs by expert, then by token; returns the number of experts that have pairs.
inline int64_t sort_pairs(const Routing& r) {
    std::vector<int32_t> next(size_t(r.experts) + 1, 0);
    for (int64_t i = 0; i < r.tokens * r.choice.top; i++) next[size_t(r.chosen[i]) + 1]++;
    int64_t hits = 0;
    for (int64_t e = 0; e < r.experts; e++) {
        if (next[size_t(e) + 1]) r.hit[hits] = int32_t(e), r.starts[hits++] = next[size_t(e)];
        next[size_t(e) + 1] += next[size_t(e)];
    }
    r.starts[hits] = int32_t(r.tokens * r.choice.top);
    for (int64_t i = 0; i < r.tokens * r.choice.top; i++) {
        const int32_t place = next[size_t(r.chosen[i])]++;
        r.places[i] = place, r.pairs[place] = int32_t(i / r.choice.top);
    }
    return hits;
}

struct WeightedSum {  // mirrored by experts.py
    const void* x;  // [pairs, size]
    const int32_t* places;  // [tokens, top]
    const float* weights;  // [tokens, top]
    void* y;  // [tokens, size]
    int64_t tokens, top, size;  // size: a multiple of 16
    int32_t type;
};

// fp32 sums in the order of the token's choice, rounded once.
template <class T> inline void sum_token(const WeightedSum& s, int64_t token) {
    const T* x = static_cast<const T*>(s.x);
    T* y = static_cast<T*>(s.y) + token * s.size;
    for (int64_t i = 0; i < s.size; i += WIDE) {
        Wide total = {};
        for (int64_t j = token * s.top; j < (token + 1) * s.top; j++) total += wide(x + s.places[j] * s.size + i) * s.weights[j];
        put(y + i, total);
    }
}

}  // namespace
