// Decode attention: R query rows at one position against the stored keys and values of one head, block by block.
//
// The kernel dots the query with the packed codes and applies each group's scale and minimum to the partial sums, so
// keys are never dequantized: q . k = sum over groups of scale * (codes . q) + minimum * (sum of q). Nor are values:
// their codes are weighted by probability * scale, and probability * minimum is summed apart.
//
// Columns are handled in units of sixteen: two vectors of codes or values, in whatever order they unpack fastest. The
// query is permuted into that order once (`begin`), and the output back out of it (`end`).

#pragma once

#include <type_traits>
#include <vector>

#include "packed_rows.h"

namespace {

constexpr int64_t kUnit = 2 * kLanes;
constexpr int64_t kFetch = 4;  // how many (block, head) pieces are prefetched ahead

struct Unit {
  Lanes a, b;
};

// The layout of a row of plain values.
template <typename T>
struct PlainRows {
  static constexpr bool grouped = false, fits_bfloat16 = std::is_same_v<T, BFloat16>;
  static constexpr int64_t unit_bytes = kUnit * sizeof(T);
  int64_t dim, row_bytes, groups = 1, units_of_group, scales = 0, minima = 0;

  explicit PlainRows(int64_t d) : dim(d), row_bytes(d * sizeof(T)), units_of_group((d + kUnit - 1) / kUnit) {}

  static constexpr int64_t column(int64_t i) { return i; }
  static constexpr float code_factor(int64_t) { return 1; }
  static Unit unit(const uint8_t* at) {
    const T* from = reinterpret_cast<const T*>(at);
    return {widen(from), widen(from + kLanes)};
  }
  static Unit last(const uint8_t* at, int64_t columns) {
    T padded[kUnit] = {};
    std::memcpy(padded, at, columns * sizeof(T));
    return unit(reinterpret_cast<const uint8_t*>(padded));
  }
  const T* cursor(const uint8_t* row) const { return reinterpret_cast<const T*>(row); }
};

// The layout of a row quantized in groups; `scales` and `minima` are byte offsets in the row.
template <int kBits>
struct GroupedRows {
  static constexpr bool grouped = true, fits_bfloat16 = true;
  static constexpr int64_t unit_bytes = kUnit / 8 * kBits;
  int64_t dim, row_bytes, groups, units_of_group, scales, minima;
  int group;  // log2 of the group size

  GroupedRows(int64_t d, int64_t bytes, int g)
      : dim(d), row_bytes(bytes), groups(((d - 1) >> g) + 1), units_of_group((int64_t{1} << g) / kUnit),
        scales((d + 7) / 8 * kBits), minima(scales + 2 * groups), group(g) {}

  // Nibbles unpack to the low ones of eight bytes, then the high ones, which stay multiplied by 16: `code_factor` takes
  // that out of the query and the output instead.
  static constexpr int64_t column(int64_t i) { return kBits != 4 ? i : i % kLanes * 2 + i / kLanes; }
  static constexpr float code_factor(int64_t i) { return kBits == 4 && i >= kLanes ? 1.0f / 16 : 1.0f; }
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
  Packed<kBits> cursor(const uint8_t* row) const { return {row, dim, group}; }
};

// Prefetches `bytes` bytes.
inline void fetch(const uint8_t* from, int64_t bytes) {
  for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(from + i);
  asm volatile("");  // without it GCC drops calls of this function, which has no visible effect
}

// The accumulators of the functions below stay in registers only if each is compiled on its own.
#define NOT_INLINED __attribute__((noinline))

// Consecutive units of one group: four, or one, or (units = 0) the incomplete last one.
struct Span {
  int64_t first, units, group;

  int64_t end() const { return first + std::max<int64_t>(1, units); }
};

// How queries attend to rows that are `stored` so, `block_rows` of them in a block.
template <typename Stored>
struct DecodeLayout {
  Stored stored;
  int64_t block_rows, units;
  std::vector<Span> spans;

  DecodeLayout(const Stored& rows, int64_t of_block)
      : stored(rows), block_rows(of_block), units((rows.dim + kUnit - 1) / kUnit) {
    const int64_t whole = stored.dim / kUnit;
    for (int64_t u = 0; u < units;) {
      const int64_t left = std::min(whole - u, stored.units_of_group - u % stored.units_of_group);
      const int64_t size = left >= 4 ? 4 : left > 0 ? 1 : 0;
      spans.push_back({u, size, u / stored.units_of_group});
      u += std::max<int64_t>(1, size);
    }
  }

