// Attention of a packed batch over a paged key/value cache, in float32 arithmetic whatever the cache holds.
//
// q is [heads, tokens, dim] and out [tokens, heads, dim]. Segment i has the tokens starts[i] to starts[i + 1], which
// follow `cached[i]` others of its sequence on the pages of row i of table [segments, max_pages]: addresses of keys
// [kv_heads, page, dim], with as many values `values_after` bytes behind; packed, a row is `row_bytes` in the place of
// dim values. `page` is a binary logarithm. Zero is no window, no soft-capping; null no sinks [heads]; `keep` of one all
// values. What they mean is in rule.py. `logs` [tokens, heads] or null takes the logarithms of the sums that shares are
// of, by which parts that were attended to elsewhere are put together.
//
// The heads of one token read what is stored, page by page and many at once; the rows of a prompt are two products with
// keys and values as panels. A row's result depends on its own query and what it sees, in bits, as long as values are finite: not on where a prompt was cut, but where that leaves a row by itself.
// Rows that take a part of the values are done one by one, and large groups of heads as the rows of a prompt are.

#include <algorithm>
#include <numeric>
#include <vector>

#include "few.h"
#include "rule.h"

namespace {

constexpr int64_t kBlock = 8 * kRows;  // rows whose scores are held together
constexpr int64_t kMany = 16;          // heads in a group for which panels are worth while
constexpr int64_t kScores = 1 << 17;   // of rows that are done together: half of a second-level cache
constexpr int64_t kShare = 4;          // pieces of work that each thread should find

// A few rows of queries: row i is at `query + i * apart`, position `first + i * step`, and of head `head + i * (1 - step)`.
struct Rows {
  const float* query;
  int64_t apart, count, first, step, head;
  float* out;
  int64_t out_apart;
  float* logs;
  int64_t logs_apart;
};

// Makes room for `count` floats; what was there need not be kept, nor be there beside it.
float* room(std::vector<float>& held, int64_t count) {
  if (held.capacity() < static_cast<size_t>(count)) std::vector<float>().swap(held);
  held.resize(count);
  return held.data();
}

// What one thread holds while it works.
struct Scratch {
  std::vector<float> scores, sorted, shares;
  std::vector<int32_t> chosen;
};

// Where the pages of a segment are. Those of one head after the other lie `head_bytes` apart.
struct Pages {
  const int64_t* table;
  int64_t keys, values, head_bytes;  // bytes from the begin of a page to its first head's
  int page;

  const uint8_t* operator()(int64_t t, int64_t offset) const {
    return reinterpret_cast<const uint8_t*>(table[t >> page] + offset);
  }
  int64_t rest(int64_t t) const { return (int64_t{1} << page) - in_page(t); }  // rows from t on
  int64_t in_page(int64_t t) const { return t & ((int64_t{1} << page) - 1); }
};

// One token's rows of some key/value heads, next to each other: on a page their keys are, and so are their values.
template <typename Stored>
class Token {
 public:
  // For up to `kv_heads` of them with `group` rows each; `alone`: rows do not share what is read.
  Token(const Stored& stored, int page, int64_t kv_heads, int64_t group, bool alone)
      : bytes_(stored.row_bytes), group_(group), fours_(alone ? 0 : group / 4), twos_(alone ? 0 : group % 4 / 2),
        four_(kv_heads * fours_, {stored, int64_t{1} << page}), two_(kv_heads * twos_, {stored, int64_t{1} << page}),
        one_(kv_heads * (group - 4 * fours_ - 2 * twos_), {stored, int64_t{1} << page}) {}

