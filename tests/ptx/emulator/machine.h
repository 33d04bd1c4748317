// What translated kernels are made of: lanes, warps, programs (CTAs), and the instructions that are not one expression.
#include <algorithm>
#include <cmath>
#include <csignal>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <string>
#include <ucontext.h>
#include <unordered_map>
#include <vector>

typedef uint8_t u8;
typedef int8_t s8;
typedef uint16_t u16;
typedef int16_t s16;
typedef uint32_t u32;
typedef int32_t s32;
typedef uint64_t u64;
typedef int64_t s64;
typedef float f32;
typedef double f64;
typedef unsigned __int128 u128;

// The lanes of the warp that execute a statement: bit l of m.
#define ALL for (int l = 0; l < 32; l++) if (m >> l & 1)
#define SHARED (CURRENT->program->shared)
#define SHARED_BYTES (CURRENT->program->bytes)

enum State { READY, AT_BARRIER, DONE };

struct Copy {  // of `size` bytes, of which all but `kept` become zero
  u32 target;
  const u8* source;
  u32 size, kept;
};
struct Program;
struct Warp {
  ucontext_t context;
  char* stack;
  State state;
  int number;
  Program* program;
  std::vector<std::vector<Copy>> copies[32];  // groups of each lane, the last one open
  u32 id;                                     // among all warps of the launch
  std::vector<u32> clock;                     // with RACE: what of each warp is known to have happened
};
struct Program {
  u32 x, y, z, bytes, number;
  u8* shared;
  std::vector<Warp*> warps;
};

static ucontext_t SCHEDULER;
static Warp* CURRENT;
static u32 THREADS, GRID_X, GRID_Y, GRID_Z;
static u64 RANDOM;
static void** PARAMETERS;
static char FAILURE[256];

static u32 random32() {  // xorshift64 (Marsaglia 2003)
  RANDOM ^= RANDOM << 13;
  RANDOM ^= RANDOM >> 7;
  RANDOM ^= RANDOM << 17;
  return (u32)(RANDOM >> 16);
}
static void give_turn(State state) {
  Warp* warp = CURRENT;
  warp->state = state;
  swapcontext(&warp->context, &SCHEDULER);
}
static void fail(const char* what) {  // the launch ends; this fiber does not go on
  if (!FAILURE[0]) snprintf(FAILURE, sizeof FAILURE, "%s", what);
  for (;;) give_turn(DONE);
}

static void fail_launch(const char* what) {  // as `fail`, outside of a warp
  if (!FAILURE[0]) snprintf(FAILURE, sizeof FAILURE, "%s", what);
}

// An access of global memory that faults fails the launch; with `guard.cpp` every access next to a tensor does.
static const char* STATEMENT = "";
#define AT(text) STATEMENT = text;
static void outside(int) {
  char text[200];
  snprintf(text, sizeof text, "access outside of all tensors: %s", STATEMENT);
  fail(text);
}

static inline f32 as_f32(u32 x) { f32 y; memcpy(&y, &x, 4); return y; }
static inline u32 from_f32(f32 x) { u32 y; memcpy(&y, &x, 4); return y; }
static inline f64 as_f64(u64 x) { f64 y; memcpy(&y, &x, 8); return y; }
static inline u64 from_f64(f64 x) { u64 y; memcpy(&y, &x, 8); return y; }
static inline f32 as_f16(u16 x) { _Float16 y; memcpy(&y, &x, 2); return (f32)y; }
static inline u16 from_f16(f32 x) { _Float16 y = (_Float16)x; u16 z; memcpy(&z, &y, 2); return z; }
static inline f32 as_bf16(u16 x) { return as_f32((u32)x << 16); }
static inline u16 from_bf16(f32 x) {
  u32 u = from_f32(x);
  if ((u & 0x7fffffff) > 0x7f800000) return 0x7fff;
  return (u + 0x7fff + (u >> 16 & 1)) >> 16;
}
typedef f32 (*Widen)(u16);

