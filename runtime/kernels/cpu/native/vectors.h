// Vectors of floats: of 16, so that sums have one order everywhere, and of the machine's own width, where speed matters.

#pragma once

#include <math.h>

#include <utility>

#include "products/packed_layout.h"

namespace {

typedef float V16 __attribute__((vector_size(64), aligned(64)));
typedef int32_t I16 __attribute__((vector_size(64), aligned(64)));
constexpr int64_t LANE = 16;

inline V16 load16(const float* at) {
    V16 v;
    memcpy(&v, at, 64);
    return v;
}
inline V16 load16(const uint16_t* at) {
    typedef uint16_t Half __attribute__((vector_size(32)));
    typedef uint32_t Word __attribute__((vector_size(64)));
    Half half;
    memcpy(&half, at, 32);
    return (V16)(__builtin_convertvector(half, Word) << 16);
}
// Applies `op` to each part of x that fills a vector of the machine: GCC compiles comparisons and selections of wider vectors number
// by number.
template <class Op, class V, class... More> inline __attribute__((always_inline)) V in_parts(Op op, const V& x, const More&... more) {
    V y;
    for (int from = 0; from < int(sizeof y); from += VECTOR) {
        const auto part = [from](const V& v) __attribute__((always_inline)) {
            Floats floats;
            memcpy(&floats, reinterpret_cast<const char*>(&v) + from, sizeof floats);
            return floats;
        };
        const Floats result = op(part(x), part(more)...);
        memcpy(reinterpret_cast<char*>(&y) + from, &result, sizeof result);
    }
    return y;
}

// e^x for x <= 0, to 2 units in the last place; below -87 it is 0.
template <class V> inline V exponential(V x) {
    if constexpr (sizeof x > VECTOR) return in_parts([](Floats part) { return exponential(part); }, x);
    const V zero = {}, floor = zero - 87.0f, magic = zero + 12582912.0f;
    const auto underflow = x < floor;
    x = underflow ? floor : x;
    const V shifted = x * 1.44269504f + magic, n = shifted - magic;
    const V r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
    V y = r * 1.9875691500e-4f + 1.3981999507e-3f;
    y = y * r + 8.3334519073e-3f;
    y = y * r + 4.1665795894e-2f;
    y = y * r + 1.6666665459e-1f;
    y = y * r + 5.0000001201e-1f;
    y = y * r * r + r + 1.0f;
    typedef decltype(x < x) Bits;
    const Bits power = ((Bits)shifted - (Bits)magic + 127) << 23;
    const V result = y * (V)power;
    return underflow ? zero : result;
}

inline float sum_of(V16 v) {
    float total = 0;
    for (int i = 0; i < 16; i++) total += v[i];
    return total;
}

// ---- The machine's own width ----

#if defined(__AVX512F__)
constexpr int WIDE = 16;  // floats
#else
constexpr int WIDE = 8;
#endif
typedef float Wide __attribute__((vector_size(WIDE * 4)));
typedef int32_t WideInt __attribute__((vector_size(WIDE * 4)));
typedef uint32_t WideBits __attribute__((vector_size(WIDE * 4)));
typedef uint16_t WideHalf __attribute__((vector_size(WIDE * 2)));

// One rounding if the machine has it; explicit, since a compiler may contract one copy of a sum and not another.
template <class V> inline V multiply_add(V a, V b, V c) {
    if constexpr (sizeof a > VECTOR) return in_parts(fused, a, b, c);
    else return fused(a, b, c);
}
inline Wide spread(float x) {
#if defined(__AVX512F__)
    return _mm512_set1_ps(x);
#elif defined(__AVX__)
    return _mm256_set1_ps(x);
#else
    return Wide{x, x, x, x, x, x, x, x};
#endif
}
inline void put(float* to, Wide v) { memcpy(to, &v, sizeof v); }
inline Wide wide(const float* at) {
    Wide v;
    memcpy(&v, at, sizeof v);
    return v;
}
inline Wide wide(const uint16_t* at) {  // bf16
    WideHalf half;
    memcpy(&half, at, sizeof half);
    return (Wide)(__builtin_convertvector(half, WideBits) << 16);
}
inline Wide wide(const int8_t* at) {
#if defined(__AVX512F__)
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(at))));
#elif defined(__AVX2__)
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(at))));
#elif defined(__aarch64__)
    const int16x8_t words = vmovl_s8(vld1_s8(at));
    const float32x4_t parts[] = {vcvtq_f32_s32(vmovl_s16(vget_low_s16(words))), vcvtq_f32_s32(vmovl_high_s16(words))};
    return load_vector<Wide>(parts);
#else
    typedef int8_t Bytes __attribute__((vector_size(WIDE)));
    typedef int16_t Words __attribute__((vector_size(WIDE * 2)));
    return __builtin_convertvector(__builtin_convertvector(__builtin_convertvector(load_vector<Bytes>(at), Words), WideInt), Wide);
