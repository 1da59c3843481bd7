// Weights in panels, as they are stored: plain bfloat16, bfloat16 in twelve bits, or quantized in groups.
//
// Each kind has the bytes of a panel and the form in which it takes x, and multiplies: sums[rows, panels] = x[rows, k]
// times up to its kAtOnce panels. The order in which a value is summed depends on k alone, so a row's result does not
// depend on the other rows.

#pragma once

#include <optional>

#include "exact12.h"
#include "packed_rows.h"
#include "panel_operand.h"
#include "plain_product.h"

namespace {

// Panels that are multiplied at once: a block of rows in float32 is read from the L1 cache for all of them.
constexpr int64_t kMostAtOnce = kInFloat32 ? 4 * kTogether : kTogether;

// visit(R, C, row, panel) for blocks of rows and of `panels` panels, where R and C are their sizes as constants.
template <typename Visit>
inline void each_block(int64_t rows, int64_t panels, Visit visit) {
  for (int64_t row = 0; row < rows; row += kBlock)
    for (int64_t panel = 0; panel < panels; panel += kTogether)
      with_sizes<kBlock, kTogether>(std::min(kBlock, rows - row), panels - panel,
                                    [&](auto R, auto C) { visit(R, C, row, panel); });
}

// Columns of a panel that are widened at a time: with a block of rows they fill half of the L1 cache.
constexpr int64_t kWidenedColumns = 256;

// add_product by weights that are widened first.
inline void add_widened(const Rows& x, int64_t column, const BFloat16* w, int64_t apart, int64_t pairs, int64_t count,
                        float* sums) {
  alignas(64) float values[kWidenedColumns * kPanel];
  const int64_t sums_ld = count * kPanel;
  for (int64_t from = 0; from < 2 * pairs; from += kWidenedColumns) {
    const int64_t columns = std::min(kWidenedColumns, 2 * pairs - from), first = column + from;
    for (int64_t c = 0; c < count; ++c) {
      const BFloat16* stored = w + c * apart + from * kPanel;
      for (int64_t i = 0; i < columns * kPanel; i += 2 * kPanel)
        for (int64_t v = 0; v < kPanel; v += kVector) {
          Words both;
          std::memcpy(&both, stored + i + 2 * v, sizeof both);
          store_floats(values + i + v, (Floats)(both << 16));
          store_floats(values + i + kPanel + v, (Floats)(both & 0xffff0000u));
        }
      each_block(x.count, 1, [&](auto R, auto, int64_t row, int64_t) {
        float* to = sums + row * sums_ld + c * kPanel;
        widened_block<R>(
            reinterpret_cast<const float*>(x.block(row, first)), x.ld, values, columns,
            [=](int64_t i, int64_t j) { return first ? load_floats(to + i * sums_ld + j) : Floats{}; },
            [=](int64_t i, int64_t j, Floats sum) { store_floats(to + i * sums_ld + j, sum); });
      });
    }
  }
}

// Adds the products of some columns of x, `column` the first, to sums, or begins these with them: `pairs` of columns of
// `count` panels, `apart` values from one to the next.
inline void add_product(const Rows& x, int64_t column, const BFloat16* w, int64_t apart, int64_t pairs, int64_t count,
                        float* sums) {
  const int64_t sums_ld = count * kPanel;
  if constexpr (kWidened)
    if (x.count >= kWidenedFrom) return add_widened(x, column, w, apart, pairs, count, sums);
  each_block(x.count, count, [&](auto R, auto C, int64_t row, int64_t panel) {
    float* to = sums + row * sums_ld + panel * kPanel;
    block<R, C>(
        x.block(row, column), x.ld, w + panel * apart, apart, pairs,
        [=](int64_t i, int64_t j) { return column ? load_floats(to + i * sums_ld + j) : Floats{}; },
        [=](int64_t i, int64_t j, Floats sum) { store_floats(to + i * sums_ld + j, sum); });
  });
}

struct PlainPanels {
  static constexpr int64_t kAtOnce = kMostAtOnce;