  // Row r is at `query + r * apart`, what it gets goes to `out + r * out_apart` and `logs + r`. It is of head `head` + r.
  void attend(const float* query, int64_t apart, float* out, int64_t out_apart, float* logs, int64_t position,
              int64_t kv_heads, int64_t head, const Pages& pages, const Rule& rule, Scratch& scratch) {
    const int64_t low = begin(rule, position), base = low / kLanes * kLanes, rows = kv_heads * group_;
    const int64_t count = (position + kLanes) / kLanes * kLanes - base;
    float* scores = room(scratch.scores, rows * count);
    each(0, kv_heads, [&](auto& work, int64_t row) { work.begin(query + row * apart, apart); });
    each_page(pages, pages.keys, low, position, kv_heads, [&](int64_t h, int64_t t, const uint8_t* from, int64_t size) {
      each(h, h + 1, [&](auto& work, int64_t row) { work.score(from, size, scores + row * count + t - base, count); });
    });
    for (int64_t row = 0; row < rows; ++row) {
      const float log = softmax(scores + row * count, low - base, position + 1 - base, count, rule, head + row);
      if (logs) logs[row] = log;
    }
    if (rule.keep < 1)
      for (int64_t row = 0; row < rows; ++row)
        take_part(one_[row], pages, row / group_, scores + row * count + low - base, low, position, rule.keep, scratch);
    else
      each_page(pages, pages.values, low, position, kv_heads, [&](int64_t h, int64_t t, const uint8_t* from, int64_t size) {
        const auto at = [=](int64_t k) { return from + k * bytes_; };
        each(h, h + 1, [&](auto& work, int64_t row) { work.take(at, size, scores + row * count + t - base, count); });
      });
    each(0, kv_heads, [&](auto& work, int64_t row) { work.end(out + row * out_apart, out_apart); });
  }

 private:
  // visit(work, first row of it) for the rows of heads from `first` to `last`.
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

  // visit(head, position, its row, rows that follow) page by page, each page's heads in turn; what comes next is fetched.
  template <typename Visit>
  void each_page(const Pages& pages, int64_t offset, int64_t low, int64_t position, int64_t kv_heads, Visit visit) const {
    const int64_t last = position >> pages.page;
    int64_t page = low >> pages.page, head = 0;  // what is fetched next
    const auto fetch_next = [&] {
      if (page > last) return;
      fetch(pages(page << pages.page, offset + head * pages.head_bytes), pages.head_bytes);
      if (++head == kv_heads) head = 0, ++page;
    };
    for (int64_t i = 0; i < kFetch; ++i) fetch_next();
    for (int64_t t = low; t <= position;) {
      const int64_t size = std::min(pages.rest(t), position + 1 - t);
      const uint8_t* from = pages(t, offset) + pages.in_page(t) * bytes_;
      for (int64_t h = 0; h < kv_heads; ++h, from += pages.head_bytes) {
        fetch_next();
        visit(h, t, from, size);
      }
      t += size;
    }
  }

  // Takes a part of the values, those with the largest of `shares`, which are from position `low` on.
  void take_part(Few<1, Stored>& work, const Pages& pages, int64_t kv_head, const float* shares, int64_t low,
                 int64_t position, double keep, Scratch& scratch) const {
    const int64_t seen = position + 1 - low, offset = pages.values + kv_head * pages.head_bytes;
    const auto at = [&](int64_t t) { return pages(t, offset) + pages.in_page(t) * bytes_; };
    std::vector<int32_t>& chosen = scratch.chosen;
    if (std::isnan(shares[0])) chosen.resize(seen), std::iota(chosen.begin(), chosen.end(), 0);
    else choose(shares, seen, keep, scratch.sorted, chosen);
    scratch.shares.clear();
    for (const int32_t t : chosen) scratch.shares.push_back(shares[t]);
    const float all = std::accumulate(shares, shares + seen, 0.0f);
    const float grown = all / std::accumulate(scratch.shares.begin(), scratch.shares.end(), 0.0f);
    for (float& share : scratch.shares) share *= grown;
    for (size_t k = 0, end = 0; k < chosen.size(); k = end) {  // page by page
      const int64_t t = low + chosen[k];
      while (end < chosen.size() && low + chosen[end] < t + pages.rest(t)) ++end;
      const auto row = [&, k](int64_t n) { return at(low + chosen[k + n]); };
      work.take(row, end - k, scratch.shares.data() + k, 0);
    }
  }