static inline u32 prmt(u32 a, u32 b, u32 selector) {
  u64 both = (u64)b << 32 | a;
  u32 r = 0;
  for (int i = 0; i < 4; i++) {
    u32 n = selector >> 4 * i & 15, byte = both >> 8 * (n & 7) & 255;
    if (n & 8) byte = byte & 128 ? 255 : 0;
    r |= byte << 8 * i;
  }
  return r;
}
static inline u32 lop3(u32 a, u32 b, u32 c, u32 table) {
  u32 r = 0;
  for (int i = 0; i < 8; i++)
    if (table >> i & 1) r |= (i & 4 ? a : ~a) & (i & 2 ? b : ~b) & (i & 1 ? c : ~c);
  return r;
}
static inline u32 bfe_u32(u32 a, u32 place, u32 count) {
  place &= 255, count &= 255;
  if (!count || place > 31) return 0;
  return count >= 32 ? a >> place : a >> place & ((1u << count) - 1);
}
static inline u32 bfe_s32(u32 a, u32 place, u32 count) {
  place &= 255, count &= 255;
  if (!count) return 0;
  u32 sign = a >> std::min(place + count - 1, 31u) & 1, r = 0;
  for (u32 i = 0; i < 32; i++) r |= (i < count && place + i < 32 ? a >> (place + i) & 1 : sign) << i;
  return r;
}
static inline u32 bfi(u32 field, u32 into, u32 place, u32 count) {
  place &= 255, count &= 255;
  if (!count || place > 31) return into;
  u32 mask = (count >= 32 ? ~0u : (1u << count) - 1) << place;
  return (field << place & mask) | (into & ~mask);
}
// Shifts past the width give zero, or the sign.
template <class T> static inline T shift_left(T a, u32 n) { return n >= 8 * sizeof(T) ? 0 : (T)(a << n); }
template <class T> static inline T shift_right(T a, u32 n) {
  return n >= 8 * sizeof(T) ? (a < 0 ? (T)-1 : (T)0) : (T)(a >> n);
}
static inline f32 larger(f32 a, f32 b) { return std::isnan(a) ? b : std::isnan(b) ? a : std::max(a, b); }
static inline f32 smaller(f32 a, f32 b) { return std::isnan(a) ? b : std::isnan(b) ? a : std::min(a, b); }
template <class T> static inline T to_integer(f64 x) {
  if (std::isnan(x)) return 0;
  f64 low = (f64)std::numeric_limits<T>::min(), high = (f64)std::numeric_limits<T>::max();
  return x <= low ? std::numeric_limits<T>::min() : x >= high ? std::numeric_limits<T>::max() : (T)x;
}

// With COUNT, what each instruction that touches memory costs: wavefronts of shared memory (the most words of one bank,
// for each part of a warp that is served together) and 32-byte sectors of global memory, beside the least that the same
// bytes need. NOTE is of one lane, SETTLE of the whole instruction.
struct Cost {
  u64 requests, made, least;
};
#ifdef COUNT
static Cost COSTS[2][STATEMENTS];  // shared, global
static std::vector<u64> NOTED[2];
#define NOTE(space, at) NOTED[space].push_back(at);
#define FORGET NOTED[0].clear(), NOTED[1].clear();
#define SETTLE(statement, size) settle_shared(COSTS[0][statement], size), settle_global(COSTS[1][statement], size);