  static Rows rows_of(const Operand& x) { return x.rows(); }
  static Form form(int64_t) { return {}; }
  static int64_t panel_bytes(int64_t k, int64_t) { return pairs_of(k) * kPair * sizeof(BFloat16); }

  static void multiply(const Rows& x, const uint8_t* panels, int64_t count, int64_t, float* sums) {
    const int64_t pairs = pairs_of(x.k);
    const BFloat16* w = reinterpret_cast<const BFloat16*>(panels);
    if constexpr (kInFloat32) {
      constexpr int64_t kPairs = 256;  // multiplied at a time: a block of rows stays in the L1 cache
      for (int64_t from = 0; from < pairs; from += kPairs)
        add_product(x, 2 * from, w + from * kPair, pairs * kPair, std::min(kPairs, pairs - from), count, sums);
    } else {
      multiply_panels(x.x, x.ld, x.count, w, pairs * kPair, pairs, count, sums, count * kPanel);
    }
  }
};

// bfloat16 in twelve bits, a chunk at a time unpacked into the L1 cache. The sums are PlainPanels', bit for bit.
struct Exact12Panels {
  static constexpr int64_t kAtOnce = kMostAtOnce;

  static Rows rows_of(const Operand& x) { return x.rows(); }
  static Form form(int64_t) { return {}; }
  static int64_t panel_bytes(int64_t k, int64_t) { return chunks_of(k) * sizeof(Chunk); }

  static void multiply(const Rows& x, const uint8_t* panels, int64_t count, int64_t, float* sums) {
#ifdef HAS_AMX
    if (amx_allowed()) return multiply_tiles(x, panels, count, sums);
#endif
    constexpr int64_t kChunks = kInFloat32 ? 4 : 1;  // unpacked at a time
    alignas(64) BFloat16 values[kAtOnce * kChunks * kChunk];
    const int64_t chunks = chunks_of(x.k), chunk_pairs = kChunk / kPair;
    for (int64_t i = 0; i < chunks; i += kChunks) {
      for (int64_t c = 0; c < count; ++c)
        for (int64_t j = 0; j < std::min(kChunks, chunks - i); ++j)
          unpack(reinterpret_cast<const Chunk*>(panels) + c * chunks + i + j, values + (c * kChunks + j) * kChunk);
      const int64_t pairs = std::min(kChunks * chunk_pairs, pairs_of(x.k) - i * chunk_pairs);
      add_product(x, i * 2 * chunk_pairs, values, kChunks * kChunk, pairs, count, sums);
    }
  }