  int64_t bytes_, group_, fours_, twos_;
  std::vector<Few<4, Stored>> four_;
  std::vector<Few<2, Stored>> two_;
  std::vector<Few<1, Stored>> one_;
};

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
      const float log = softmax(scores + i * wide, begin(rule, position) - low, position + 1 - low, wide, rule,
                                rows.head + (from + i) * (1 - rows.step));
      if (rows.logs) rows.logs[(from + i) * rows.logs_apart] = log;
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
            int64_t values_after, const int32_t* cached, const int32_t* starts, float* out, float* logs,
            int64_t segments, int64_t heads, int64_t kv_heads, int64_t dim, int page, int64_t max_pages, const Rule& rule, int threads) {
  const int64_t group = heads / kv_heads;
  const bool sparse = rule.keep < 1, wide = group >= kMany && !sparse;
  // pieces of work: a segment's key/value heads from one to another
  struct Item {
    int64_t segment, first, last;
  };
  std::vector<Item> items;
  // of one token many heads at once, since what they read lies in one piece
  const int64_t longest = max_pages << page, rows = std::min(kBlock, kScores / longest);
  const int64_t several = std::max<int64_t>(1, std::min(rows / group, segments * kv_heads / (kShare * threads)));
  for (int64_t segment = segments - 1; segment >= 0; --segment) {  // prompts, which take longest, come last
    const int64_t size = wide || starts[segment + 1] - starts[segment] > 1 ? 1 : several;
    for (int64_t h = 0; h < kv_heads; h += size) items.push_back({segment, h, std::min(kv_heads, h + size)});
  }
#pragma omp parallel num_threads(threads)
  {
    Panels panels;
    Scratch scratch;
    Token<Stored> token(stored, page, several, group, sparse);
#pragma omp for schedule(dynamic)
    for (size_t i = 0; i < items.size(); ++i) {
      const auto [segment, kv_head, last] = items[i];
      const int64_t count = starts[segment + 1] - starts[segment], first = cached[segment], head = kv_head * group;
      const int64_t bytes = stored.row_bytes, of_head = bytes << page, first_row = kv_head * of_head;
      const Pages pages{table + segment * max_pages, first_row, first_row + values_after, of_head, page};
      const float* query = q + head * q_head + starts[segment] * q_row;
      float* result = out + (starts[segment] * heads + head) * dim;
      float* log = logs ? logs + starts[segment] * heads + head : nullptr;
      if (!wide && (sparse || count == 1)) {
        for (int64_t k = 0; k < count; ++k, query += q_row, result += heads * dim, log += log ? heads : 0)
          token.attend(query, q_head, result, dim, log, first + k, last - kv_head, head, pages, rule, scratch);
        continue;
      }
      const auto key = [=](int64_t t) { return stored.place(pages(t, pages.keys) + pages.in_page(t) * bytes); };
      const auto value = [=](int64_t t) { return stored.place(pages(t, pages.values) + pages.in_page(t) * bytes); };
      panels.fill(begin(rule, first), first + count, dim, key, value);
      if (count == 1) many({query, q_head, group, first, 0, head, result, dim, log, 1}, panels, rule, scratch);
      else
        for (int64_t g = 0; g < group; ++g)  // a prompt's rows head by head
          many({query + g * q_head, q_row, count, first, 1, head + g, result + g * dim, heads * dim,
                log ? log + g : nullptr, heads}, panels, rule, scratch);
    }
  }
}

}  // namespace

#define ATTEND(name, type, ...)                                                                                       \
  extern "C" void attend_##name(const float* q, int64_t q_head, int64_t q_row, const int64_t* table,                  \
                                int64_t values_after, const int32_t* cached, const int32_t* starts, float* out,       \
                                float* logs, int64_t segments, int64_t heads, int64_t kv_heads, int64_t dim, int page,             \
                                int64_t max_pages, int64_t window, float scale, float softcap, double keep,           \
                                const float* sinks, int threads, [[maybe_unused]] int64_t row_bytes,                  \
                                [[maybe_unused]] int group) {                                                         \
    attend(q, q_head, q_row, type{__VA_ARGS__}, table, values_after, cached, starts, out, logs, segments, heads,     \
           kv_heads, dim, page, max_pages, {window, scale, softcap, keep, sinks}, threads);                                     \
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
