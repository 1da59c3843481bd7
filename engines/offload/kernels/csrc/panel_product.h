// Products of a few rows with panels of bfloat16 weights, by the CPU's units for bfloat16 or in float32.
//
// A panel holds kPanel rows of W[n, k]: pairs of columns one after the other, of each pair the two values of every row,
// as VDPBF16PS and TDPBF16PS take them. Elsewhere a pair's values are the halves of a 32-bit word, which a shift and a
// mask widen. The last panel's missing rows are zeros, as is the last pair's missing column.

#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "simd.h"

namespace {

constexpr int64_t kPanel = 16;           // rows of W in a panel

inline int64_t pairs_of(int64_t k) { return (k + 1) / 2; }
inline int64_t panels_of(int64_t n) { return (n + kPanel - 1) / kPanel; }

#ifdef __AVX512BF16__

using Activation = BFloat16;
constexpr int64_t kBlock = 8, kTogether = 3;  // 24 accumulators, three weights and an x of 32 registers

// sums[R, C panels] += x[R, pairs] times C panels, `apart` values from one to the next.
template <int R, int C>
void block(const Activation* x, int64_t ldx, const BFloat16* w, int64_t apart, int64_t pairs, float* sums,
           int64_t lds, bool first) {
  __m512 sum[R][C];
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
    for (int c = 0; c < C; ++c) sum[r][c] = first ? _mm512_setzero_ps() : _mm512_loadu_ps(sums + r * lds + c * kPanel);
  for (int64_t p = 0; p < pairs; ++p) {
    __m512bh weights[C];
#pragma GCC unroll 4
    for (int c = 0; c < C; ++c) {
      weights[c] = (__m512bh)_mm512_loadu_si512(w + c * apart + p * 2 * kPanel);
      if (R < kBlock) _mm_prefetch(reinterpret_cast<const char*>(w + c * apart + (p + 32) * 2 * kPanel), _MM_HINT_T0);
    }
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
      int32_t pair;
      std::memcpy(&pair, x + r * ldx + 2 * p, sizeof pair);
      const __m512bh values = (__m512bh)_mm512_set1_epi32(pair);
#pragma GCC unroll 4
      for (int c = 0; c < C; ++c) sum[r][c] = _mm512_dpbf16_ps(sum[r][c], values, weights[c]);
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
    for (int c = 0; c < C; ++c) _mm512_storeu_ps(sums + r * lds + c * kPanel, sum[r][c]);
}

#else

using Activation = float;
#ifdef __AVX512F__
constexpr int64_t kBlock = 12, kTogether = 1, kVector = 16;
#else
constexpr int64_t kBlock = 6, kTogether = 1, kVector = 8;  // twelve accumulators, two weights and an x of 16 registers
#endif
constexpr int64_t kVectors = kPanel / kVector;

typedef float Floats __attribute__((vector_size(kVector * 4)));
typedef uint32_t Words __attribute__((vector_size(kVector * 4)));

template <int R, int C>
void block(const Activation* x, int64_t ldx, const BFloat16* w, int64_t, int64_t pairs, float* sums, int64_t lds,
           bool first) {
  Floats sum[R][kVectors];
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 2
    for (int v = 0; v < kVectors; ++v) {
      sum[r][v] = Floats{};
      if (!first) std::memcpy(&sum[r][v], sums + r * lds + v * kVector, sizeof sum[r][v]);
    }
  for (int64_t p = 0; p < pairs; ++p, w += 2 * kPanel, x += 2) {
    Words both[kVectors];
    Floats left[kVectors], right[kVectors];
#pragma GCC unroll 2
    for (int v = 0; v < kVectors; ++v) {
      std::memcpy(&both[v], w + v * 2 * kVector, sizeof both[v]);
      left[v] = (Floats)(both[v] << 16), right[v] = (Floats)(both[v] & 0xffff0000u);
    }
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 2
      for (int v = 0; v < kVectors; ++v) sum[r][v] += x[r * ldx] * left[v];
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 2
      for (int v = 0; v < kVectors; ++v) sum[r][v] += x[r * ldx + 1] * right[v];
  }
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 2
    for (int v = 0; v < kVectors; ++v) std::memcpy(sums + r * lds + v * kVector, &sum[r][v], sizeof sum[r][v]);
}

#endif

// Pairs of columns that are multiplied at a time: 4 KiB of a row of x, so that a block of rows stays in the L1 cache.
constexpr int64_t kPairs = 2048 / sizeof(Activation);

// `block` for rows <= R and panels <= C.
template <int R, int C>
void any_block(int64_t rows, int64_t panels, const Activation* x, int64_t ldx, const BFloat16* w, int64_t apart,
               int64_t pairs, float* sums, int64_t lds, bool first) {
  if constexpr (R > 1)
    if (rows < R) return any_block<R - 1, C>(rows, panels, x, ldx, w, apart, pairs, sums, lds, first);
  if constexpr (C > 1)
    if (panels < C) return any_block<R, C - 1>(rows, panels, x, ldx, w, apart, pairs, sums, lds, first);
  block<R, C>(x, ldx, w, apart, pairs, sums, lds, first);
}

// sums[rows, panels] = x[rows, k] times up to kTogether panels. The order in which a value is summed depends on k alone.
inline void multiply_panels(const Activation* x, int64_t ldx, int64_t rows, const BFloat16* w, int64_t panels, int64_t k,
                            float* sums) {
  const int64_t pairs = pairs_of(k), apart = pairs * 2 * kPanel, lds = kTogether * kPanel;
  for (int64_t from = 0; from < pairs; from += kPairs) {
    const int64_t some = std::min(kPairs, pairs - from);
    for (int64_t r = 0; r < rows; r += kBlock)
      any_block<kBlock, kTogether>(std::min(kBlock, rows - r), panels, x + r * ldx + 2 * from, ldx,
                                   w + from * 2 * kPanel, apart, some, sums + r * lds, lds, from == 0);
  }
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