 private:
  // Unpacks the chunk that a thread needs, and fetches the one after the next.
  static void unpack(const Chunk* chunk, BFloat16* values) {
    for (size_t ahead = 0; ahead < sizeof *chunk; ahead += 64)
      __builtin_prefetch(reinterpret_cast<const char*>(chunk + 2) + ahead);
    chunk->unpack(values);
  }

#ifdef HAS_AMX
  static void multiply_tiles(const Rows& x, const uint8_t* panels, int64_t count, float* sums) {
    constexpr int64_t kChunks = 4, kSteps = kChunk / kTileValues;  // chunks that are unpacked at a time, steps of one
    alignas(64) BFloat16 values[kAtOnce * kChunks * kChunk];
    const int64_t chunks = chunks_of(x.k), steps = (x.k + kTileColumns - 1) / kTileColumns;
    const Amx units(x.count);
    for (int64_t i = 0; i < chunks; i += kChunks) {
      const int64_t some = std::min(kChunks, chunks - i);
      for (int64_t c = 0; c < count; ++c)
        for (int64_t j = 0; j < some; ++j)
          unpack(reinterpret_cast<const Chunk*>(panels) + c * chunks + i + j, values + (c * kChunks + j) * kChunk);
      amx_product<Dot::kPairs, 0>(x.x + i * kSteps * kTileColumns, x.ld * kValueBytes, x.count, values,
                                  kChunks * kChunk * kValueBytes, count, std::min(some * kSteps, steps - i * kSteps),
                                  i > 0, sums, count * kPanel * sizeof *sums);
    }
  }
#endif
};

// A group of a panel: the scales of its rows in float16, their minima, then codes. A word of 32 bits for each row holds
// codes of adjacent columns: even ones in its lower half, odd ones in its upper half, the first in the lowest bits. Codes
// of three bits are two planes, of their lower two bits and of the highest. As in quantize.py a code c stands for minimum
// + c * scale. Codes are whole numbers below 257, which bfloat16 holds exactly, so they are multiplied as they are, and
// each group's sum is scaled in float32.
template <int kBits>
struct GroupedPanels {
  static constexpr int64_t kAtOnce = kMostAtOnce;

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
    if (!kInFloat32 || (kInterleaved && x.count > kDirect)) return multiply_staged(x, panels, count, group, sums);
    if constexpr (kWidened)
      if (x.count >= kWidenedFrom) return multiply_widened(x, panels, count, group, sums);
    const int64_t apart = panel_bytes(x.k, group), sums_ld = count * kPanel;
    int64_t c = 0;
    if (x.count <= kFew)
      with_sizes<kFew, 1>(x.count, 1, [&](auto R, auto) {
        for (constexpr int C = kChains / (R * kVectors); c + C <= count; c += C)
          multiply_direct<R, C>(x, panels + c * apart, apart, group, sums + c * kPanel, sums_ld);
      });
    for (; c < count; ++c)
      for (int64_t r = 0; r < x.count; r += kDirect)
        with_sizes<kDirect, 1>(std::min(kDirect, x.count - r), 1, [&](auto R, auto) {
          multiply_direct<R, 1>(x.from(r, R), panels + c * apart, apart, group, sums + r * sums_ld + c * kPanel,
                                sums_ld);
        });
  }

 private:
  // Rows of multiply_direct, whose sums, weights and an x fit the registers.
  static constexpr int64_t kDirect = kVectors == 1 ? 8 : 4;
  // Sums that do not wait for each other: as few rows have few of them, some panels are multiplied at once.
  static constexpr int kChains = 4, kFew = kChains / kVectors / 2;

  // Codes become bfloat16 in the L1 cache, as the units for it take them.
  static void multiply_staged(const Rows& x, const uint8_t* panels, int64_t count, int64_t group, float* sums) {
    constexpr int64_t kMost = 64 * kPair;  // pairs of the largest group
    alignas(64) BFloat16 codes[kAtOnce * kMost];
    alignas(64) float scales[kAtOnce * kPanel], minima[kAtOnce * kPanel];
    const int64_t groups = groups_of(x.k, group), apart = panel_bytes(x.k, group), bytes = group_bytes(group);
    const int64_t sums_ld = count * kPanel;
#ifdef HAS_AMX
    std::optional<Amx> units;
    if (amx_allowed()) units.emplace(x.count);
#endif
    for (int64_t g = 0; g < groups; ++g) {
      const int64_t pairs = std::min(group / 2, pairs_of(x.k) - g * group / 2);
      for (int64_t c = 0; c < count; ++c) {
        const uint8_t* from = panels + c * apart + g * bytes;
        for (int64_t ahead = 0; ahead < bytes; ahead += 64) __builtin_prefetch(from + 4 * bytes + ahead);
        scales_of(from, scales + c * kPanel, minima + c * kPanel);
        unpack(from + 4 * kPanel, group, codes + c * kMost);
      }
#ifdef HAS_AMX
      if (units) {
        amx_each<Dot::kPairs>(
            x.x + g * group, x.ld * kValueBytes, x.count, codes, kMost * kValueBytes, count,
            (2 * pairs + kTileColumns - 1) / kTileColumns,
            [&](int64_t row, int64_t j, const char* products) {
              add_group(sums + row * sums_ld + j, load_floats(reinterpret_cast<const float*>(products)),
                        x.sums(row)[g], scales + j, minima + j, !g);
            });
        continue;
      }
#endif
      each_block(x.count, count, [&](auto R, auto C, int64_t row, int64_t panel) {
        float* to = sums + row * sums_ld + panel * kPanel;
        const float *of_group = x.sums(row) + g, *scale = scales + panel * kPanel, *minimum = minima + panel * kPanel;
        block<R, C>(
            x.block(row, g * group), x.ld, codes + panel * kMost, kMost, pairs,
            [](int64_t, int64_t) { return Floats{}; },
            [&](int64_t i, int64_t j, Floats sum) {
              add_group(to + i * sums_ld + j, sum, of_group[i * x.sums_apart()], scale + j, minimum + j, !g);
            });
      });
    }
  }