static void settle_shared(Cost& cost, u32 size) {
  auto& noted = NOTED[0];
  if (noted.empty()) return;
  cost.requests++;
  size_t together = size >= 16 ? 8 : size == 8 ? 16 : 32;
  for (size_t first = 0; first < noted.size(); first += together) {
    std::vector<u64> words;
    for (size_t i = first; i < std::min(noted.size(), first + together); i++)
      for (u32 word = 0; word < std::max(1u, size / 4); word++) words.push_back(noted[i] / 4 + word);
    std::sort(words.begin(), words.end());
    words.erase(std::unique(words.begin(), words.end()), words.end());
    u64 banks[32] = {}, most = 0;
    for (u64 word : words) most = std::max(most, ++banks[word % 32]);
    cost.made += most, cost.least += (words.size() + 31) / 32;
  }
  noted.clear();
}
static void settle_global(Cost& cost, u32 size) {
  auto& noted = NOTED[1];
  if (noted.empty()) return;
  cost.requests++;
  std::sort(noted.begin(), noted.end());
  noted.erase(std::unique(noted.begin(), noted.end()), noted.end());
  u64 sectors = 0, bytes = 0, last = ~0ull, end = 0;
  for (u64 at : noted) {
    for (u64 sector = at / 32; sector <= (at + size - 1) / 32; sector++)
      if (sector != last) sectors++, last = sector;
    bytes += at + size - std::max(at, std::min(end, at + size)), end = at + size;
  }
  cost.made += sectors, cost.least += (bytes + 31) / 32;
  noted.clear();
}
extern "C" const Cost* costs(int space) { return COSTS[space]; }
extern "C" void forget_costs() { memset(COSTS, 0, sizeof COSTS); }
#else
#define NOTE(space, at)
#define FORGET
#define SETTLE(statement, size)
#endif

// With RACE, two accesses of a byte of memory of which one writes, by warps that nothing orders, are an error. An
// asynchronous copy writes from where it begins to where it is waited for: both count.
// What orders warps are barriers of their program, and an atomic that releases before one that acquires at the same place
// (vector clocks; a warp counts as one thread). Atomics do not race with each other.
enum Access { READ, WRITE, ATOMIC };
#ifdef RACE
struct Shadow {
  u32 writer = 0, wrote = 0;  // warp and its time; 0: nobody has written
  bool atomic = false;
  std::vector<std::pair<u32, u32>> reads;
};
static std::unordered_map<u64, Shadow> SHADOW;
static std::unordered_map<u64, std::vector<u32>> RELEASED;  // by place
struct Again {  // a byte of shared memory that two warps write in no order
  u8* at;
  u8 before;
};
static std::vector<Again> AGAIN;
static Access KIND;
static bool ACQUIRES, RELEASES;
#define KIND_OF(kind, acquires, releases) KIND = kind, ACQUIRES = acquires, RELEASES = releases;

static void join(std::vector<u32>& clock, const std::vector<u32>& other) {
  clock.resize(std::max(clock.size(), other.size()));
  for (size_t i = 0; i < other.size(); i++) clock[i] = std::max(clock[i], other[i]);
}
static bool known(u32 warp, u32 time) { return CURRENT->clock[warp] >= time; }
static void race(bool shared, const char* what) {
  char text[128];
  snprintf(text, sizeof text, "a race: %s%s", what, shared ? ", in shared memory" : "");
  fail(text);
}
static void touch(u64 at, u32 size, bool shared) {
  if (ACQUIRES) join(CURRENT->clock, RELEASED[at]);
  for (u64 byte = at; byte < at + size; byte++) {
    Shadow& shadow = SHADOW[byte];
    bool both_atomic = shadow.atomic && KIND == ATOMIC;
    if (shadow.wrote && !both_atomic && !known(shadow.writer, shadow.wrote)) {
      if (KIND == READ) race(shared, "a read that nothing orders after a write");
      if (!shared) race(shared, "two writes in no order");
      AGAIN.push_back({(u8*)byte, *(u8*)byte});
    }
    if (KIND == READ) {
      auto& reads = shadow.reads;
      reads.erase(std::remove_if(reads.begin(), reads.end(), [](auto& read) { return known(read.first, read.second); }),
                  reads.end());
      reads.push_back({CURRENT->id, CURRENT->clock[CURRENT->id]});
      continue;
    }
    for (auto& read : shadow.reads)
      if (!known(read.first, read.second)) race(shared, "a write that nothing orders after a read");
    shadow.reads.clear();
    shadow.writer = CURRENT->id, shadow.wrote = CURRENT->clock[CURRENT->id], shadow.atomic = KIND == ATOMIC;
  }
  if (RELEASES) {
    join(RELEASED[at], CURRENT->clock);
    CURRENT->clock[CURRENT->id]++;
  }
}
// After a store: warps with the same results may write the same bytes of shared memory in any order.
static void same_again() {
  for (auto& again : AGAIN)
    if (*again.at != again.before) race(true, "two writes in no order");
  AGAIN.clear();
}
// The shared memory of a program that has ended may be another's.
static void forget_shared(const u8* shared, u32 bytes) {
  for (u32 byte = 0; byte < bytes; byte++) SHADOW.erase((u64)shared + byte);
}
#define TOUCH(at, size, shared) touch(at, size, shared);
#define SAME_AGAIN same_again();
#else
#define SAME_AGAIN
#define KIND_OF(kind, acquires, releases)
#define TOUCH(at, size, shared)
#endif
static u64 WRITES;  // of all programs: without any, those that wait do so for nobody

