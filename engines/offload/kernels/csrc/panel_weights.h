// Weights in panels, as they are stored: plain bfloat16, bfloat16 in twelve bits, or quantized in groups.
//
// Each kind has the bytes of a panel and the form in which it takes x, and multiplies: sums[rows, panels] = x[rows, k]
// times up to kTogether panels. The order in which a value is summed depends on k alone, so a row's result does not
// depend on the other rows.

#pragma once

#include "exact12.h"
#include "packed_rows.h"
#include "panel_operand.h"

namespace {

constexpr int64_t kSumsApart = kTogether * kPanel;  // of the rows of sums

struct PlainPanels {
  // Pairs of columns that are multiplied at a time: 4 KiB of a row of x, so that a block of rows stays in the L1 cache.
  static constexpr int64_t kPairs = 2048 / sizeof(Activation);

  static Rows rows_of(const Operand& x) { return x.rows(); }
  static Form form(int64_t) { return {}; }
  static int64_t panel_bytes(int64_t k, int64_t) { return pairs_of(k) * kPair * sizeof(BFloat16); }

  static void multiply(const Rows& x, const uint8_t* panels, int64_t count, int64_t, float* sums) {
    const BFloat16* w = reinterpret_cast<const BFloat16*>(panels);
    const int64_t pairs = pairs_of(x.k), apart = pairs * kPair;
    for (int64_t from = 0; from < pairs; from += kPairs) {
      const int64_t some = std::min(kPairs, pairs - from);
      for (int64_t r = 0; r < x.count; r += kBlock)
        with_sizes<kBlock, kTogether>(std::min(kBlock, x.count - r), count, [&](auto R, auto C) {
          float* to = sums + r * kSumsApart;
          block<R, C>(
              x.x + r * x.ld + 2 * from, x.ld, w + from * kPair, apart, some,
              [=](int64_t i, int64_t j) { return from ? load_floats(to + i * kSumsApart + j) : Floats{}; },
              [=](int64_t i, int64_t j, Floats sum) { store_floats(to + i * kSumsApart + j, sum); });
        });
    }
  }
};

// bfloat16 in twelve bits, a chunk at a time unpacked into the L1 cache. The sums are PlainPanels', bit for bit.
struct Exact12Panels {
  static Rows rows_of(const Operand& x) { return x.rows(); }
  static Form form(int64_t) { return {}; }
  static int64_t panel_bytes(int64_t k, int64_t) { return chunks_of(k) * sizeof(Chunk); }

  static void multiply(const Rows& x, const uint8_t* panels, int64_t count, int64_t, float* sums) {
    alignas(64) BFloat16 values[kTogether * kChunk];
    const int64_t chunks = chunks_of(x.k), chunk_pairs = kChunk / kPair;
    for (int64_t i = 0; i < chunks; ++i) {
      for (int64_t c = 0; c < count; ++c) {
        const Chunk* chunk = reinterpret_cast<const Chunk*>(panels) + c * chunks + i;
        for (size_t ahead = 0; ahead < sizeof *chunk; ahead += 64)
          __builtin_prefetch(reinterpret_cast<const char*>(chunk + 2) + ahead);
        chunk->unpack(values + c * kChunk);
      }
      const int64_t pairs = std::min(chunk_pairs, pairs_of(x.k) - i * chunk_pairs);
      for (int64_t r = 0; r < x.count; r += kBlock)
        with_sizes<kBlock, kTogether>(std::min(kBlock, x.count - r), count, [&](auto R, auto C) {
          float* to = sums + r * kSumsApart;
          block<R, C>(
              x.x + r * x.ld + i * 2 * chunk_pairs, x.ld, values, kChunk, pairs,
              [=](int64_t row, int64_t j) { return i ? load_floats(to + row * kSumsApart + j) : Floats{}; },
              [=](int64_t row, int64_t j, Floats sum) { store_floats(to + row * kSumsApart + j, sum); });
        });
    }
  }
};

// A group of a panel: the scales of its rows in float16, their minima, then codes. A word of 32 bits for each row holds
// codes of adjacent columns: even ones in its lower half, odd ones in its upper half, the first in the lowest bits. Codes
// of three bits are two planes, of their lower two bits and of the highest. As in quantize.py a code c stands for minimum
// + c * scale. Codes are whole numbers below 257, which bfloat16 holds exactly, so they are multiplied as they are, and
// each group's sum is scaled in float32.
template <int kBits>
struct GroupedPanels {
  static Rows rows_of(const Operand& x) { return x.rows(); }
  static Form form(int64_t group) { return {group, 0}; }
  static int64_t groups_of(int64_t k, int64_t group) { return (k + group - 1) / group; }
  static int64_t group_bytes(int64_t group) { return 4 * kPanel + kPanel * group * kBits / 8; }
  static int64_t panel_bytes(int64_t k, int64_t group) { return groups_of(k, group) * group_bytes(group); }

