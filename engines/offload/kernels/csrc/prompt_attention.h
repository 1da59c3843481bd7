// Attention of prompt rows in bfloat16: products by the CPU's units for it, the softmax in float32.
//
// All rows attend to a block of keys and values, which becomes panels of bfloat16 in the L2 cache, before the next: the
// scores of a few rows with a block are all that is ever held. Source: FlashAttention (Dao et al. 2022), algorithm 1.
// As its kernels do, this one rounds queries, keys, values and the probabilities that meet the values to bfloat16.
//
// Blocks lie at multiples of kKeys positions, and what a row does not see adds zeros to it. So as long as values are
// finite, a row's result depends, bit for bit, only on its query and what it sees.

#pragma once

#include "packed_rows.h"
#include "plain_product.h"
#include "softmax.h"

#ifdef __AVX512BF16__
#define HAS_PROMPT_ATTENTION 1

#include "aligned.h"
#include "attention_items.h"

namespace {

constexpr int64_t kKeys = 256;    // positions of a block
constexpr int64_t kQueries = 32;  // rows whose scores with a block are held at once: two tiles of the matrix units
constexpr int64_t kScoresLd = kKeys + 16;  // of rows of scores: at a power of two they would share sets of the caches
constexpr int64_t kWholeSteps = 32;        // memory is taken for a multiple of so many columns, whatever kStep is
#ifdef HAS_AMX
constexpr int64_t kStep = kTileColumns, kPanels = 2;  // columns of a step, and panels that are multiplied together
#else
constexpr int64_t kStep = kPanel, kPanels = kTogether;
#endif

constexpr float kLog2e = 1.44269504088896341f, kUnseen = -1e30f;  // a score whose exponential is zero

inline int64_t round_down(int64_t n) { return n / kStep * kStep; }
inline int64_t round_up(int64_t n) { return round_down(n + kStep - 1); }

// The query rows of some tokens for the heads that share a key/value head: row r is of token r / group, whose position
// is first + r / group, and of head `head` + r % group.
struct PromptRows {
  const float* query;
  int64_t query_token, query_head;  // floats from one to the next
  int64_t tokens, group, first, head;
  float* out;
  int64_t out_token;
  float* lse;  // or null
  int64_t lse_token;

  int64_t count() const { return tokens * group; }
  int64_t position(int64_t r) const { return first + r / group; }
  const float* query_of(int64_t r) const { return query + r / group * query_token + r % group * query_head; }
  float* out_of(int64_t r, int64_t dim) const { return out + r / group * out_token + r % group * dim; }
  float* lse_of(int64_t r) const { return lse + r / group * lse_token + r % group; }
};

inline void write_rounded(BFloat16* to, Lanes values) {  // to the nearest, ties to even
  const auto rounded = _mm256_cvtneps_pbh((__m256)values);
  std::memcpy(to, &rounded, sizeof rounded);
}

// `dim` stored values as bfloat16.
inline void write_row(BFloat16* to, const BFloat16* from, int64_t dim) { std::memcpy(to, from, dim * sizeof *to); }

// `to` has room for whole vectors.
template <int kBits>
inline void write_row(BFloat16* to, Packed<kBits> from, int64_t dim) {
  while (from.at < dim) {
    const Lanes scale = spread(from.scale()), minimum = spread(from.minimum());
    for (const int64_t end = std::min(dim, from.at + from.left()); from.at < end; from.at += kLanes)
      write_rounded(to + from.at, minimum + codes_at<kBits>(from.here()) * scale);
  }
  for (int64_t j = dim; j < from.at; ++j) to[j] = {};
}

// What a thread needs to attend.
class PromptAttention {
 public:
  // Takes memory for the rows of an item.
  void take(Arena& arena, int64_t dim, int64_t group) {
    dim_ = dim, columns_ = round_up(dim);
    const int64_t columns = (dim + kWholeSteps - 1) / kWholeSteps * kWholeSteps, rows = std::max(kMostRows, group);
    keys_ = arena.take<BFloat16>(kKeys * columns);
    values_ = arena.take<BFloat16>(kKeys * columns);
    queries_ = arena.take<BFloat16>(kQueries * columns);
    stored_ = arena.take<BFloat16>(kPanel * columns);
    scores_ = arena.take<float>(kQueries * kScoresLd);
    products_ = arena.take<float>(kQueries * columns);
    maxima_ = arena.take<float>(rows);
    sums_ = arena.take<float>(rows);
  }