static inline u8* in_shared(u32 at, u32 size) {
  NOTE(0, at)
  if (at % size) fail("misaligned access of shared memory");
  if ((u64)at + size > SHARED_BYTES) fail("access beyond the shared memory of the launch");
  TOUCH((u64)(SHARED + at), size, true)
  return SHARED + at;
}
static inline u8* in_global(u64 at, u32 size) {
  NOTE(1, at)
  if (at % size) fail("misaligned access of global memory");
  TOUCH(at, size, false)
  *(volatile u8*)at, *(volatile u8*)(at + size - 1);  // here, and not when a copy arrives
  return (u8*)at;
}

// Asynchronous copies are done when they are waited for, as late as they may be.
static void commit(int lane) { CURRENT->copies[lane].emplace_back(); }
static void copy_later(int lane, u32 target, u64 source, u32 size, u32 kept) {
  KIND_OF(WRITE, 0, 0)
  in_shared(target, size);
  KIND_OF(READ, 0, 0)
  if (kept) in_global(source, size);
  auto& groups = CURRENT->copies[lane];
  if (groups.empty()) groups.emplace_back();
  groups.back().push_back({target, (const u8*)source, size, kept});
}
static void wait_copies(int lane, u32 left) {
  auto& groups = CURRENT->copies[lane];
  while (!groups.empty() && groups.size() - 1 > left) {
    KIND_OF(WRITE, 0, 0)
    for (auto& one : groups[0]) {
      TOUCH((u64)(SHARED + one.target), one.size, true)
      memset(SHARED + one.target, 0, one.size);
      memcpy(SHARED + one.target, one.source, one.kept);
      SAME_AGAIN
    }
    groups.erase(groups.begin());
  }
}

static void whole_warp(u32 m, const char* what) {
  if (m != 0xffffffffu) fail(what);
}

// D = A B + C with A 16 x K, B K x 8: fragments as in the PTX ISA, "mma.m16n8k16 with floating point type".
static void mma(u32** a, int count_a, u32** b, int count_b, u32** c, u32** d, Widen widen, int k) {
  f32 left[16][16], right[16][8], sum[16][8];
  for (int l = 0; l < 32; l++) {
    int group = l >> 2, lane = l & 3;
    for (int i = 0; i < count_a; i++)
      for (int half = 0; half < 2; half++)
        left[group + 8 * (i % 2)][2 * lane + 8 * (i / 2) + half] = widen((u16)(a[i][l] >> 16 * half));
    for (int i = 0; i < count_b; i++)
      for (int half = 0; half < 2; half++) right[2 * lane + 8 * i + half][group] = widen((u16)(b[i][l] >> 16 * half));
    for (int i = 0; i < 4; i++) sum[group + 8 * (i / 2)][2 * lane + i % 2] = as_f32(c[i][l]);
  }
  for (int row = 0; row < 16; row++)
    for (int column = 0; column < 8; column++) {
      f32 product = 0;
      for (int i = 0; i < k; i++) product += left[row][i] * right[i][column];
      sum[row][column] += product;
    }
  for (int l = 0; l < 32; l++)
    for (int i = 0; i < 4; i++) d[i][l] = from_f32(sum[(l >> 2) + 8 * (i / 2)][2 * (l & 3) + i % 2]);
}

