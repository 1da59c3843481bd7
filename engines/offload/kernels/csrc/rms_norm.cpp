// Root-mean-square norms of rows, in the order in which transformers' LlamaRMSNorm rounds: in float32, to the type of
// x, and after the multiplication by the weight again.

#include <cmath>

#include "rounding.h"
#include "threads.h"

namespace {

template <typename T>
void norm(const T* x, const T* weight, float epsilon, T* out, int64_t columns) {
  constexpr int64_t kSums = 4;  // that do not wait for each other
  Lanes sums[kSums] = {};
  int64_t j = 0;
  for (; j + kSums * kLanes <= columns; j += kSums * kLanes)
#pragma GCC unroll 4
    for (int64_t i = 0; i < kSums; ++i) {
      const Lanes values = widen(x + j + i * kLanes);
      sums[i] += values * values;
    }
  const int64_t whole = columns / kLanes * kLanes;
  const Lanes rest = whole < columns ? widen(x + whole, columns - whole) : Lanes{};
  for (; j < whole; j += kLanes) sums[0] += widen(x + j) * widen(x + j);
  sums[1] += rest * rest;
  const float mean = add_up((sums[0] + sums[1]) + (sums[2] + sums[3])) / static_cast<float>(columns);
  const Lanes factor = spread(1.0f / std::sqrt(mean + epsilon));
  const auto normed = [&](Lanes values, Lanes by) { return rounded(by * rounded(values * factor, x), x); };
  for (j = 0; j < whole; j += kLanes) write(out + j, normed(widen(x + j), widen(weight + j)));
  if (whole < columns) write(out + whole, normed(rest, widen(weight + whole, columns - whole)), columns - whole);
}

}  // namespace

// Row i of x is at x + i * apart; out [rows, columns] is contiguous.
#define RMS_NORM(name, type)                                                                                          \
  extern "C" void rms_norm_##name(const type* x, int64_t apart, const type* weight, float epsilon, type* out,         \
                                  int64_t rows, int64_t columns, int threads) {                                       \
    _Pragma("omp parallel for num_threads(threads) schedule(static) if (rows * columns >= kSharedValues)")            \
    for (int64_t i = 0; i < rows; ++i) norm(x + i * apart, weight, epsilon, out + i * columns, columns);              \
  }

RMS_NORM(float32, float)
RMS_NORM(bfloat16, BFloat16)