  // key(t), value(t): cursors at the stored rows [dim] of position t. What no row sees is not read.
  template <typename Key, typename Value>
  void attend(const PromptRows& rows, Key key, Value value, const AttentionSpec& spec) {
    begin(rows, spec);
    const int64_t seen = first_seen(spec, rows.first), end = rows.first + rows.tokens;
    for (int64_t low = seen / kKeys * kKeys; low < end; low += kKeys) {
      const int64_t from = std::max<int64_t>(0, seen - low), count = std::min(kKeys, end - low);
      pack_keys(from, count, [&](int64_t i) { return key(low + i); });
      pack_values(from, count, [&](int64_t i) { return value(low + i); });
      for (int64_t r = 0; r < rows.count(); r += kQueries)
        attend_block(rows, r, std::min(kQueries, rows.count() - r), low, count, spec);
    }
    finish(rows);
  }

 private:
  void begin(const PromptRows& rows, const AttentionSpec& spec) {
    const int64_t count = rows.count();
    values_apart_ = std::min(kKeys, round_up(rows.first + rows.tokens)) * kPanel;
    std::fill(stored_, stored_ + kPanel * columns_, BFloat16{});  // the columns beyond dim stay zeros
    std::fill(queries_, queries_ + kQueries * columns_, BFloat16{});
    for (int64_t r = 0; r < count; ++r) {
      std::fill(rows.out_of(r, dim_), rows.out_of(r, dim_) + dim_, 0.0f);
      maxima_[r] = spec.sinks ? kLog2e * spec.sinks[rows.head + r % rows.group] : -INFINITY;
      sums_[r] = spec.sinks ? 1 : 0;
    }
  }

  // Rows [from, count) of a block in panels of kPanel positions, of each pair of columns the two values of every one.
  template <typename Row>
  void pack_keys(int64_t from, int64_t count, Row row) {
    for (int64_t t = round_down(from); t < round_up(count); t += kPanel) {
      BFloat16* panel = keys_ + t * columns_;
      for (int64_t i = 0; i < kPanel; ++i) stage(i, t + i, from, count, row);
      for (int64_t i = 0; i < kPanel; i += kLanes)
        for (int64_t j = 0; j < columns_; j += 2 * kLanes) {  // a lane is a pair
          Lanes pairs[kLanes];
          for (int64_t k = 0; k < kLanes; ++k) std::memcpy(pairs + k, stored_ + (i + k) * columns_ + j, sizeof(Lanes));
          transpose(pairs);
          for (int64_t k = 0; k < kLanes; ++k)
            std::memcpy(panel + (j / 2 + k) * kPair + 2 * i, pairs + k, sizeof(Lanes));
        }
    }
  }

  // The same in panels of kPanel columns, of each pair of positions the two values of every column.
  template <typename Row>
  void pack_values(int64_t from, int64_t count, Row row) {
    for (int64_t t = round_down(from); t < round_up(count); t += 2) {
      for (int64_t i = 0; i < 2; ++i) stage(i, t + i, from, count, row);
      for (int64_t j = 0; j < columns_; j += kLanes) {
        HalfBits even, odd;
        std::memcpy(&even, stored_ + j, sizeof even);
        std::memcpy(&odd, stored_ + columns_ + j, sizeof odd);
        const Bits pairs = __builtin_convertvector(even, Bits) | __builtin_convertvector(odd, Bits) << 16;
        std::memcpy(values_ + j / kPanel * values_apart_ + t / 2 * kPair + 2 * (j % kPanel), &pairs, sizeof pairs);
      }
    }
  }

  // Row t of a block as number i of stored_, zeros beyond its rows [from, count).
  template <typename Row>
  void stage(int64_t i, int64_t t, int64_t from, int64_t count, Row row) {
    BFloat16* to = stored_ + i * columns_;
    if (from <= t && t < count) write_row(to, row(t), dim_);
    else std::fill(to, to + dim_, BFloat16{});
  }

  // `size` rows, from row r on, attend to what they see of the block of `count` positions from `low` on.
  void attend_block(const PromptRows& rows, int64_t r, int64_t size, int64_t low, int64_t count,
                    const AttentionSpec& spec) {
    const int64_t earliest = first_seen(spec, rows.position(r)), latest = rows.position(r + size - 1);
    const int64_t from = round_down(std::max<int64_t>(0, earliest - low));
    const int64_t to = round_up(std::min(count, latest + 1 - low));
    if (from >= to) return;
    for (int64_t i = 0; i < size; ++i) copy_query(rows.query_of(r + i), queries_ + i * columns_);
    each_group((to - from) / kPanel, [&](int64_t panel, int64_t panels) {
      multiply_panels(queries_, columns_, size, keys_ + (from + panel * kPanel) * columns_, kPanel * columns_,
                      columns_ / 2, panels, scores_ + from + panel * kPanel, kScoresLd);
    });
    float kept[kQueries];
    for (int64_t i = 0; i < size; ++i) {
      const int64_t position = rows.position(r + i);
      kept[i] = soften(scores_ + i * kScoresLd, from, to, first_seen(spec, position) - low, position + 1 - low, spec,
                       maxima_[r + i], sums_[r + i]);
    }
    each_group(columns_ / kPanel, [&](int64_t panel, int64_t panels) {
      multiply_panels(probabilities(scores_) + from, 2 * kScoresLd, size,
                      values_ + panel * values_apart_ + from / 2 * kPair, values_apart_, (to - from) / 2, panels,
                      products_ + panel * kPanel, columns_);
    });
    for (int64_t i = 0; i < size; ++i) add_row(rows.out_of(r + i, dim_), kept[i], products_ + i * columns_);
  }

