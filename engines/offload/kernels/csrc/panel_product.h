// Products of a few rows with panels of weights, by the CPU's units for bfloat16 or in float32.
//
// A panel holds kPanel rows of W[n, k]: pairs of columns one after the other, of each pair the two values of every row in
// bfloat16, as VDPBF16PS and TDPBF16PS take them. Elsewhere a pair's values are the halves of a 32-bit word, which a
// shift and a mask widen. The last panel's missing rows are zeros, as is the last pair's missing column.

#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "simd.h"

namespace {

constexpr int64_t kPanel = 16;         // rows of W in a panel
constexpr int64_t kPair = 2 * kPanel;  // values of a pair of columns

#ifdef __AVX512BF16__
using Activation = BFloat16;
constexpr int64_t kBlock = 8, kTogether = 3, kVector = 16;  // 24 accumulators, three weights and an x of 32 registers
#elif defined(__AVX512F__)
using Activation = float;
constexpr int64_t kBlock = 12, kTogether = 2, kVector = 16;  // 24 accumulators, four weights and an x of 32 registers
#else
using Activation = float;
constexpr int64_t kBlock = 6, kTogether = 1, kVector = 8;  // twelve accumulators, two weights and an x of 16 registers
#endif
constexpr int64_t kVectors = kPanel / kVector;

constexpr bool kInFloat32 = std::is_same_v<Activation, float>;
// Whether a block of R rows of x holds the R values of a column, then those of the next: a product reads one stream, and
// at addresses that need no registers. In bfloat16 the values of a row follow each other, as the units take them in
// pairs; AVX2, with blocks half as large, is no faster by it.
constexpr bool kInterleaved = kInFloat32 && kVectors == 1;

// Value `column` of row r of a block of R rows of x.
template <int R>
inline Activation value_at(const Activation* x, int64_t ldx, int r, int column) {
  return kInterleaved ? x[column * R + r] : x[r * ldx + column];
}

typedef float Floats __attribute__((vector_size(kVector * 4)));
typedef uint32_t Words __attribute__((vector_size(kVector * 4)));

inline int64_t pairs_of(int64_t k) { return (k + 1) / 2; }
inline int64_t panels_of(int64_t n) { return (n + kPanel - 1) / kPanel; }

inline Floats load_floats(const float* from) {
  Floats values;
  std::memcpy(&values, from, sizeof values);
  return values;
}

// a * b + c, rounded once where the CPU can. A compiler that may choose where to do so chooses differently from one
// instance of a template to the next, and a row's result would depend on how many rows there are.
inline Floats fused(Floats a, Floats b, Floats c) {
#if defined(__AVX512F__)
  return (Floats)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__FMA__)
  return (Floats)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
  return a * b + c;
#endif
}

inline void store_floats(float* to, Floats values) { std::memcpy(to, &values, sizeof values); }

// A block x[R, pairs] times C panels, `apart` values from one to the next: sum by sum from begin(row, column) to end(row,
// column, sum), for vectors of columns. Rows that are not interleaved are `ldx` values apart.
template <int R, int C, typename Begin, typename End>
inline __attribute__((always_inline)) void block(const Activation* x, int64_t ldx, const BFloat16* w, int64_t apart,
                                                 int64_t pairs, Begin begin, End end) {
  Floats sum[R][C * kVectors];
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
    for (int c = 0; c < C * kVectors; ++c) sum[r][c] = begin(r, c * kVector);
  for (int64_t p = 0; p < pairs; ++p, w += kPair, x += kInterleaved ? 2 * R : 2) {
#ifdef __AVX512BF16__
    __m512bh weights[C];
#pragma GCC unroll 4
    for (int c = 0; c < C; ++c) {
      weights[c] = (__m512bh)_mm512_loadu_si512(w + c * apart);
      if (R < kBlock) _mm_prefetch(reinterpret_cast<const char*>(w + c * apart + 32 * kPair), _MM_HINT_T0);
    }
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
      int32_t pair;
      std::memcpy(&pair, x + r * ldx, sizeof pair);
      const __m512bh values = (__m512bh)_mm512_set1_epi32(pair);
#pragma GCC unroll 4
      for (int c = 0; c < C; ++c) sum[r][c] = (Floats)_mm512_dpbf16_ps((__m512)sum[r][c], values, weights[c]);
    }
#else
    constexpr int64_t kAhead = R < kBlock ? 32 : 8;  // pairs, from memory and from the L2 cache
#pragma GCC unroll 4
    for (int c = 0; c < C; ++c) __builtin_prefetch(w + c * apart + kAhead * kPair);
    constexpr int kEach = C * kVectors;
    Floats left[kEach], right[kEach];
#pragma GCC unroll 4
    for (int v = 0; v < kEach; ++v) {
      Words both;
      std::memcpy(&both, w + v / kVectors * apart + v % kVectors * 2 * kVector, sizeof both);
      left[v] = (Floats)(both << 16), right[v] = (Floats)(both & 0xffff0000u);
    }
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
      for (int v = 0; v < kEach; ++v) sum[r][v] = fused(value_at<R>(x, ldx, r, 0) - Floats{}, left[v], sum[r][v]);
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
      for (int v = 0; v < kEach; ++v) sum[r][v] = fused(value_at<R>(x, ldx, r, 1) - Floats{}, right[v], sum[r][v]);
#endif
  }
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
    for (int c = 0; c < C * kVectors; ++c) end(r, c * kVector, sum[r][c]);
}

// Whether weights become float32 in the L1 cache once for many rows: with AVX2 to widen them for each block of rows takes
// as long as a third of its products.
constexpr bool kWidened = kInFloat32 && kVectors > 1;
constexpr int64_t kWidenedFrom = 2 * kBlock;  // rows from which that pays

// A block x[R, columns], whose rows are `ldx` values apart, times a panel of float32: columns of kPanel values. The sums
// are `block`'s, bit for bit.
template <int R, typename Begin, typename End>
inline __attribute__((always_inline)) void widened_block(const float* x, int64_t ldx, const float* w, int64_t columns,
                                                         Begin begin, End end) {
  Floats sum[R][kVectors];
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) sum[r][v] = begin(r, v * kVector);
#pragma GCC unroll 4
  for (int64_t k = 0; k < columns; ++k, w += kPanel) {
    Floats weights[kVectors];
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) weights[v] = load_floats(w + v * kVector);
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) sum[r][v] = fused(x[r * ldx + k] - Floats{}, weights[v], sum[r][v]);
  }
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) end(r, v * kVector, sum[r][v]);
}

// Calls visit with the numbers of rows and panels, up to kBlock and kTogether, as constants.
template <int R, int C, typename Visit>
void with_sizes(int64_t rows, int64_t panels, Visit visit) {
  if constexpr (R > 1)
    if (rows < R) return with_sizes<R - 1, C>(rows, panels, visit);
  if constexpr (C > 1)
    if (panels < C) return with_sizes<R, C - 1>(rows, panels, visit);
  visit(std::integral_constant<int, R>(), std::integral_constant<int, C>());
}

inline void round_to(float* out, float x) { *out = x; }

// To the nearest bfloat16, ties to even; NaN stays NaN.
inline void round_to(BFloat16* out, float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  out->bits = x != x ? 0x7fc0 : static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

inline float widened(float x) { return x; }

inline float widened(BFloat16 x) {
  const uint32_t bits = static_cast<uint32_t>(x.bits) << 16;
  float wide;
  std::memcpy(&wide, &bits, sizeof wide);
  return wide;
}

}  // namespace
