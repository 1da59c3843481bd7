// Softmax of one query row's scores and the choice of its top values, as reference_attention.py defines them.

#pragma once

#include <algorithm>
#include <cmath>
#include <functional>

#include "simd.h"

namespace {

// The fields of attention.py's AttentionSpec; 0 is no window and no soft-capping, null no sinks.
struct AttentionSpec {
  int64_t window;
  float scale, softcap;
  double value_topk;
  const float* sinks;
};

// The first position that a query at `position` sees.
int64_t first_seen(const AttentionSpec& spec, int64_t position) {
  return spec.window ? std::max<int64_t>(0, position - spec.window + 1) : 0;
}

// Softmax over scores[low, high); the rest of [0, count), a multiple of kLanes, becomes zero. Returns the log-sum-exp
// of the scaled and capped scores, sink included.
float softmax(float* scores, int64_t low, int64_t high, int64_t count, const AttentionSpec& spec, int64_t head) {
  for (int64_t t = 0; t < count; t += kLanes) store(scores + t, load(scores + t) * spec.scale);
  if (spec.softcap)
    for (int64_t t = low; t < high; ++t) scores[t] = spec.softcap * std::tanh(scores[t] / spec.softcap);
  std::fill(scores, scores + low, -INFINITY);
  std::fill(scores + high, scores + count, -INFINITY);
  Lanes maxima = load(scores), sums = {};
  for (int64_t t = kLanes; t < count; t += kLanes) {
    const Lanes next = load(scores + t);
    maxima = next > maxima ? next : maxima;
  }
  float maximum = spec.sinks ? spec.sinks[head] : -INFINITY;
  for (int64_t i = 0; i < kLanes; ++i) maximum = std::max(maximum, maxima[i]);
  for (int64_t t = 0; t < count; t += kLanes) {
    const Lanes next = exp(load(scores + t) - maximum);
    store(scores + t, next);
    sums += next;
  }
  const float sum = add_up(sums) + (spec.sinks ? std::exp(spec.sinks[head] - maximum) : 0.0f), inverse = 1 / sum;
  for (int64_t t = 0; t < count; t += kLanes) store(scores + t, load(scores + t) * inverse);
  return maximum + std::log(sum);
}

// Writes to `kept`, in ascending order, the positions of the ceil(value_topk * count) largest probabilities; returns
// their number. Of equal ones at the threshold the earliest are kept. `sorted` and `kept` have room for `count`.
int64_t top_values(const float* probabilities, int64_t count, double value_topk, float* sorted, int32_t* kept) {
  const int64_t size = std::min<int64_t>(count, std::ceil(value_topk * count));
  std::copy(probabilities, probabilities + count, sorted);
  std::nth_element(sorted, sorted + size - 1, sorted + count, std::greater<float>());
  const float threshold = sorted[size - 1];
  int64_t equals = size - std::count_if(probabilities, probabilities + count, [=](float p) { return p > threshold; });
  int64_t found = 0;
  for (int64_t t = 0; t < count; ++t)
    if (probabilities[t] > threshold || (probabilities[t] == threshold && equals-- > 0)) kept[found++] = t;
  return found;
}

}  // namespace