  static BFloat16* probabilities(float* scores) { return reinterpret_cast<BFloat16*>(scores); }

  // visit(first panel, their number) for groups that differ by a panel at most.
  template <typename Visit>
  static void each_group(int64_t panels, Visit visit) {
    const int64_t groups = (panels + kPanels - 1) / kPanels;
    for (int64_t g = 0; g < groups; ++g) {
      const int64_t panel = panels * g / groups;
      visit(panel, panels * (g + 1) / groups - panel);
    }
  }

  void copy_query(const float* from, BFloat16* to) const {
    int64_t j = 0;
    for (; j + kLanes <= dim_; j += kLanes) write_rounded(to + j, load(from + j));
    for (; j < dim_; ++j) round_to(to + j, from[j]);
  }

  // Scores [from, to) of a row, which sees [low, high) of the block, to exponentials in bfloat16 in their place. The
  // row's largest score and sum of exponentials change; returns the factor by which what it had before shrinks.
  static float soften(float* scores, int64_t from, int64_t to, int64_t low, int64_t high, const AttentionSpec& spec,
                      float& maximum, float& sum) {
    BFloat16* const result = probabilities(scores);
    low = std::max(from, low), high = std::min(to, high);
    if (low >= high) {
      std::fill(result + from, result + to, BFloat16{});
      return 1;
    }
    std::fill(scores + from, scores + low, kUnseen);
    std::fill(scores + high, scores + to, kUnseen);
    if (spec.softcap)
      for (int64_t t = low; t < high; ++t) scores[t] = spec.softcap * std::tanh(scores[t] * spec.scale / spec.softcap);
    const __m512 scale = _mm512_set1_ps(kLog2e * (spec.softcap ? 1 : spec.scale));
    __m512 maxima = _mm512_set1_ps(-INFINITY), sums = _mm512_setzero_ps();
    for (int64_t t = from; t < to; t += kVector)  // of two operands the instruction gives the second if one is NaN
      maxima = _mm512_max_ps(_mm512_mul_ps(_mm512_loadu_ps(scores + t), scale), maxima);
    const float before = maximum;
    maximum = std::max(before, _mm512_reduce_max_ps(maxima));
    for (int64_t t = from; t < to; t += kVector) {
      const __m512 next = exp2(_mm512_fmsub_ps(_mm512_loadu_ps(scores + t), scale, _mm512_set1_ps(maximum)));
      const auto rounded = _mm512_cvtneps_pbh(next);
      std::memcpy(result + t, &rounded, sizeof rounded);
      sums = _mm512_add_ps(sums, next);
    }
    const float kept = std::exp2(before - maximum);
    sum = sum * kept + _mm512_reduce_add_ps(sums);
    return kept;
  }

  // 2^x, within 2e-7 of it; NaN stays NaN.
  static __m512 exp2(__m512 x) {
    constexpr float kFactors[] = {1.00000007f,    0.693146967f,   0.240221197f,
                                  0.0555071327f,  0.00967554138f, 0.0013276472f};  // least largest relative error
    const __m512 fraction = _mm512_sub_ps(x, _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
    __m512 y = _mm512_set1_ps(kFactors[5]);
    for (int i = 4; i >= 0; --i) y = _mm512_fmadd_ps(y, fraction, _mm512_set1_ps(kFactors[i]));
    return _mm512_scalef_ps(y, _mm512_sub_ps(x, fraction));
  }

  void add_row(float* out, float kept, const float* product) const {
    int64_t j = 0;
    for (; j + kLanes <= dim_; j += kLanes) store(out + j, load(out + j) * kept + load(product + j));
    for (; j < dim_; ++j) out[j] = out[j] * kept + product[j];
  }

  void finish(const PromptRows& rows) const {
    for (int64_t r = 0; r < rows.count(); ++r) {
      float* out = rows.out_of(r, dim_);
      const float inverse = 1 / sums_[r];
      for (int64_t j = 0; j < dim_; ++j) out[j] *= inverse;
      if (rows.lse) *rows.lse_of(r) = maxima_[r] / kLog2e + std::log(sums_[r]);
    }
  }

  int64_t dim_ = 0, columns_ = 0, values_apart_ = 0;
  BFloat16 *keys_ = nullptr, *values_ = nullptr, *queries_ = nullptr, *stored_ = nullptr;
  float *scores_ = nullptr, *products_ = nullptr;
  float *maxima_ = nullptr, *sums_ = nullptr;  // of each row: its largest score times log2 e, and of its exponentials
};

}  // namespace

#endif
