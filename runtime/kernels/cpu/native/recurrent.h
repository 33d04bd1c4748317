// Operations of recurrent layers with state: a convolution of each channel, the gated delta rule, Mamba's scan, gated norms.
//
// Rows are processed one after another in one order: the bits of a row depend on neither the other rows nor how a prompt was
// split. A piece of 16 or 32 columns of a head's state stays in the L1 cache while a whole prompt passes, so the plain recurrence
// costs less than the chunked form of matrix products.

#pragma once

#include "steps.h"

namespace {

struct Runs {  // mirrored by recurrent.py; all sequences of a pass
    const int32_t* starts;  // [runs + 1]: sequence s has the rows starts[s] .. starts[s + 1]
    const int32_t* slots;   // [runs]: slot of the state
    const uint8_t* stays;   // [runs]: the state must not change; null: all may
    int64_t runs;
    int32_t type;  // type of activations: F32 or BF16
};

struct Convolution {  // mirrored by recurrent.py
    const void* x;      // [rows, channels], stride in elements; channels a multiple of 16
    const float* weight;  // [taps, channels]
    const float* bias;    // [channels], or null
    float* state;         // [slots, taps - 1, channels], the oldest first
    void* y;              // [rows, channels]
    int64_t stride, channels, taps;
    int32_t silu;
};

constexpr int64_t MAX_TAPS = 64;
constexpr int64_t BLOCKS = 4, TILE_ROWS = 32;  // of LANE channels, and rows, convolved together

// LANE channels of rows [first, last); `ring` holds the last inputs, starting at `oldest`.
template <class T> inline void convolve_block(const Convolution& c, V16* ring, int64_t oldest, int64_t first, int64_t last, int64_t channel) {
    V16 weight[MAX_TAPS];
    for (int64_t i = 0; i < c.taps; i++) weight[i] = load16(c.weight + i * c.channels + channel);
    const V16 none = {}, bias = c.bias ? load16(c.bias + channel) : none;
    for (int64_t row = first; row < last; row++) {
        ring[oldest ? oldest - 1 : c.taps - 1] = load16(static_cast<const T*>(c.x) + row * c.stride + channel);
        V16 sum = bias;
        for (int64_t i = 0, at = oldest; i < c.taps; i++) {
            sum += ring[at] * weight[i];
            at = at + 1 == c.taps ? 0 : at + 1;
        }
        store16(static_cast<T*>(c.y) + row * c.channels + channel, c.silu ? silu(sum) : sum);
        oldest = oldest + 1 == c.taps ? 0 : oldest + 1;
    }
}

// `blocks` blocks of LANE channels of a sequence from `channel`: a few rows of each block in turn, so that the cache lines of the
// rows are read once.
template <class T> void convolve_channels(const Runs& r, const Convolution& c, int64_t run, int64_t channel, int64_t blocks) {
    const int64_t before = c.taps - 1, end = r.starts[run + 1];
    float* state = c.state + r.slots[run] * before * c.channels + channel;
    V16 ring[BLOCKS][MAX_TAPS];
    for (int64_t b = 0; b < blocks; b++)
        for (int64_t i = 0; i < before; i++) ring[b][i] = load16(state + i * c.channels + b * LANE);
    int64_t oldest = 0;
    for (int64_t first = r.starts[run]; first < end; first += TILE_ROWS) {
        const int64_t last = std::min(first + TILE_ROWS, end);
        for (int64_t b = 0; b < blocks; b++) convolve_block<T>(c, ring[b], oldest, first, last, channel + b * LANE);
        oldest = (oldest + last - first) % c.taps;
    }
    if (r.stays && r.stays[run]) return;
    for (int64_t b = 0; b < blocks; b++)
        for (int64_t i = 0; i < before; i++) store16(state + i * c.channels + b * LANE, ring[b][(oldest + i) % c.taps]);
}

struct Delta {  // mirrored by recurrent.py
    const void* qkv;    // [rows, 2 * key_heads * key_dim + heads * value_dim]
    const void* gates;  // [rows, heads + decays], stride in elements: b of every head, then a
    const float *rate, *dt_bias;  // [heads] and [decays]
    float* state;    // [slots, heads, key_dim, value_dim]
    float* scratch;  // [rows, 2 * key_heads * key_dim + heads + decays]
    void* y;         // [rows, heads * value_dim]
    int64_t stride, heads, key_heads, key_dim, value_dim;  // dims are multiples of 16, key_dim at most 256
    float beta_scale;    // multiplies beta
    float floor;         // if not 0, a decay is exp(floor * sigmoid(-rate * a))
    int32_t by_channel;  // each row of a state has its own decay, and each head its own key

