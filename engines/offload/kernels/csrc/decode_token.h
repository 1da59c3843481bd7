// The token that a sequence decodes attends: its scores, their softmax and the values, some key/value heads at a time.

#pragma once

#include <cmath>
#include <numeric>

#include "aligned.h"
#include "decode_attention.h"
#include "softmax.h"

namespace {

constexpr int64_t kTokenRows = 48;    // query rows that attend together, at most,
constexpr int64_t kScores = 1 << 17;  // and their scores: half of an L2 cache

// A segment's blocks. The rows of consecutive heads are `head_bytes` apart.
struct BlockTable {
  const int64_t* table;
  int64_t keys, values, head_bytes;  // keys, values: what is added to a block's place for the first head's rows
  int block;                         // log2 of the tokens in a block

  const uint8_t* operator()(int64_t t, int64_t offset) const {
    return reinterpret_cast<const uint8_t*>(table[t >> block] + offset);
  }
  int64_t rest(int64_t t) const { return (int64_t{1} << block) - in_block(t); }  // rows in the block from t on
  int64_t in_block(int64_t t) const { return t & ((int64_t{1} << block) - 1); }
};

// The query rows of one token and some consecutive key/value heads, whose keys (and values) are adjacent in a block.
template <typename Stored>
class DecodeToken {
 public:
  // Of `heads` heads in groups of `group`. `alone`: each row reads its values by itself.
  DecodeToken(const DecodeLayout<Stored>& layout, int64_t heads, int64_t group, bool alone)
      : layout_(layout), bytes_(layout.stored.row_bytes), heads_(heads), group_(group), alone_(alone) {}

  // Key/value heads that may attend together, where positions go up to `longest`.
  static int64_t heads_together(int64_t heads, int64_t group, int64_t longest) {
    return std::max<int64_t>(1, std::min({kTokenRows, kScores / longest, heads}) / group);
  }

  // Takes memory for tokens between whose first and last position there are up to `positions`, a multiple of kLanes.
  void take(Arena& arena, int64_t positions) {
    const int64_t rows = std::max(group_, std::min(kTokenRows, heads_));
    const int64_t together = std::min(kScores, std::min(kTokenRows, heads_) * positions);
    scores_ = arena.take<float>(std::max(group_ * positions, together));
    rows_ = arena.take<float>(rows * layout_.floats());
    if (!alone_) return;
    sorted_ = arena.take<float>(positions);
    probabilities_ = arena.take<float>(positions);
    kept_ = arena.take<int32_t>(positions);
  }

  // Row r is at `query + r * apart` and of head `head` + r; its output goes to `out + r * out_apart` and `lse + r`.
  void attend(const float* query, int64_t apart, float* out, int64_t out_apart, float* lse, int64_t position,
              int64_t kv_heads, int64_t head, const BlockTable& blocks, const AttentionSpec& spec) const {
    const int64_t low = first_seen(spec, position), base = low / kLanes * kLanes, rows = kv_heads * group_;
    const int64_t count = (position + kLanes) / kLanes * kLanes - base;
    float* const scores = scores_;
    each(0, kv_heads, [&](const auto& work, int64_t row) { work.begin(query + row * apart, apart); });
    each_block(blocks, blocks.keys, low, position, kv_heads, [&](int64_t h, int64_t t, auto from, int64_t size) {
      each(h, h + 1, [&](const auto& work, int64_t row) {
        work.score(from, size, scores + row * count + t - base, count);
      });
    });
    for (int64_t row = 0; row < rows; ++row) {
      const float row_lse = softmax(scores + row * count, low - base, position + 1 - base, count, spec, head + row);
      if (lse) lse[row] = row_lse;
    }
    if (spec.value_topk < 1)
      for (int64_t row = 0; row < rows; ++row)
        accumulate_top(rows_at<1>(row), blocks, row / group_, scores + row * count + low - base, low, position,
                       spec.value_topk);
    else
      each_block(blocks, blocks.values, low, position, kv_heads, [&](int64_t h, int64_t t, auto from, int64_t size) {
        const auto at = [=](int64_t k) { return from + k * bytes_; };
        each(h, h + 1, [&](const auto& work, int64_t row) {
          work.accumulate(at, size, scores + row * count + t - base, count);
        });
      });
    each(0, kv_heads, [&](const auto& work, int64_t row) { work.end(out + row * out_apart, out_apart); });
  }