// Where element (row, column) of a 16-bit matrix lies that a wgmma descriptor describes ("matrix descriptor format").
static inline u32 described(u64 descriptor, int row, int column, int transposed) {
  u32 start = (descriptor & 0x3fff) << 4, leading = (descriptor >> 16 & 0x3fff) << 4;
  u32 stride = (descriptor >> 32 & 0x3fff) << 4, mode = descriptor >> 62;
  if (descriptor >> 49 & 7) fail("a wgmma descriptor with a base offset");
  if (!mode) fail("a wgmma descriptor without swizzling");
  u32 bytes = mode == 1 ? 128 : mode == 2 ? 64 : 32, width = bytes / 2, at;
  if (transposed)
    at = start + row % width * 2 + column % 8 * bytes + row / width * leading + column / 8 * stride;
  else
    at = start + row % 8 * bytes + row / 8 * stride + 2 * column;
  u32 swizzled = mode == 1 ? 7 : mode == 2 ? 3 : 1;
  return at ^ (at >> 7 & swizzled) << 4;
}
static f32 from_shared(u32 at, Widen widen) {
  u16 bits;
  memcpy(&bits, in_shared(at, 2), 2);
  return widen(bits);
}
// The share of a warp in D[64 x n] = A B (+ D), A of registers or described.
static void wgmma(u32** d, int n, u32** a, u64 a_at, int a_transposed, u64 b_at, int b_transposed, bool add, Widen widen) {
  static f32 left[16][16], right[16][256];
  int first = 16 * (CURRENT->number % 4);
  if (a)
    for (int l = 0; l < 32; l++)
      for (int i = 0; i < 4; i++)
        for (int half = 0; half < 2; half++)
          left[(l >> 2) + 8 * (i % 2)][2 * (l & 3) + 8 * (i / 2) + half] = widen((u16)(a[i][l] >> 16 * half));
  else
    for (int row = 0; row < 16; row++)
      for (int k = 0; k < 16; k++) left[row][k] = from_shared(described(a_at, first + row, k, a_transposed), widen);
  for (int column = 0; column < n; column++)
    for (int k = 0; k < 16; k++) right[k][column] = from_shared(described(b_at, column, k, b_transposed), widen);
  for (int l = 0; l < 32; l++)
    for (int i = 0; i < n / 2; i++) {
      int row = (l >> 2) + 8 * (i / 2 % 2), column = 8 * (i / 4) + 2 * (l & 3) + i % 2;
      f32 product = 0;
      for (int k = 0; k < 16; k++) product += left[row][k] * right[k][column];
      d[i][l] = from_f32(product + (add ? as_f32(d[i][l]) : 0.0f));
    }
}

// Matrices of 8 x 8 16-bit elements to and from shared memory; lane 8 i + r has the address of row r of matrix i.
static void move_matrices(u32** registers, int count, const u32* rows, bool transposed, bool load) {
  for (int i = 0; i < count; i++)
    for (int l = 0; l < 32; l++)
      for (int half = 0; half < 2; half++) {
        int row = transposed ? 2 * (l & 3) + half : l >> 2, column = transposed ? l >> 2 : 2 * (l & 3) + half;
        u16* place = (u16*)in_shared(rows[8 * i + row] + 2 * column, 2);
        u32& word = registers[i][l];
        if (load)
          word = half ? (word & 0xffff) | (u32)*place << 16 : (word & 0xffff0000) | *place;
        else
          *place = word >> 16 * half;
      }
}
