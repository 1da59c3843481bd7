// Vectors rounded to the type that a row has.

#pragma once

#include "simd.h"

namespace {

// Rounds to the nearest bfloat16, of two the even one; NaN stays NaN.
inline Lanes rounded(Lanes x, const BFloat16*) {
  const Bits bits = (Bits)x, nan = (Bits)(x != x);
  const Bits nearest = (bits + 0x7fff + (bits >> 16 & 1)) & 0xffff0000u;
  return (Lanes)((nearest & ~nan) | (0x7fc00000u & nan));
}
inline Lanes rounded(Lanes x, const float*) { return x; }

// Values that were rounded.
inline void write(float* to, Lanes x) { store(to, x); }
inline void write(BFloat16* to, Lanes x) {
  const HalfBits half = __builtin_convertvector((Bits)x >> 16, HalfBits);
  std::memcpy(to, &half, sizeof half);
}

// The first `count` < kLanes of them.
template <typename T>
inline void write(T* to, Lanes x, int64_t count) {
  T lanes[kLanes];
  write(lanes, x);
  std::memcpy(to, lanes, count * sizeof(T));
}

}  // namespace
