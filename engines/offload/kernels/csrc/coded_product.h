// Products of quantized panels with activations in eight bits, by VNNI's units or in halves of 16 bits.
//
// A weight is minimum + c * scale and an activation q * s, so a group's share of a product is s * (scale * sum(q c) +
// minimum * sum(q)): whole numbers are summed exactly, and scaled once a group.

#pragma once

#include "panel_weights.h"

namespace {

typedef int32_t Ints __attribute__((vector_size(kVector * 4)));

#if defined(__AVX512BW__) && !defined(__AVX512VNNI__)
#define WITHOUT_VNNI(call) _mm512_##call
typedef __m512i Vector;
#elif defined(__AVX2__) && !defined(__AVX512F__) && !defined(__AVXVNNI__)
#define WITHOUT_VNNI(call) _mm256_##call
typedef __m256i Vector;
#endif

// Adds to every lane of `sum` four products: of the unsigned bytes of `weights` and the signed bytes of x.
inline Ints dot(Ints sum, Words weights, int32_t x) {
#if defined(__AVX512VNNI__)
  return (Ints)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)weights, _mm512_set1_epi32(x));
#elif defined(__AVXVNNI__) && !defined(__AVX512F__)
  return (Ints)_mm256_dpbusd_avx_epi32((__m256i)sum, (__m256i)weights, _mm256_set1_epi32(x));
#else
  // The bytes in even and in odd places, as halves of 16 bits: two products of 16 bits are added without overflow.
  const Words even = weights & 0x00ff00ffu, odd = weights >> 8 & 0x00ff00ffu;
#ifdef WITHOUT_VNNI
  const Vector both = WITHOUT_VNNI(set1_epi32)(x), x_odd = WITHOUT_VNNI(srai_epi16)(both, 8);
  const Vector x_even = WITHOUT_VNNI(srai_epi16)(WITHOUT_VNNI(slli_epi16)(both, 8), 8);
  return sum + (Ints)WITHOUT_VNNI(madd_epi16)((Vector)even, x_even) +
         (Ints)WITHOUT_VNNI(madd_epi16)((Vector)odd, x_odd);
#else
  const auto byte = [x](int place) { return static_cast<int32_t>(static_cast<int8_t>(x >> 8 * place)); };
  return sum + (Ints)(even & 0xffffu) * byte(0) + (Ints)(even >> 16) * byte(2) + (Ints)(odd & 0xffffu) * byte(1) +
         (Ints)(odd >> 16) * byte(3);
#endif
#endif
}

// Adds to `sum`, by add(sum, weights, x), codes of R rows of x times C panels' codes, `apart` bytes from one to the next,
// over `quads` times four columns.
template <int R, int C, typename Sum, typename Add>
inline __attribute__((always_inline)) void add_quads(const int8_t* x, int64_t ldx, const uint8_t* codes, int64_t apart,
                                                     int64_t quads, Sum (&sum)[R][C * kVectors], Add add) {
  for (int64_t q = 0; q < quads; ++q, codes += 4 * kPanel, x += 4) {
    Words weights[C * kVectors];
#pragma GCC unroll 4
    for (int c = 0; c < C * kVectors; ++c)
      std::memcpy(&weights[c], codes + c / kVectors * apart + c % kVectors * sizeof weights[c], sizeof weights[c]);
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
      int32_t four;
      std::memcpy(&four, x + r * ldx, sizeof four);
#pragma GCC unroll 4
      for (int c = 0; c < C * kVectors; ++c) sum[r][c] = add(sum[r][c], weights[c], four);
    }
  }
}

// The products of R rows' codes with those of C panels, of kBits bits, to end(row, column, sum) for vectors of columns.
template <int R, int C, int kBits, typename End>
inline __attribute__((always_inline)) void coded_block(const int8_t* x, int64_t ldx, const uint8_t* codes,
                                                       int64_t apart, int64_t quads, End end) {
  Ints sum[R][C * kVectors] = {};
#ifdef WITHOUT_VNNI
  if constexpr (kBits == 4) {
    // Two products are added to a half of 16 bits by one instruction; it holds them for 8 * 2 * 15 * 127 < 2^15.
    constexpr int64_t kQuads = 8;
    for (int64_t from = 0; from < quads; from += kQuads) {
      Words halves[R][C * kVectors] = {};
      add_quads<R, C>(x + 4 * from, ldx, codes + 4 * kPanel * from, apart, std::min(kQuads, quads - from), halves,
                      [](Words halves, Words weights, int32_t x) {
                        const Vector two = WITHOUT_VNNI(maddubs_epi16)((Vector)weights, WITHOUT_VNNI(set1_epi32)(x));
                        return (Words)WITHOUT_VNNI(add_epi16)((Vector)halves, two);
                      });
#pragma GCC unroll 16
      for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
        for (int c = 0; c < C * kVectors; ++c)
          sum[r][c] += (Ints)WITHOUT_VNNI(madd_epi16)((Vector)halves[r][c], WITHOUT_VNNI(set1_epi16)(1));
    }
  } else
#endif
    add_quads<R, C>(x, ldx, codes, apart, quads, sum,
                    [](Ints sum, Words weights, int32_t x) { return dot(sum, weights, x); });
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
    for (int c = 0; c < C * kVectors; ++c) end(r, c * kVector, sum[r][c]);
}

