// What a row sees, and how scores become shares, as rule.py defines them.

#pragma once

#include <algorithm>
#include <cmath>
#include <functional>
#include <vector>

#include "lanes.h"

namespace {

struct Rule {
  int64_t window;
  float scale, softcap;
  double keep;
  const float* sinks;
};

// What a row at `position` sees begins here.
int64_t begin(const Rule& rule, int64_t position) {
  return rule.window ? std::max<int64_t>(0, position - rule.window + 1) : 0;
}

// Softmax over scores[low, high); what else lies in [0, count), a whole number of lanes, becomes zero. Returns the
// logarithm of the sum that the exponentials of what it began with had.
float softmax(float* scores, int64_t low, int64_t high, int64_t count, const Rule& rule, int64_t head) {
  for (int64_t t = 0; t < count; t += kLanes) store(scores + t, load(scores + t) * rule.scale);
  if (rule.softcap)
    for (int64_t t = low; t < high; ++t) scores[t] = rule.softcap * std::tanh(scores[t] / rule.softcap);
  std::fill(scores, scores + low, -INFINITY);
  std::fill(scores + high, scores + count, -INFINITY);
  Lanes tops = load(scores), sums = {};
  for (int64_t t = kLanes; t < count; t += kLanes) {
    const Lanes next = load(scores + t);
    tops = next > tops ? next : tops;
  }
  float top = rule.sinks ? rule.sinks[head] : -INFINITY;
  for (int64_t i = 0; i < kLanes; ++i) top = std::max(top, tops[i]);
  for (int64_t t = 0; t < count; t += kLanes) {
    const Lanes next = exp(load(scores + t) - top);
    store(scores + t, next);
    sums += next;
  }
  const float sum = add_up(sums) + (rule.sinks ? std::exp(rule.sinks[head] - top) : 0.0f), share = 1 / sum;
  for (int64_t t = 0; t < count; t += kLanes) store(scores + t, load(scores + t) * share);
  return top + std::log(sum);
}

// The positions whose values a row takes, in order: a part of those it sees, with the largest shares.
void choose(const float* shares, int64_t count, double keep, std::vector<float>& sorted, std::vector<int32_t>& chosen) {
  const int64_t wanted = std::min<int64_t>(count, std::ceil(keep * count));
  sorted.assign(shares, shares + count);
  std::nth_element(sorted.begin(), sorted.begin() + wanted - 1, sorted.end(), std::greater<float>());
  const float least = sorted[wanted - 1];
  int64_t equals = wanted - std::count_if(shares, shares + count, [=](float share) { return share > least; });
  chosen.clear();
  for (int64_t t = 0; t < count; ++t)
    if (shares[t] > least || (shares[t] == least && equals-- > 0)) chosen.push_back(t);
}

}  // namespace
