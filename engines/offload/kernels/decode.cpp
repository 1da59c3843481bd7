// Attention of single queries over a paged key/value cache, in float32 arithmetic whatever the cache holds.
//
// One work item is a sequence and a key/value head: its group of query heads shares every key and value row read.
// Keys and values are [pages, kv_heads, page, dim]; table is [sequences, max_pages]; q and out are
// [sequences, heads, dim]. Items [first, last) are done here, so that threads can share the work.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

namespace {

inline float widen(float x) { return x; }

struct BFloat16 { uint16_t bits; };
struct Float16 { uint16_t bits; };

inline float from_bits(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, sizeof x);
  return x;
}

inline float widen(BFloat16 x) { return from_bits(static_cast<uint32_t>(x.bits) << 16); }  // the upper half

inline float widen(Float16 x) {  // the exponent is moved by a product, which makes subnormal numbers right as well
  const uint32_t magnitude = static_cast<uint32_t>(x.bits & 0x7fff) << 13;
  const uint32_t sign = static_cast<uint32_t>(x.bits & 0x8000) << 16;
  const uint32_t special = (x.bits & 0x7c00) == 0x7c00 ? 0x7f800000u : 0u;  // infinity and NaN
  const float scaled = from_bits(magnitude) * 0x1p112f;
  uint32_t bits;
  std::memcpy(&bits, &scaled, sizeof bits);
  return from_bits(bits | special | sign);
}

template <typename T>
void decode(const float* q, const T* keys, const T* values, const int32_t* table, const int32_t* lengths, float* out,
            int64_t first, int64_t last, int64_t heads, int64_t kv_heads, int64_t dim, int64_t page,
            int64_t max_pages, float scale) {
  const int64_t group = heads / kv_heads;
  std::vector<float> scores, row(dim);
  for (int64_t item = first; item < last; ++item) {
    const int64_t sequence = item / kv_heads, head = item % kv_heads, n = lengths[sequence];
    const int32_t* pages = table + sequence * max_pages;
    const float* query = q + (sequence * heads + head * group) * dim;
    float* result = out + (sequence * heads + head * group) * dim;
    scores.resize(group * n);

    for (int64_t t = 0; t < n; ++t) {
      const T* key = keys + ((pages[t / page] * kv_heads + head) * page + t % page) * dim;
      for (int64_t j = 0; j < dim; ++j) row[j] = widen(key[j]);
      for (int64_t g = 0; g < group; ++g) {
        float sum = 0;
        for (int64_t j = 0; j < dim; ++j) sum += query[g * dim + j] * row[j];
        scores[g * n + t] = sum * scale;
      }
    }
    for (int64_t g = 0; g < group; ++g) {
      float* s = scores.data() + g * n;
      const float top = *std::max_element(s, s + n);
      float sum = 0;
      for (int64_t t = 0; t < n; ++t) sum += s[t] = std::exp(s[t] - top);
      for (int64_t t = 0; t < n; ++t) s[t] /= sum;
    }
    std::fill(result, result + group * dim, 0.0f);
    for (int64_t t = 0; t < n; ++t) {
      const T* value = values + ((pages[t / page] * kv_heads + head) * page + t % page) * dim;
      for (int64_t j = 0; j < dim; ++j) row[j] = widen(value[j]);
      for (int64_t g = 0; g < group; ++g) {
        const float weight = scores[g * n + t];
        for (int64_t j = 0; j < dim; ++j) result[g * dim + j] += weight * row[j];
      }
    }
  }
}

}  // namespace

extern "C" {

void decode_float32(const float* q, const float* keys, const float* values, const int32_t* table,
                    const int32_t* lengths, float* out, int64_t first, int64_t last, int64_t heads, int64_t kv_heads,
                    int64_t dim, int64_t page, int64_t max_pages, float scale) {
  decode(q, keys, values, table, lengths, out, first, last, heads, kv_heads, dim, page, max_pages, scale);
}

void decode_bfloat16(const float* q, const BFloat16* keys, const BFloat16* values, const int32_t* table,
                     const int32_t* lengths, float* out, int64_t first, int64_t last, int64_t heads, int64_t kv_heads,
                     int64_t dim, int64_t page, int64_t max_pages, float scale) {
  decode(q, keys, values, table, lengths, out, first, last, heads, kv_heads, dim, page, max_pages, scale);
}

void decode_float16(const float* q, const Float16* keys, const Float16* values, const int32_t* table,
                    const int32_t* lengths, float* out, int64_t first, int64_t last, int64_t heads, int64_t kv_heads,
                    int64_t dim, int64_t page, int64_t max_pages, float scale) {
  decode(q, keys, values, table, lengths, out, first, last, heads, kv_heads, dim, page, max_pages, scale);
}

}  // extern "C"
