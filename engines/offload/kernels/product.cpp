// out = start + x W^T in float32, with W as it is stored: no copy of W in float32 is ever written to memory.
//
// x is [m, k], out and start [m, n], rows `ldx`, `ldo` and `lds` apart (0: one row for all), start may be out itself
// or null, which is zeros; w is [n, k], row-major. A few panels of W, kWidth rows by kDepth columns each, are widened
// and transposed into the second-level cache and meet all rows of x, kRows at a time, in registers (Goto and van de
// Geijn 2008, "Anatomy of high-performance matrix multiplication", with the roles of the operands exchanged: the rows
// of x are many and already float32). Each value of `out` is summed in an order that depends on k alone, so it does
// not change with the rows that share the product.

#include <algorithm>

#include "lanes.h"

namespace {

constexpr int64_t kRows = 6;             // by two vectors: twelve sums, which with two weights and an x fill AVX2
constexpr int64_t kWidth = 2 * kLanes;   // rows of W in a panel
constexpr int64_t kDepth = 1024;         // columns of W in a panel: 64 KiB; 5 % faster than 512
constexpr int64_t kPanels = 2;           // that the rows of x meet while they are in the first-level cache
constexpr int64_t kAhead = 8;            // columns of a panel that are fetched before they are needed

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

// panel[depth][kWidth] from `rows` <= kWidth rows of W; rows that are not there are zeros.
template <typename T>
void unpack(const T* w, int64_t stride, int64_t rows, int64_t depth, float* panel) {
  for (int64_t j = 0; j < kWidth; j += kLanes)
    for (int64_t k = 0; k < depth; k += kLanes) {
      const int64_t count = std::min(kLanes, depth - k);
      Lanes r[kLanes] = {};
      for (int64_t i = 0; i < std::min(kLanes, rows - j); ++i) {
        const T* from = w + (j + i) * stride + k;
        r[i] = count == kLanes ? widen(from) : widen(from, count);
      }
      transpose(r);
      for (int64_t i = 0; i < count; ++i) store(panel + (k + i) * kWidth + j, r[i]);
    }
}

// R rows of x times a panel, into R x `width` of out.
template <int64_t R>
void tile(const float* x, int64_t ldx, const float* panel, int64_t depth, const float* start, int64_t lds, float* out,
          int64_t ldo, int64_t width) {
  Lanes sum[R][2] = {};
#pragma GCC unroll 4
  for (int64_t k = 0; k < depth; ++k) {
    __builtin_prefetch(panel + (k + kAhead) * kWidth);
    const Lanes low = load(panel + k * kWidth), high = load(panel + k * kWidth + kLanes);
#pragma GCC unroll 16
    for (int64_t i = 0; i < R; ++i) {
      sum[i][0] += x[i * ldx + k] * low;
      sum[i][1] += x[i * ldx + k] * high;
    }
  }
  for (int64_t i = 0; i < R; ++i) {
    const float* from = start + i * lds;
    float* to = out + i * ldo;
    if (width == kWidth) {
      store(to, start ? load(from) + sum[i][0] : sum[i][0]);
      store(to + kLanes, start ? load(from + kLanes) + sum[i][1] : sum[i][1]);
      continue;
    }
    for (int64_t j = 0; j < width; ++j) to[j] = (start ? from[j] : 0.0f) + sum[i][j / kLanes][j % kLanes];
  }
}

// `tile` for the `rows` <= R that are left at the end of x.
template <int64_t R>
void last_tile(int64_t rows, const float* x, int64_t ldx, const float* panel, int64_t depth, const float* start,
               int64_t lds, float* out, int64_t ldo, int64_t width) {
  if (rows == R) tile<R>(x, ldx, panel, depth, start, lds, out, ldo, width);
  else if constexpr (R > 1) last_tile<R - 1>(rows, x, ldx, panel, depth, start, lds, out, ldo, width);
}

template <typename T>
void product(const float* x, int64_t ldx, const T* w, const float* start, int64_t lds, float* out, int64_t ldo,
             int64_t m, int64_t n, int64_t k, int threads) {
  constexpr int64_t span = kPanels * kWidth;
#pragma omp parallel for schedule(dynamic) num_threads(threads)
  for (int64_t first = 0; first < n; first += span) {
    alignas(64) float panels[kPanels][kDepth * kWidth];
    const int64_t last = std::min(n, first + span);
    for (int64_t at = 0; at < k; at += kDepth) {
      const int64_t depth = std::min(kDepth, k - at);
      const float* from = at ? out : start;  // after the first part of k, the sum so far
      const int64_t apart = at ? ldo : lds;
      for (int64_t j = first, p = 0; j < last; j += kWidth, ++p)
        unpack(w + j * k + at, k, std::min(kWidth, last - j), depth, panels[p]);
      for (int64_t i = 0; i < m; i += kRows)
        for (int64_t j = first, p = 0; j < last; j += kWidth, ++p)
          last_tile<kRows>(std::min(kRows, m - i), x + i * ldx + at, ldx, panels[p], depth,
                           from ? from + i * apart + j : nullptr, apart, out + i * ldo + j, ldo,
                           std::min(kWidth, last - j));
    }
  }
}

}  // namespace

#define PRODUCT(name, type)                                                                                     \
  extern "C" void product_##name(const float* x, int64_t ldx, const type* w, const float* start, int64_t lds,   \
                                 float* out, int64_t ldo, int64_t m, int64_t n, int64_t k, int threads) {       \
    product(x, ldx, w, start, lds, out, ldo, m, n, k, threads);                                                 \
  }

PRODUCT(float32, float)
PRODUCT(bfloat16, BFloat16)
PRODUCT(float16, Float16)
