// Attention of a packed batch over a paged KV cache: in float32 arithmetic whatever the cache holds, but for prompts in
// bfloat16 (`half`) where the CPU has units for it.
//
// q is [heads, tokens, dim], out is [tokens, heads, dim]. Segment i owns the tokens starts[i] to starts[i + 1], which
// follow `cached[i]` tokens of the same sequence. Row i of table [segments, max_blocks] says how many bytes behind the
// address `base` its KV blocks lie: keys [kv_heads, block, dim], and the values `values_after` bytes behind them. In a
// packed cache a row takes `row_bytes` bytes instead of dim values. `block` is log2 of the tokens in a block. window = 0
// and softcap = 0 turn these off, sinks [heads] may be null, and value_topk = 1 takes all values;
// reference_attention.py defines them. lse [tokens, heads], or null, receives log-sum-exps, by which the attention
// states of two parts of a cache are merged.
//
// Decode tokens: decode_attention.h reads the stored rows block by block, many heads at once. Prompt rows: two GEMMs
// with keys and values as float32 panels, or those of prompt_attention.h. As long as values are finite, a row's result
// depends, bit for bit, only on its query and what it sees, not on where the prompt was cut; the exception is a cut
// that leaves one row alone, which the decode path computes. Rows with value_topk < 1 take the decode path one by one;
// groups of many heads take the prompt path.

#include <algorithm>
#include <numeric>
#include <vector>

#include "decode_attention.h"
#include "prompt_attention.h"
#include "softmax.h"
#include "threads.h"

namespace {

constexpr int64_t kScoreRows = 48;         // prompt rows whose scores are held at once: a multiple of kRows
constexpr int64_t kManyHeads = 16;         // from so many heads in a group, panels beat the decode path
constexpr int64_t kScores = 1 << 17;       // scores of the rows of one work item: half of an L2 cache
constexpr int64_t kItems = 4;              // work items per thread to aim for
constexpr int64_t kShared = 16 * kSharedValues;  // multiply-adds from which several threads attend

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

// Makes room for `count` floats; drops the old contents first, so that old and new are never held together.
float* room(std::vector<float>& held, int64_t count) {
  if (held.capacity() < static_cast<size_t>(count)) std::vector<float>().swap(held);
  held.resize(count);
  return held.data();
}

// A thread's buffers.
struct Scratch {
  std::vector<float> scores, sorted, probabilities;
  std::vector<int32_t> kept;
};

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
  // For up to `kv_heads` heads with `group` query rows each. `alone`: each row reads its values by itself.
  DecodeToken(const Stored& stored, int block, int64_t kv_heads, int64_t group, bool alone)
      : bytes_(stored.row_bytes), group_(group), fours_(alone ? 0 : group / 4), twos_(alone ? 0 : group % 4 / 2),
        four_(kv_heads * fours_, {stored, int64_t{1} << block}), two_(kv_heads * twos_, {stored, int64_t{1} << block}),
        one_(kv_heads * (group - 4 * fours_ - 2 * twos_), {stored, int64_t{1} << block}) {}

  // Row r is at `query + r * apart` and of head `head` + r; its output goes to `out + r * out_apart` and `lse + r`.
  void attend(const float* query, int64_t apart, float* out, int64_t out_apart, float* lse, int64_t position,
              int64_t kv_heads, int64_t head, const BlockTable& blocks, const AttentionSpec& spec, Scratch& scratch) {
    const int64_t low = first_seen(spec, position), base = low / kLanes * kLanes, rows = kv_heads * group_;
    const int64_t count = (position + kLanes) / kLanes * kLanes - base;
    float* scores = room(scratch.scores, rows * count);
    each(0, kv_heads, [&](auto& work, int64_t row) { work.begin(query + row * apart, apart); });
    each_block(blocks, blocks.keys, low, position, kv_heads, [&](int64_t h, int64_t t, auto from, int64_t size) {
      each(h, h + 1, [&](auto& work, int64_t row) { work.score(from, size, scores + row * count + t - base, count); });
    });
    for (int64_t row = 0; row < rows; ++row) {
      const float row_lse = softmax(scores + row * count, low - base, position + 1 - base, count, spec, head + row);
      if (lse) lse[row] = row_lse;
    }
    if (spec.value_topk < 1)
      for (int64_t row = 0; row < rows; ++row)
        accumulate_top(one_[row], blocks, row / group_, scores + row * count + low - base, low, position,
                       spec.value_topk, scratch);
    else
      each_block(blocks, blocks.values, low, position, kv_heads, [&](int64_t h, int64_t t, auto from, int64_t size) {
        const auto at = [=](int64_t k) { return from + k * bytes_; };
        each(h, h + 1, [&](auto& work, int64_t row) {
          work.accumulate(at, size, scores + row * count + t - base, count);
        });
      });
    each(0, kv_heads, [&](auto& work, int64_t row) { work.end(out + row * out_apart, out_apart); });
  }

