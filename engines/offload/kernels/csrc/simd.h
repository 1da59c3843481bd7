// Vectors of eight float32 lanes, and the conversion of each stored type to them: GCC's vector extension, on any CPU.

#pragma once

#include <cstdint>
#include <cstring>
#include <initializer_list>

#ifdef __AVX2__
#include <immintrin.h>
#endif

constexpr int64_t kLanes = 8;

typedef float Lanes __attribute__((vector_size(kLanes * 4)));
typedef uint32_t Bits __attribute__((vector_size(kLanes * 4)));
typedef int32_t Integers __attribute__((vector_size(kLanes * 4)));  // AVX2 converts only signed integers to float
typedef uint16_t HalfBits __attribute__((vector_size(kLanes * 2)));

#ifdef __clang__
#define SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define SHUFFLE(a, b, ...) __builtin_shuffle(a, b, (Bits){__VA_ARGS__})
#endif

struct BFloat16 { uint16_t bits; };
struct Float16 { uint16_t bits; };

inline Lanes load(const float* x) {
  Lanes lanes;
  std::memcpy(&lanes, x, sizeof lanes);
  return lanes;
}

inline Lanes spread(float x) { return Lanes{x, x, x, x, x, x, x, x}; }

inline void store(float* x, Lanes lanes) { std::memcpy(x, &lanes, sizeof lanes); }

inline Lanes widen(const float* x) { return load(x); }

inline Lanes widen(const BFloat16* x) {  // bfloat16 is the upper half of a float32
  HalfBits half;
  std::memcpy(&half, x, sizeof half);
#ifdef __AVX2__  // the portable form below compiles to two half-width conversions in GCC 12
  return (Lanes)((Bits)_mm256_cvtepu16_epi32((__m128i)half) << 16);
#else
  return (Lanes)(__builtin_convertvector(half, Bits) << 16);
#endif
}

// Eight float16 values.
inline Lanes widen(HalfBits half) {
#if defined(__F16C__) && defined(__AVX2__)
  return (Lanes)_mm256_cvtph_ps((__m128i)half);
#else  // a multiplication rebiases the exponent, which also normalizes subnormal numbers
  const Bits bits = __builtin_convertvector(half, Bits);
  const Bits special = (Bits)((bits & 0x7c00) == 0x7c00) & 0x7f800000;  // infinity or NaN
  const Lanes moved = (Lanes)((bits & 0x7fff) << 13) * 0x1p112f;
  return (Lanes)((Bits)moved | special | (bits & 0x8000) << 16);
#endif
}

inline Lanes widen(const Float16* x) {
  HalfBits half;
  std::memcpy(&half, x, sizeof half);
  return widen(half);
}

// The first `count` < kLanes values, padded with zeros.
template <typename T>
inline Lanes widen(const T* x, int64_t count) {
  T padded[kLanes] = {};
  std::memcpy(padded, x, count * sizeof(T));
  return widen(padded);
}

// Horizontal sum.
inline float add_up(Lanes lanes) {
  lanes += SHUFFLE(lanes, lanes, 4, 5, 6, 7, 0, 1, 2, 3);
  lanes += SHUFFLE(lanes, lanes, 2, 3, 0, 1, 6, 7, 4, 5);
  return lanes[0] + lanes[1];
}

// Horizontal sums of eight vectors.
inline Lanes add_up(const Lanes* v) {
  Lanes s[4], t[2];
  for (int i = 0; i < 4; ++i, v += 2)
    s[i] = SHUFFLE(v[0], v[1], 0, 8, 1, 9, 4, 12, 5, 13) + SHUFFLE(v[0], v[1], 2, 10, 3, 11, 6, 14, 7, 15);
  for (int i = 0; i < 2; ++i) {
    const Lanes a = s[2 * i], b = s[2 * i + 1];
    t[i] = SHUFFLE(a, b, 0, 1, 8, 9, 4, 5, 12, 13) + SHUFFLE(a, b, 2, 3, 10, 11, 6, 7, 14, 15);
  }
  return SHUFFLE(t[0], t[1], 0, 1, 2, 3, 8, 9, 10, 11) + SHUFFLE(t[0], t[1], 4, 5, 6, 7, 12, 13, 14, 15);
}

// e^x for x <= 0, within one unit in the last place. Subnormal results are flushed to zero; NaN stays NaN.
// Source: Cephes' expf (Moshier): range reduction by ln 2 in two parts, then a polynomial.
inline Lanes exp(Lanes x) {
  constexpr float whole = 12582912.0f;  // 1.5 * 2^23: adding and subtracting it rounds to an integer
  const Lanes n = (x * 1.44269504088896341f + whole) - whole;
  const Lanes r = (x - n * 0.693359375f) - n * -2.12194440e-4f;
  Lanes y = 1.9875691500e-4f + 0.0f * r;
  for (const float c : {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f, 5.0000001201e-1f})
    y = y * r + c;
  y = y * r * r + r + 1.0f;
  const Lanes power = (Lanes)((__builtin_convertvector(n, Integers) + 127) << 23);
  const Bits tiny = (Bits)(x < -87.0f);
  return (Lanes)((Bits)(y * power) & ~tiny);
}