 private:
  template <int R>
  DecodeRows<R, Stored> rows_at(int64_t row) const {
    return {layout_, rows_ + row * layout_.floats()};
  }

  // visit(decode rows, index of the first) for the heads from `first` up to `last`: four at a time, two, or one.
  template <typename Visit>
  void each(int64_t first, int64_t last, Visit visit) const {
    for (int64_t h = first; h < last; ++h) {
      int64_t row = h * group_;
      const int64_t end = row + group_;
      for (; !alone_ && end - row >= 4; row += 4) visit(rows_at<4>(row), row);
      for (; !alone_ && end - row >= 2; row += 2) visit(rows_at<2>(row), row);
      for (; row < end; ++row) visit(rows_at<1>(row), row);
    }
  }

  // visit(head, position, its stored row, number of rows) block by block, in a block head by head, with prefetching.
  template <typename Visit>
  void each_block(const BlockTable& blocks, int64_t offset, int64_t low, int64_t position, int64_t kv_heads,
                  Visit visit) const {
    const int64_t last = position >> blocks.block;
    int64_t block = low >> blocks.block, head = 0;  // the next to prefetch
    const auto fetch_next = [&] {
      if (block > last) return;
      fetch(blocks(block << blocks.block, offset + head * blocks.head_bytes), blocks.head_bytes);
      if (++head == kv_heads) head = 0, ++block;
    };
    for (int64_t i = 0; i < kFetch; ++i) fetch_next();
    for (int64_t t = low; t <= position;) {
      const int64_t size = std::min(blocks.rest(t), position + 1 - t);
      const uint8_t* from = blocks(t, offset) + blocks.in_block(t) * bytes_;
      for (int64_t h = 0; h < kv_heads; ++h, from += blocks.head_bytes) {
        fetch_next();
        visit(h, t, from, size);
      }
      t += size;
    }
  }

  // Accumulates only the values with the largest `probabilities`, which start at position `low`, scaled up so that they
  // sum to what all did.
  void accumulate_top(const DecodeRows<1, Stored>& work, const BlockTable& blocks, int64_t kv_head,
                      const float* probabilities, int64_t low, int64_t position, double value_topk) const {
    const int64_t seen = position + 1 - low, offset = blocks.values + kv_head * blocks.head_bytes;
    const auto at = [&](int64_t t) { return blocks(t, offset) + blocks.in_block(t) * bytes_; };
    int64_t count = seen;
    if (std::isnan(probabilities[0])) std::iota(kept_, kept_ + seen, 0);
    else count = top_values(probabilities, seen, value_topk, sorted_, kept_);
    for (int64_t k = 0; k < count; ++k) probabilities_[k] = probabilities[kept_[k]];
    const float all = std::accumulate(probabilities, probabilities + seen, 0.0f);
    const float of_kept = std::accumulate(probabilities_, probabilities_ + count, 0.0f);
    const float growth = of_kept == 0 ? 0 : all / of_kept;  // a sink may outweigh all; NaN stays NaN
    for (int64_t k = 0; k < count; ++k) probabilities_[k] *= growth;
    for (int64_t k = 0, end = 0; k < count; k = end) {  // block by block
      const int64_t t = low + kept_[k];
      while (end < count && low + kept_[end] < t + blocks.rest(t)) ++end;
      const auto row = [&, k](int64_t n) { return at(low + kept_[k + n]); };
      work.accumulate(row, end - k, probabilities_ + k, 0);
    }
  }

  const DecodeLayout<Stored>& layout_;
  int64_t bytes_, heads_, group_;
  bool alone_;
  float *scores_ = nullptr, *rows_ = nullptr, *sorted_ = nullptr, *probabilities_ = nullptr;
  int32_t* kept_ = nullptr;
};

}  // namespace