  // Codes become float32 in the L1 cache, a group of a panel for all rows.
  static void multiply_widened(const Rows& x, const uint8_t* panels, int64_t count, int64_t group, float* sums) {
    constexpr int64_t kMost = 128 * kPanel;  // codes of the largest group
    alignas(64) float codes[kMost], scales[kPanel], minima[kPanel];
    const int64_t groups = groups_of(x.k, group), apart = panel_bytes(x.k, group), bytes = group_bytes(group);
    const int64_t sums_ld = count * kPanel;
    for (int64_t c = 0; c < count; ++c)
      for (int64_t g = 0; g < groups; ++g) {
        const uint8_t* from = panels + c * apart + g * bytes;
        for (int64_t ahead = 0; ahead < bytes; ahead += 64) __builtin_prefetch(from + 4 * bytes + ahead);
        scales_of(from, scales, minima);
        widen_codes(from + 4 * kPanel, group, codes);
        const int64_t columns = std::min(group, x.k - g * group);
        each_block(x.count, 1, [&](auto R, auto, int64_t row, int64_t) {
          float* to = sums + row * sums_ld + c * kPanel;
          const float* of_group = x.sums(row) + g;
          widened_block<R>(
              reinterpret_cast<const float*>(x.block(row, g * group)), x.ld, codes, columns,
              [](int64_t, int64_t) { return Floats{}; },
              [&](int64_t i, int64_t j, Floats sum) {
                add_group(to + i * sums_ld + j, sum, of_group[i * x.sums_apart()], scales + j, minima + j, !g);
              });
        });
      }
  }

  // Writes a group's codes as columns of float32.
  static void widen_codes(const uint8_t* codes, int64_t group, float* out) {
    constexpr int64_t kWord = kBits == 3 ? 8 : 16 / kBits;  // pairs in a word
    for (int64_t p = 0; p < group / 2; p += kWord)
      for (int64_t v = 0; v < kVectors; ++v) {
        const Words low = words(codes + p / kWord * sizeof(Halves), v);
        Words high = {};
        if (kBits == 3) high = words(codes + (group / 16 + p / 16) * sizeof(Halves), v) >> (p % 16);
#pragma GCC unroll 8
        for (int i = 0; i < kWord; ++i)
          for (int odd = 0; odd < 2; ++odd)
            store_floats(out + (2 * (p + i) + odd) * kPanel + v * kVector, code(low, high, i, odd));
      }
  }

  // Codes of one column, the first or the second of pair number i of those that the words hold, in float32.
  static inline __attribute__((always_inline)) Floats code(Words low, Words high, int i, int odd) {
    const Words codes = kBits == 3 ? (low >> (2 * i + 16 * odd) & 3) | (high >> (i + 16 * odd) & 1) << 2
                                   : low >> (kBits * i + 16 * odd) & ((1 << kBits) - 1);
    return __builtin_convertvector((Int32s)codes, Floats);
  }

