// The left operand of a product with panels: a copy of x, and what products with quantized weights need of its rows.

#pragma once

#include "panel_product.h"
#include "tile_pool.h"

namespace {

// How x is multiplied by weights in groups of `group` columns: its values with their codes, for which each group's sum is
// needed; or its values' own codes of eight bits, arranged as weights of `bits` bits are. No group: plain weights.
struct Form {
  int64_t group = 0;
  int bits = 0;

  bool operator==(const Form& other) const { return group == other.group && bits == other.bits; }
};

// Rows of x, and the sum of each row's values by groups of columns, where weights are quantized in such groups.
struct Rows {
  const Activation* x;
  int64_t ld, count, k;
  const float* group_sums;
  int64_t groups;

  Rows from(int64_t row, int64_t rows) const {
    return {x + row * ld, ld, rows, k, group_sums + row * groups, groups};
  }
};

// Rows of x in eight bits: a value of group g is its code times scales(row)[g]. sums(row)[g]: of the group's codes.
struct CodedRows {
  const uint8_t* records;
  int64_t stride, count, k, groups, group;

  CodedRows from(int64_t row, int64_t rows) const { return {records + row * stride, stride, rows, k, groups, group}; }
  const int8_t* codes(int64_t row) const { return reinterpret_cast<const int8_t*>(records + row * stride); }
  const float* scales(int64_t row) const {
    return reinterpret_cast<const float*>(records + row * stride + groups * group);
  }
  const float* sums(int64_t row) const { return scales(row) + groups; }
};

class Operand {
 public:
  // Copies x[rows, k], whose rows are `ldx` values apart.
  void copy(const Activation* x, int64_t ldx, int64_t rows, int64_t k) {
    count_ = rows, k_ = k, form_ = {};
    ld_ = pairs_of(k) * 2 + 64 / sizeof(Activation);  // rows a power of two apart would share sets of the caches
    Activation* to = static_cast<Activation*>(values_.at_least(std::max<int64_t>(1, rows) * ld_ * sizeof *to));
    for (int64_t i = 0; i < rows; ++i) {
      std::memcpy(to + i * ld_, x + i * ldx, k * sizeof *to);
      if (k % 2) to[i * ld_ + k] = {};
    }
  }

  // Makes room for what a form needs of each row. Returns whether it has yet to be derived.
  bool take_form(Form form) {
    if (form == form_) return false;
    form_ = form, groups_ = (k_ + form.group - 1) / form.group;
    stride_ = form.bits ? (groups_ * (form.group + 8) + 63) / 64 * 64 : groups_ * sizeof(float);
    records_.at_least(std::max<int64_t>(1, count_) * stride_);
    return true;
  }

  // Writes what the form needs of a row.
  void derive(int64_t row, uint8_t* record) const {
    if (form_.bits == 0) sum_groups(row, reinterpret_cast<float*>(record));
    else encode(row, record);
  }

  uint8_t* record(int64_t row) { return static_cast<uint8_t*>(records_.data()) + row * stride_; }
  int64_t stride() const { return stride_; }
  int64_t count() const { return count_; }
  int64_t columns() const { return k_; }

  Rows rows() const {
    return {values(), ld_, count_, k_, static_cast<const float*>(records_.data()), form_.group ? groups_ : 0};
  }
  CodedRows coded_rows() const {
    return {static_cast<const uint8_t*>(records_.data()), stride_, count_, k_, groups_, form_.group};
  }

 private:
  const Activation* values() const { return static_cast<const Activation*>(values_.data()); }

  void sum_groups(int64_t row, float* sums) const {
    for (int64_t g = 0; g < groups_; ++g) {
      Lanes sum = {};
      each_lanes(row, g, [&](int64_t, Lanes values) { sum += values; });
      sums[g] = add_up(sum);
    }
  }

