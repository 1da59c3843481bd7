// Attention of a packed batch over a paged key/value cache, in float32 arithmetic whatever the cache holds.
//
// q is [heads, tokens, dim] and out [tokens, heads, dim]. Segment i has the tokens starts[i] to starts[i + 1], which
// follow `cached[i]` others of its sequence on the pages of row i of table [segments, max_pages]: addresses of keys
// [kv_heads, page, dim], with as many values `values_after` bytes behind; packed, a row is `row_bytes` in the place of
// dim values. `page` is a binary logarithm. Zero is no window, no soft-capping; null no sinks [heads]; `keep` of one all
// values. What they mean is in rule.py.
//
// One work item is a segment and a key/value head. The heads of one token read what is stored, a few at a time; the
// rows of a prompt are two products with keys and values as panels. A row's result depends on its own query and what
// it sees, in bits, as long as values are finite: not on where a prompt was cut, but where that leaves a row by itself.
// Rows that take a part of the values are done one by one, and large groups of heads as the rows of a prompt are.

#include <algorithm>
#include <cmath>
#include <functional>
#include <numeric>
#include <vector>

#include "few.h"

namespace {

constexpr int64_t kBlock = 8 * kRows;  // rows whose scores are held together
constexpr int64_t kMany = 16;          // heads in a group for which panels are worth while

struct Rule {
  int64_t window;
  float scale, softcap;
  double keep;
  const float* sinks;
};

// A few rows of queries: row i is at `query + i * apart`, position `first + i * step`, and of head `head + i * (1 - step)`.
struct Rows {
  const float* query;
  int64_t apart, count, first, step, head;
  float* out;
  int64_t out_apart;
};

// What a row at `position` sees begins here.
int64_t begin(const Rule& rule, int64_t position) {
  return rule.window ? std::max<int64_t>(0, position - rule.window + 1) : 0;
}

// Softmax over scores[low, high); what else lies in [0, count), a whole number of lanes, becomes zero.
void softmax(float* scores, int64_t low, int64_t high, int64_t count, const Rule& rule, int64_t head) {
  for (int64_t t = 0; t < count; t += kLanes) store(scores + t, load(scores + t) * rule.scale);
  if (rule.softcap)
    for (int64_t t = low; t < high; ++t) scores[t] = rule.softcap * std::tanh(scores[t] / rule.softcap);
  std::fill(scores, scores + low, -INFINITY);
  std::fill(scores + high, scores + count, -INFINITY);
  Lanes tops = load(scores), sums = {};
  for (int64_t t = kLanes; t < count; t += kLanes) {
    const Lanes next = load(scores + t);
    tops = next > tops ? next : tops;
  }
  float top = rule.sinks ? rule.sinks[head] : -INFINITY;
  for (int64_t i = 0; i < kLanes; ++i) top = std::max(top, tops[i]);
  for (int64_t t = 0; t < count; t += kLanes) {
    const Lanes next = exp(load(scores + t) - top);
    store(scores + t, next);
    sums += next;
  }
  const float share = 1 / (add_up(sums) + (rule.sinks ? std::exp(rule.sinks[head] - top) : 0.0f));
  for (int64_t t = 0; t < count; t += kLanes) store(scores + t, load(scores + t) * share);
}

// The positions whose values a row takes, in order: a part of those it sees, with the largest shares.
void choose(const float* shares, int64_t count, double keep, std::vector<float>& sorted, std::vector<int32_t>& chosen) {
  const int64_t wanted = std::min<int64_t>(count, std::ceil(keep * count));
  sorted.assign(shares, shares + count);
  std::nth_element(sorted.begin(), sorted.begin() + wanted - 1, sorted.end(), std::greater<float>());
  const float least = sorted[wanted - 1];
  int64_t equals = wanted - std::count_if(shares, shares + count, [=](float share) { return share > least; });
  chosen.clear();
  for (int64_t t = 0; t < count; ++t)
    if (shares[t] > least || (shares[t] == least && equals-- > 0)) chosen.push_back(t);
}

// What `few` and `many` hold while they work.
struct Scratch {
  std::vector<float> scores, sorted, shares;
  std::vector<int32_t> chosen;
};

// Where the pages of one head are.
struct Pages {
  const int64_t* table;
  int64_t keys, values;  // bytes from the begin of a page
  int page;

