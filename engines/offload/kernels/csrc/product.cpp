// out = start + x W^T in float32, with W as it is stored: no copy of W in float32 is ever written to memory.
//
// x is [m, k], out and start [m, n], rows `ldx`, `ldo` and `lds` apart (0: one row for all), start may be out itself
// or null, which is zeros; w is [n, k], row-major. A few panels of W, kWidth rows by kDepth columns each, are widened
// and transposed into the second-level cache and meet all rows of x, kRows at a time, in registers (Goto and van de
// Geijn 2008, "Anatomy of high-performance matrix multiplication", with the roles of the operands exchanged: the rows
// of x are many and already float32). Each value of `out` is summed in an order that depends on k alone, so it does
// not change with the rows that share the product.

#include <algorithm>

#include "packed.h"

namespace {

constexpr int64_t kDepth = 1024;         // columns of W in a panel: 64 KiB; 5 % faster than 512
constexpr int64_t kPanels = 2;           // that the rows of x meet while they are in the first-level cache

// W stored one value by one.
template <typename T>
struct Plain {
  const T* w;
  int64_t columns;

  // Rows from `first` on, columns from `at` on.
  void fill(int64_t first, int64_t rows, int64_t at, int64_t depth, float* panel) const {
    unpack(rows, depth, panel, [&](int64_t row) { return w + (first + row) * columns + at; });
  }
};

// W in groups along its rows.
template <int kBits>
struct Along {
  const uint8_t* w;
  int64_t columns, row_bytes;
  int group;

  void fill(int64_t first, int64_t rows, int64_t at, int64_t depth, float* panel) const {
    unpack_packed<kBits>(rows, depth, panel, [&](int64_t row) {
      return Packed<kBits>(w + (first + row) * row_bytes, columns, group) + at;
    });
  }
};

// W^T in groups along its rows: a panel lies there as it is needed.
template <int kBits>
struct Across {
  const uint8_t* w;
  int64_t rows_of_w, row_bytes;
  int group;

  void fill(int64_t first, int64_t rows, int64_t at, int64_t depth, float* panel) const {
    for (int64_t k = 0; k < depth; ++k) {
      const Packed<kBits> row(w + (at + k) * row_bytes, rows_of_w, group);
      for (int64_t j = 0; j < kWidth; j += kLanes)
        store(panel + k * kWidth + j, widen(row + (first + j), std::min(kLanes, rows - j)));
    }
  }
};

template <typename Weights>
void product(const float* x, int64_t ldx, const Weights& w, const float* start, int64_t lds, float* out, int64_t ldo,
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
        w.fill(j, std::min(kWidth, last - j), at, depth, panels[p]);
      for (int64_t i = 0; i < m; i += kRows)
        for (int64_t j = first, p = 0; j < last; j += kWidth, ++p)
          last_tile<kRows>(std::min(kRows, m - i), x + i * ldx + at, ldx, panels[p], depth,
                           from ? from + i * apart + j : nullptr, apart, out + i * ldo + j, ldo,
                           std::min(kWidth, last - j));
    }
  }
}

}  // namespace

#define PRODUCT(name, type)                                                                                   \
  extern "C" void product_##name(const float* x, int64_t ldx, const type* w, const float* start, int64_t lds, \
                                 float* out, int64_t ldo, int64_t m, int64_t n, int64_t k, int threads) {     \
    product(x, ldx, Plain<type>{w, k}, start, lds, out, ldo, m, n, k, threads);                               \
  }

PRODUCT(float32, float)
PRODUCT(bfloat16, BFloat16)
PRODUCT(float16, Float16)

#define PACKED_PRODUCT(bits, layout, columns)                                                                         \
  extern "C" void product_bits##bits##_##layout(const float* x, int64_t ldx, const uint8_t* w, const float* start,    \
                                                int64_t lds, float* out, int64_t ldo, int64_t m, int64_t n,           \
                                                int64_t k, int threads, int64_t row_bytes, int group) {               \
    product(x, ldx, layout<bits>{w, columns, row_bytes, group}, start, lds, out, ldo, m, n, k, threads);              \
  }

PACKED_PRODUCT(3, Along, k)
PACKED_PRODUCT(4, Along, k)
PACKED_PRODUCT(8, Along, k)
PACKED_PRODUCT(3, Across, n)
PACKED_PRODUCT(4, Across, n)
PACKED_PRODUCT(8, Across, n)
