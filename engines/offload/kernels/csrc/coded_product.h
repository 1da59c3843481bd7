// Products of quantized panels with activations in eight bits, by VNNI's units or in halves of 16 bits.
//
// A weight is minimum + c * scale and an activation q * s, so a group's share of a product is s * (scale * sum(q c) +
// minimum * sum(q)): whole numbers are summed exactly, and scaled once a group.

#pragma once

#include "panel_weights.h"

namespace {

typedef int32_t Ints __attribute__((vector_size(kVector * 4)));

// Adds to every lane of `sum` four products: of the unsigned bytes of `weights` and the signed bytes of x.
inline Ints dot(Ints sum, Words weights, int32_t x) {
#if defined(__AVX512VNNI__)
  return (Ints)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)weights, _mm512_set1_epi32(x));
#elif defined(__AVXVNNI__) && !defined(__AVX512F__)
  return (Ints)_mm256_dpbusd_avx_epi32((__m256i)sum, (__m256i)weights, _mm256_set1_epi32(x));
#else
  // The bytes in even and in odd places, as halves of 16 bits: two products of 16 bits are added without overflow.
  const Words even = weights & 0x00ff00ffu, odd = weights >> 8 & 0x00ff00ffu;
  const uint32_t bits = static_cast<uint32_t>(x);
  const auto half = [](uint32_t byte) { return static_cast<uint32_t>(static_cast<int8_t>(byte)) & 0xffffu; };
  const uint32_t x_even = half(bits) | half(bits >> 16) << 16, x_odd = half(bits >> 8) | half(bits >> 24) << 16;
#if defined(__AVX512BW__)
  const __m512i first = _mm512_madd_epi16((__m512i)even, _mm512_set1_epi32(static_cast<int32_t>(x_even)));
  const __m512i second = _mm512_madd_epi16((__m512i)odd, _mm512_set1_epi32(static_cast<int32_t>(x_odd)));
  return sum + (Ints)first + (Ints)second;
#elif defined(__AVX2__) && !defined(__AVX512F__)
  const __m256i first = _mm256_madd_epi16((__m256i)even, _mm256_set1_epi32(static_cast<int32_t>(x_even)));
  const __m256i second = _mm256_madd_epi16((__m256i)odd, _mm256_set1_epi32(static_cast<int32_t>(x_odd)));
  return sum + (Ints)first + (Ints)second;
#else
  const auto low = [](uint32_t both) { return static_cast<int32_t>(static_cast<int16_t>(both)); };
  return sum + (Ints)(even & 0xffffu) * low(x_even) + (Ints)(even >> 16) * low(x_even >> 16) +
         (Ints)(odd & 0xffffu) * low(x_odd) + (Ints)(odd >> 16) * low(x_odd >> 16);
#endif
#endif
}

// Codes of R rows of x times C panels' codes, `apart` bytes from one to the next, over `quads` times four columns.
template <int R, int C, typename End>
inline __attribute__((always_inline)) void coded_block(const int8_t* x, int64_t ldx, const uint8_t* codes,
                                                       int64_t apart, int64_t quads, End end) {
  Ints sum[R][C * kVectors] = {};
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
      for (int c = 0; c < C * kVectors; ++c) sum[r][c] = dot(sum[r][c], weights[c], four);
    }
  }
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
        coded_block<R, C>(x.codes(row) + g * group, x.stride, codes + panel * kMost, kMost, group / 4,
                          [&](int64_t i, int64_t j, Ints sum) {
                            add_group(to + i * sums_ld + j, sum, scale[i * next], sum_of[i * next], weight_scale + j,
                                      minimum + j, !g);
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