  // Floats that a query row needs in memory: the arrays of DecodeRows, each of whole vectors.
  int64_t floats() const {
    return 2 * units * kUnit + stored.groups * (kLanes + block_rows) + (units + kLanes - 1) / kLanes * kLanes;
  }
};

// R query rows, whose arrays are in `memory`, R * layout.floats() floats from a vector's start.
template <int R, typename Stored>
class DecodeRows {
 public:
  DecodeRows(const DecodeLayout<Stored>& layout, float* memory)
      : layout_(layout), stored_(layout.stored), queries_(reinterpret_cast<Lanes*>(memory)),
        sums_(queries_ + layout.units * R * 2), minimum_sums_(sums_ + layout.units * R * 2),
        weights_(reinterpret_cast<float*>(minimum_sums_ + layout.stored.groups * R)),
        query_sums_(weights_ + layout.stored.groups * R * layout.block_rows) {}

  // Loads R queries [dim], `apart` floats apart, and resets the sums.
  void begin(const float* query, int64_t apart) const {
    std::fill(sums_, minimum_sums_ + stored_.groups * R, Lanes{});
    for (size_t s = 0; s < layout_.spans.size(); ++s)
      for (int64_t r = 0; r < R; ++r) {
        float sum = 0;
        for (int64_t u = layout_.spans[s].first; u < layout_.spans[s].end(); ++u)
          for (int64_t i = 0; i < kUnit; ++i) {
            const int64_t j = u * kUnit + Stored::column(i);
            const float x = j < stored_.dim ? query[r * apart + j] : 0;
            queries_[(u * R + r) * 2 + i / kLanes][i % kLanes] = x * Stored::code_factor(i);
            sum += x;
          }
        query_sums_[s * R + r] = sum;
      }
  }

  // scores[r * apart + t] = key t . query r.
  NOT_INLINED void score(const uint8_t* rows, int64_t count, float* scores, int64_t apart) const {
    for (int64_t t = 0; t < count; t += kLanes, rows += kLanes * stored_.row_bytes) {
      const int64_t size = std::min(kLanes, count - t);
      const auto row = [&](int64_t i) { return rows + i * stored_.row_bytes; };
      Lanes score[R];
      for (int64_t r = 0; r < R; ++r) score[r] = Lanes{};  // an initializer would compile to a slow instruction
      for (size_t s = 0; s < layout_.spans.size(); ++s) {
        const Span& span = layout_.spans[s];
        Lanes sums[R][kLanes];
        if (span.units == 4) dot<4>(span.first, rows, size, sums);
        else if (span.units == 1) dot<1>(span.first, rows, size, sums);
        else dot<0>(span.first, rows, size, sums);
        if constexpr (Stored::grouped) {
          const Lanes scales = halves(stored_.scales, span.group, row, size);
          const Lanes minima = halves(stored_.minima, span.group, row, size);
          for (int64_t r = 0; r < R; ++r) score[r] += add_up(sums[r]) * scales + query_sums_[s * R + r] * minima;
        } else {
          for (int64_t r = 0; r < R; ++r) score[r] += add_up(sums[r]);
        }
      }
      for (int64_t r = 0; r < R; ++r) {
        if (size == kLanes) store(scores + r * apart + t, score[r]);
        else std::memcpy(scores + r * apart + t, &score[r], size * sizeof(float));
      }
    }
  }

  // Adds probabilities[r * apart + i] times value row(i) for `count` rows, at most a block's.
  template <typename Row>
  void accumulate(Row row, int64_t count, const float* probabilities, int64_t apart) const {
    for (int64_t i = 0; i < count; i += kLanes) {
      const int64_t size = std::min(kLanes, count - i);
      for (int64_t g = 0; g < stored_.groups; ++g) {
        const auto rest = [&](int64_t k) { return row(i + k); };
        const Lanes scales = Stored::grouped ? halves(stored_.scales, g, rest, size) : spread(1);
        const Lanes minima = Stored::grouped ? halves(stored_.minima, g, rest, size) : Lanes{};
        for (int64_t r = 0; r < R; ++r) {
          const float* from = probabilities + r * apart + i;
          const Lanes probability = size == kLanes ? load(from) : widen(from, size);
          minimum_sums_[g * R + r] += probability * minima;
          store(&weights_[(g * R + r) * layout_.block_rows + i], probability * scales);
        }
      }
    }
    for (const Span& span : layout_.spans) {
      if (span.units == 4) add_columns<4>(span, row, count);
      else if (span.units == 1) add_columns<1>(span, row, count);
      else add_columns<0>(span, row, count);
    }
  }

