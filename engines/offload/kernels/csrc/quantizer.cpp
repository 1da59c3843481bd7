// Packs float32 rows and unpacks them, bit for bit as quantize.py does.

#include <algorithm>
#include <cmath>
#include <limits>

#include "packed_rows.h"

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

template <int kBits>
void pack_row(const float* x, int64_t columns, int group, uint8_t* row) {
  constexpr double top = (1 << kBits) - 1;
  constexpr float half_max = 65504.0f;
  constexpr uint16_t nan = 0x7e00;
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
    const double range = static_cast<double>(most) - least;
    const uint16_t scale = broken ? nan : narrow(std::min(static_cast<float>(range / top), half_max));
    const uint16_t minimum = broken ? nan : narrow(std::clamp(least + 0.0f, -half_max, half_max));  // turns -0 into 0
    std::memcpy(scales + 2 * g, &scale, 2);
    std::memcpy(minima + 2 * g, &minimum, 2);
    const double s = widen_one(scales + 2 * g), low = widen_one(minima + 2 * g);  // rounded to float16
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

#define QUANTIZER(bits)                                                                                                \
  extern "C" void pack_bits##bits(const float* x, int64_t rows, int64_t columns, int group, uint8_t* out,              \
                                  int64_t row_bytes, int threads) {                                                    \
    _Pragma("omp parallel for schedule(static) num_threads(threads)")                                                  \
    for (int64_t i = 0; i < rows; ++i) pack_row<bits>(x + i * columns, columns, group, out + i * row_bytes);           \
  }                                                                                                                    \
  extern "C" void unpack_bits##bits(const uint8_t* packed, int64_t rows, int64_t columns, int group, float* out,       \
                                    int64_t row_bytes, int threads) {                                                  \
    _Pragma("omp parallel for schedule(static) num_threads(threads)")                                                  \
    for (int64_t i = 0; i < rows; ++i) unpack_row<bits>(packed + i * row_bytes, columns, group, out + i * columns);    \
  }

QUANTIZER(3)
QUANTIZER(4)
QUANTIZER(8)
