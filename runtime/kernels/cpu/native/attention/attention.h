// Attention of a ragged batch of queries over a paged cache: prefill, decoding, and the verification of drafts.
//
// One arithmetic, two orders of work. If few rows share a key head, as in decoding, threads share the chunks: each chunk's keys
// are read once, and the chunks of a row are joined afterwards. If many do, the chunks of a head are first packed for the
// products, and threads share the rows, which go from chunk to chunk. attention_task.h says why the bits are the same.

#pragma once

#include <memory>
#include <new>
#include <vector>

#include "attention/attention_pairs.h"
#include "attention/attention_tiles.h"

namespace {

constexpr int64_t FEW_ROWS = 32;  // rows of a key head up to which threads share chunks
constexpr int64_t ALONE_VECTORS = 256;  // vectors up to which one thread has rotated all before others are awake
constexpr int64_t ROUND_FLOATS = int64_t(4) << 20;  // for the chunks of several heads; one head may need more

// The two steps of a round: chunks, then rows or parts of rows. A share is a sequence and a key head.
struct Share {
    Rows rows;
    int64_t first[2];  // index of its first task in each step
    int64_t memory;  // offset of its floats
};
struct Round {
    std::vector<Share> shares;
    int64_t tasks[2] = {}, memory = 0;

    void add(const Rows& rows, int64_t chunks, int64_t pieces, int64_t floats) {
        shares.push_back({rows, {tasks[0], tasks[1]}, memory});
        tasks[0] += chunks;
        tasks[1] += pieces;
        memory += floats;
    }
    const Share& of(int64_t task, int step) const {
        const auto later = [=](int64_t number, const Share& share) { return number < share.first[step]; };
        return *(std::upper_bound(shares.begin(), shares.end(), task, later) - 1);
    }
};

template <class Path> struct Attending {
    const Attention& a;
    const int threads;
    const int64_t size = Path::size(a), row_size = sums_of(size);

    int64_t room_size(int64_t rows) const {
        return rows * (Path::query_size(a) + CHUNK + Path::weights_size() + 2 * row_size) + Path::panel_size(a);
    }
    Room room_at(float* memory, int64_t rows) const {
        Room room;
        room.query = memory;
        room.scores = room.query + rows * Path::query_size(a);
        room.weights = room.scores + rows * CHUNK;
        room.sums = room.weights + rows * Path::weights_size();
        room.joined = room.sums + rows * row_size;
        room.panel = room.joined + rows * row_size;
        return room;
    }

    // Returns whether row r sees any position of the chunk; if so, computes its weights.
    bool soften_row(const Rows& rows, int64_t r, int64_t first, const Span& span, const Scales& scales, const Room& room, int64_t row) const {
        const int64_t begin = std::max(rows.begin(a, r) - first, span.low), end = std::min(rows.end(a, r) - first, span.high);
        if (begin >= end) return false;
        soften(a, room.scores + row * CHUNK, span, begin, end, scales, room.sums + row * row_size, size, Path::keep(room, row));
        return true;
    }

    // The weighted values of some rows. NaN or infinity among the values times the weight 0 of a row that does not see them would
    // be NaN: where that may have happened, each row is computed over its own positions.
    template <class Mix>
    void mix_rows(const Rows& rows, int64_t row, int64_t count, const Span& span, int64_t first, const Room& room, Mix mix) const {
        mix();
        const int64_t last = row + count - 1, filled = std::min(CHUNK, rows.length - first);
        if (rows.end(a, row) - first >= filled && rows.begin(a, last) <= first) return;  // every row sees the whole chunk
        Wide check = {};
        for (int64_t r = 0; r < count; r++)
            for (int64_t d = 0; d < size; d += WIDE) check = multiply_add(wide(room.sums + r * row_size + d), Wide{}, check);
        if (total(check) == 0) return;
        const Chunk chunk(a, rows, first);
        for (int64_t r = 0; r < count; r++) {
            const int64_t begin = std::max(rows.begin(a, row + r) - first, span.low), end = std::min(rows.end(a, row + r) - first, filled);
            if (begin < end) Path::mix_row(a, room, r, begin, end, chunk);
        }
    }

    // Prefetches the keys and values of a task of the first step, if there is one, to the L2 cache.
    void prefetch(const Round& round, int64_t task) const {
        if (task >= round.tasks[0]) return;
        const Share& share = round.of(task, 0);
        const Chunk chunk(a, share.rows, (share.rows.first_chunk(a) + task - share.first[0]) * CHUNK);
        for (int64_t p = chunk.oldest; p < chunk.count; p++)
            for (const void* data : {a.keys, a.values}) {
                const char* vector = static_cast<const char*>(data) + chunk.at[p] * vector_bytes(a);
                for (int64_t i = 0; i < vector_bytes(a); i += 64) __builtin_prefetch(vector + i, 0, 2);
            }
    }

    // The sums of one chunk for all rows, to `to`; empty sums for rows that see none of it. If it is the only chunk, the final
    // result.
    void few_chunk(const Rows& rows, int64_t index, const Room& room, float* to) const {
        const Chunk chunk(a, rows, (rows.first_chunk(a) + index) * CHUNK);
        const Span span(a, rows, 0, rows.count, chunk.first);
        Scales scales;
        scales.take(a, chunk);
        Path::take_query(a, rows, 0, rows.count, room);
        Path::score_few(a, room, rows.count, span, chunk);
        for (int64_t r = 0; r < rows.count; r++)
            soften_row(rows, r, chunk.first, span, scales, room, r);
        const typename Path::Setup setup(rows.count);
        mix_rows(rows, 0, rows.count, span, chunk.first, room, [&] { Path::mix_few(a, room, rows.count, span, chunk); });
        if (rows.chunks(a) > 1) memcpy(to, room.sums, size_t(rows.count * row_size) * 4);
        else for (int64_t r = 0; r < rows.count; r++) few_end(rows, r, room.sums, room.joined);
    }
    void few_end(const Rows& rows, int64_t r, float* sums, float* joined) const {
        const int64_t chunk = rows.first_chunk(a);
        clear(joined, size);
        for (int64_t c = rows.begin(a, r) / CHUNK; c * CHUNK < rows.end(a, r); c++)
            join(joined, sums + ((c - chunk) * rows.count + r) * row_size, size);
        Path::write(a, joined, share_of(a, rows, r, joined, size), rows.at(a, r));
    }

    int64_t packed_size() const { return Path::packed_size(a) + int64_t(sizeof(Scales) / 4); }
    void pack_chunk(const Rows& rows, int64_t index, float* to) const {
        const Chunk chunk(a, rows, (rows.first_chunk(a) + index) * CHUNK);
        reinterpret_cast<Scales*>(to)->take(a, chunk);
        Path::pack(a, chunk, to + sizeof(Scales) / 4);
    }
    // Rows [row, row + count) over all chunks, packed at `packed`, scales first.
    void many_rows(const Rows& rows, int64_t row, int64_t count, const Room& room, const float* packed) const {
        const typename Path::Setup setup(count);
        Path::take_query(a, rows, row, count, room);
        for (int64_t r = 0; r < count; r++) clear(room.joined + r * row_size, size);
        for (int64_t c = rows.begin(a, row) / CHUNK; c * CHUNK < rows.end(a, row + count - 1); c++) {
            const float* at = packed + (c - rows.first_chunk(a)) * packed_size();
            const Scales& scales = *reinterpret_cast<const Scales*>(at);
            const Span span(a, rows, row, count, c * CHUNK);
            at += sizeof(Scales) / 4;
            Path::score(a, room, count, span, at);
            bool sees[Path::ROWS_AT_ONCE];
            for (int64_t r = 0; r < count; r++) sees[r] = soften_row(rows, row + r, c * CHUNK, span, scales, room, r);
            const int64_t filled = std::min(CHUNK, rows.length - c * CHUNK);
            mix_rows(rows, row, count, span, c * CHUNK, room, [&] { Path::mix(a, room, count, span, filled, at); });
            for (int64_t r = 0; r < count; r++)
                if (sees[r]) join(room.joined + r * row_size, room.sums + r * row_size, size);
        }
        for (int64_t r = 0; r < count; r++) {
            float* sums = room.joined + r * row_size;
            Path::write(a, sums, share_of(a, rows, row + r, sums, size), rows.at(a, row + r));
        }
    }

    // Returns false without memory.
    bool run(const Round& round, bool few) const {
        constexpr int64_t most = Path::ROWS_AT_ONCE;
        const int64_t room = (room_size(few ? FEW_ROWS : most) + 15) / 16 * 16;
        float* memory = static_cast<float*>(aligned_alloc(64, size_t(round.memory + threads * room) * 4));
        if (!memory) return false;
        int next = 0;
#pragma omp parallel num_threads(threads)
        {
            int self;
#pragma omp atomic capture
            self = next++;
            float* private_memory = memory + round.memory + self * room;
            const Room place = room_at(private_memory, few ? FEW_ROWS : most);
#pragma omp for schedule(dynamic, 1)
            for (int64_t i = 0; i < round.tasks[0]; i++) {
                const Share& share = round.of(i, 0);
                const int64_t index = i - share.first[0];
                float* at = memory + share.memory;
                prefetch(round, i + threads);  // blocks are scattered, which processors do not predict
                if (few) few_chunk(share.rows, index, place, at + index * share.rows.count * row_size);
                else pack_chunk(share.rows, index, at + index * packed_size());
            }
            // The last rows of a prompt see most positions: the longest tasks come first.
#pragma omp for schedule(dynamic, 1) nowait
            for (int64_t i = round.tasks[1] - 1; i >= 0; i--) {
                const Share& share = round.of(i, 1);
                const int64_t index = i - share.first[1];
                float* at = memory + share.memory;
                if (few) few_end(share.rows, index, at, place.joined);
                else many_rows(share.rows, index * most, std::min(most, share.rows.count - index * most), place, at);
            }
        }
        free(memory);
        return true;
    }

    // Computes the sequences of few rows, or those of many, in rounds that bound the memory.
    bool run_all(bool few) const {
        Round round;
        for (int64_t s = 0; s < a.sequences; s++)
            for (int64_t h = 0; h < a.kv_heads; h++) {
                const Rows rows(a, s, h);
                if (!rows.count || (rows.count <= FEW_ROWS) != few) continue;
                const int64_t chunks = rows.chunks(a), joined = chunks > 1 ? rows.count : 0;  // rows that need the second step
                const int64_t pieces = few ? joined : (rows.count + Path::ROWS_AT_ONCE - 1) / Path::ROWS_AT_ONCE;
                const int64_t floats = chunks * (few ? joined * row_size : packed_size());
                if (round.memory && round.memory + floats > ROUND_FLOATS) {
                    if (!run(round, few)) return false;
                    round = Round();
                }
                round.add(rows, chunks, pieces, (floats + 15) / 16 * 16);
            }
        return round.shares.empty() || run(round, few);
    }
};

// Returns 0, or 1 without memory.
template <class Path> int attend_rows(const Attention& a, int threads) {
    const Attending<Path> attending{a, threads};
    return attending.run_all(true) && attending.run_all(false) ? 0 : 1;
}
template <class Path> int attend_by(const Attention& a, int threads) {
    if constexpr (Path::ROTATED) {
        const int64_t vectors = a.starts[a.sequences] * a.kv_heads * a.group;
        std::unique_ptr<float[]> query(new (std::nothrow) float[size_t(vectors * a.head_dim)]);
        if (!query) return 1;
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1 && vectors > ALONE_VECTORS)
        for (int64_t i = 0; i < vectors; i++) {
            float* x = query.get() + i * a.head_dim;
            widen(a.query, a.query_type, i * a.head_dim, a.head_dim, x);
            rotate_vector(x, a.head_dim);
        }
        Attention rotated = a;
        rotated.query = query.get();
        rotated.query_type = F32;
        return attend_rows<Path>(rotated, threads);
    }
    return attend_rows<Path>(a, threads);
}
// Returns 0; 1: no memory; 2: lengths or block table out of range.
inline int attend_any(const Attention& a, int threads) try {
    if (!is_sound(a)) return 2;
#if AMX
    if (have_amx() && a.query_type == BF16 && !a.portable) {
        if (a.cache_type == CACHE_BF16) return attend_by<TilePath<uint16_t>>(a, threads);
        if (a.cache_type == CACHE_INT8) return attend_by<TilePath<int8_t>>(a, threads);
        if (a.cache_type == CACHE_INT4) return attend_by<TilePath<Int4>>(a, threads);
    }
#endif
#if BF16_PAIRS
    if (a.query_type == BF16 && !a.portable && a.head_dim % WIDE == 0) {
        if (a.cache_type == CACHE_BF16) return attend_by<PairPath<uint16_t>>(a, threads);
        if (a.cache_type == CACHE_INT8) return attend_by<PairPath<int8_t>>(a, threads);
    }
#endif
    if (a.cache_type == CACHE_INT8) return attend_by<FloatPath<int8_t>>(a, threads);
    if (a.cache_type == CACHE_INT4) return attend_by<FloatPath<Int4>>(a, threads);
    if (a.cache_type == CACHE_BF16) return attend_by<FloatPath<uint16_t>>(a, threads);
    return attend_by<FloatPath<float>>(a, threads);
} catch (const std::bad_alloc&) {
    return 1;
}

}  // namespace
