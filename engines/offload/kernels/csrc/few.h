// A few rows of queries, all of one position, against keys and values of one head as they are stored, page by page.
//
// Sixteen columns are a unit: two vectors of what is stored, in whatever order it unpacks fastest, which queries are
// brought into once and sums out of. Steps and lows of groups meet sums, not values: a dot product is the sum over
// groups of step * (codes . query) + low * (sum of query).

#pragma once

#include <vector>

#include "packed.h"

namespace {

constexpr int64_t kUnit = 2 * kLanes;
constexpr int64_t kFetch = 4;  // parts ahead, of a page those of one head

struct Unit {
  Lanes a, b;
};

// Rows stored value by value.
template <typename T>
struct PlainRows {
  static constexpr bool grouped = false;
  static constexpr int64_t unit_bytes = kUnit * sizeof(T);
  int64_t dim, row_bytes, groups = 1, units_of_group, steps = 0, lows = 0;

  explicit PlainRows(int64_t d) : dim(d), row_bytes(d * sizeof(T)), units_of_group((d + kUnit - 1) / kUnit) {}

  static constexpr int64_t column(int64_t i) { return i; }
  static constexpr float scale(int64_t) { return 1; }
  static Unit unit(const uint8_t* at) {
    const T* from = reinterpret_cast<const T*>(at);
    return {widen(from), widen(from + kLanes)};
  }
  static Unit last(const uint8_t* at, int64_t columns) {
    T padded[kUnit] = {};
    std::memcpy(padded, at, columns * sizeof(T));
    return unit(reinterpret_cast<const uint8_t*>(padded));
  }
  const T* place(const uint8_t* row) const { return reinterpret_cast<const T*>(row); }
};

// Rows quantized in groups.
template <int kBits>
struct GroupedRows {
  static constexpr bool grouped = true;
  static constexpr int64_t unit_bytes = kUnit / 8 * kBits;
  int64_t dim, row_bytes, groups, units_of_group, steps, lows;
  int group;  // its binary logarithm

  GroupedRows(int64_t d, int64_t bytes, int g)
      : dim(d), row_bytes(bytes), groups(((d - 1) >> g) + 1), units_of_group((int64_t{1} << g) / kUnit),
        steps((d + 7) / 8 * kBits), lows(steps + 2 * groups), group(g) {}

  // Nibbles: the lower ones of eight bytes, then the upper ones, as multiples of 16.
  static constexpr int64_t column(int64_t i) { return kBits != 4 ? i : i % kLanes * 2 + i / kLanes; }
  static constexpr float scale(int64_t i) { return kBits == 4 && i >= kLanes ? 1.0f / 16 : 1.0f; }
  static Unit unit(const uint8_t* at) {
    if constexpr (kBits != 4) return {codes_at<kBits>(at), codes_at<kBits>(at + kBits)};
    const Integers wide = widen_bytes(at);
    return {__builtin_convertvector(wide & 15, Lanes), __builtin_convertvector(wide & 240, Lanes)};
  }
  static Unit last(const uint8_t* at, int64_t columns) {
    uint8_t padded[unit_bytes + 4] = {};  // three bits are read in words of four bytes
    std::memcpy(padded, at, (columns + 7) / 8 * kBits);
    return unit(padded);
  }
  Packed<kBits> place(const uint8_t* row) const { return {row, dim, group}; }
};

// Into the cache.
inline void fetch(const uint8_t* from, int64_t bytes) {
  for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(from + i);
  asm volatile("");  // GCC would leave out calls of what has no effect
}

// Registers hold what one of the functions below works on, but only where it is compiled by itself.
#define BY_ITSELF __attribute__((noinline))

template <int R, typename Stored>
class Few {
 public:
  Few(const Stored& stored, int64_t page_rows)
      : stored_(stored), page_rows_(page_rows), units_((stored.dim + kUnit - 1) / kUnit), queries_(units_ * R * kUnit),
        sums_(units_ * R * kUnit), weights_(stored.groups * R * page_rows), low_sums_(stored.groups * R) {
    const int64_t whole = stored.dim / kUnit;
    for (int64_t u = 0; u < units_;) {
      const int64_t left = std::min(whole - u, stored.units_of_group - u % stored.units_of_group);
      const int64_t size = left >= 4 ? 4 : left > 0 ? 1 : 0;
      spans_.push_back({u, size, u / stored.units_of_group});
      u += std::max<int64_t>(1, size);
    }
    query_sums_.resize(spans_.size() * R);
  }

