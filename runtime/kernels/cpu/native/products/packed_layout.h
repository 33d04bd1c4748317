// The layout of repacked weights, their scales, the number formats, and vectors, shared by all paths of packed_cpu.cpp.
//
// Layout. A block is 16 output rows times 32 inputs: exactly `bits` vectors of 64 bytes, in the order [rows / 16][inputs /
// 32][bits][16 lanes of 32 bits]. A code is split into fields of 8, 4, 2 or 1 bits, the lowest bits first (3 is 2 + 1, 5 is 4 +
// 1, 6 is 4 + 2); a field of P bits has P vectors. Lane j is row j; word p of it holds the inputs 2r+p; pair r = 2q+h is in
// vector q * P / 8 of its field, at bit 8h + P * (q % (8 / P)). So one shift and one mask of bytes yield the codes of four inputs
// (a "four", q) of each row, an operand of a byte dot product; the same on words yields a pair of inputs, an operand of a word
// dot product. Scales are [rows / 16][groups][16] in their own type, offsets (none, or one per scale) fp32. In super-blocks both
// are bytes, and their factors are [rows / 16][inputs / 256][scales', offsets'][16] of fp16. Rows past the last are zero.

#pragma once

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <algorithm>
#include <type_traits>

#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif
#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif
#if defined(__AVX512VNNI__) && defined(__AVX512BW__)
#define WIDTH 64  // bytes of a vector in integer dot products
#elif defined(__AVX2__)
#define WIDTH 32
#elif defined(__ARM_FEATURE_DOTPROD)
#define WIDTH 16
#endif
#if defined(__AVX512BW__) && defined(__AVX512VL__)
#define VECTOR 64  // bytes of a vector everywhere else
#elif defined(__AVX2__) && defined(__FMA__)
#define VECTOR 32
#else
#define VECTOR 16
#endif
#if defined(__AMX_BF16__) && defined(__AMX_INT8__) && VECTOR == 64 && defined(__linux__)
#define AMX 1
#endif
// Declarations outside the unnamed namespace are shared by several translation units.
#define EXPORT extern "C" __attribute__((visibility("default")))

struct Weight {  // mirrored by build.py
    const uint8_t* codes;
    const void* scales;
    const void* offsets;  // or null
    const void* factors;  // or null; F16 of super-blocks, whose scales and offsets are I8, or F32 pairs of rows, whose scales are E4M3
    int64_t rows, inputs, group;
    int32_t bits, scale_type;
    int32_t kind;  // of the codes: `bits` of integers, or a table (`scales` of E2M1 are halved)
    int32_t activations;  // bits of the integers that bf16 activations become: 16 or 8
    float unit;  // times a factor and an integer, this is a scale
};

