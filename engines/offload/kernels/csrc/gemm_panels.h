// The GEMM micro-kernel: a few float32 rows times a panel of float32 values, in registers. gemm.cpp and the prompt path
// of attention.cpp are built from it.

#pragma once

#include <algorithm>

#include "simd.h"

namespace {

#ifdef __AVX512F__
constexpr int64_t kRows = 12, kWideLanes = 16;  // twelve accumulators hide the latency of an addition
#else
constexpr int64_t kRows = 6, kWideLanes = 8;  // times two vectors: twelve accumulators, two weights and an x fill AVX2
#endif
constexpr int64_t kWidth = 16;           // rows of W in a panel
constexpr int64_t kWides = kWidth / kWideLanes;
typedef float Wide __attribute__((vector_size(kWideLanes * 4)));

inline Wide load_wide(const float* from) {
  Wide values;
  std::memcpy(&values, from, sizeof values);
  return values;
}

constexpr int64_t kAhead = 8;            // columns of a panel to prefetch ahead

// Transposes eight vectors in place.
void transpose(Lanes* r) {
  Lanes s[8], t[8];
  for (int i = 0; i < 8; i += 2) {
    s[i] = SHUFFLE(r[i], r[i + 1], 0, 8, 2, 10, 4, 12, 6, 14);
    s[i + 1] = SHUFFLE(r[i], r[i + 1], 1, 9, 3, 11, 5, 13, 7, 15);
  }
  for (int i : {0, 1, 4, 5}) {
    t[i] = SHUFFLE(s[i], s[i + 2], 0, 1, 8, 9, 4, 5, 12, 13);
    t[i + 2] = SHUFFLE(s[i], s[i + 2], 2, 3, 10, 11, 6, 7, 14, 15);
  }
  for (int i = 0; i < 4; ++i) {
    r[i] = SHUFFLE(t[i], t[i + 4], 0, 1, 2, 3, 8, 9, 10, 11);
    r[i + 4] = SHUFFLE(t[i], t[i + 4], 4, 5, 6, 7, 12, 13, 14, 15);
  }
}

// Transposes and widens `rows` <= kWidth rows of stored values, `row(i)` each, into panel[depth][kWidth]; missing rows
// become zeros.
template <typename Row>
void unpack(int64_t rows, int64_t depth, float* panel, Row row) {
  for (int64_t j = 0; j < kWidth; j += kLanes)
    for (int64_t k = 0; k < depth; k += kLanes) {
      const int64_t count = std::min(kLanes, depth - k);
      Lanes r[kLanes] = {};
      for (int64_t i = 0; i < std::min(kLanes, rows - j); ++i) {
        const auto from = row(j + i) + k;
        r[i] = count == kLanes ? widen(from) : widen(from, count);
      }
      transpose(r);
      for (int64_t i = 0; i < count; ++i) store(panel + (k + i) * kWidth + j, r[i]);
    }
}

// out[R, width] = start[R, width] + x[R, depth] times a panel; null `start` is zeros.
template <int64_t R>
void tile(const float* x, int64_t ldx, const float* panel, int64_t depth, const float* start, int64_t lds, float* out,
          int64_t ldo, int64_t width) {
  Wide sum[R][kWides] = {};
#pragma GCC unroll 4
  for (int64_t k = 0; k < depth; ++k) {
    __builtin_prefetch(panel + (k + kAhead) * kWidth);
    Wide values[kWides];
    for (int64_t v = 0; v < kWides; ++v) values[v] = load_wide(panel + k * kWidth + v * kWideLanes);
#pragma GCC unroll 16
    for (int64_t i = 0; i < R; ++i)
#pragma GCC unroll 2
      for (int64_t v = 0; v < kWides; ++v) sum[i][v] += x[i * ldx + k] * values[v];
  }
  for (int64_t i = 0; i < R; ++i) {
    const float* from = start + i * lds;
    float* to = out + i * ldo;
    if (width == kWidth) {
      for (int64_t v = 0; v < kWides; ++v) {
        const Wide total = start ? load_wide(from + v * kWideLanes) + sum[i][v] : sum[i][v];
        std::memcpy(to + v * kWideLanes, &total, sizeof total);
      }
      continue;
    }
    for (int64_t j = 0; j < width; ++j) to[j] = (start ? from[j] : 0.0f) + sum[i][j / kWideLanes][j % kWideLanes];
  }
}

// `tile` for `rows` <= R rows: the end of x may have fewer than R.
template <int64_t R>
void last_tile(int64_t rows, const float* x, int64_t ldx, const float* panel, int64_t depth, const float* start,
               int64_t lds, float* out, int64_t ldo, int64_t width) {
  if (rows == R) tile<R>(x, ldx, panel, depth, start, lds, out, ldo, width);
  else if constexpr (R > 1) last_tile<R - 1>(rows, x, ldx, panel, depth, start, lds, out, ldo, width);
}

}  // namespace
