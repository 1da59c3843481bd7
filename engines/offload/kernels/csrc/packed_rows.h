// Reads rows quantized in groups, whose layout quantize.py defines, eight values at a time.

#pragma once

#include <type_traits>

#include "gemm_panels.h"

// Eight bytes as integers.
inline Integers widen_bytes(const uint8_t* from) {
#ifdef __AVX2__  // the portable form below compiles to many instructions in GCC 12
  return (Integers)_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from)));
#else
  typedef uint8_t Bytes __attribute__((vector_size(kLanes)));
  Bytes eight;
  std::memcpy(&eight, from, sizeof eight);
  return __builtin_convertvector(eight, Integers);
#endif
}

// One float16 value.
inline float widen_one(const uint8_t* half) {
  HalfBits bits = {};
  std::memcpy(&bits, half, sizeof bits[0]);
  return widen(bits)[0];
}

// The codes of eight values, which start at `from`. Three bits read four bytes too: the group scales follow the codes,
// so the fourth byte is inside the row.
template <int kBits>
inline Lanes codes_at(const uint8_t* from) {
  if constexpr (kBits == 8) {
    return __builtin_convertvector(widen_bytes(from), Lanes);
  } else {
    uint32_t word;
    std::memcpy(&word, from, sizeof word);
    const Bits shifts = {0, kBits, 2 * kBits, 3 * kBits, 4 * kBits, 5 * kBits, 6 * kBits, 7 * kBits};
    const Bits shifted = (Bits{} + word) >> shifts;
    return __builtin_convertvector((Integers)(shifted & ((1u << kBits) - 1)), Lanes);
  }
}

// A cursor into a packed row, as a pointer is into plain values. Its position is a multiple of eight.
template <int kBits>
struct Packed {
  static constexpr int bits = kBits;
  const uint8_t *codes, *scales, *minima;
  int64_t at;
  int group;  // log2 of the group size

  Packed(const uint8_t* row, int64_t columns, int g)
      : codes(row), scales(row + (columns + 7) / 8 * kBits), minima(scales + 2 * (((columns - 1) >> g) + 1)), at(0),
        group(g) {}

  Packed operator+(int64_t k) const {
    Packed moved = *this;
    moved.at += k;
    return moved;
  }
  const uint8_t* here() const { return codes + at / 8 * kBits; }
  float scale() const { return widen_one(scales + 2 * (at >> group)); }
  float minimum() const { return widen_one(minima + 2 * (at >> group)); }
  // Values left in the group.
  int64_t left() const { return (int64_t{1} << group) - (at & ((int64_t{1} << group) - 1)); }
};

template <int kBits>
inline Lanes widen(const Packed<kBits>& from) {
  return from.minimum() + codes_at<kBits>(from.here()) * from.scale();
}

// The first `count` values, padded with zeros.
template <int kBits>
inline Lanes widen(const Packed<kBits>& from, int64_t count) {
  if (count <= 0) return Lanes{};
  Lanes lanes = widen(from);
  for (int64_t i = count; i < kLanes; ++i) lanes[i] = 0;
  return lanes;
}

namespace {

// As gemm_panels.h's `unpack`, for packed rows: loads one word of each row into a lane, so that the codes of a column
// are in one vector and need no transposing.
template <int kBits, typename Row>
void unpack_packed(int64_t rows, int64_t depth, float* panel, Row row) {
  constexpr int64_t kWord = kBits == 8 ? 4 : 8;  // values in a 32-bit word
  for (int64_t j = 0; j < kWidth; j += kLanes) {
    const int64_t lanes = std::min(kLanes, rows - j);
    const uint8_t *codes[kLanes], *scales[kLanes], *minima[kLanes];
    for (int64_t i = 0; i < lanes; ++i) {
      const Packed<kBits> from = row(j + i);
      codes[i] = from.here();
      scales[i] = from.scales + 2 * (from.at >> from.group), minima[i] = from.minima + 2 * (from.at >> from.group);
    }
    const int64_t group = lanes > 0 ? row(j).left() : depth;
    for (int64_t k = 0, g = 0; k < depth; ++g) {
      Lanes scale = {}, minimum = {};
      for (int64_t i = 0; i < lanes; ++i) {
        scale[i] = widen_one(scales[i] + 2 * g);
        minimum[i] = widen_one(minima[i] + 2 * g);
      }
      for (const int64_t end = std::min(depth, k + group); k < end; k += kWord) {
        Bits words = {};
        for (int64_t i = 0; i < lanes; ++i) {
          uint32_t word;
          std::memcpy(&word, codes[i] + k / kWord * (kWord * kBits / 8), sizeof word);
          words[i] = word;
        }
        const auto put = [&](int64_t c) {
          const Lanes values = __builtin_convertvector((Integers)((words >> (c * kBits)) & ((1u << kBits) - 1)), Lanes);
          store(panel + (k + c) * kWidth + j, minimum + values * scale);
        };
        if (depth - k >= kWord) {
#pragma GCC unroll 8
          for (int64_t c = 0; c < kWord; ++c) put(c);
        } else {
          for (int64_t c = 0; c < depth - k; ++c) put(c);
        }
      }
    }
  }
}

// `unpack` for plain or packed rows.
template <typename Row>
void unpack_any(int64_t rows, int64_t depth, float* panel, Row row) {
  using Cursor = decltype(row(0));
  if constexpr (std::is_pointer_v<Cursor>) unpack(rows, depth, panel, row);
  else unpack_packed<Cursor::bits>(rows, depth, panel, row);
}

}  // namespace