namespace {

enum Type : int32_t { F32 = 0, BF16 = 1, F16 = 2, I8 = 3, E4M3 = 4, HALF_E8M0 = 5 };  // the last two: of scales, never negative

constexpr int ROWS = 16, INPUTS = 32, PAIRS = INPUTS / 2, FOURS = INPUTS / 4;
constexpr int64_t SUPER_BLOCK = 256;  // inputs that share a factor of their scales
// AMD's processors with bf16 dot products: Zen 5 has AVX-VNNI.
#if defined(BF16_DOT) && defined(__AVXVNNI__)
constexpr bool ZEN4 = false, ZEN5 = true;
#elif defined(BF16_DOT)
constexpr bool ZEN4 = true, ZEN5 = false;
#else
constexpr bool ZEN4 = false, ZEN5 = false;
#endif
// Bytes prefetched ahead of a stream of codes: of a panel; of few rows, which do little work per byte; and of few rows with codes of
// 8 bits, which Zen 4 reads faster without.
constexpr int64_t AHEAD = 2048;
constexpr int64_t FAR_AHEAD = ZEN4 ? 4096 : 8192, BYTE_CODES_AHEAD = ZEN4 ? 0 : FAR_AHEAD;

inline int64_t blocks_of(int64_t rows) { return (rows + ROWS - 1) / ROWS; }

inline float from_bf16(uint16_t bits) {
    const uint32_t word = uint32_t(bits) << 16;
    float value;
    memcpy(&value, &word, 4);
    return value;
}

inline uint16_t to_bf16(float value) {  // to nearest, ties to even; NaN stays NaN
    uint32_t word;
    memcpy(&word, &value, 4);
    if (value != value) return uint16_t((word >> 16) | 64);
    return uint16_t((word + 0x7fff + ((word >> 16) & 1)) >> 16);
}

inline float from_f16(uint16_t bits) {
#if defined(__F16C__)
    return _cvtsh_ss(bits);
#elif defined(__aarch64__)
    __fp16 half;
    memcpy(&half, &bits, 2);
    return half;
#else
    const uint32_t sign = uint32_t(bits & 0x8000) << 16, exponent = (bits >> 10) & 31, fraction = bits & 1023;
    uint32_t word = sign | (exponent == 31 ? 0x7f800000u | (fraction << 13) : ((exponent + 112) << 23) | (fraction << 13));
    if (exponent == 0) {
        const float small = float(fraction) * 0x1p-24f;
        memcpy(&word, &small, 4);
        word |= sign;
    }
    float value;
    memcpy(&value, &word, 4);
    return value;
#endif
}

inline uint16_t to_f16(float value) {
#if defined(__F16C__)
    return uint16_t(_cvtss_sh(value, 0));
#elif defined(__aarch64__)
    const __fp16 half = __fp16(value);
    uint16_t bits;
    memcpy(&bits, &half, 2);
    return bits;
#else
    uint32_t word;
    memcpy(&word, &value, 4);
    const uint16_t sign = uint16_t((word >> 16) & 0x8000);
    const uint32_t magnitude = word & 0x7fffffff;
    if (magnitude > 0x7f800000) return sign | 0x7e00;
    if (magnitude >= 0x47800000) return sign | 0x7c00;
    if (magnitude < 0x38800000) {  // below the smallest normal number: a multiple of 2^-24, rounded by the addition
        float small;
        memcpy(&small, &magnitude, 4);
        small += 0.5f;
        memcpy(&word, &small, 4);
        return sign | uint16_t(word - 0x3f000000);
    }
    return sign | uint16_t((magnitude - 0x38000000 + 0xfff + ((magnitude >> 13) & 1)) >> 13);
#endif
}

inline void store(void* out, int32_t type, int64_t index, float value) {
    if (type == F32) static_cast<float*>(out)[index] = value;
    else static_cast<uint16_t*>(out)[index] = type == BF16 ? to_bf16(value) : to_f16(value);
}

// ---- Vectors: of the machine's width, or of SSE's, which compilers map to what there is ----

constexpr int LANES = VECTOR / 4, PARTS = ROWS / LANES;  // lanes of a vector; vectors of a row block
typedef uint16_t Words __attribute__((vector_size(VECTOR), aligned(VECTOR)));
typedef int32_t Ints __attribute__((vector_size(VECTOR), aligned(VECTOR)));
typedef float Floats __attribute__((vector_size(VECTOR), aligned(VECTOR)));

template <class V> inline V load_vector(const void* at) {
    V v;
    memcpy(&v, at, sizeof v);
    return v;
}

// a * b + c with one rounding if the machine has it; explicit, so that every path rounds alike.
inline Floats fused(Floats a, Floats b, Floats c) {
#if VECTOR == 64
    return (Floats)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif VECTOR == 32
    return (Floats)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__aarch64__)
    return (Floats)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
    return a * b + c;
#endif
}

inline Floats spread_lanes(float x) {
#if VECTOR == 64
    return (Floats)_mm512_set1_ps(x);
#elif VECTOR == 32
    return (Floats)_mm256_set1_ps(x);
#else
    return Floats{x, x, x, x};
#endif
}

// A number of `type`; of E4M3, that divided by 2^8: its bits are those of an fp16. Of HALF_E8M0, 2^(byte - 127) / 2.
inline float widen_one(const void* from, int64_t index, int32_t type) {
    if (type >= I8) {
        const uint8_t byte = static_cast<const uint8_t*>(from)[index];
        const uint32_t word = byte ? uint32_t(byte) << 23 : 1 << 22;
        float power;
        memcpy(&power, &word, 4);
        return type == I8 ? float(int8_t(byte)) : type == HALF_E8M0 ? power * 0.5f : from_f16(uint16_t(byte << 7));
    }
    const uint16_t half = static_cast<const uint16_t*>(from)[index];
    return type == BF16 ? from_bf16(half) : from_f16(half);
}

