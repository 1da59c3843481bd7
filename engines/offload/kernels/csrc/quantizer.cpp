// Packs float32 rows and unpacks them, bit for bit as quantize.py does; packs weights by least squares.

#include <algorithm>
#include <cmath>
#include <limits>

#include "least_squares.h"
#include "packed_rows.h"
#include "threads.h"

namespace {

// Rounds to float16, ties to even.
uint16_t narrow(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  const uint32_t sign = bits & 0x80000000u;
  bits ^= sign;
  uint32_t half;
  if (bits > 0x7f800000u) {
    half = 0x7e00;
  } else if (bits >= 0x47800000u) {
    half = 0x7c00;
  } else if (bits < 0x38800000u) {  // subnormal: adding 0.5 rounds it at the right bit
    float moved;
    std::memcpy(&moved, &bits, sizeof moved);
    moved += 0.5f;
    std::memcpy(&half, &moved, sizeof half);
    half -= 0x3f000000u;
  } else {
    half = (bits + 0xc8000fffu + (bits >> 13 & 1)) >> 13;
  }
  return half | sign >> 16;
}

// A group's scale and minimum in float16.
struct Halves {
  uint16_t scale, minimum;

  Halves(float s, float m) {
    constexpr float most = 65504.0f;
    scale = narrow(std::min(s, most));
    minimum = narrow(std::clamp(m + 0.0f, -most, most));  // turns -0 into 0
  }
  float wide_scale() const { return widen_one(reinterpret_cast<const uint8_t*>(&scale)); }
  float wide_minimum() const { return widen_one(reinterpret_cast<const uint8_t*>(&minimum)); }
};

// From the group's least value to its largest.
struct Nearest {
  template <int kBits>
  static Halves choose(const float*, int64_t, float least, float most) {
    constexpr double top = (1 << kBits) - 1;
    return {static_cast<float>((static_cast<double>(most) - least) / top), least};
  }
};

// Of least squared error, as stored, and nearest's where the search finds nothing better.
struct LeastSquares {
  template <int kBits>
  static Halves choose(const float* x, int64_t count, float least, float most) {
    const Halves nearest = Nearest::choose<kBits>(x, count, least, most);
    if (nearest.wide_scale() == 0) return nearest;
    const Group<kBits> group(x, count);
    const Line line = best_line(group, least - group.mean(), most - group.mean());
    const Halves fitted(line.scale, line.minimum + group.mean());
    const auto error = [&](const Halves& stored) {
      return group.stored_error({stored.wide_scale(), stored.wide_minimum()});
    };
    return fitted.wide_scale() > 0 && error(fitted) < error(nearest) ? fitted : nearest;
  }
};

template <int kBits, typename Method>
void pack_row(const float* x, int64_t columns, int group, uint8_t* row) {
  constexpr double top = (1 << kBits) - 1;
  constexpr float nan = std::numeric_limits<float>::quiet_NaN();
  const int64_t groups = ((columns - 1) >> group) + 1, size = int64_t{1} << group;
  uint8_t *scales = row + (columns + 7) / 8 * kBits, *minima = scales + 2 * groups;
  for (int64_t g = 0; g < groups; ++g) {
    const float* from = x + g * size;
    const int64_t count = std::min(size, columns - g * size);
    float least = from[0], most = from[0];
    bool broken = false;
    for (int64_t i = 0; i < count; ++i) {
      broken |= !(std::fabs(from[i]) <= std::numeric_limits<float>::max());
      least = std::min(least, from[i]), most = std::max(most, from[i]);
    }
    const Halves stored = broken ? Halves(nan, nan) : Method::template choose<kBits>(from, count, least, most);
    std::memcpy(scales + 2 * g, &stored.scale, 2);
    std::memcpy(minima + 2 * g, &stored.minimum, 2);
    const double s = stored.wide_scale(), low = stored.wide_minimum();  // rounded to float16
    for (int64_t i = 0; i < count; i += kLanes) {
      uint64_t word = 0;
      for (int64_t j = i; j < std::min(i + kLanes, count); ++j) {
        const double q = broken || s == 0 ? 0 : std::clamp(std::nearbyint((from[j] - low) / s), 0.0, top);
        word |= static_cast<uint64_t>(q) << (j - i) * kBits;
      }
      std::memcpy(row + (g * size + i) / 8 * kBits, &word, kBits);
    }
  }
}

template <int kBits>
void unpack_row(const uint8_t* row, int64_t columns, int group, float* out) {
  Packed<kBits> cursor(row, columns, group);
  for (int64_t j = 0; j < columns; j += kLanes, cursor.at += kLanes) {
    const Lanes values = widen(cursor);
    if (j + kLanes <= columns) store(out + j, values);
    else std::memcpy(out + j, &values, (columns - j) * sizeof *out);
  }
}

}  // namespace

template <typename Row>
void each_row(int64_t rows, int64_t columns, int threads, Row row) {
#pragma omp parallel for schedule(static) num_threads(threads) if (rows * columns >= kSharedValues)
  for (int64_t i = 0; i < rows; ++i) row(i);
}

#define PACK(verb, Method, bits)                                                                                       \
  extern "C" void verb##_bits##bits(const float* x, int64_t rows, int64_t columns, int group, uint8_t* out,            \
                                    int64_t row_bytes, int threads) {                                                  \
    each_row(rows, columns, threads,                                                                                   \
             [=](int64_t i) { pack_row<bits, Method>(x + i * columns, columns, group, out + i * row_bytes); });        \
  }

#define QUANTIZER(bits)                                                                                                \
  PACK(pack, Nearest, bits)                                                                                            \
  PACK(pack_weights, LeastSquares, bits)                                                                               \
  extern "C" void unpack_bits##bits(const uint8_t* packed, int64_t rows, int64_t columns, int group, float* out,       \
                                    int64_t row_bytes, int threads) {                                                  \
    each_row(rows, columns, threads,                                                                                   \
             [=](int64_t i) { unpack_row<bits>(packed + i * row_bytes, columns, group, out + i * columns); });         \
  }

QUANTIZER(3)
QUANTIZER(4)
QUANTIZER(8)
