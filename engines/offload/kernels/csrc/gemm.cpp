// GEMM with weights as they are stored: out = start + x W^T in float32, without ever writing a float32 copy of W to
// memory.
//
// x is [m, k], out and start are [m, n], with rows `ldx`, `ldo` and `lds` elements apart; lds = 0 adds one row, a bias,
// to all rows. start may be out itself, or null for zeros. W is [n, k], row-major. The kernel dequantizes or widens a
// few panels of W (kWidth rows by kDepth columns each), transposed, into the L2 cache and multiplies them with all rows
// of x, kRows at a time, in registers (Goto and van de Geijn 2008, "Anatomy of high-performance matrix multiplication",
// with the operands' roles exchanged: x has many rows and is already float32). The order in which a value of out is
// summed depends on k alone, so a row's result does not depend on the other rows of x.

#include <algorithm>

#include "packed_rows.h"

namespace {

constexpr int64_t kDepth = 1024;         // columns of W in a panel: 64 KiB; 5 % faster than 512
constexpr int64_t kPanels = 2;           // panels that a group of x rows is multiplied with while it is in the L1 cache

// W[n, k], one value after the other.
template <typename T>
struct PlainWeights {
  const T* w;
  int64_t columns;

  // Fills a panel with `rows` rows from `first` on, of each `depth` columns from `at` on.
  void fill(int64_t first, int64_t rows, int64_t at, int64_t depth, float* panel) const {
    unpack(rows, depth, panel, [&](int64_t row) { return w + (first + row) * columns + at; });
  }
};

// W[n, k] as packed rows: groups run along the inputs.
template <int kBits>
struct GroupsAlongInputs {
  const uint8_t* w;
  int64_t columns, row_bytes;
  int group;

  void fill(int64_t first, int64_t rows, int64_t at, int64_t depth, float* panel) const {
    unpack_packed<kBits>(rows, depth, panel, [&](int64_t row) {
      return Packed<kBits>(w + (first + row) * row_bytes, columns, group) + at;
    });
  }
};

// W^T[k, n] as packed rows: groups run along the outputs, and a panel needs no transposing.
template <int kBits>
struct GroupsAlongOutputs {
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
void gemm(const float* x, int64_t ldx, const Weights& w, const float* start, int64_t lds, float* out, int64_t ldo,
          int64_t m, int64_t n, int64_t k, int threads) {
  constexpr int64_t span = kPanels * kWidth;
#pragma omp parallel for schedule(dynamic) num_threads(threads)
  for (int64_t first = 0; first < n; first += span) {
    alignas(64) float panels[kPanels][kDepth * kWidth];
    const int64_t last = std::min(n, first + span);
    for (int64_t at = 0; at < k; at += kDepth) {
      const int64_t depth = std::min(kDepth, k - at);
      const float* from = at ? out : start;  // after the first kDepth columns, the sum so far
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

#define GEMM(name, type)                                                                                   \
  extern "C" void gemm_##name(const float* x, int64_t ldx, const type* w, const float* start, int64_t lds, \
                              float* out, int64_t ldo, int64_t m, int64_t n, int64_t k, int threads) {     \
    gemm(x, ldx, PlainWeights<type>{w, k}, start, lds, out, ldo, m, n, k, threads);                        \
  }

GEMM(float32, float)
GEMM(bfloat16, BFloat16)
GEMM(float16, Float16)

// The suffix is Grouped.group_axis: 1 for groups along the inputs, 0 along the outputs.
#define PACKED_GEMM(bits, axis, layout, columns)                                                                       \
  extern "C" void gemm_bits##bits##_axis##axis(const float* x, int64_t ldx, const uint8_t* w, const float* start,      \
                                               int64_t lds, float* out, int64_t ldo, int64_t m, int64_t n, int64_t k,  \
                                               int threads, int64_t row_bytes, int group) {                            \
    gemm(x, ldx, layout<bits>{w, columns, row_bytes, group}, start, lds, out, ldo, m, n, k, threads);                  \
  }

PACKED_GEMM(3, 1, GroupsAlongInputs, k)
PACKED_GEMM(4, 1, GroupsAlongInputs, k)
PACKED_GEMM(8, 1, GroupsAlongInputs, k)
PACKED_GEMM(3, 0, GroupsAlongOutputs, n)
PACKED_GEMM(4, 0, GroupsAlongOutputs, n)
PACKED_GEMM(8, 0, GroupsAlongOutputs, n)