  // The scales and minima of a group's rows.
  static void scales_of(const uint8_t* from, float* scales, float* minima) {
    for (int64_t j = 0; j < kPanel; j += kLanes) {
      store(scales + j, widen(reinterpret_cast<const Float16*>(from) + j));
      store(minima + j, widen(reinterpret_cast<const Float16*>(from) + kPanel + j));
    }
  }

  static void multiply(const Rows& x, const uint8_t* panels, int64_t count, int64_t group, float* sums) {
    constexpr int64_t kMost = 64 * kPair;  // pairs of the largest group
    alignas(64) BFloat16 codes[kTogether * kMost];
    alignas(64) float scales[kSumsApart], minima[kSumsApart];
    const int64_t groups = groups_of(x.k, group), apart = panel_bytes(x.k, group), bytes = group_bytes(group);
    for (int64_t g = 0; g < groups; ++g) {
      const int64_t pairs = std::min(group / 2, pairs_of(x.k) - g * group / 2);
      for (int64_t c = 0; c < count; ++c) {
        const uint8_t* from = panels + c * apart + g * bytes;
        for (int64_t ahead = 0; ahead < bytes; ahead += 64) __builtin_prefetch(from + 4 * bytes + ahead);
        scales_of(from, scales + c * kPanel, minima + c * kPanel);
        unpack(from + 4 * kPanel, group, codes + c * kMost);
      }
      for (int64_t r = 0; r < x.count; r += kBlock)
        with_sizes<kBlock, kTogether>(std::min(kBlock, x.count - r), count, [&](auto R, auto C) {
          float* to = sums + r * kSumsApart;
          const float* of_group = x.sums(r) + g;
          block<R, C>(
              x.x + r * x.ld + g * group, x.ld, codes, kMost, pairs,
              [](int64_t, int64_t) { return Floats{}; },
              [&](int64_t i, int64_t j, Floats sum) {
                const Floats before = g ? load_floats(to + i * kSumsApart + j) : Floats{};
                const Floats scaled = fused(sum, load_floats(scales + j), before);
                const Floats minimum = load_floats(minima + j);
                store_floats(to + i * kSumsApart + j, fused(of_group[i * x.sums_apart()] - Floats{}, minimum, scaled));
              });
        });
    }
  }

 private:
  static constexpr int64_t kHalf = kPanel * 2;  // codes of a pair
  typedef uint16_t Halves __attribute__((vector_size(2 * kHalf)));
  typedef uint32_t Wide __attribute__((vector_size(4 * kPanel)));
  typedef int32_t Signed __attribute__((vector_size(4 * kPanel)));
  typedef float Values __attribute__((vector_size(4 * kPanel)));

  static Halves word(const uint8_t* from) {
    Halves found;
    std::memcpy(&found, from, sizeof found);
    return found;
  }

  // Writes a group's codes as pairs of bfloat16.
  static void unpack(const uint8_t* from, int64_t group, BFloat16* out) {
    constexpr int64_t kBytes = sizeof(Halves);
    if constexpr (kBits == 3) {
      const uint8_t* highest = from + group / 16 * kBytes;
      for (int64_t p = 0; p < group / 2; p += 8) {
        const Halves low = word(from + p / 8 * kBytes), high = word(highest + p / 16 * kBytes) >> (p % 16);
        for (int i = 0; i < 8; ++i) put(out + (p + i) * kPair, (low >> (2 * i) & 3) | (high >> i & 1) << 2);
      }
    } else {
      constexpr int64_t kIn = 16 / kBits;  // pairs in a word
      constexpr uint16_t kMask = (1 << kBits) - 1;
      for (int64_t p = 0; p < group / 2; p += kIn) {
        const Halves codes = word(from + p / kIn * kBytes);
#pragma GCC unroll 4
        for (int i = 0; i < kIn; ++i) put(out + (p + i) * kPair, codes >> (kBits * i) & kMask);
      }
    }
  }

  static void put(BFloat16* out, Halves codes) {
#ifdef __AVX512BW__
    if constexpr (kBits < 8) {
      alignas(64) static constexpr uint16_t kValues[32] = {
          0,      0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0, 0x40c0, 0x40e0, 0x4100, 0x4110, 0x4120,
          0x4130, 0x4140, 0x4150, 0x4160, 0x4170};  // 0 to 15
      const __m512i values = _mm512_load_si512(kValues);
      _mm512_storeu_si512(out, _mm512_permutexvar_epi16((__m512i)codes, values));
      return;
    }
#endif
    const Wide pairs = (Wide)codes;
    const Values even = __builtin_convertvector((Signed)(pairs & 0xffff), Values);
    const Values odd = __builtin_convertvector((Signed)(pairs >> 16), Values);
    const Wide both = (Wide)even >> 16 | ((Wide)odd & 0xffff0000u);
    std::memcpy(out, &both, sizeof both);
  }
};

}  // namespace
