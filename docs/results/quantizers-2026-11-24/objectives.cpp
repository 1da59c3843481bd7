// Quantizers that compare.py compares: searches for a group's scale and minimum under several objectives, and HQQ.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

namespace {

constexpr int kGroup = 64;

float half(float x) { return static_cast<float>(static_cast<_Float16>(x)); }

void nearest_codes(const float* x, float scale, float minimum, float top, float* codes) {
  for (int i = 0; i < kGroup; ++i) codes[i] = std::min(std::max(std::nearbyint((x[i] - minimum) / scale), 0.0f), top);
}

}  // namespace

// weighting: 0 none, 1 |x|, 2 rms of the group + |x|. The objective is sum weight |error|^power; regressions reweight.
struct Search {
  int weighting;
  float power;
  int refits, starts;
  float low[64], high[64];
  int bits;
};

static void search_group(const float* x, float* out, const Search& s) {
  const float top = (1 << s.bits) - 1;
  const float least = *std::min_element(x, x + kGroup), most = *std::max_element(x, x + kGroup);
  if (!(most > least)) {
    std::fill(out, out + kGroup, half(least));
    return;
  }
  float squares = 0, weight[kGroup], w[kGroup], q[kGroup];
  for (int i = 0; i < kGroup; ++i) squares += x[i] * x[i];
  const float rms = std::sqrt(squares / kGroup), middle = (least + most) / 2;
  for (int i = 0; i < kGroup; ++i)
    weight[i] = s.weighting == 0 ? 1 : s.weighting == 1 ? std::fabs(x[i]) : rms + std::fabs(x[i]);
  float best = INFINITY, best_scale = half((most - least) / top), best_minimum = half(least);
  for (int k = 0; k < s.starts; ++k) {
    float minimum = middle + (least - middle) * s.low[k];
    float scale = (middle + (most - middle) * s.high[k] - minimum) / top;
    for (int refit = 0; refit <= s.refits; ++refit) {
      const float stored = half(scale), low = half(minimum);
      if (!(stored > 0)) break;
      nearest_codes(x, stored, low, top, q);
      float error = 0;
      for (int i = 0; i < kGroup; ++i) error += weight[i] * powf(std::fabs(x[i] - low - stored * q[i]) + 1e-12f, s.power);
      if (error < best) best = error, best_scale = stored, best_minimum = low;
      if (refit == s.refits) break;
      for (int i = 0; i < kGroup; ++i)
        w[i] = weight[i] * (s.power == 2 ? 1 : powf(std::fabs(x[i] - low - stored * q[i]) + 0.02f * stored, s.power - 2));
      float sum = 0, codes = 0, values = 0, variance = 0, product = 0;
      for (int i = 0; i < kGroup; ++i) sum += w[i], codes += w[i] * q[i], values += w[i] * x[i];
      for (int i = 0; i < kGroup; ++i) {
        const float off = q[i] - codes / sum;
        variance += w[i] * off * off, product += w[i] * off * (x[i] - values / sum);
      }
      if (!(variance > 0 && product > 0)) break;
      scale = product / variance, minimum = values / sum - codes / sum * scale;
    }
  }
  nearest_codes(x, best_scale, best_minimum, top, q);
  for (int i = 0; i < kGroup; ++i) out[i] = best_minimum + best_scale * q[i];
}

// Half-quadratic quantization (Badri and Shaji 2023): the scale of nearest, the zero point by 20 iterations that shrink the
// errors under |error|^0.7, beta 10 growing by 1.01.
static void hqq_group(const float* x, float* out, int bits) {
  const float top = (1 << bits) - 1;
  const float least = *std::min_element(x, x + kGroup), most = *std::max_element(x, x + kGroup);
  if (!(most > least)) {
    std::fill(out, out + kGroup, half(least));
    return;
  }
  const float scale = std::min(top / (most - least), 2e4f);
  float zero = -least * scale, best = INFINITY, best_zero = zero, beta = 10;
  for (int round = 0; round < 20; ++round, beta *= 1.01f) {
    float sum = 0, error = 0;
    for (int i = 0; i < kGroup; ++i) {
      const float code = std::min(std::max(std::nearbyint(x[i] * scale + zero), 0.0f), top);
      const float off = x[i] - (code - zero) / scale, size = std::fabs(off);
      error += size;
      const float shrunk = std::copysign(std::max(size - powf(size + 1e-30f, 0.7f - 1) / beta, 0.0f), off);
      sum += code - (x[i] - shrunk) * scale;
    }
    if (!(error < best)) break;
    best = error, best_zero = zero, zero = sum / kGroup;
  }
  const float stored = half(1 / scale), minimum = half(-best_zero / scale);
  float q[kGroup];
  nearest_codes(x, stored, minimum, top, q);
  for (int i = 0; i < kGroup; ++i) out[i] = minimum + stored * q[i];
}

extern "C" void search(const float* x, float* out, int64_t groups, const Search* s) {
#pragma omp parallel for schedule(static)
  for (int64_t i = 0; i < groups; ++i) search_group(x + i * kGroup, out + i * kGroup, *s);
}

extern "C" void hqq(const float* x, float* out, int64_t groups, int bits) {
#pragma omp parallel for schedule(static)
  for (int64_t i = 0; i < groups; ++i) hqq_group(x + i * kGroup, out + i * kGroup, bits);
}