  // Codes are symmetric: the largest magnitude of a group is 127. A group with an infinity or NaN gives NaN.
  void encode(int64_t row, uint8_t* record) const {
    constexpr float kLeast = 0x1p-100f;  // below, the inverse of a scale might be infinite
    constexpr float kWhole = 12582912.0f;  // 1.5 * 2^23: adding and subtracting it rounds to an integer
    int8_t* codes = reinterpret_cast<int8_t*>(record);
    float* scales = reinterpret_cast<float*>(record + groups_ * form_.group);
    for (int64_t g = 0; g < groups_; ++g) {
      Lanes most = {}, poison = {};
      each_lanes(row, g, [&](int64_t, Lanes values) {
        const Lanes magnitudes = (Lanes)((Bits)values & 0x7fffffffu);
        most = magnitudes > most ? magnitudes : most;
        poison += values - values;
      });
      float largest = most[0];
      for (int i = 1; i < kLanes; ++i) largest = std::max(largest, most[i]);
      const float inverse = largest < kLeast ? 0 : 127 / largest;
      Integers sum = {};
      int8_t* to = codes + g * form_.group;
      std::memset(to, 0, form_.group);
      each_lanes(row, g, [&](int64_t at, Lanes values) {
        const Lanes rounded = (values * inverse + kWhole) - kWhole;
        const Integers eight = __builtin_convertvector(rounded, Integers);
        sum += eight;
        put(to + at, eight);
      });
      scales[g] = largest / 127 + add_up(poison);
      scales[groups_ + g] = add_up(__builtin_convertvector(sum, Lanes));
    }
  }

  // Visits the values of group g, eight at a time, the last ones padded with zeros.
  template <typename Visit>
  void each_lanes(int64_t row, int64_t g, Visit visit) const {
    const Activation* from = values() + row * ld_ + g * form_.group;
    const int64_t columns = std::min(form_.group, k_ - g * form_.group);
    for (int64_t at = 0; at < columns; at += kLanes)
      visit(at, columns - at < kLanes ? widen(from + at, columns - at) : widen(from + at));
  }

  // Eight codes in the order in which a word of a panel has the columns: see GroupedPanels and CodedPanels.
  void put(int8_t* to, Integers codes) const {
    typedef int8_t Bytes __attribute__((vector_size(kLanes)));
    const Integers arranged = form_.bits == 4 ? SHUFFLE(codes, codes, 0, 4, 1, 5, 2, 6, 3, 7)
                                              : SHUFFLE(codes, codes, 0, 2, 1, 3, 4, 6, 5, 7);
    const Bytes bytes = __builtin_convertvector(arranged, Bytes);
    std::memcpy(to, &bytes, sizeof bytes);
  }

  Aligned values_, records_;
  int64_t count_ = 0, k_ = 0, ld_ = 0, groups_ = 0, stride_ = 0;
  Form form_;
};

// Derives what the form of x needs of its rows, some of them in each part.
class Deriving : public Task {
 public:
  explicit Deriving(std::shared_ptr<Operand> x)
      : Task(static_cast<int>((x->count() + kRowsOfPart - 1) / kRowsOfPart)), x_(std::move(x)) {}

 protected:
  void compute(int part, Aligned& scratch) const override {
    uint8_t* to = static_cast<uint8_t*>(scratch.at_least(kRowsOfPart * x_->stride()));
    for (int64_t i = 0; i < rows(part); ++i) x_->derive(part * kRowsOfPart + i, to + i * x_->stride());
  }

  void write(int part, Aligned& scratch) const override {
    std::memcpy(x_->record(part * kRowsOfPart), scratch.data(), rows(part) * x_->stride());
  }

 private:
  static constexpr int64_t kRowsOfPart = 16;

  int64_t rows(int part) const { return std::min(kRowsOfPart, x_->count() - part * kRowsOfPart); }

  const std::shared_ptr<Operand> x_;
};

// Copies of x that are no longer used, for the next products: fresh memory would have to be mapped page by page.
class Copies {
 public:
  std::shared_ptr<Operand> copy(const Activation* x, int64_t ldx, int64_t rows, int64_t k) {
    std::shared_ptr<Operand> made(spare(), [this](Operand* used) {
      std::lock_guard<std::mutex> lock(mutex_);
      spare_.emplace_back(used);
    });
    made->copy(x, ldx, rows, k);
    return made;
  }

 private:
  Operand* spare() {
    std::lock_guard<std::mutex> lock(mutex_);
    if (spare_.empty()) return new Operand();
    Operand* operand = spare_.back().release();
    spare_.pop_back();
    return operand;
  }

  std::mutex mutex_;
  std::vector<std::unique_ptr<Operand>> spare_;
};

}  // namespace
