// Rows quantized in groups, as quantize.py defines them, read eight values at a time.

#pragma once

#include <type_traits>

#include "panels.h"

// Eight bytes.
inline Integers widen_bytes(const uint8_t* from) {
#ifdef __AVX2__  // GCC 12 makes many instructions of the other
  return (Integers)_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from)));
#else
  typedef uint8_t Bytes __attribute__((vector_size(kLanes)));
  Bytes eight;
  std::memcpy(&eight, from, sizeof eight);
  return __builtin_convertvector(eight, Integers);
#endif
}

inline float widen_one(const uint8_t* half) {
  HalfBits bits = {};
  std::memcpy(&bits, half, sizeof bits[0]);
  return widen(bits)[0];
}

// The codes of eight values, from the first `kBits` bytes on. Four bytes are read for three bits
// too: where codes end, steps follow.
template <int kBits>
inline Lanes codes_at(const uint8_t* from) {
  if constexpr (kBits == 8) {
    return __builtin_convertvector(widen_bytes(from), Lanes);
  } else {
    uint32_t word;
    std::memcpy(&word, from, sizeof word);
    const Bits shifted = (Bits{} + word) >> Bits{0, kBits, 2 * kBits, 3 * kBits, 4 * kBits, 5 * kBits, 6 * kBits, 7 * kBits};
    return __builtin_convertvector((Integers)(shifted & ((1u << kBits) - 1)), Lanes);
  }
}

// A place in a packed row: what a pointer is to values stored one by one. Places are multiples of eight.
template <int kBits>
struct Packed {
  static constexpr int bits = kBits;
  const uint8_t *codes, *steps, *lows;
  int64_t at;
  int group;  // its binary logarithm

  Packed(const uint8_t* row, int64_t columns, int g)
      : codes(row), steps(row + (columns + 7) / 8 * kBits), lows(steps + 2 * (((columns - 1) >> g) + 1)), at(0), group(g) {}

  Packed operator+(int64_t k) const {
    Packed moved = *this;
    moved.at += k;
    return moved;
  }
  const uint8_t* here() const { return codes + at / 8 * kBits; }
  float step() const { return widen_one(steps + 2 * (at >> group)); }
  float low() const { return widen_one(lows + 2 * (at >> group)); }
  int64_t left() const { return (int64_t{1} << group) - (at & ((int64_t{1} << group) - 1)); }  // in this group
};

template <int kBits>
inline Lanes widen(const Packed<kBits>& from) {
  return from.low() + codes_at<kBits>(from.here()) * from.step();
}

// The first `count` values, and zeros.
template <int kBits>
inline Lanes widen(const Packed<kBits>& from, int64_t count) {
  if (count <= 0) return Lanes{};
  Lanes lanes = widen(from);
  for (int64_t i = count; i < kLanes; ++i) lanes[i] = 0;
  return lanes;
}

namespace {

// Packed rows as the lanes of a panel: a word of each row at a time, whose codes then lie below each other.
template <int kBits, typename Row>
void unpack_packed(int64_t rows, int64_t depth, float* panel, Row row) {
  constexpr int64_t kWord = kBits == 8 ? 4 : 8;  // values in a word
  for (int64_t j = 0; j < kWidth; j += kLanes) {
    const int64_t lanes = std::min(kLanes, rows - j);
    const uint8_t *codes[kLanes], *steps[kLanes], *lows[kLanes];
    for (int64_t i = 0; i < lanes; ++i) {
      const Packed<kBits> from = row(j + i);
      codes[i] = from.here();
      steps[i] = from.steps + 2 * (from.at >> from.group), lows[i] = from.lows + 2 * (from.at >> from.group);
    }
    const int64_t group = lanes > 0 ? row(j).left() : depth;
    for (int64_t k = 0, g = 0; k < depth; ++g) {
      Lanes step = {}, low = {};
      for (int64_t i = 0; i < lanes; ++i) step[i] = widen_one(steps[i] + 2 * g), low[i] = widen_one(lows[i] + 2 * g);
      for (const int64_t end = std::min(depth, k + group); k < end; k += kWord) {
        Bits words = {};
        for (int64_t i = 0; i < lanes; ++i) {
          uint32_t word;
          std::memcpy(&word, codes[i] + k / kWord * (kWord * kBits / 8), sizeof word);
          words[i] = word;
        }
        const auto put = [&](int64_t c) {
          const Lanes values = __builtin_convertvector((Integers)((words >> (c * kBits)) & ((1u << kBits) - 1)), Lanes);
          store(panel + (k + c) * kWidth + j, low + values * step);
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

// `unpack` for rows of either kind.
template <typename Row>
void unpack_any(int64_t rows, int64_t depth, float* panel, Row row) {
  using Place = decltype(row(0));
  if constexpr (std::is_pointer_v<Place>) unpack(rows, depth, panel, row);
  else unpack_packed<Place::bits>(rows, depth, panel, row);
}

}  // namespace