// Panels of GroupedPanels<kBits>, for rows in eight bits.
template <int kBits>
struct CodedPanels {
  static constexpr int64_t kAtOnce = kTogether;  // with more, its sums would leave the L1 cache
  using Stored = GroupedPanels<kBits>;

  static CodedRows rows_of(const Operand& x) { return x.coded_rows(); }
  static Form form(int64_t group) { return {group, kBits}; }
  static int64_t panel_bytes(int64_t k, int64_t group) { return Stored::panel_bytes(k, group); }

  static void multiply(const CodedRows& x, const uint8_t* panels, int64_t count, int64_t group, float* sums) {
    constexpr int64_t kMost = 128 * kPanel;  // codes of the largest group
    alignas(64) uint8_t codes[kAtOnce * kMost] = {};
    alignas(64) float scales[kAtOnce * kPanel], minima[kAtOnce * kPanel];
    const int64_t apart = panel_bytes(x.k, group), bytes = Stored::group_bytes(group), sums_ld = count * kPanel;
#ifdef HAS_AMX
    std::optional<Amx> units;  // whose sums of whole numbers are VNNI's, which is faster for few rows
    if (x.count > kBlock && amx_allowed()) units.emplace(x.count);
#endif
    for (int64_t g = 0; g < x.groups; ++g) {
      for (int64_t c = 0; c < count; ++c) {
        const uint8_t* from = panels + c * apart + g * bytes;
        for (int64_t ahead = 0; ahead < bytes; ahead += 64) __builtin_prefetch(from + 4 * bytes + ahead);
        Stored::scales_of(from, scales + c * kPanel, minima + c * kPanel);
        unpack(from + 4 * kPanel, group, codes + c * kMost);
      }
#ifdef HAS_AMX
      if (units) {
        amx_each<Dot::kBytes>(x.codes(0) + g * group, x.stride, x.count, codes, kMost, count,
                              (group + kTileBytes - 1) / kTileBytes,
                              [&](int64_t row, int64_t j, const char* products) {
                                Ints sum;
                                std::memcpy(&sum, products, sizeof sum);
                                add_group(sums + row * sums_ld + j, sum, x.scales(row)[g], x.sums(row)[g],
                                          scales + j, minima + j, !g);
                              });
        continue;
      }
#endif
      each_block(x.count, count, [&](auto R, auto C, int64_t row, int64_t panel) {
        float* to = sums + row * sums_ld + panel * kPanel;
        const float *scale = x.scales(row) + g, *sum_of = x.sums(row) + g;
        const float *weight_scale = scales + panel * kPanel, *minimum = minima + panel * kPanel;
        const int64_t next = x.floats_apart();
        coded_block<R, C, kBits>(x.codes(row) + g * group, x.stride, codes + panel * kMost, kMost, group / 4,
                                 [&](int64_t i, int64_t j, Ints sum) {
                                   add_group(to + i * sums_ld + j, sum, scale[i * next], sum_of[i * next],
                                             weight_scale + j, minimum + j, !g);
                                 });
      });
    }
  }

 private:
  // Adds to sums, or begins them with, a group's: of a row's codes times those of weights, and of a row's codes alone.
  static void add_group(float* to, Ints sum, float scale, float sum_of_x, const float* scales, const float* minima,
                        bool first) {
    const Floats products = __builtin_convertvector(sum, Floats) * load_floats(scales);
    const Floats shifted = fused(sum_of_x - Floats{}, load_floats(minima), products);
    store_floats(to, fused(shifted, scale - Floats{}, first ? Floats{} : load_floats(to)));
  }

  // Writes a group's codes as bytes, in the words' order of columns.
  static void unpack(const uint8_t* from, int64_t group, uint8_t* out) {
    static_assert(kBits == 4 || kBits == 8, "words of four or eight codes");
    if constexpr (kBits == 8) {
      std::memcpy(out, from, group * kPanel);
    } else {
      constexpr int64_t kBytes = sizeof(Words);
      for (int64_t at = 0; at < group * kPanel / 2; at += 4 * kPanel)
        for (int64_t v = 0; v < 4 * kPanel; v += kBytes, from += kBytes) {
          Words both;
          std::memcpy(&both, from, kBytes);
          const Words low = both & 0x0f0f0f0fu, high = both >> 4 & 0x0f0f0f0fu;
          std::memcpy(out + 2 * at + v, &low, kBytes);
          std::memcpy(out + 2 * at + 4 * kPanel + v, &high, kBytes);
        }
    }
  }
};

}  // namespace