  const uint8_t* operator()(int64_t t, int64_t offset) const {
    return reinterpret_cast<const uint8_t*>(table[t >> page] + offset);
  }
  int64_t rest(int64_t t) const { return (int64_t{1} << page) - in_page(t); }  // rows from t on
  int64_t in_page(int64_t t) const { return t & ((int64_t{1} << page) - 1); }
};

// R rows of one position, from row i on.
template <int R, typename Stored>
void few(Few<R, Stored>& work, const Rows& rows, int64_t i, const Stored& stored, const Pages& pages, const Rule& rule,
         Scratch& scratch) {
  const int64_t position = rows.first + i * rows.step, low = begin(rule, position), base = low / kLanes * kLanes;
  const int64_t count = (position + kLanes) / kLanes * kLanes - base, seen = position + 1 - low;
  const int64_t last = position >> pages.page << pages.page, bytes = stored.row_bytes, page_bytes = bytes << pages.page;
  const auto fetch_page = [&](int64_t t, int64_t offset) {  // ahead of its use
    if (t <= last) fetch(pages(t, offset), page_bytes);
  };
  const auto fetch_first = [&](int64_t offset) {
    for (int64_t k = 0; k < kFetch; ++k) fetch_page(low + (k << pages.page), offset);
  };
  fetch_first(pages.keys);
  work.begin(rows.query + i * rows.apart, rows.apart);
  scratch.scores.resize(R * count);
  float *scores = scratch.scores.data(), *out = rows.out + i * rows.out_apart;
  const auto each_page = [&](int64_t offset, auto visit) {
    for (int64_t t = low; t <= position;) {
      const int64_t size = std::min(pages.rest(t), position + 1 - t);
      fetch_page(t + (kFetch << pages.page), offset);
      visit(t, pages(t, offset) + pages.in_page(t) * bytes, size);
      t += size;
    }
  };
  each_page(pages.keys, [&](int64_t t, const uint8_t* from, int64_t size) {
    work.score(from, size, scores + t - base, count);
  });
  fetch_first(pages.values);
  for (int64_t r = 0; r < R; ++r)
    softmax(scores + r * count, low - base, position + 1 - base, count, rule, rows.head + (i + r) * (1 - rows.step));
  const float* shares = scores + low - base;
  if (rule.keep >= 1 || std::isnan(shares[0])) {
    each_page(pages.values, [&](int64_t t, const uint8_t* from, int64_t size) {
      work.take([=](int64_t k) { return from + k * bytes; }, size, scores + t - base, count);
    });
  } else if constexpr (R == 1) {  // each row chooses others
    choose(shares, seen, rule.keep, scratch.sorted, scratch.chosen);
    scratch.shares.clear();
    for (const int32_t t : scratch.chosen) scratch.shares.push_back(shares[t]);
    const float all = std::accumulate(shares, shares + seen, 0.0f);
    const float grown = all / std::accumulate(scratch.shares.begin(), scratch.shares.end(), 0.0f);
    for (float& share : scratch.shares) share *= grown;
    for (size_t k = 0, end = 0; k < scratch.chosen.size(); k = end) {  // page by page
      const int64_t t = low + scratch.chosen[k];
      while (end < scratch.chosen.size() && low + scratch.chosen[end] < t + pages.rest(t)) ++end;
      const int32_t* chosen = scratch.chosen.data() + k;
      const auto row = [&, chosen](int64_t n) {
        const int64_t t = low + chosen[n];
        return pages(t, pages.values) + pages.in_page(t) * bytes;
      };
      work.take(row, end - k, scratch.shares.data() + k, 0);
    }
  }
  work.end(out, rows.out_apart);
}

// Makes room for `count` floats; what was there need not be kept, nor be there beside it.
float* room(std::vector<float>& held, int64_t count) {
  if (held.capacity() < static_cast<size_t>(count)) std::vector<float>().swap(held);
  held.resize(count);
  return held.data();
}

// Keys and values of positions `low`, a multiple of kWidth, up to `high` as panels: keys by kWidth positions, [dim]
// each, values by kWidth columns, [positions] each.
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

// Several rows of one key/value head against its panels.
void many(const Rows& rows, const Panels& panels, const Rule& rule, Scratch& scratch) {
  const int64_t dim = panels.dim, count = panels.high - panels.low;
  for (int64_t from = 0; from < rows.count; from += kBlock) {
    const int64_t size = std::min(kBlock, rows.count - from), earliest = rows.first + from * rows.step;
    const int64_t low = begin(rule, earliest) / kWidth * kWidth, high = earliest + (size - 1) * rows.step + 1;
    const int64_t wide = (high - low + kWidth - 1) / kWidth * kWidth;
    float* scores = room(scratch.scores, kBlock * wide);
    for (int64_t t = 0; t < wide; t += kWidth)
      for (int64_t i = 0; i < size; i += kRows)
        last_tile<kRows>(std::min(kRows, size - i), rows.query + (from + i) * rows.apart, rows.apart,
                         panels.keys.data() + (low - panels.low + t) * dim, dim, nullptr, 0, scores + i * wide + t, wide,
                         kWidth);
    for (int64_t i = 0; i < size; ++i) {
      const int64_t position = earliest + i * rows.step;
      softmax(scores + i * wide, begin(rule, position) - low, position + 1 - low, wide, rule,
              rows.head + (from + i) * (1 - rows.step));
    }
    for (int64_t j = 0; j < dim; j += kWidth)
      for (int64_t i = 0; i < size; i += kRows)
        last_tile<kRows>(std::min(kRows, size - i), scores + i * wide, wide,
                         panels.values.data() + (j / kWidth * count + low - panels.low) * kWidth, high - low, nullptr, 0,
                         rows.out + (from + i) * rows.out_apart + j, rows.out_apart, std::min(kWidth, dim - j));
  }
}

template <typename Stored>
void attend(const float* q, int64_t q_head, int64_t q_row, const Stored& stored, const int64_t* table,
            int64_t values_after, const int32_t* cached, const int32_t* starts, float* out, int64_t segments,
            int64_t heads, int64_t kv_heads, int64_t dim, int page, int64_t max_pages, const Rule& rule, int threads) {
  const int64_t group = heads / kv_heads;
#pragma omp parallel num_threads(threads)
  {
    Panels panels;
    Scratch scratch;
    Few<1, Stored> one(stored, int64_t{1} << page);
    Few<2, Stored> two(stored, int64_t{1} << page);
    Few<4, Stored> four(stored, int64_t{1} << page);
#pragma omp for schedule(dynamic)
    for (int64_t item = segments * kv_heads - 1; item >= 0; --item) {  // prompts, which take longest, come last
      const int64_t segment = item / kv_heads, kv_head = item % kv_heads, head = kv_head * group;
      const int64_t count = starts[segment + 1] - starts[segment], first = cached[segment];
      const int64_t bytes = stored.row_bytes, first_row = (kv_head << page) * bytes;
      const Pages pages{table + segment * max_pages, first_row, first_row + values_after, page};
      const auto key = [=](int64_t t) { return stored.place(pages(t, pages.keys) + pages.in_page(t) * bytes); };
      const auto value = [=](int64_t t) { return stored.place(pages(t, pages.values) + pages.in_page(t) * bytes); };
      const bool prompt = count > 1;
      const float* query = q + head * q_head + starts[segment] * q_row;
      float* result = out + (starts[segment] * heads + head) * dim;
      // a prompt's rows head by head; of one token the rows are the group's heads
      Rows rows{query, prompt ? q_row : q_head, prompt ? count : group, first, prompt, head, result,
                prompt ? heads * dim : dim};
      const int64_t turns = prompt ? group : 1;
      const bool sparse = rule.keep < 1, in_panels = !sparse && (prompt || group >= kMany);
      if (in_panels) panels.fill(begin(rule, first), first + count, dim, key, value);
      for (int64_t g = 0; g < turns; ++g) {
        if (in_panels) many(rows, panels, rule, scratch);
        for (int64_t i = 0; !in_panels && i < rows.count;) {
          const int64_t left = sparse ? 1 : rows.count - i;  // of a token's rows each would choose others
          if (left >= 4) few(four, rows, i, stored, pages, rule, scratch), i += 4;
          else if (left >= 2) few(two, rows, i, stored, pages, rule, scratch), i += 2;
          else few(one, rows, i, stored, pages, rule, scratch), ++i;
        }
        rows.query += q_head, rows.out += dim, ++rows.head;
      }
    }
  }
}

}  // namespace

#define ATTEND(name, type, ...)                                                                                       \
  extern "C" void attend_##name(const float* q, int64_t q_head, int64_t q_row, const int64_t* table,                  \
                                int64_t values_after, const int32_t* cached, const int32_t* starts, float* out,       \
                                int64_t segments, int64_t heads, int64_t kv_heads, int64_t dim, int page,             \
                                int64_t max_pages, int64_t window, float scale, float softcap, double keep,           \
                                const float* sinks, int threads, [[maybe_unused]] int64_t row_bytes,                  \
                                [[maybe_unused]] int group) {                                                         \
    attend(q, q_head, q_row, type{__VA_ARGS__}, table, values_after, cached, starts, out, segments, heads, kv_heads, \
           dim, page, max_pages, {window, scale, softcap, keep, sinks}, threads);                                     \
  }

// One kind at a time: all of them take a compiler a quarter of a minute.
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
