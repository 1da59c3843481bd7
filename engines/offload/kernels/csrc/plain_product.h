// Products of rows with panels of bfloat16 as they lie in memory, by the CPU's matrix units (AMX) where it has them.
//
// The order in which a value is summed depends on the number of columns alone, so a row's result does not depend on the
// other rows. panel_weights.h multiplies weights by it, prompt_attention.h keys and values.

#pragma once

#include "amx.h"
#include "panel_product.h"

namespace {

#ifdef HAS_AMX
constexpr int64_t kValueBytes = sizeof(BFloat16);
constexpr int64_t kTileColumns = kTileBytes / kValueBytes, kTileValues = kTileColumns * kPanel;
constexpr int kFetchAhead = 2048;  // bytes ahead of which panels are fetched for few rows

// Some rows of x, `ld` values apart, of which memory holds whole tiles.
inline void multiply_tiles(const Activation* x, int64_t ld, int64_t rows, const BFloat16* w, int64_t apart,
                           int64_t pairs, int64_t panels, float* sums, int64_t sums_ld) {
  constexpr int64_t kSteps = 8;  // multiplied at a time: with three panels 24 KiB, so that these stay in the L1 cache
  const Amx units(rows);
  const auto multiply = rows > 2 * kTileRows ? amx_product<Dot::kPairs, 0> : amx_product<Dot::kPairs, kFetchAhead>;
  const int64_t steps = pairs * kPair / kTileValues, rest = pairs * kPair % kTileValues, bytes = sums_ld * sizeof *sums;
  for (int64_t from = 0; from < steps; from += kSteps)
    multiply(x + from * kTileColumns, ld * kValueBytes, rows, w + from * kTileValues, apart * kValueBytes, panels,
             std::min(kSteps, steps - from), from > 0, sums, bytes);
  if (!rest) return;
  alignas(64) BFloat16 last[kTogether * kTileValues] = {};  // behind a panel's end there are others
  for (int64_t c = 0; c < panels; ++c)
    std::memcpy(last + c * kTileValues, w + c * apart + steps * kTileValues, rest * kValueBytes);
  amx_product<Dot::kPairs, 0>(x + steps * kTileColumns, ld * kValueBytes, rows, last, kTileValues * kValueBytes, panels,
                              1, steps > 0, sums, bytes);
}
#endif

// sums[rows, panels] = x[rows, pairs] times up to kTogether panels, `apart` values from one to the next. Rows of x, which
// are not interleaved, and of sums are `ld` and `sums_ld` values apart; with AMX memory holds whole tiles of them.
inline void multiply_panels(const Activation* x, int64_t ld, int64_t rows, const BFloat16* w, int64_t apart,
                            int64_t pairs, int64_t panels, float* sums, int64_t sums_ld) {
#ifdef HAS_AMX
  if (amx_allowed()) return multiply_tiles(x, ld, rows, w, apart, pairs, panels, sums, sums_ld);
#endif
  constexpr int64_t kPairs = 1024;  // of columns, multiplied at a time: a block of rows stays in the L1 cache
  for (int64_t from = 0; from < pairs; from += kPairs) {
    const int64_t some = std::min(kPairs, pairs - from);
    for (int64_t r = 0; r < rows; r += kBlock)
      with_sizes<kBlock, kTogether>(std::min(kBlock, rows - r), panels, [&](auto R, auto C) {
        float* to = sums + r * sums_ld;
        block<R, C>(
            x + r * ld + 2 * from, ld, w + from * kPair, apart, some,
            [=](int64_t i, int64_t j) { return from ? load_floats(to + i * sums_ld + j) : Floats{}; },
            [=](int64_t i, int64_t j, Floats sum) { store_floats(to + i * sums_ld + j, sum); });
      });
  }
}

}  // namespace
