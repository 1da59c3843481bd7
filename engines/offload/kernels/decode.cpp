// Attention of single queries over a paged key/value cache, in float32 arithmetic whatever the cache holds.
//
// One work item is a sequence and a key/value head: its group of query heads shares every key and value row read.
// Keys and values are [pages, kv_heads, page, dim]; table is [sequences, max_pages]; q and out are
// [sequences, heads, dim]. Zero is no window, no soft-capping; null no sinks [heads]. What they mean is in rule.py.

#include <algorithm>
#include <cmath>
#include <vector>

#include "lanes.h"

namespace {

template <typename T>
float dot(const float* a, const T* b, int64_t dim) {
  Lanes sum = {};
  int64_t j = 0;
  for (; j + kLanes <= dim; j += kLanes) sum += load(a + j) * widen(b + j);
  if (j < dim) sum += widen(a + j, dim - j) * widen(b + j, dim - j);
  float total = 0;
  for (int64_t i = 0; i < kLanes; ++i) total += sum[i];
  return total;
}

template <typename T>
void add_scaled(float* out, float weight, const T* b, int64_t dim) {
  int64_t j = 0;
  for (; j + kLanes <= dim; j += kLanes) store(out + j, load(out + j) + weight * widen(b + j));
  for (; j < dim; ++j) out[j] += weight * widen(b + j, 1)[0];
}

void softmax(float* scores, int64_t n, const float* sink) {
  float top = *std::max_element(scores, scores + n);
  if (sink) top = std::max(top, *sink);
  float sum = sink ? std::exp(*sink - top) : 0;
  for (int64_t t = 0; t < n; ++t) sum += scores[t] = std::exp(scores[t] - top);
  for (int64_t t = 0; t < n; ++t) scores[t] /= sum;
}

template <typename T>
void decode(const float* q, const T* keys, const T* values, const int32_t* table, const int32_t* lengths, float* out,
            int64_t sequences, int64_t heads, int64_t kv_heads, int64_t dim, int64_t page, int64_t max_pages, int64_t window,
            float scale, float softcap, const float* sinks, int threads) {
  const int64_t group = heads / kv_heads;
#pragma omp parallel for schedule(dynamic, 4) num_threads(threads)
  for (int64_t item = 0; item < sequences * kv_heads; ++item) {
    const int64_t sequence = item / kv_heads, head = item % kv_heads;
    const int64_t stop = lengths[sequence], start = window ? std::max<int64_t>(0, stop - window) : 0, n = stop - start;
    const int32_t* pages = table + sequence * max_pages;
    const auto row = [&](const T* cache, int64_t t) {
      const int64_t at = start + t;
      return cache + ((pages[at / page] * kv_heads + head) * page + at % page) * dim;
    };
    const float* query = q + (sequence * heads + head * group) * dim;
    float* result = out + (sequence * heads + head * group) * dim;
    std::vector<float> scores(group * n);
    for (int64_t t = 0; t < n; ++t)
      for (int64_t g = 0; g < group; ++g) scores[g * n + t] = dot(query + g * dim, row(keys, t), dim) * scale;
    if (softcap)
      for (float& score : scores) score = softcap * std::tanh(score / softcap);
    for (int64_t g = 0; g < group; ++g) softmax(scores.data() + g * n, n, sinks ? sinks + head * group + g : nullptr);
    std::fill(result, result + group * dim, 0.0f);
    for (int64_t t = 0; t < n; ++t)
      for (int64_t g = 0; g < group; ++g) add_scaled(result + g * dim, scores[g * n + t], row(values, t), dim);
  }
}

}  // namespace

#define DECODE(name, type)                                                                                      \
  extern "C" void decode_##name(const float* q, const type* keys, const type* values, const int32_t* table,    \
                                const int32_t* lengths, float* out, int64_t sequences, int64_t heads,          \
                                int64_t kv_heads, int64_t dim, int64_t page, int64_t max_pages, int64_t window, \
                                float scale, float softcap, const float* sinks, int threads) {                 \
    decode(q, keys, values, table, lengths, out, sequences, heads, kv_heads, dim, page, max_pages, window,     \
           scale, softcap, sinks, threads);                                                                    \
  }

DECODE(float32, float)
DECODE(bfloat16, BFloat16)
DECODE(float16, Float16)
