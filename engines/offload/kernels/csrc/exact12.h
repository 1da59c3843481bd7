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
    unused_ = 0;  // equal values, equal bytes
    std::memset(listed_, 0, sizeof listed_);
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
    for (int64_t i = 0; i < kChunk; i += 2 * kPair) put(exponents_ + i / 2, rest_ + i, out + i);
    // A late thread (tile_pool.h) may read a slot that another tile has by now. What it computes then is thrown away, so
    // it may be wrong, but whatever the bytes are nothing may be written beyond the chunk's values.
    for (int i = 0; i < std::min<int>(exceptions_, kMost); ++i) out[listed_[i].at & (kChunk - 1)].bits = listed_[i].bits;
  }

 private:
  static constexpr int kMost = 3;

  static int exponent(uint16_t bits) { return bits >> 7 & 0xff; }

  // Two pairs' values of `codes` and `rest`. With vectors of bytes a shuffle looks exponents up, and the lower and the
  // upper bytes of values are put together before they are interleaved.
#if defined(__AVX512BW__)
  void put(const uint8_t* codes, const uint8_t* rest, BFloat16* out) const {
    constexpr int kFirst = 0xe4, kSecond = 0xd8;  // of two operands, where the bits of a third are set
    const __m512i low_seven = _mm512_set1_epi8(0x7f);
    const __m512i both = _mm512_castsi256_si512(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(codes)));
    const __m512i twice = _mm512_permutexvar_epi64(_mm512_setr_epi64(0, 0, 1, 1, 2, 2, 3, 3), both);
    const __m512i shifted = _mm512_srlv_epi64(twice, _mm512_setr_epi64(0, 4, 0, 4, 0, 4, 0, 4));
    const __m512i exponents = _mm512_shuffle_epi8(_mm512_broadcast_i32x4(exponents_by_code()),
                                                  _mm512_and_si512(shifted, _mm512_set1_epi8(15)));
    const __m512i signs = _mm512_permutexvar_epi64(_mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7), _mm512_loadu_si512(rest));
    const __m512i upper = _mm512_ternarylogic_epi64(signs, _mm512_srli_epi16(exponents, 1), low_seven, kSecond);
    const __m512i lower = _mm512_ternarylogic_epi64(signs, _mm512_slli_epi16(exponents, 7), low_seven, kFirst);
    _mm512_storeu_si512(out, _mm512_unpacklo_epi8(lower, upper));
    _mm512_storeu_si512(out + kPair, _mm512_unpackhi_epi8(lower, upper));
  }
#elif defined(__AVX2__)
  void put(const uint8_t* codes, const uint8_t* rest, BFloat16* out) const {
    const __m256i both = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(codes)), low_four = _mm256_set1_epi8(15);
    put_pair(_mm256_and_si256(both, low_four), rest, out);
    put_pair(_mm256_and_si256(_mm256_srli_epi16(both, 4), low_four), rest + kPair, out + kPair);
  }

  void put_pair(__m256i codes, const uint8_t* rest, BFloat16* out) const {
    const __m256i exponents = _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(exponents_by_code()), codes);
    const __m256i signs = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(rest)), low_seven = _mm256_set1_epi8(0x7f);
    const __m256i upper = select(signs, _mm256_srli_epi16(exponents, 1), low_seven);
    const __m256i lower = select(_mm256_slli_epi16(exponents, 7), signs, low_seven);
    const __m256i first = _mm256_unpacklo_epi8(lower, upper), second = _mm256_unpackhi_epi8(lower, upper);
    __m256i* const to = reinterpret_cast<__m256i*>(out);
    _mm256_storeu_si256(to, _mm256_permute2x128_si256(first, second, 0x20));
    _mm256_storeu_si256(to + 1, _mm256_permute2x128_si256(first, second, 0x31));
  }

  // b where the bits of `mask` are set, else a.
  static __m256i select(__m256i a, __m256i b, __m256i mask) {
    return _mm256_or_si256(_mm256_and_si256(mask, b), _mm256_andnot_si256(mask, a));
  }
#else
  typedef uint16_t Halves __attribute__((vector_size(2 * kPair)));
  typedef uint8_t Bytes __attribute__((vector_size(kPair)));

  static Halves widen_halves(const uint8_t* from) {
    Bytes bytes;
    std::memcpy(&bytes, from, sizeof bytes);
    return __builtin_convertvector(bytes, Halves);
  }

  void put(const uint8_t* codes, const uint8_t* rest, BFloat16* out) const {
    const Halves both = widen_halves(codes);
    put_pair(both & 15, widen_halves(rest), out);
    put_pair(both >> 4, widen_halves(rest + kPair), out + kPair);
  }

  void put_pair(Halves codes, Halves rest, BFloat16* out) const {
    const Halves exponents = (codes + base_) & (Halves)(codes != 0);
    const Halves values = (rest & 0x7f) | exponents << 7 | (rest & 0x80) << 8;
    std::memcpy(out, &values, sizeof values);
  }
#endif

#ifdef __AVX2__
  __m128i exponents_by_code() const {
    const __m128i codes = _mm_setr_epi8(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    const __m128i base = _mm_andnot_si128(_mm_cmpeq_epi8(codes, __m128i{}), _mm_set1_epi8(static_cast<char>(base_)));
    return _mm_add_epi8(codes, base);
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