// The fp32 vector of such numbers from index `index`.
inline Floats widen(const void* from, int64_t index, int32_t type) {
    const auto* byte = static_cast<const int8_t*>(from) + index;
    const auto* half = static_cast<const uint16_t*>(from) + index;
    if (type == F32) return load_vector<Floats>(static_cast<const float*>(from) + index);
#if VECTOR == 64
    const auto words = [&] { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(half)); };
    if (type == I8) return (Floats)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(byte))));
    if (type == BF16) return (Floats)_mm512_slli_epi32(_mm512_cvtepu16_epi32(words()), 16);
    if (type == F16) return (Floats)_mm512_cvtph_ps(words());
    const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(byte));
    if (type == E4M3) return (Floats)_mm512_cvtph_ps(_mm256_slli_epi16(_mm256_cvtepu8_epi16(bytes), 7));
    const __m512i power = _mm512_max_epi32(_mm512_slli_epi32(_mm512_cvtepu8_epi32(bytes), 23), _mm512_set1_epi32(1 << 22));
    return (Floats)power * 0.5f;
#elif VECTOR == 32 && defined(__F16C__)
    const auto words = [&] { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(half)); };
    if (type == I8) return (Floats)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(byte))));
    if (type == BF16) return (Floats)_mm256_slli_epi32(_mm256_cvtepu16_epi32(words()), 16);
    if (type == F16) return (Floats)_mm256_cvtph_ps(words());
    const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(byte));
    if (type == E4M3) return (Floats)_mm256_cvtph_ps(_mm_slli_epi16(_mm_cvtepu8_epi16(bytes), 7));
    const __m256i power = _mm256_max_epi32(_mm256_slli_epi32(_mm256_cvtepu8_epi32(bytes), 23), _mm256_set1_epi32(1 << 22));
    return (Floats)power * 0.5f;
#elif defined(__aarch64__)
    if (type == I8) return Floats{float(byte[0]), float(byte[1]), float(byte[2]), float(byte[3])};
    if (type == BF16) return (Floats)vshlq_n_u32(vmovl_u16(vld1_u16(half)), 16);
    if (type == F16) return (Floats)vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(half)));
    return Floats{widen_one(byte, 0, type), widen_one(byte, 1, type), widen_one(byte, 2, type), widen_one(byte, 3, type)};
#else
    Floats to;
    for (int j = 0; j < LANES; j++) to[j] = widen_one(from, index + j, type);
    return to;
#endif
}

inline void store_row(void* out, int32_t type, int64_t index, const float* from, int64_t count) {
    if (type == F32) memcpy(static_cast<float*>(out) + index, from, size_t(count) * sizeof *from);
    else if (type == BF16)
        for (int64_t j = 0; j < count; j++) static_cast<uint16_t*>(out)[index + j] = to_bf16(from[j]);
    else
        for (int64_t j = 0; j < count; j++) static_cast<uint16_t*>(out)[index + j] = to_f16(from[j]);
}

// ---- Codes ----

template <int P> constexpr int field_mask = (1 << P) - 1;

// Bits [place, place + P) of 16-bit codes, from the field of P bits at `shift` of each word; `mask` selects them.
inline __attribute__((always_inline)) Words cut_field(Words v, int shift, int place, uint16_t mask) {
    const Words moved = shift > place ? v >> uint16_t(shift - place) : shift < place ? v << uint16_t(place - shift) : v;
    return mask == 0xffff ? moved : moved & mask;
}

// B is the number of bits of a code, plus 16 times the number of a table of 16 or 8: E2M1, or one of ggml's codebook types. The
// values of those, and twice those of E2M1, are integers, so their products are those of integers: a byte from the table replaces
// the code.
constexpr int E2M1 = 16 + 4, IQ4 = 32 + 4, IQ3_XXS = 48 + 4, IQ3_S = 64 + 4, IQ2 = 80 + 3, IQ1 = 96 + 3;
template <int B> constexpr bool TABLE = B >= 16;
template <int B> constexpr int STORED = B & 15;  // bits
// Tables of the numbers that replace codes: the values of `INTEGER_TABLES` plus ZERO.
constexpr int ZEROS[] = {12, 128, 64, 16, 64, 16};
alignas(16) constexpr uint8_t NUMBERS[][16] = {
    {12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0},
    {1, 24, 45, 63, 79, 93, 106, 118, 129, 141, 153, 166, 181, 197, 217, 241},
    {2, 12, 20, 28, 36, 44, 52, 60, 68, 76, 84, 92, 100, 108, 116, 126},
    {1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31},
    {21, 21, 39, 56, 72, 89, 107, 107},
    {7, 7, 9, 15, 17, 23, 25, 25}};