  // Takes R queries [dim], `apart` from each other; sums are zero.
  void begin(const float* query, int64_t apart) {
    std::fill(sums_.begin(), sums_.end(), 0.0f);
    std::fill(low_sums_.begin(), low_sums_.end(), Lanes{});
    for (size_t s = 0; s < spans_.size(); ++s)
      for (int64_t r = 0; r < R; ++r) {
        float sum = 0;
        for (int64_t u = spans_[s].first; u < spans_[s].end(); ++u)
          for (int64_t i = 0; i < kUnit; ++i) {
            const int64_t j = u * kUnit + Stored::column(i);
            const float x = j < stored_.dim ? query[r * apart + j] : 0;
            queries_[(u * R + r) * kUnit + i] = x * Stored::scale(i);
            sum += x;
          }
        query_sums_[s * R + r] = sum;
      }
  }

  // scores[r * apart + t] = row t . query r.
  BY_ITSELF void score(const uint8_t* rows, int64_t count, float* scores, int64_t apart) const {
    for (int64_t t = 0; t < count; t += kLanes, rows += kLanes * stored_.row_bytes) {
      const int64_t size = std::min(kLanes, count - t);
      const auto row = [&](int64_t i) { return rows + i * stored_.row_bytes; };
      Lanes found[R];
      for (int64_t r = 0; r < R; ++r) found[r] = Lanes{};  // as an initializer it would be a slow instruction
      for (size_t s = 0; s < spans_.size(); ++s) {
        const Span& span = spans_[s];
        Lanes sums[R][kLanes];
        if (span.units == 4) products<4>(span.first, rows, size, sums);
        else if (span.units == 1) products<1>(span.first, rows, size, sums);
        else products<0>(span.first, rows, size, sums);
        if constexpr (Stored::grouped) {
          const Lanes steps = eight(stored_.steps, span.group, row, size), lows = eight(stored_.lows, span.group, row, size);
          for (int64_t r = 0; r < R; ++r) found[r] += add_up(sums[r]) * steps + query_sums_[s * R + r] * lows;
        } else {
          for (int64_t r = 0; r < R; ++r) found[r] += add_up(sums[r]);
        }
      }
      for (int64_t r = 0; r < R; ++r) {
        if (size == kLanes) store(scores + r * apart + t, found[r]);
        else std::memcpy(scores + r * apart + t, &found[r], size * sizeof(float));
      }
    }
  }

  // Adds shares[r * apart + i] times row(i), for `count` rows, no more than a page has.
  template <typename Row>
  void take(Row row, int64_t count, const float* shares, int64_t apart) {
    for (int64_t i = 0; i < count; i += kLanes) {
      const int64_t size = std::min(kLanes, count - i);
      for (int64_t g = 0; g < stored_.groups; ++g) {
        const auto rest = [&](int64_t k) { return row(i + k); };
        const Lanes steps = Stored::grouped ? eight(stored_.steps, g, rest, size) : spread(1);
        const Lanes lows = Stored::grouped ? eight(stored_.lows, g, rest, size) : Lanes{};
        for (int64_t r = 0; r < R; ++r) {
          const float* from = shares + r * apart + i;
          const Lanes share = size == kLanes ? load(from) : widen(from, size);
          low_sums_[g * R + r] += share * lows;
          store(&weights_[(g * R + r) * page_rows_ + i], share * steps);
        }
      }
    }
    for (const Span& span : spans_) {
      if (span.units == 4) columns<4>(span, row, count);
      else if (span.units == 1) columns<1>(span, row, count);
      else columns<0>(span, row, count);
    }
  }

  // The sums [dim], `apart` from each other.
  void end(float* out, int64_t apart) const {
    for (int64_t u = 0; u < units_; ++u)
      for (int64_t r = 0; r < R; ++r) {
        const float low = add_up(low_sums_[u / stored_.units_of_group * R + r]);
        for (int64_t i = 0; i < kUnit; ++i) {
          const int64_t j = u * kUnit + Stored::column(i);
          if (j >= stored_.dim) continue;
          out[r * apart + j] = sums_[(u * R + r) * kUnit + i] * Stored::scale(i) + low;
        }
      }
  }