    int64_t decays() const { return by_channel ? heads * key_dim : heads; }
    int64_t inputs() const { return 2 * key_heads * key_dim + heads + decays(); }
};

constexpr int64_t MAX_KEY_DIM = 256;

// log(1 + e^x), by the series of the inverse hyperbolic tangent of e / (2 + e), where e = e^-|x|.
template <class V> inline V softplus(V x) {
    if constexpr (sizeof x > VECTOR) return in_parts([](Floats part) { return softplus(part); }, x);
    const V zero = {}, e = exponential(x < 0 ? x : -x), s = e / (e + 2.0f), square = s * s;
    V y = square * (2.0f / 15) + 2.0f / 13;
    y = y * square + 2.0f / 11;
    y = y * square + 2.0f / 9;
    y = y * square + 2.0f / 7;
    y = y * square + 2.0f / 5;
    y = y * square + 2.0f / 3;
    y = y * square + 2.0f;
    return (x < 0 ? zero : x) + s * y;
}

// The decay of each key channel of a row.
template <class T> void channel_decays(const Delta& d, const T* a, float* out) {
    for (int64_t head = 0; head < d.heads; head++)
        for (int64_t i = head * d.key_dim; i < (head + 1) * d.key_dim; i += LANE) {
            const V16 step = load16(a + i) + load16(d.dt_bias + i), rate = V16{} + d.rate[head];
            store16(out + i, exponential(d.floor != 0.0f ? times_sigmoid(V16{} + d.floor, -rate * step) : rate * softplus(step)));
        }
}

// Normalizes the queries and keys of a row, the queries also by sqrt(key_dim), then exp(g) and beta of each head.
template <class T> void delta_inputs(const Delta& d, int64_t row) {
    const int64_t width = d.key_heads * d.key_dim;
    const T* x = static_cast<const T*>(d.qkv) + row * (2 * width + d.heads * d.value_dim);
    float* out = d.scratch + row * d.inputs();
    for (int64_t head = 0; head < 2 * d.key_heads; head++) {
        V16 sum = {};
        for (int64_t i = 0; i < d.key_dim; i += LANE) {
            const V16 v = load16(x + head * d.key_dim + i);
            sum += v * v;
        }
        float scale = 1.0f / sqrtf(sum_of(sum) + 1e-6f);
        if (head < d.key_heads) scale /= sqrtf(float(d.key_dim));
        for (int64_t i = 0; i < d.key_dim; i += LANE)
            store16(out + head * d.key_dim + i, load16(x + head * d.key_dim + i) * scale);
    }
    const T* gates = static_cast<const T*>(d.gates) + row * d.stride;
    float *decays = out + 2 * width, *betas = decays + d.decays();
    if (d.by_channel) channel_decays(d, gates + d.heads, decays);
    for (int64_t head = 0; head < d.heads; head++) {
        betas[head] = d.beta_scale / (1.0f + expf(-number(gates[head])));
        if (d.by_channel) continue;
        const float a = number(gates[d.heads + head]) + d.dt_bias[head];
        const float softplus = a > 20.0f ? a : log1pf(expf(a));  // threshold of torch's softplus
        decays[head] = expf(d.rate[head] * softplus);
    }
}

// Advances B times 16 columns of a head's state by all rows of a sequence.
template <class T, int B, bool BY_CHANNEL> void delta_columns(const Runs& r, const Delta& d, int64_t run, int64_t head, int64_t column) {
    const int64_t width = d.key_heads * d.key_dim, values = d.heads * d.value_dim;
    const int64_t key_head = head / (d.heads / d.key_heads);
    float* state = d.state + (r.slots[run] * d.heads + head) * d.key_dim * d.value_dim + column;
    V16 s[MAX_KEY_DIM][B];
    for (int64_t i = 0; i < d.key_dim; i++)
        for (int b = 0; b < B; b++) s[i][b] = load16(state + i * d.value_dim + b * LANE);
    for (int64_t row = r.starts[run]; row < r.starts[run + 1]; row++) {
        const float* in = d.scratch + row * d.inputs();
        const float *query = in + key_head * d.key_dim, *key = query + width;
        const float* decays = in + 2 * width + head * (BY_CHANNEL ? d.key_dim : 1);
        const float decay = decays[0], beta = in[2 * width + d.decays() + head];
        const T* value = static_cast<const T*>(d.qkv) + row * (2 * width + values) + 2 * width + head * d.value_dim + column;
        V16 recalled[4][B] = {}, read[4][B] = {}, written[B];
        for (int64_t i = 0; i < d.key_dim; i += 4)
            for (int64_t j = 0; j < 4; j++)
                for (int b = 0; b < B; b++) {
                    if (BY_CHANNEL) s[i + j][b] *= decays[i + j];
                    recalled[j][b] += s[i + j][b] * key[i + j];
                }
        for (int b = 0; b < B; b++) {
            const V16 all = (recalled[0][b] + recalled[1][b]) + (recalled[2][b] + recalled[3][b]);
            written[b] = (load16(value + b * LANE) - (BY_CHANNEL ? all : all * decay)) * beta;
        }
        for (int64_t i = 0; i < d.key_dim; i += 4)
            for (int64_t j = 0; j < 4; j++)
                for (int b = 0; b < B; b++) {
                    s[i + j][b] = (BY_CHANNEL ? s[i + j][b] : s[i + j][b] * decay) + written[b] * key[i + j];
                    read[j][b] += s[i + j][b] * query[i + j];
                }
        for (int b = 0; b < B; b++)
            store16(static_cast<T*>(d.y) + row * values + head * d.value_dim + column + b * LANE,
                    (read[0][b] + read[1][b]) + (read[2][b] + read[3][b]));
    }
    if (r.stays && r.stays[run]) return;
    for (int64_t i = 0; i < d.key_dim; i++)
        for (int b = 0; b < B; b++) store16(state + i * d.value_dim + b * LANE, s[i][b]);
}

struct GatedNorm {  // mirrored by recurrent.py
    const void *x, *gain, *gate;  // [rows, heads * size], [size] of the same type, and as x with a stride in elements
    void* y;                      // as x
    int64_t rows, heads, size, stride;  // size is a multiple of 16
    float eps;
    int32_t silu;
};

// RMSNorm of each head of a row, times SiLU(gate) or its sigmoid, rounded once.
template <class T> void gated_norm_row(const GatedNorm& n, int64_t row) {
    const T* gain = static_cast<const T*>(n.gain);
    for (int64_t head = 0; head < n.heads; head++) {
        const int64_t at = (row * n.heads + head) * n.size;
        const T *x = static_cast<const T*>(n.x) + at, *gate = static_cast<const T*>(n.gate) + row * n.stride + head * n.size;
        V16 sum = {};
        for (int64_t i = 0; i < n.size; i += LANE) {
            const V16 v = load16(x + i);
            sum += v * v;
        }
        const float root = 1.0f / sqrtf(sum_of(sum) / float(n.size) + n.eps);
        for (int64_t i = 0; i < n.size; i += LANE)
            store16(static_cast<T*>(n.y) + at + i, load16(x + i) * root * load16(gain + i) *
                    times_sigmoid(n.silu ? load16(gate + i) : V16{} + 1.0f, load16(gate + i)));
    }
}

struct Scan {  // mirrored by recurrent.py
    const void* x;      // [rows, heads * head_dim + 2 * groups * state_dim]: x, B and C
    const void* steps;  // [rows, heads], by channel [rows, head_dim], stride in elements
    const float *rate, *dt_bias, *skip;  // [heads]; by channel [state_dim, head_dim], then [head_dim]
    float* state;    // [slots, heads, state_dim, head_dim]
    float* scratch;  // [rows, 2 * (groups * state_dim + heads)]
    void* y;         // [rows, heads * head_dim]
    int64_t stride, heads, groups, head_dim, state_dim;  // dims are multiples of 16, state_dim at most 256
    float low, high;  // limits of a step
    int32_t by_channel;  // a step of each column of a state, and a rate of each value; one head (Mamba-1)
};

// B and C of a row in fp32, then the decay of each head, and its step.
template <class T> void scan_inputs(const Scan& s, int64_t row) {
    const int64_t inner = s.heads * s.head_dim, width = 2 * s.groups * s.state_dim;
    const T* x = static_cast<const T*>(s.x) + row * (inner + width) + inner;
    const T* steps = static_cast<const T*>(s.steps) + row * s.stride;
    float* out = s.scratch + row * (width + 2 * s.heads);
    for (int64_t i = 0; i < width; i += LANE) store16(out + i, load16(x + i));
    if (s.by_channel) return;  // the steps of 16 columns are computed with these
    for (int64_t head = 0; head < s.heads; head++) {
        const float t = number(steps[head]) + s.dt_bias[head];
        const float softplus = t > 20.0f ? t : log1pf(expf(t));  // threshold of torch's softplus
        const float step = std::min(std::max(softplus, s.low), s.high);
        out[width + head] = expf(s.rate[head] * step);
        out[width + s.heads + head] = step;
    }
}

// Advances B times 16 columns of a head's state by all rows of a sequence.
template <class T, int B> void scan_columns(const Runs& r, const Scan& s, int64_t run, int64_t head, int64_t column) {
    const int64_t inner = s.heads * s.head_dim, width = s.groups * s.state_dim, group = head / (s.heads / s.groups);
    float* state = s.state + (r.slots[run] * s.heads + head) * s.state_dim * s.head_dim + column;
    V16 at[MAX_KEY_DIM][B];
    for (int64_t i = 0; i < s.state_dim; i++)
        for (int b = 0; b < B; b++) at[i][b] = load16(state + i * s.head_dim + b * LANE);
    for (int64_t row = r.starts[run]; row < r.starts[run + 1]; row++) {
        const float* in = s.scratch + row * 2 * (width + s.heads);
        const float *key = in + group * s.state_dim, *query = key + width;
        const float decay = in[2 * width + head], step = in[2 * width + s.heads + head];
        const T* x = static_cast<const T*>(s.x) + row * (inner + 2 * width) + head * s.head_dim + column;
        V16 value[B], written[B], read[4][B] = {};
        for (int b = 0; b < B; b++) value[b] = load16(x + b * LANE), written[b] = value[b] * step;
        for (int64_t i = 0; i < s.state_dim; i += 4)
            for (int64_t j = 0; j < 4; j++)
                for (int b = 0; b < B; b++) {
                    at[i + j][b] = at[i + j][b] * decay + written[b] * key[i + j];
                    read[j][b] += at[i + j][b] * query[i + j];
                }
        for (int b = 0; b < B; b++)
            store16(static_cast<T*>(s.y) + row * inner + head * s.head_dim + column + b * LANE,
                    (read[0][b] + read[1][b]) + (read[2][b] + read[3][b]) + value[b] * s.skip[head]);
    }
    if (r.stays && r.stays[run]) return;
    for (int64_t i = 0; i < s.state_dim; i++)
        for (int b = 0; b < B; b++) store16(state + i * s.head_dim + b * LANE, at[i][b]);
}

// As `scan_columns`, by channel: in vectors of columns, whose steps and rates differ.
template <class T, int B> void scan_channels(const Runs& r, const Scan& s, int64_t run, int64_t column) {
    float* state = s.state + r.slots[run] * s.state_dim * s.head_dim + column;
    V16 at[MAX_KEY_DIM][B], shift[B], skip[B];
    for (int64_t i = 0; i < s.state_dim; i++)
        for (int b = 0; b < B; b++) at[i][b] = load16(state + i * s.head_dim + b * LANE);
    for (int b = 0; b < B; b++) shift[b] = load16(s.dt_bias + column + b * LANE), skip[b] = load16(s.skip + column + b * LANE);
    for (int64_t row = r.starts[run]; row < r.starts[run + 1]; row++) {
        const float *key = s.scratch + row * 2 * (s.state_dim + 1), *query = key + s.state_dim;
        const T* x = static_cast<const T*>(s.x) + row * (s.head_dim + 2 * s.state_dim) + column;
        const T* steps = static_cast<const T*>(s.steps) + row * s.stride + column;
        V16 value[B], step[B], written[B], read[4][B] = {};
        for (int b = 0; b < B; b++) {
            value[b] = load16(x + b * LANE), step[b] = softplus(load16(steps + b * LANE) + shift[b]);
            step[b] = in_parts([&](Floats v) { return v < s.low ? Floats{} + s.low : v > s.high ? Floats{} + s.high : v; }, step[b]);
            written[b] = value[b] * step[b];
        }
        for (int64_t i = 0; i < s.state_dim; i += 4)
            for (int64_t j = 0; j < 4; j++)
                for (int b = 0; b < B; b++) {
                    const V16 decay = exponential(load16(s.rate + (i + j) * s.head_dim + column + b * LANE) * step[b]);
                    at[i + j][b] = at[i + j][b] * decay + written[b] * key[i + j];
                    read[j][b] += at[i + j][b] * query[i + j];
                }
        for (int b = 0; b < B; b++)
            store16(static_cast<T*>(s.y) + row * s.head_dim + column + b * LANE,
                    (read[0][b] + read[1][b]) + (read[2][b] + read[3][b]) + value[b] * skip[b]);
    }
    if (r.stays && r.stays[run]) return;
    for (int64_t i = 0; i < s.state_dim; i++)
        for (int b = 0; b < B; b++) store16(state + i * s.head_dim + b * LANE, at[i][b]);
}

struct GroupNorm {  // mirrored by recurrent.py
    const void *x, *gain, *gate;  // [rows, groups * size], [groups * size] of the same type, and as x with a stride in elements
    void* y;                      // as x
    int64_t rows, groups, size, stride;  // size is a multiple of 16
    float eps;
};

// RMSNorm of each group of a row times SiLU(gate), rounded once.
template <class T> void group_norm_row(const GroupNorm& n, int64_t row) {
    for (int64_t group = 0; group < n.groups; group++) {
        const int64_t first = group * n.size, at = row * n.groups * n.size + first;
        const T *x = static_cast<const T*>(n.x) + at, *gate = static_cast<const T*>(n.gate) + row * n.stride + first;
        const T* gain = static_cast<const T*>(n.gain) + first;
        V16 sum = {};
        for (int64_t i = 0; i < n.size; i += LANE) {
            const V16 v = load16(x + i) * silu(load16(gate + i));
            sum += v * v;
        }
        const float root = 1.0f / sqrtf(sum_of(sum) / float(n.size) + n.eps);
        for (int64_t i = 0; i < n.size; i += LANE)
            store16(static_cast<T*>(n.y) + at + i, load16(x + i) * silu(load16(gate + i)) * root * load16(gain + i));
    }
}

template <class T, int B> void scan_piece(const Runs& r, const Scan& s, int64_t run, int64_t head, int64_t column) {
    s.by_channel ? scan_channels<T, B>(r, s, run, column) : scan_columns<T, B>(r, s, run, head, column);
}
template <class T> void scan_rows(const Runs& r, const Scan& s, int threads) {
    const bool wide = s.head_dim % (2 * LANE) == 0;
    const int64_t width = wide ? 2 * LANE : LANE, columns = s.head_dim / width, tasks = r.runs * s.heads * columns;
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
#pragma omp for schedule(static)
        for (int64_t row = r.starts[0]; row < r.starts[r.runs]; row++) scan_inputs<T>(s, row);
#pragma omp for schedule(static)
        for (int64_t i = 0; i < tasks; i++) {
            const int64_t run = i / (s.heads * columns), head = i / columns % s.heads, column = i % columns * width;
            wide ? scan_piece<T, 2>(r, s, run, head, column) : scan_piece<T, 1>(r, s, run, head, column);
        }
    }
}
template <class T> void group_norm_rows(const GroupNorm& n, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1)
    for (int64_t row = 0; row < n.rows; row++) group_norm_row<T>(n, row);
}

