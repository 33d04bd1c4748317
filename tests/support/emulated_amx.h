// AMX in plain code, for a processor that has AVX-512 alone: included before everything else (`-include`), with what a
// compiler defines where there is AMX, it takes the place of the instructions that packed_tiles.h would have.
//
// Follows Intel's Software Developer's Manual (LDTILECFG, TILELOADD, TDPBSSD, TDPBF16PS), but for denormal numbers, which
// the instructions take for zero; and AVX512-BF16's conversions, which machines with AMX have.

#pragma once

#include <immintrin.h>
#include <stdint.h>
#include <string.h>

#define __AMX_TILE__ 1
#define __AMX_INT8__ 1
#define __AMX_BF16__ 1

namespace emulated_amx {

struct Config {
    uint8_t palette, start, reserved[14];
    uint16_t bytes[16];
    uint8_t rows[16];
};

struct Tiles {
    Config config;
    alignas(64) uint8_t tile[8][16][64];

    void zero(int t) { memset(tile[t], 0, sizeof tile[t]); }
    void load(int t, const void* base, int64_t stride) {
        zero(t);
        for (int row = 0; row < config.rows[t]; row++)
            memcpy(tile[t][row], static_cast<const uint8_t*>(base) + row * stride, config.bytes[t]);
    }
    void store(int t, void* base, int64_t stride) const {
        for (int row = 0; row < config.rows[t]; row++)
            memcpy(static_cast<uint8_t*>(base) + row * stride, tile[t][row], config.bytes[t]);
    }
    // The 4 bytes of column n of a row, as D or as an array of them.
    template <class D> D get(int t, int row, int n) const {
        D value;
        memcpy(&value, tile[t][row] + 4 * n, 4);
        return value;
    }
    template <class D> void put(int t, int row, int n, D value) { memcpy(tile[t][row] + 4 * n, &value, 4); }

    void dot_bytes(int sum, int a, int b) {
        struct Four {
            int8_t at[4];
        };
        for (int m = 0; m < config.rows[sum]; m++)
            for (int n = 0; n < config.bytes[sum] / 4; n++) {
                int32_t total = get<int32_t>(sum, m, n);
                for (int k = 0; k < config.bytes[a] / 4; k++) {
                    const Four x = get<Four>(a, m, k), y = get<Four>(b, k, n);
                    for (int i = 0; i < 4; i++) total += x.at[i] * y.at[i];
                }
                put(sum, m, n, total);
            }
    }
    void dot_halves(int sum, int a, int b) {
        struct Pair {
            uint16_t at[2];
            float number(int i) const {
                const uint32_t word = uint32_t(at[i]) << 16;
                float value;
                memcpy(&value, &word, 4);
                return value;
            }
        };
        for (int m = 0; m < config.rows[sum]; m++)
            for (int n = 0; n < config.bytes[sum] / 4; n++) {
                float even = 0, odd = 0;
                for (int k = 0; k < config.bytes[a] / 4; k++) {
                    const Pair x = get<Pair>(a, m, k), y = get<Pair>(b, k, n);
                    even = __builtin_fmaf(x.number(0), y.number(0), even), odd = __builtin_fmaf(x.number(1), y.number(1), odd);
                }
                put(sum, m, n, get<float>(sum, m, n) + (even + odd));
            }
    }
};

inline thread_local Tiles tiles;

}  // namespace emulated_amx

#define TILES_GRANTED() true
#define TILE_CONFIGURE(from) memcpy(&emulated_amx::tiles.config, from, sizeof emulated_amx::tiles.config)
#define TILE_RELEASE() memset(&emulated_amx::tiles.config, 0, sizeof emulated_amx::tiles.config)
#define TILE_ZERO(t) emulated_amx::tiles.zero(t)
#define TILE_LOAD(t, base, stride) emulated_amx::tiles.load(t, base, stride)
#define TILE_STORE(base, stride, t) emulated_amx::tiles.store(t, base, stride)
#define TILE_DOT_S8(sum, a, b) emulated_amx::tiles.dot_bytes(sum, a, b)
#define TILE_DOT_BF16(sum, a, b) emulated_amx::tiles.dot_halves(sum, a, b)
// Used where vectors.h is known.
#define _mm512_cvtneps_pbh(values) ((__m256bh)to_bf16(Wide(values)))
#define _mm512_cvtne2ps_pbh(high, low) \
    ((__m512bh)_mm512_inserti64x4(_mm512_castsi256_si512((__m256i)to_bf16(Wide(low))), (__m256i)to_bf16(Wide(high)), 1))