  // Writes the R outputs [dim], `apart` floats apart.
  void end(float* out, int64_t apart) const {
    for (int64_t u = 0; u < layout_.units; ++u)
      for (int64_t r = 0; r < R; ++r) {
        const float minimum = add_up(minimum_sums_[u / stored_.units_of_group * R + r]);
        for (int64_t i = 0; i < kUnit; ++i) {
          const int64_t j = u * kUnit + Stored::column(i);
          if (j >= stored_.dim) continue;
          const float sum = sums_[(u * R + r) * 2 + i / kLanes][i % kLanes];
          out[r * apart + j] = sum * Stored::code_factor(i) + minimum;
        }
      }
  }

 private:
  template <int U>
  Unit unit(const uint8_t* at, int64_t first, int64_t u) const {
    if constexpr (U == 0) return Stored::last(at, stored_.dim - first * kUnit);
    return Stored::unit(at + u * Stored::unit_bytes);
  }

  // The float16 scales or minima, which start at byte `begin` of a row, of one group in `size` <= 8 rows; zeros beyond.
  template <typename Row>
  static Lanes halves(int64_t begin, int64_t group, Row row, int64_t size) {
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

  // Lane sums of codes of row i . query r into sums[r][i], over the span that starts at unit `first`: of several rows
  // at a time, for which a query is loaded once. Beyond `count` rows the last one is taken again.
  template <int U>
  NOT_INLINED void dot(int64_t first, const uint8_t* row, int64_t count, Lanes (*sums)[kLanes]) const {
    constexpr int64_t kUnits = U ? U : 1, kAtOnce = kLanes / R;  // as many sums as hide the latency of an addition
    const Lanes* query = &queries_[first * R * 2];
    for (int64_t i = 0; i < count; i += kAtOnce) {
      Lanes sum[kAtOnce][R] = {};
      const uint8_t* at[kAtOnce];
      for (int64_t k = 0; k < kAtOnce; ++k)
        at[k] = row + std::min(i + k, count - 1) * stored_.row_bytes + first * Stored::unit_bytes;
#pragma GCC unroll 4
      for (int64_t u = 0; u < kUnits; ++u) {
        Unit values[kAtOnce];
#pragma GCC unroll 8
        for (int64_t k = 0; k < kAtOnce; ++k) values[k] = unit<U>(at[k], first, u);
#pragma GCC unroll 4
        for (int64_t r = 0; r < R; ++r) {
          const Lanes left = query[(u * R + r) * 2], right = query[(u * R + r) * 2 + 1];
#pragma GCC unroll 8
          for (int64_t k = 0; k < kAtOnce; ++k) sum[k][r] += values[k].a * left, sum[k][r] += values[k].b * right;
        }
      }
#pragma GCC unroll 8
      for (int64_t k = 0; k < kAtOnce; ++k)
#pragma GCC unroll 4
        for (int64_t r = 0; r < R; ++r) sums[r][i + k] = sum[k][r];
    }
  }

  // Adds the rows, times their weights, to the span's columns: as many units at a time as eight accumulators allow.
  template <int U, typename Row>
  NOT_INLINED void add_columns(const Span& span, Row row, int64_t count) const {
    constexpr int64_t kUnits = U == 4 ? 4 / R : 1;
    const float* weights = &weights_[span.group * R * layout_.block_rows];
    for (int64_t first = span.first; first < span.end(); first += kUnits) {
      Lanes* sums = &sums_[first * R * 2];
      Lanes a[kUnits][R], b[kUnits][R];
      for (int64_t u = 0; u < kUnits; ++u)
        for (int64_t r = 0; r < R; ++r) {
          const Lanes* from = sums + (u * R + r) * 2;
          a[u][r] = from[0], b[u][r] = from[1];
        }
      for (int64_t i = 0; i < count; ++i) {
        const uint8_t* at = row(i) + first * Stored::unit_bytes;
#pragma GCC unroll 4
        for (int64_t u = 0; u < kUnits; ++u) {
          const Unit values = unit<U>(at, first, u);
#pragma GCC unroll 4
          for (int64_t r = 0; r < R; ++r) {
            const Lanes weight = spread(weights[r * layout_.block_rows + i]);
            a[u][r] += weight * values.a, b[u][r] += weight * values.b;
          }
        }
      }
      for (int64_t u = 0; u < kUnits; ++u)
        for (int64_t r = 0; r < R; ++r) {
          Lanes* to = sums + (u * R + r) * 2;
          to[0] = a[u][r], to[1] = b[u][r];
        }
    }
  }

  const DecodeLayout<Stored>& layout_;
  const Stored& stored_;
  Lanes *queries_, *sums_, *minimum_sums_;  // as vectors none crosses a line of the caches
  float *weights_, *query_sums_;
};

}  // namespace