template <class T> void convolve_rows(const Runs& r, const Convolution& c, int threads) {
    const int64_t blocks = c.channels / LANE, groups = (blocks + BLOCKS - 1) / BLOCKS;
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1)
    for (int64_t i = 0; i < r.runs * groups; i++) {
        const int64_t block = i % groups * BLOCKS;
        convolve_channels<T>(r, c, i / groups, block * LANE, std::min(BLOCKS, blocks - block));
    }
}
template <class T, int B> void delta_piece(const Runs& r, const Delta& d, int64_t run, int64_t head, int64_t column) {
    d.by_channel ? delta_columns<T, B, true>(r, d, run, head, column) : delta_columns<T, B, false>(r, d, run, head, column);
}
template <class T> void delta_rows(const Runs& r, const Delta& d, int threads) {
    const bool wide = d.value_dim % (2 * LANE) == 0;
    const int64_t width = wide ? 2 * LANE : LANE, columns = d.value_dim / width, tasks = r.runs * d.heads * columns;
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
#pragma omp for schedule(static)
        for (int64_t row = r.starts[0]; row < r.starts[r.runs]; row++) delta_inputs<T>(d, row);
#pragma omp for schedule(static)
        for (int64_t i = 0; i < tasks; i++) {
            const int64_t run = i / (d.heads * columns), head = i / columns % d.heads, column = i % columns * width;
            wide ? delta_piece<T, 2>(r, d, run, head, column) : delta_piece<T, 1>(r, d, run, head, column);
        }
    }
}
template <class T> void gated_norm_rows(const GatedNorm& n, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1)
    for (int64_t row = 0; row < n.rows; row++) gated_norm_row<T>(n, row);
}

}  // namespace
