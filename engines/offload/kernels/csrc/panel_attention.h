// Attention of prompt rows in float32: two GEMMs with keys and values as float32 panels.

#pragma once

#include "aligned.h"
#include "packed_rows.h"
#include "softmax.h"

namespace {

constexpr int64_t kScoreRows = 48;  // rows whose scores are held at once: a multiple of kRows

// Query rows: row i is at `query + i * apart`, at position `first + i * step`, of head `head + i * (1 - step)`. So they
// are the tokens of one head (step = 1) or the heads of one token (step = 0).
struct QueryRows {
  const float* query;
  int64_t apart, count, first, step, head;
  float* out;
  int64_t out_apart;
  float* lse;
  int64_t lse_apart;
};

// `positions` rounded up to whole panels.
inline int64_t whole_panels(int64_t positions) { return (positions + kWidth - 1) / kWidth * kWidth; }

// What a thread needs to attend.
class PanelAttention {
 public:
  // Takes memory for keys and values of up to `positions` positions, a multiple of kWidth, from a multiple of it on.
  void take(Arena& arena, int64_t positions, int64_t dim) {
    dim_ = dim;
    keys_ = arena.take<float>(positions * dim);
    values_ = arena.take<float>(positions * whole_panels(dim));
    scores_ = arena.take<float>(positions * kScoreRows);
  }

  // Keys and values of the positions from `from` up to `to`: key(t), value(t) are cursors at the stored rows [dim] of
  // position t. A panel begins at a multiple of kWidth: what it has before `from`, which no row sees, is not read.
  template <typename Key, typename Value>
  void fill(int64_t from, int64_t to, Key key, Value value) {
    const int64_t low = from / kWidth * kWidth, count = to - low;
    low_ = low, high_ = to;
    for (int64_t t = 0; t < count; t += kWidth)  // keys in panels of kWidth positions by dim
      unpack_any(std::min(kWidth, count - t), dim_, keys_ + t * dim_,
                 [=](int64_t i) { return key(std::max(from, low + t + i)); });
    for (int64_t j = 0; j < whole_panels(dim_); j += kLanes)  // values in panels of kWidth columns by positions
      for (int64_t t = 0; t < count; ++t) {
        const auto from_row = value(std::max(from, low + t)) + j;
        float* to_row = values_ + (j / kWidth * count + t) * kWidth + j % kWidth;
        store(to_row, j + kLanes <= dim_ ? widen(from_row) : widen(from_row, std::max<int64_t>(0, dim_ - j)));
      }
  }

  // Rows of one key/value head attend to its panels, whose positions are all that they see.
  void attend(const QueryRows& rows, const AttentionSpec& spec) const {
    const int64_t count = high_ - low_;
    for (int64_t from = 0; from < rows.count; from += kScoreRows) {
      const int64_t size = std::min(kScoreRows, rows.count - from), earliest = rows.first + from * rows.step;
      const int64_t low = first_seen(spec, earliest) / kWidth * kWidth, high = earliest + (size - 1) * rows.step + 1;
      const int64_t wide = whole_panels(high - low);
      for (int64_t t = 0; t < wide; t += kWidth)
        for (int64_t i = 0; i < size; i += kRows)
          last_tile<kRows>(std::min(kRows, size - i), rows.query + (from + i) * rows.apart, rows.apart,
                           keys_ + (low - low_ + t) * dim_, dim_, nullptr, 0, scores_ + i * wide + t, wide, kWidth);
      for (int64_t i = 0; i < size; ++i) {
        const int64_t position = earliest + i * rows.step;
        const float lse = softmax(scores_ + i * wide, first_seen(spec, position) - low, position + 1 - low, wide, spec,
                                  rows.head + (from + i) * (1 - rows.step));
        if (rows.lse) rows.lse[(from + i) * rows.lse_apart] = lse;
      }
      for (int64_t j = 0; j < dim_; j += kWidth)
        for (int64_t i = 0; i < size; i += kRows)
          last_tile<kRows>(std::min(kRows, size - i), scores_ + i * wide, wide,
                           values_ + (j / kWidth * count + low - low_) * kWidth, high - low, nullptr, 0,
                           rows.out + (from + i) * rows.out_apart + j, rows.out_apart, std::min(kWidth, dim_ - j));
    }
  }

 private:
  int64_t dim_ = 0, low_ = 0, high_ = 0;
  float *keys_ = nullptr, *values_ = nullptr, *scores_ = nullptr;
};

}  // namespace