constexpr int largest_of(const uint8_t (&numbers)[16]) {
    int largest = 0;
    for (const uint8_t number : numbers) largest = number > largest ? number : largest;
    return largest;
}
template <int B> constexpr int ZERO = TABLE<B> ? ZEROS[B / 16 - 1] : 1 << (B - 1);  // subtracted from a number of `numbers` to get the signed value
template <int B> constexpr int LARGEST = TABLE<B> ? largest_of(NUMBERS[B / 16 - 1]) : (1 << B) - 1;  // of these numbers

struct Table {
    alignas(16) uint8_t of[16];
};
constexpr Table table_from(int kind, int zero) {
    Table table = {};
    for (int i = 0; i < 16; i++) table.of[i] = uint8_t(NUMBERS[kind][i] - zero);
    return table;
}
// The numbers of a table minus FROM, as bytes.
template <int B, int FROM> constexpr Table NUMBERS_FROM = table_from(B / 16 - 1, FROM);

// A vector V of codes in bytes, as numbers from 0, minus FROM.
template <int B, int FROM = 0, class V> inline __attribute__((always_inline)) V numbers(V codes) {
    if constexpr (TABLE<B>) {
        typedef uint8_t Sixteen __attribute__((vector_size(16)));
        const uint8_t* const table = NUMBERS_FROM<B, FROM>.of;
#if defined(__AVX512BW__)
        if constexpr (sizeof(V) == 64) return (V)_mm512_shuffle_epi8(_mm512_broadcast_i32x4(load_vector<__m128i>(table)), (__m512i)codes);
#endif
#if defined(__AVX2__)
        if constexpr (sizeof(V) == 32) return (V)_mm256_shuffle_epi8(_mm256_broadcastsi128_si256(load_vector<__m128i>(table)), (__m256i)codes);
#endif
        if constexpr (sizeof(V) == 16) return (V)__builtin_shuffle(load_vector<Sixteen>(table), (Sixteen)codes);
    }
    typedef int8_t Signed __attribute__((vector_size(sizeof(V))));
    return FROM ? (V)((Signed)codes - int8_t(FROM)) : codes;
}

// Calls use(bits of the field, its first vector, its position in the code) for each field of B bits.
template <int B, class Use> inline __attribute__((always_inline)) void each_field(Use use) {
    if constexpr (B == 8) use(std::integral_constant<int, 8>(), 0, 0);
    else {
        if constexpr (B & 4) use(std::integral_constant<int, 4>(), 0, 0);
        if constexpr (B & 2) use(std::integral_constant<int, 2>(), B & 4, B & 4);
        if constexpr (B & 1) use(std::integral_constant<int, 1>(), B & 6, B & 6);
    }
}

// The codes of four q of a block in the bytes of each lane, for the rows of vector `part`, as numbers from 0, minus FROM.
template <int B, class V, int FROM = 0> inline __attribute__((always_inline)) V four_numbers(const uint8_t* block, int q, int part) {
    V code = {};
    each_field<B>([&](auto bits, int first, int place) __attribute__((always_inline)) {
        constexpr int P = bits.value;
        const V v = load_vector<V>(block + 64 * (first + q * P / 8) + int(sizeof(V)) * part);
        const int shift = P * (q % (8 / P));
        const V moved = shift > place ? v >> uint16_t(shift - place) : shift < place ? v << uint16_t(place - shift) : v;
        code |= P == 8 ? moved : moved & uint16_t((field_mask<P> << place) * 0x101);
    });
    return numbers<B, FROM>(code);
}

template <int B> inline __attribute__((always_inline)) void prefetch(const uint8_t* block) {
#pragma GCC unroll 8
    for (int v = 0; v < STORED<B>; v++) __builtin_prefetch(block + 64 * v + AHEAD);
}
// Numbers of pair r of a block, as words, for the rows of vector `part`.
template <int B> inline __attribute__((always_inline)) Words pair_of(const uint8_t* block, int r, int part) {
    Words code = {};
    each_field<B>([&](auto bits, int first, int place) __attribute__((always_inline)) {
        constexpr int P = bits.value;
        const int q = r / 2, h = r % 2;
        const Words v = load_vector<Words>(block + 64 * (first + q * P / 8) + VECTOR * part);
        code |= cut_field(v, 8 * h + P * (q % (8 / P)), place, uint16_t(field_mask<P> << place));
    });
    return numbers<B>(code) & (TABLE<B> ? 255 : 65535);
}

}  // namespace