 private:
  // visit(decode rows, index of the first) for the heads from `first` up to `last`.
  template <typename Visit>
  void each(int64_t first, int64_t last, Visit visit) {
    const int64_t ones = group_ - 4 * fours_ - 2 * twos_;
    for (int64_t h = first; h < last; ++h) {
      int64_t row = h * group_;
      for (int64_t i = 0; i < fours_; ++i, row += 4) visit(four_[h * fours_ + i], row);
      for (int64_t i = 0; i < twos_; ++i, row += 2) visit(two_[h * twos_ + i], row);
      for (int64_t i = 0; i < ones; ++i, ++row) visit(one_[h * ones + i], row);
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
  void accumulate_top(DecodeRows<1, Stored>& work, const BlockTable& blocks, int64_t kv_head,
                      const float* probabilities, int64_t low, int64_t position, double value_topk,
                      Scratch& scratch) const {
    const int64_t seen = position + 1 - low, offset = blocks.values + kv_head * blocks.head_bytes;
    const auto at = [&](int64_t t) { return blocks(t, offset) + blocks.in_block(t) * bytes_; };
    std::vector<int32_t>& kept = scratch.kept;
    if (std::isnan(probabilities[0])) kept.resize(seen), std::iota(kept.begin(), kept.end(), 0);
    else top_values(probabilities, seen, value_topk, scratch.sorted, kept);
    scratch.probabilities.clear();
    for (const int32_t t : kept) scratch.probabilities.push_back(probabilities[t]);
    const float all = std::accumulate(probabilities, probabilities + seen, 0.0f);
    const float growth = all / std::accumulate(scratch.probabilities.begin(), scratch.probabilities.end(), 0.0f);
    for (float& probability : scratch.probabilities) probability *= growth;
    for (size_t k = 0, end = 0; k < kept.size(); k = end) {  // block by block
      const int64_t t = low + kept[k];
      while (end < kept.size() && low + kept[end] < t + blocks.rest(t)) ++end;
      const auto row = [&, k](int64_t n) { return at(low + kept[k + n]); };
      work.accumulate(row, end - k, scratch.probabilities.data() + k, 0);
    }
  }

  int64_t bytes_, group_, fours_, twos_;
  std::vector<DecodeRows<4, Stored>> four_;
  std::vector<DecodeRows<2, Stored>> two_;
  std::vector<DecodeRows<1, Stored>> one_;
};

// Keys and values of the positions from `low`, a multiple of kWidth, up to `high` as float32 panels: keys in panels of
// kWidth positions by dim, values in panels of kWidth columns by positions.
struct Panels {
  int64_t low, high, dim;
  std::vector<float> keys, values;

  template <typename Key, typename Value>
  void fill(int64_t from, int64_t to, int64_t width, Key key, Value value) {
    low = from / kWidth * kWidth, high = to, dim = width;
    const int64_t count = high - low, wide = (count + kWidth - 1) / kWidth * kWidth;
    const int64_t columns = (dim + kWidth - 1) / kWidth * kWidth;
    room(keys, wide * dim);
    room(values, count * columns);
    for (int64_t t = 0; t < count; t += kWidth)
      unpack_any(std::min(kWidth, count - t), dim, keys.data() + t * dim, [&](int64_t i) { return key(low + t + i); });
    for (int64_t j = 0; j < columns; j += kLanes)
      for (int64_t t = 0; t < count; ++t) {
        const auto from_row = value(low + t) + j;
        float* to_row = values.data() + (j / kWidth * count + t) * kWidth + j % kWidth;
        store(to_row, j + kLanes <= dim ? widen(from_row) : widen(from_row, std::max<int64_t>(0, dim - j)));
      }
  }
};

// Attention of several rows of one key/value head to its panels.
void attend_rows(const QueryRows& rows, const Panels& panels, const AttentionSpec& spec, Scratch& scratch) {
  const int64_t dim = panels.dim, count = panels.high - panels.low;
  for (int64_t from = 0; from < rows.count; from += kScoreRows) {
    const int64_t size = std::min(kScoreRows, rows.count - from), earliest = rows.first + from * rows.step;
    const int64_t low = first_seen(spec, earliest) / kWidth * kWidth, high = earliest + (size - 1) * rows.step + 1;
    const int64_t wide = (high - low + kWidth - 1) / kWidth * kWidth;
    float* scores = room(scratch.scores, kScoreRows * wide);
    for (int64_t t = 0; t < wide; t += kWidth)
      for (int64_t i = 0; i < size; i += kRows)
        last_tile<kRows>(std::min(kRows, size - i), rows.query + (from + i) * rows.apart, rows.apart,
                         panels.keys.data() + (low - panels.low + t) * dim, dim, nullptr, 0, scores + i * wide + t,
                         wide, kWidth);
    for (int64_t i = 0; i < size; ++i) {
      const int64_t position = earliest + i * rows.step;
      const float lse = softmax(scores + i * wide, first_seen(spec, position) - low, position + 1 - low, wide, spec,
                                rows.head + (from + i) * (1 - rows.step));
      if (rows.lse) rows.lse[(from + i) * rows.lse_apart] = lse;
    }
    for (int64_t j = 0; j < dim; j += kWidth)
      for (int64_t i = 0; i < size; i += kRows)
        last_tile<kRows>(std::min(kRows, size - i), scores + i * wide, wide,
                         panels.values.data() + (j / kWidth * count + low - panels.low) * kWidth, high - low, nullptr,
                         0, rows.out + (from + i) * rows.out_apart + j, rows.out_apart, std::min(kWidth, dim - j));
  }
}

template <typename Stored>
void attend(const float* q, int64_t q_head, int64_t q_row, const Stored& stored, int64_t base, const int64_t* table,
            int64_t values_after, const int32_t* cached, const int32_t* starts, float* out, float* lse,
            int64_t segments, int64_t heads, int64_t kv_heads, int64_t dim, int block, int64_t max_blocks,
            const AttentionSpec& spec, bool half, int threads) {
  const int64_t group = heads / kv_heads;
  const bool sparse = spec.value_topk < 1, wide = group >= kManyHeads && !sparse;
  // key/value heads [first, last) of a segment
  struct Item {
    int64_t segment, first, last;
  };
  std::vector<Item> items;
  int64_t work = 0;
  // a decode item takes several heads, whose rows are adjacent in memory
  const int64_t longest = max_blocks << block, rows = std::min(kScoreRows, kScores / longest);
  const int64_t several = std::max<int64_t>(1, std::min(rows / group, segments * kv_heads / (kItems * threads)));
  for (int64_t segment = segments - 1; segment >= 0; --segment) {  // prompts come last in a batch and take longest
    const int64_t size = wide || starts[segment + 1] - starts[segment] > 1 ? 1 : several;
    for (int64_t h = 0; h < kv_heads; h += size) items.push_back({segment, h, std::min(kv_heads, h + size)});
    const int64_t count = starts[segment + 1] - starts[segment];
    work += 2 * count * (cached[segment] + count) * heads * dim;
  }
#pragma omp parallel num_threads(threads) if (work >= kShared)
  {
    Panels panels;
#ifdef HAS_PROMPT_ATTENTION
    PromptAttention prompt;
#endif
    Scratch scratch;
    DecodeToken<Stored> token(stored, block, several, group, sparse);
#pragma omp for schedule(dynamic)
    for (size_t i = 0; i < items.size(); ++i) {
      const auto [segment, kv_head, last] = items[i];
      const int64_t count = starts[segment + 1] - starts[segment], first = cached[segment], head = kv_head * group;
      const int64_t bytes = stored.row_bytes, head_bytes = bytes << block, first_row = base + kv_head * head_bytes;
      const BlockTable blocks{table + segment * max_blocks, first_row, first_row + values_after, head_bytes, block};
      const float* query = q + head * q_head + starts[segment] * q_row;
      float* result = out + (starts[segment] * heads + head) * dim;
      float* row_lse = lse ? lse + starts[segment] * heads + head : nullptr;
      if (!wide && (sparse || count == 1)) {
        for (int64_t k = 0; k < count; ++k, query += q_row, result += heads * dim, row_lse += row_lse ? heads : 0)
          token.attend(query, q_head, result, dim, row_lse, first + k, last - kv_head, head, blocks, spec, scratch);
        continue;
      }
      const auto key = [=](int64_t t) {
        return stored.cursor(blocks(t, blocks.keys) + blocks.in_block(t) * bytes);
      };
      const auto value = [=](int64_t t) {
        return stored.cursor(blocks(t, blocks.values) + blocks.in_block(t) * bytes);
      };
#ifdef HAS_PROMPT_ATTENTION
      if constexpr (Stored::fits_bfloat16)
        if (half) {
          prompt.attend({query, q_row, q_head, count, group, first, head, result, heads * dim, row_lse, heads}, dim,
                        key, value, spec);
          continue;
        }
#endif
      panels.fill(first_seen(spec, first), first + count, dim, key, value);
      if (count == 1)
        attend_rows({query, q_head, group, first, 0, head, result, dim, row_lse, 1}, panels, spec, scratch);
      else
        for (int64_t g = 0; g < group; ++g)  // prompt rows, head by head
          attend_rows({query + g * q_head, q_row, count, first, 1, head + g, result + g * dim, heads * dim,
                       row_lse ? row_lse + g : nullptr, heads}, panels, spec, scratch);
    }
  }
}

}  // namespace

#define ATTEND(name, type, ...)                                                                                       \
  extern "C" void attend_##name(const float* q, int64_t q_head, int64_t q_row, int64_t base, const int64_t* table,    \
                                int64_t values_after, const int32_t* cached, const int32_t* starts, float* out,       \
                                float* lse, int64_t segments, int64_t heads, int64_t kv_heads, int64_t dim,           \
                                int block, int64_t max_blocks, int64_t window, float scale, float softcap,            \
                                double value_topk, const float* sinks, int half, int threads,                         \
                                [[maybe_unused]] int64_t row_bytes, [[maybe_unused]] int group) {                     \
    const AttentionSpec spec{window, scale, softcap, value_topk, sinks};                                              \
    attend(q, q_head, q_row, type{__VA_ARGS__}, base, table, values_after, cached, starts, out, lse, segments, heads, \
           kv_heads, dim, block, max_blocks, spec, half, threads);                                                    \
  }

// One storage a library, chosen at build time: compiling all of them takes a quarter of a minute.
#if defined(STORED_float32)
ATTEND(float32, PlainRows<float>, dim)
#elif defined(STORED_bfloat16)
ATTEND(bfloat16, PlainRows<BFloat16>, dim)
#elif defined(STORED_float16)
ATTEND(float16, PlainRows<Float16>, dim)
#elif defined(STORED_bits3)
ATTEND(bits3, GroupedRows<3>, dim, row_bytes, group)
#elif defined(STORED_bits4)
ATTEND(bits4, GroupedRows<4>, dim, row_bytes, group)
#elif defined(STORED_bits8)
ATTEND(bits8, GroupedRows<8>, dim, row_bytes, group)
#endif