 private:
  // Units of one group: four, one, or none: then the last one, which is not whole.
  struct Span {
    int64_t first, units, group;

    int64_t end() const { return first + std::max<int64_t>(1, units); }
  };

  template <int U>
  Unit unit(const uint8_t* at, int64_t first, int64_t u) const {
    if constexpr (U == 0) return Stored::last(at, stored_.dim - first * kUnit);
    return Stored::unit(at + u * Stored::unit_bytes);
  }

  // The numbers in float16 of a group that `size` <= 8 rows have, steps or lows; zeros where there is no row.
  template <typename Row>
  static Lanes eight(int64_t begin, int64_t group, Row row, int64_t size) {
    const auto half = [&](int64_t i) {
      uint16_t bits;
      std::memcpy(&bits, row(i) + begin + 2 * group, sizeof bits);
      return bits;
    };
    if (size == kLanes) return widen(HalfBits{half(0), half(1), half(2), half(3), half(4), half(5), half(6), half(7)});
    HalfBits bits = {};
    for (int64_t i = 0; i < size; ++i) bits[i] = half(i);
    return widen(bits);
  }

  // sums[r][i] adds up to codes of row i . query r, in a span from unit `first` on.
  template <int U>
  BY_ITSELF void products(int64_t first, const uint8_t* row, int64_t count, Lanes (*sums)[kLanes]) const {
    constexpr int64_t kUnits = U ? U : 1;
    const float* query = &queries_[first * R * kUnit];
    const uint8_t* at = row + first * Stored::unit_bytes;
    for (int64_t i = 0; i < count; ++i, at += stored_.row_bytes) {
      Lanes a[R] = {}, b[R] = {};
#pragma GCC unroll 4
      for (int64_t u = 0; u < kUnits; ++u) {
        const Unit values = unit<U>(at, first, u);
#pragma GCC unroll 4
        for (int64_t r = 0; r < R; ++r) {
          const float* from = query + (u * R + r) * kUnit;
          a[r] += values.a * load(from), b[r] += values.b * load(from + kLanes);
        }
      }
#pragma GCC unroll 4
      for (int64_t r = 0; r < R; ++r) sums[r][i] = a[r] + b[r];
    }
  }

  // Adds rows by their weights in a span, as many units at a time as eight sums are enough for.
  template <int U, typename Row>
  BY_ITSELF void columns(const Span& span, Row row, int64_t count) {
    constexpr int64_t kUnits = U == 4 ? 4 / R : 1;
    const float* weights = &weights_[span.group * R * page_rows_];
    for (int64_t first = span.first; first < span.end(); first += kUnits) {
      float* sums = &sums_[first * R * kUnit];
      Lanes a[kUnits][R], b[kUnits][R];
      for (int64_t u = 0; u < kUnits; ++u)
        for (int64_t r = 0; r < R; ++r) {
          const float* from = sums + (u * R + r) * kUnit;
          a[u][r] = load(from), b[u][r] = load(from + kLanes);
        }
      for (int64_t i = 0; i < count; ++i) {
        const uint8_t* at = row(i) + first * Stored::unit_bytes;
#pragma GCC unroll 4
        for (int64_t u = 0; u < kUnits; ++u) {
          const Unit values = unit<U>(at, first, u);
#pragma GCC unroll 4
          for (int64_t r = 0; r < R; ++r) {
            const Lanes weight = spread(weights[r * page_rows_ + i]);
            a[u][r] += weight * values.a, b[u][r] += weight * values.b;
          }
        }
      }
      for (int64_t u = 0; u < kUnits; ++u)
        for (int64_t r = 0; r < R; ++r) {
          float* to = sums + (u * R + r) * kUnit;
          store(to, a[u][r]), store(to + kLanes, b[u][r]);
        }
    }
  }

  Stored stored_;
  int64_t page_rows_, units_;
  std::vector<Span> spans_;
  std::vector<float> queries_, query_sums_, sums_, weights_;
  std::vector<Lanes> low_sums_;
};

}  // namespace
