// Attention of a packed batch over a paged key/value cache, in float32 arithmetic whatever the cache holds.
//
// q is [heads, tokens, dim] and out [tokens, heads, dim]. Segment i has the tokens starts[i] to starts[i + 1], which
// follow `cached[i]` others of its sequence on the pages of row i of table [segments, max_pages]: addresses of keys
// [kv_heads, page, dim], with as many values `values_after` bytes behind; packed, a row is `row_bytes` in the place of
// dim values. `page` is a binary logarithm. Zero is no window, no soft-capping; null no sinks [heads]; `keep` of one all
// values. What they mean is in rule.py.
//
// One work item is a segment and a key/value head. One row by itself is a few dot products; several, of a prompt or
// of a group of heads, are two products with keys and values as panels. A row's result depends on its own query and
// what it sees, in bits: not on where a prompt was cut, but where that leaves a row by itself.

#include <algorithm>
#include <cmath>
#include <functional>
#include <vector>

#include "packed.h"

namespace {

constexpr int64_t kBlock = 8 * kRows;  // rows whose scores are held together
constexpr int64_t kFew = 2;            // rows that are done one by one: panels would cost more than they save

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

template <typename T>
float dot(const float* a, const T* b, int64_t dim) {
  Lanes sum = {};
  int64_t j = 0;
  for (; j + kLanes <= dim; j += kLanes) sum += load(a + j) * widen(b + j);
  if (j < dim) sum += widen(a + j, dim - j) * widen(b + j, dim - j);
  return add_up(sum);
}

// sums[4] += p times the 32 values from a place on.
template <typename T>
void add_to(Lanes* sums, float p, const T* from) {
  for (int64_t l = 0; l < 4; ++l) sums[l] += p * widen(from + l * kLanes);
}

template <int kBits>  // a group is no smaller, and begins at a multiple of 32
void add_to(Lanes* sums, float p, const Packed<kBits>& from) {
  const float step = p * from.step(), low = p * from.low();
  const uint8_t* codes = from.here();
  for (int64_t l = 0; l < 4; ++l) sums[l] += low + codes_at<kBits>(codes + l * kBits) * step;
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

// out[dim] = the sum of shares times values, over `count` positions that `at` gives, from `low` on.
template <typename Value, typename At>
void add_values(const float* shares, int64_t low, int64_t count, int64_t dim, Value value, At at, float* out) {
  int64_t j = 0;
  for (; j + 4 * kLanes <= dim; j += 4 * kLanes) {
    Lanes sums[4] = {};
    for (int64_t i = 0; i < count; ++i) add_to(sums, shares[at(i)], value(low + at(i)) + j);
    for (int64_t l = 0; l < 4; ++l) store(out + j + l * kLanes, sums[l]);
  }
  for (; j < dim; j += kLanes) {
    const int64_t width = std::min(kLanes, dim - j);
    Lanes sum = {};
    for (int64_t i = 0; i < count; ++i) sum += shares[at(i)] * widen(value(low + at(i)) + j, width);
    std::memcpy(out + j, &sum, width * sizeof *out);
  }
}

// What `single` and `many` hold while they work.
struct Scratch {
  std::vector<float> scores, sorted;
  std::vector<int32_t> chosen;
};

// One row: `key` and `value` of a position point to what is stored of it.
template <typename Key, typename Value>
void single(const Rows& rows, int64_t i, int64_t dim, const Rule& rule, Scratch& scratch, Key key, Value value) {
  const int64_t position = rows.first + i * rows.step, low = begin(rule, position), base = low / kLanes * kLanes;
  const int64_t count = (position + kLanes) / kLanes * kLanes - base, seen = position + 1 - low;
  scratch.scores.resize(count);
  float* scores = scratch.scores.data();
  const float* query = rows.query + i * rows.apart;
  for (int64_t t = low; t <= position; ++t) scores[t - base] = dot(query, key(t), dim);
  softmax(scores, low - base, position + 1 - base, count, rule, rows.head + i * (1 - rows.step));
  const float* shares = scores + low - base;
  float* out = rows.out + i * rows.out_apart;
  if (rule.keep >= 1 || std::isnan(shares[0])) return add_values(shares, low, seen, dim, value, [](int64_t t) { return t; }, out);
  choose(shares, seen, rule.keep, scratch.sorted, scratch.chosen);
  add_values(shares, low, scratch.chosen.size(), dim, value, [&](int64_t t) { return scratch.chosen[t]; }, out);
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

// Rows of a page, stored value by value or packed.
template <typename T>
struct Plain {
  int64_t dim;

  const T* row(int64_t page, int64_t i) const { return reinterpret_cast<const T*>(page) + i * dim; }
};

template <int kBits>
struct Grouped {
  int64_t dim, row_bytes;
  int group;

  Packed<kBits> row(int64_t page, int64_t i) const {
    return {reinterpret_cast<const uint8_t*>(page) + i * row_bytes, dim, group};
  }
};

template <typename Stored>
void attend(const float* q, int64_t q_head, int64_t q_row, const Stored& stored, const int64_t* table,
            int64_t values_after, const int32_t* cached, const int32_t* starts, float* out, int64_t segments,
            int64_t heads, int64_t kv_heads, int64_t dim, int page, int64_t max_pages, const Rule& rule, int threads) {
  const int64_t group = heads / kv_heads;
#pragma omp parallel num_threads(threads)
  {
    Panels panels;
    Scratch scratch;
#pragma omp for schedule(dynamic)
    for (int64_t item = segments * kv_heads - 1; item >= 0; --item) {  // prompts, which take longest, come last
      const int64_t segment = item / kv_heads, kv_head = item % kv_heads, head = kv_head * group;
      const int64_t count = starts[segment + 1] - starts[segment], first = cached[segment];
      const int64_t* pages = table + segment * max_pages;
      const int64_t first_row = kv_head << page, in_page = (int64_t{1} << page) - 1;
      const auto key = [=](int64_t t) { return stored.row(pages[t >> page], first_row + (t & in_page)); };
      const auto value = [=](int64_t t) {
        return stored.row(pages[t >> page] + values_after, first_row + (t & in_page));
      };
      const bool prompt = count > 1;
      const float* query = q + head * q_head + starts[segment] * q_row;
      float* result = out + (starts[segment] * heads + head) * dim;
      // a prompt's rows head by head; of one token the rows are the group's heads
      Rows rows{query, prompt ? q_row : q_head, prompt ? count : group, first, prompt, head, result,
                prompt ? heads * dim : dim};
      const int64_t turns = prompt ? group : 1;
      const bool one_by_one = rule.keep < 1 || (!prompt && rows.count <= kFew);
      if (!one_by_one) panels.fill(begin(rule, first), first + count, dim, key, value);
      for (int64_t g = 0; g < turns; ++g) {
        if (!one_by_one) many(rows, panels, rule, scratch);
        else
          for (int64_t i = 0; i < rows.count; ++i) single(rows, i, dim, rule, scratch, key, value);
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
                                const float* sinks, int threads, [[maybe_unused]] int64_t row_bytes, [[maybe_unused]] int group) {        \
    attend(q, q_head, q_row, type{__VA_ARGS__}, table, values_after, cached, starts, out, segments, heads, kv_heads, \
           dim, page, max_pages, {window, scale, softcap, keep, sinks}, threads);                                     \
  }

ATTEND(float32, Plain<float>, dim)
ATTEND(bfloat16, Plain<BFloat16>, dim)
ATTEND(float16, Plain<Float16>, dim)
ATTEND(bits3, Grouped<3>, dim, row_bytes, group)
ATTEND(bits4, Grouped<4>, dim, row_bytes, group)
ATTEND(bits8, Grouped<8>, dim, row_bytes, group)
