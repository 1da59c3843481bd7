// bfloat16 in twelve bits, exactly: a sign and seven bits of mantissa, and four bits for the exponent.
//
// Exponents of weights crowd below the largest: of 8 bits they carry 2.5. A chunk of kChunk values has a base; the code c
// of 1 to 15 stands for the exponent base + c, and 0 for the exponent 0, of zeros and denormals. What lies outside, one or
// two in ten thousand of a normal distribution's values, stands in full in a short list. A chunk with more of these cannot be
// packed. DFloat11 (Zhang et al. 2025) codes exponents by Huffman's method for weights that stay on a GPU; four bits are
// longer and need no tree.

#pragma once

#include "panel_product.h"

namespace {

constexpr int64_t kChunk = 64 / 2 * kPair;  // values of 64 columns of a panel

inline int64_t chunks_of(int64_t k) { return (pairs_of(k) * kPair + kChunk - 1) / kChunk; }

class Chunk {
 public:
  // Packs `count` values; the rest are zeros. Returns false where too many exponents are outside.
  bool pack(const BFloat16* from, int64_t count) {
    int counts[256] = {};
    for (int64_t i = 0; i < count; ++i) ++counts[exponent(from[i].bits)];
    int inside = 0, best = -1;
    for (int e = 1; e <= 15; ++e) inside += counts[e];
    for (int base = 0; base <= 255 - 15; ++base) {
      if (inside > best) best = inside, base_ = base;
      if (base < 255 - 15) inside += counts[base + 16] - counts[base + 1];
    }
    exceptions_ = 0;
    if (count - counts[0] - best > kMost) return false;
    std::memset(exponents_, 0, sizeof exponents_);
    std::memset(rest_, 0, sizeof rest_);
    for (int64_t i = 0; i < count; ++i) {
      const uint16_t bits = from[i].bits;
      int code = exponent(bits) ? exponent(bits) - base_ : 0;
      if (code < 0 || code > 15 || (exponent(bits) && !code)) {
        listed_[exceptions_++] = {static_cast<uint16_t>(i), bits};
        code = 0;
      }
      // a byte has the codes of two values that are kPair apart
      exponents_[i / (2 * kPair) * kPair + i % kPair] |= code << (i / kPair % 2 * 4);
      rest_[i] = (bits >> 8 & 0x80) | (bits & 0x7f);
    }
    return true;
  }

  void unpack(BFloat16* out) const {
#ifdef __AVX512BW__
    alignas(64) uint16_t exponents[32];  // by code, twice: a lookup takes five bits, of which the fifth may be any
    for (int code = 0; code < 16; ++code) exponents[code] = exponents[code + 16] = code ? (base_ + code) << 7 : 0;
    const __m512i table = _mm512_load_si512(exponents);
    for (int64_t i = 0; i < kChunk; i += 2 * kPair) {
      const __m512i codes = widen_bytes(exponents_ + i / 2);
      put(out + i, _mm512_permutexvar_epi16(codes, table), widen_bytes(rest_ + i));
      put(out + i + kPair, _mm512_permutexvar_epi16(_mm512_srli_epi16(codes, 4), table), widen_bytes(rest_ + i + kPair));
    }
#else
    const Halves base = Halves{} + base_;
    for (int64_t i = 0; i < kChunk; i += 2 * kPair) {
      const Halves codes = widen_halves(exponents_ + i / 2);
      put(out + i, codes & 15, base, widen_halves(rest_ + i));
      put(out + i + kPair, codes >> 4, base, widen_halves(rest_ + i + kPair));
    }
#endif
    // A late thread (tile_pool.h) may read a slot that another tile has by now. What it computes then is thrown away, so
    // it may be wrong, but whatever the bytes are nothing may be written beyond the chunk's values.
    for (int i = 0; i < std::min<int>(exceptions_, kMost); ++i) out[listed_[i].at & (kChunk - 1)].bits = listed_[i].bits;
  }

 private:
  static constexpr int kMost = 3;

  static int exponent(uint16_t bits) { return bits >> 7 & 0xff; }

#ifdef __AVX512BW__
  static __m512i widen_bytes(const uint8_t* from) {
    return _mm512_cvtepu8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
  }

  static void put(BFloat16* out, __m512i exponents, __m512i rest) {
    constexpr int kSelect = 0xea;  // (a & b) | c
    const __m512i lower = _mm512_ternarylogic_epi64(rest, _mm512_set1_epi16(0x7f), exponents, kSelect);
    const __m512i sign = _mm512_set1_epi16(static_cast<int16_t>(0x8000));
    _mm512_storeu_si512(out, _mm512_ternarylogic_epi64(_mm512_slli_epi16(rest, 8), sign, lower, kSelect));
  }
#else
  typedef uint16_t Halves __attribute__((vector_size(2 * kPair)));
  typedef uint8_t Bytes __attribute__((vector_size(kPair)));

  static Halves widen_halves(const uint8_t* from) {
    Bytes bytes;
    std::memcpy(&bytes, from, sizeof bytes);
    return __builtin_convertvector(bytes, Halves);
  }

  static void put(BFloat16* out, Halves codes, Halves base, Halves rest) {
    const Halves exponents = (codes + base) & (Halves)(codes != 0);
    const Halves values = (rest & 0x7f) | exponents << 7 | (rest & 0x80) << 8;
    std::memcpy(out, &values, sizeof values);
  }
#endif

  uint16_t base_;
  uint8_t exceptions_, unused_;
  struct { uint16_t at, bits; } listed_[kMost];
  uint8_t exponents_[kChunk / 2], rest_[kChunk];
};
static_assert(sizeof(Chunk) == 16 + kChunk / 2 * 3, "storage.py knows the size");
static_assert((kChunk & (kChunk - 1)) == 0, "places are masked");

}  // namespace