#endif
}
inline Wide wide(const void* from, int64_t index, int32_t type) {  // `type` of packed_layout.h
    Wide v;
    for (int i = 0; i < WIDE; i += LANES) {
        const Floats part = widen(from, index + i, type);
        memcpy(reinterpret_cast<float*>(&v) + i, &part, sizeof part);
    }
    return v;
}
// The first `count` values at `at`, then zeros; no byte after them is read.
template <class T> inline Wide first_of(const T* at, int64_t count) {
    T values[WIDE] = {};
    memcpy(values, at, size_t(count) * sizeof(T));
    return wide(values);
}
// The bits of bf16 in the upper half of each lane: to nearest, ties to even; NaN stays NaN.
template <class V> inline V rounded_to_bf16(V v) {
    if constexpr (sizeof v > VECTOR) return in_parts([](Floats part) { return rounded_to_bf16(part); }, v);
    typedef decltype(v != v) Bits;
    const Bits word = (Bits)v, near = word + 0x7fff + (word >> 16 & 1);
    return (V)(v != v ? word | 0x400000 : near);
}
inline WideHalf to_bf16(Wide v) { return __builtin_convertvector((WideBits)rounded_to_bf16(v) >> 16, WideHalf); }
inline void put(uint16_t* to, Wide v) {
    const WideHalf half = to_bf16(v);
    memcpy(to, &half, sizeof half);
}
template <class T> inline void put_first(T* to, Wide v, int64_t count) {
    T values[WIDE];
    put(values, v);
    memcpy(to, values, size_t(count) * sizeof(T));
}
inline float total(Wide v) {
    float sum = 0;
    for (int i = 0; i < WIDE; i++) sum += v[i];
    return sum;
}

// 2^x to 2 units in the last place, 0 below 2^-126; NaN stays NaN. By Cephes' polynomial for exp2f.
template <class V> inline V power_of_two(V x) {
    if constexpr (sizeof x > VECTOR) return in_parts([](Floats part) { return power_of_two(part); }, x);
    const V zero = {};
#if defined(__AVX512F__)
    const V n = _mm512_roundscale_ps(x, 0);
#else
    const V floor = zero - 126.0f, magic = zero + 12582912.0f;
    const auto underflow = x < floor;
    x = underflow ? floor : x;
    const V shifted = x + magic, n = shifted - magic;
#endif
    const V r = x - n;
    V y = multiply_add(r, zero + 1.535336188319500e-4f, zero + 1.339887440266574e-3f);
    y = multiply_add(y, r, zero + 9.618437357674640e-3f);
    y = multiply_add(y, r, zero + 5.550332471162809e-2f);
    y = multiply_add(y, r, zero + 2.402264791363012e-1f);
    y = multiply_add(y, r, zero + 6.931472028550421e-1f);
    y = multiply_add(y, r, zero + 1.0f);
#if defined(__AVX512F__)
    return _mm512_maskz_scalef_ps(_mm512_cmp_ps_mask(x, _mm512_set1_ps(-126.0f), _CMP_NLT_UQ), y, n);
#else
    typedef decltype(x < x) Bits;
    const Bits power = ((Bits)shifted - (Bits)magic + 127) << 23;
    return underflow ? zero : y * (V)power;
#endif
}

// Hyperbolic tangent to 3 units in the last place; by Cephes' polynomial for tanhf near 0.
template <class V> inline V tangent(V x) {
    if constexpr (sizeof x > VECTOR) return in_parts([](Floats part) { return tangent(part); }, x);
    const V zero = {}, size = x < 0.0f ? -x : x;
    const V e = power_of_two(size * -2.88539008f), far = (1.0f - e) / (1.0f + e), square = x * x;
    V y = multiply_add(square, zero - 5.70498872745e-3f, zero + 2.06390887954e-2f);
    y = multiply_add(y, square, zero - 5.37397155531e-2f);
    y = multiply_add(y, square, zero + 1.33314422036e-1f);
    y = multiply_add(y, square, zero - 3.33332819422e-1f);
    y = multiply_add(y * square, x, x);
    return size < 0.625f ? y : x < 0.0f ? -far : far;
}

// Lane by lane; b's where one is NaN.
template <class V> inline V larger(V a, V b) {
    if constexpr (sizeof a > VECTOR) return in_parts([](Floats a, Floats b) { return larger(a, b); }, a, b);
    else return a > b ? a : b;
}
template <class V> inline V smaller(V a, V b) {
    if constexpr (sizeof a > VECTOR) return in_parts([](Floats a, Floats b) { return smaller(a, b); }, a, b);
    else return a < b ? a : b;
}

// The largest lane.
template <int S, size_t... L> inline Wide greater_half(Wide v, std::index_sequence<L...>) {
    return larger(v, __builtin_shuffle(v, WideInt{int(L ^ S)...}));
}
inline float greatest(Wide v) {
    constexpr auto lanes = std::make_index_sequence<WIDE>();
    if constexpr (WIDE == 16) v = greater_half<8>(v, lanes);
    return greater_half<1>(greater_half<2>(greater_half<4>(v, lanes), lanes), lanes)[0];
}

// Transposes WIDE vectors, whatever their lanes hold.
template <int S, size_t... L> inline void exchange(Wide (&v)[WIDE], std::index_sequence<L...>) {
    constexpr WideInt lower{int(L & S ? WIDE + (L ^ S) : L)...}, upper{int(L & S ? WIDE + L : L ^ S)...};
#pragma GCC unroll 16
    for (int i = 0; i < WIDE; i++)
        if (!(i & S)) {
            const Wide a = v[i], b = v[i + S];
            v[i] = __builtin_shuffle(a, b, lower);
            v[i + S] = __builtin_shuffle(a, b, upper);
        }
}
inline void transpose(Wide (&v)[WIDE]) {
    constexpr auto lanes = std::make_index_sequence<WIDE>();
    if constexpr (WIDE == 16) exchange<8>(v, lanes);
    exchange<4>(v, lanes);
    exchange<2>(v, lanes);
    exchange<1>(v, lanes);
}

}  // namespace
