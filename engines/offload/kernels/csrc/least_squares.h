// Chooses a group's scale and minimum by least squares, as least_squares.py defines it.

#pragma once

#include <algorithm>
#include <limits>

#include "simd.h"

namespace {

constexpr int kStarts = 4, kRefits = 4, kClips = 5;  // as in least_squares.py
constexpr float kMove = 0.75f, kClip = 0.05f;

// A code c stands for minimum + c * scale.
struct Line { float scale, minimum; };

// A group of up to 128 values, less their mean: of values far from zero the sums keep few digits otherwise.
template <int kBits>
class Group {
 public:
  static constexpr float top = (1 << kBits) - 1;

  Group(const float* x, int64_t count) : x_(x), count_(count), vectors_((count + kLanes - 1) / kLanes) {
    double sum = 0;
    for (int64_t i = 0; i < count; ++i) sum += x[i];
    mean_ = static_cast<float>(sum / count);
    Lanes squares = {};
    for (int64_t v = 0; v < vectors_; ++v) {
      const int64_t left = count - v * kLanes;
      inside_[v] = spread(1);
      values_[v] = original(v);
      for (int64_t i = left; i < kLanes; ++i) inside_[v][i] = 0;
      values_[v] = (values_[v] - mean_) * inside_[v];
      squares += values_[v] * values_[v];
    }
    energy_ = add_up(squares);
  }

  float mean() const { return mean_; }

  // Gives every value its nearest code on `line`, and replaces `line` by the one that fits these codes best. Returns
  // its squared error; infinity, with `line` as it was, where no line rises through them.
  float refit(Line& line) const {
    Lanes sum = {}, squares = {}, products = {};
    for (int64_t v = 0; v < vectors_; ++v) {
      const Lanes code = codes(v, line);
      sum += code, squares += code * code, products += code * values_[v];
    }
    const float total = add_up(sum), product = add_up(products);
    const float variance = add_up(squares) - total * total / count_;
    if (!(variance > 0 && product > 0)) return std::numeric_limits<float>::infinity();
    line.scale = product / variance;
    line.minimum = -line.scale * total / count_;
    return energy_ - line.scale * product;
  }

  // The squared error of the nearest codes on `line`.
  float error(const Line& line) const {
    Lanes squares = {};
    for (int64_t v = 0; v < vectors_; ++v) {
      const Lanes off = (values_[v] - (line.minimum + codes(v, line) * line.scale)) * inside_[v];
      squares += off * off;
    }
    return add_up(squares);
  }

  // The same of the values themselves, with their mean, as unpacking gives them: without an error of its own.
  double stored_error(const Line& line) const {
    double sum = 0;
    for (int64_t v = 0; v < vectors_; ++v) {
      const Lanes value = original(v), off = value - (line.minimum + codes_of(value, v, line) * line.scale);
      for (int64_t i = 0; i < std::min(kLanes, count_ - v * kLanes); ++i) sum += double{off[i]} * off[i];
    }
    return sum;
  }

 private:
  Lanes original(int64_t v) const {
    const int64_t left = count_ - v * kLanes;
    return left < kLanes ? widen(x_ + v * kLanes, left) : load(x_ + v * kLanes);
  }

  Lanes codes(int64_t v, const Line& line) const { return codes_of(values_[v], v, line); }

  Lanes codes_of(Lanes values, int64_t v, const Line& line) const {
    Lanes code = (values - line.minimum) * (1 / line.scale) + 0.5f;
    code = code < 0 ? Lanes{} : code;
    code = code > top ? spread(top) : code;
    return __builtin_convertvector(__builtin_convertvector(code, Integers), Lanes) * inside_[v];
  }

  static constexpr int64_t kMost = 128 / kLanes;
  Lanes values_[kMost], inside_[kMost];
  const float* x_;
  int64_t count_, vectors_;
  float mean_, energy_;
};

// The line of least error among those that the search meets, for a group whose values lie from `least` to `most`.
template <int kBits>
Line best_line(const Group<kBits>& group, float least, float most) {
  constexpr float top = Group<kBits>::top;
  const float step = (most - least) / top;
  Line best = {step, least};
  float error = std::numeric_limits<float>::infinity();
  const auto keep = [&](const Line& line, float found) {
    if (found < error) error = found, best = line;
  };
  if (kBits == 3) {
    for (int low = 0; low < kClips; ++low)
      for (int high = 0; high < kClips; ++high) {
        const float cut = kClip * (most - least) / 2;
        const Line line = {step - (low + high) * cut / top, least + low * cut};
        keep(line, group.error(line));
      }
    return best;
  }
  for (int start = 0; start < kStarts; ++start) {
    const float inwards = start * kMove * step;
    Line line = {step - 2 * inwards / top, least + inwards};
    for (int i = 0; i < kRefits; ++i) {
      const float found = group.refit(line);
      keep(line, found);
    }
  }
  return best;
}

}  // namespace