  // Adds to sums, or begins them with, a group's: of x times codes, and of x itself.
  static void add_group(float* to, Floats codes, float of_x, const float* scales, const float* minima, bool first) {
    const Floats scaled = fused(codes, load_floats(scales), first ? Floats{} : load_floats(to));
    store_floats(to, fused(of_x - Floats{}, load_floats(minima), scaled));
  }

  // Codes become float32 in registers, once for R rows and C panels, `apart` bytes from one to the next: faster for few
  // rows, without AVX-512 for any number.
  template <int R, int C>
  static void multiply_direct(const Rows& x, const uint8_t* panel, int64_t apart, int64_t group, float* sums,
                              int64_t sums_ld) {
    constexpr int64_t kWord = kBits == 3 ? 8 : 16 / kBits;  // pairs in a word
    constexpr int kEach = C * kVectors;
    alignas(64) float scales[C * kPanel], minima[C * kPanel];
    const int64_t groups = groups_of(x.k, group), bytes = group_bytes(group);
    const float* of_x = x.sums(0);
    for (int64_t g = 0; g < groups; ++g, panel += bytes) {
      for (int c = 0; c < C; ++c) {
        const uint8_t* from = panel + c * apart;
        for (int64_t ahead = 0; ahead < bytes; ahead += 64) __builtin_prefetch(from + 4 * bytes + ahead);
        scales_of(from, scales + c * kPanel, minima + c * kPanel);
      }
      const uint8_t* codes = panel + 4 * kPanel;
      const int64_t pairs = std::min(group / 2, pairs_of(x.k) - g * group / 2);
      Floats sum[R][kEach] = {};
      for (int64_t p = 0; p < pairs; p += kWord) {
        Words low[kEach], high[kEach];
        for (int64_t v = 0; v < kEach; ++v) {
          const uint8_t* from = codes + v / kVectors * apart;
          low[v] = words(from + p / kWord * sizeof(Halves), v % kVectors);
          if (kBits == 3) high[v] = words(from + (group / 16 + p / 16) * sizeof(Halves), v % kVectors) >> (p % 16);
        }
        const Activation* from = x.block(0, g * group + 2 * p);
        if (p + kWord <= pairs) {
#pragma GCC unroll 8
          for (int i = 0; i < kWord; ++i) add_pair<R, kEach>(low, high, i, from, x.ld, sum);
        } else {
          for (int i = 0; i < pairs - p; ++i) add_pair<R, kEach>(low, high, i, from, x.ld, sum);
        }
      }
      for (int r = 0; r < R; ++r)
        for (int64_t v = 0; v < kEach; ++v)
          add_group(sums + r * sums_ld + v * kVector, sum[r][v], of_x[r * x.sums_apart() + g],
                    scales + v * kVector, minima + v * kVector, !g);
    }
  }

  // Adds x times a pair of columns, number i of those that the words hold.
  template <int R, int kEach>
  static inline __attribute__((always_inline)) void add_pair(const Words* low, const Words* high, int i,
                                                             const Activation* x, int64_t ldx,
                                                             Floats (&sum)[R][kEach]) {
    for (int odd = 0; odd < 2; ++odd) {
      Floats values[kEach];
#pragma GCC unroll 4
      for (int64_t v = 0; v < kEach; ++v) values[v] = code(low[v], kBits == 3 ? high[v] : Words{}, i, odd);
#pragma GCC unroll 16
      for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
        for (int64_t v = 0; v < kEach; ++v)
          sum[r][v] = fused(widened(value_at<R>(x, ldx, r, 2 * i + odd)) - Floats{}, values[v], sum[r][v]);
    }
  }

  // Words of the rows of vector v.
  static Words words(const uint8_t* from, int64_t v) {
    Words found;
    std::memcpy(&found, from + v * sizeof found, sizeof found);
    return found;
  }

  typedef int32_t Int32s __attribute__((vector_size(kVector * 4)));
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
