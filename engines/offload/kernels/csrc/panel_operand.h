// The left operand of a product with panels: what products need of the rows of x, copied by the threads of the pool.

#pragma once

#include "amx.h"
#include "panel_product.h"
#include "tile_pool.h"

namespace {

#ifdef HAS_AMX
// Rows whose products are computed together, of which a part has as many as it can: two tiles.
inline int64_t rows_together() { return amx_allowed() ? 2 * kTileRows : kBlock; }
#else
constexpr int64_t kTileRows = 1, kTileBytes = 2 * sizeof(Activation);
inline int64_t rows_together() { return kBlock; }
#endif

// Rows that memory is held for, where `rows` are used: whole tiles.
inline int64_t whole_tiles(int64_t rows) { return (rows + kTileRows - 1) / kTileRows * kTileRows; }

// How weights take x: its values; by weights in groups of `group` columns also each group's sum, or its values' codes
// of eight bits instead, arranged as weights of `bits` bits are.
struct Form {
  int64_t group = 0;
  int bits = 0;

  bool operator==(const Form& other) const { return group == other.group && bits == other.bits; }
};

// Rows of x, `ld` values apart, in blocks of kBlock rows. Interleaved ones have a block's values, then its sums.
struct Rows {
  const Activation* x;
  int64_t ld, count, k, sums_at;

  // Of rows that are first in a block.
  Rows from(int64_t row, int64_t rows) const { return {x + row * ld, ld, rows, k, sums_at}; }
  int64_t in_block(int64_t row) const { return std::min(kBlock, count - row); }
  const Activation* block(int64_t row, int64_t column) const {
    return x + row * ld + column * (kInterleaved ? in_block(row) : 1);
  }
  // sums(row)[i * sums_apart() + g]: of the values of a group of columns of row i of a block.
  const float* sums(int64_t row) const {
    return reinterpret_cast<const float*>(x + row * ld + sums_at * (kInterleaved ? in_block(row) : 1));
  }
  int64_t sums_apart() const {
    return (ld - (kInterleaved ? sums_at : 0)) * static_cast<int64_t>(sizeof(Activation)) / sizeof(float);
  }
};

// Rows of x in eight bits, `stride` bytes apart: a value of group g is its code times scales(row)[g]. sums(row)[g]: of
// the group's codes.
struct CodedRows {
  const uint8_t* records;
  int64_t stride, count, k, groups, scales_at;

  CodedRows from(int64_t row, int64_t rows) const {
    return {records + row * stride, stride, rows, k, groups, scales_at};
  }
  const int8_t* codes(int64_t row) const { return reinterpret_cast<const int8_t*>(records + row * stride); }
  const float* scales(int64_t row) const {
    return reinterpret_cast<const float*>(records + row * stride + scales_at);
  }
  const float* sums(int64_t row) const { return scales(row) + groups; }
  int64_t floats_apart() const { return stride / sizeof(float); }
};

class Operand {
 public:
  // Of x[rows, k], whose rows are `ldx` values apart; x is read by `derive`.
  void begin(const Activation* x, int64_t ldx, int64_t rows, int64_t k) {
    x_ = x, ldx_ = ldx, count_ = rows, k_ = k, derived_ = false;
  }

  // Makes room for what a form needs of each row. Returns whether it has yet to be derived.
  bool take_form(Form form) {
    if (derived_ && form == form_) return false;
    form_ = form, groups_ = form.group ? (k_ + form.group - 1) / form.group : 0;
    const int64_t bytes = form.bits ? groups_ * form.group : k_ * static_cast<int64_t>(sizeof(Activation));
    values_bytes_ = (bytes + kTileBytes - 1) / kTileBytes * kTileBytes;
    stride_ = (values_bytes_ + (form.bits ? 2 : 1) * groups_ * sizeof(float) + 63) / 64 * 64;
    if (stride_ % 512 == 0) stride_ += 64;  // rows a power of two apart would share sets of the caches
    records_.at_least(whole_tiles(std::max<int64_t>(1, count_)) * stride_);
    return true;
  }

  // Rows that `derive` must be given a multiple of, but at the end.
  static constexpr int64_t kDerived = kInterleaved ? kBlock : 1;

  // Writes what the form needs of `count` rows from `first` on.
  void derive(int64_t first, int64_t count, uint8_t* records) const {
    for (int64_t row = first; row < first + count; row += kDerived, records += kDerived * stride_) {
      const int64_t rows = std::min(kDerived, first + count - row), apart = stride_ - (kInterleaved ? values_bytes_ : 0);
      if (form_.bits) {
        for (int64_t i = 0; i < rows; ++i) encode(row + i, records + i * stride_);
        continue;
      }
      with_sizes<kDerived, 1>(rows, 1, [&](auto R, auto) { copy_block<R>(row, reinterpret_cast<Activation*>(records)); });
      if (!form_.group) continue;
      for (int64_t i = 0; i < rows; ++i)
        sum_groups(row + i, reinterpret_cast<float*>(records + rows * values_bytes_ + i * apart));
    }
  }

  void is_derived() { derived_ = true; }
  uint8_t* record(int64_t row) { return static_cast<uint8_t*>(records_.data()) + row * stride_; }
  int64_t stride() const { return stride_; }
  int64_t count() const { return count_; }
  int64_t columns() const { return k_; }

  Rows rows() const {
    constexpr int64_t kBytes = sizeof(Activation);
    return {static_cast<const Activation*>(records_.data()), stride_ / kBytes, count_, k_, values_bytes_ / kBytes};
  }
  CodedRows coded_rows() const {
    return {static_cast<const uint8_t*>(records_.data()), stride_, count_, k_, groups_, values_bytes_};
  }

 private:
  template <int R>
  void copy_block(int64_t row, Activation* to) const {
    const Activation* from = x_ + row * ldx_;
    const int64_t columns = values_bytes_ / static_cast<int64_t>(sizeof *to);
    for (int64_t j = 0; j < k_; ++j, to += R)
#pragma GCC unroll 16
      for (int r = 0; r < R; ++r) to[r] = from[r * ldx_ + j];
    std::memset(to, 0, R * (columns - k_) * sizeof *to);
  }

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
    float* scales = reinterpret_cast<float*>(record + values_bytes_);
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
      int8_t* to = reinterpret_cast<int8_t*>(record) + g * form_.group;
      std::memset(to, 0, form_.group);
      each_lanes(row, g, [&](int64_t at, Lanes values) {
        const Integers eight = nearest(values * inverse);
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
    const Activation* from = x_ + row * ldx_ + g * form_.group;
    const int64_t columns = std::min(form_.group, k_ - g * form_.group);
    for (int64_t at = 0; at < columns; at += kLanes)
      visit(at, columns - at < kLanes ? widen(from + at, columns - at) : widen(from + at));
  }

  // The nearest integers of small values, ties to even. The portable form would be fused with the product that gives the
  // values where a CPU can, and some codes would differ from one CPU to the next.
  static Integers nearest(Lanes values) {
#ifdef __AVX2__
    return (Integers)_mm256_cvtps_epi32((__m256)values);
#else
    constexpr float kWhole = 12582912.0f;  // 1.5 * 2^23: adding and subtracting it rounds to an integer
    return __builtin_convertvector((values + kWhole) - kWhole, Integers);
#endif
  }

  // Eight codes in the order in which a word of a panel has the columns: see GroupedPanels and CodedPanels.
  void put(int8_t* to, Integers codes) const {
    typedef int8_t Bytes __attribute__((vector_size(kLanes)));
    const Integers arranged = form_.bits == 4 ? SHUFFLE(codes, codes, 0, 4, 1, 5, 2, 6, 3, 7)
                                              : SHUFFLE(codes, codes, 0, 2, 1, 3, 4, 6, 5, 7);
    const Bytes bytes = __builtin_convertvector(arranged, Bytes);
    std::memcpy(to, &bytes, sizeof bytes);
  }

  const Activation* x_ = nullptr;
  int64_t ldx_ = 0, count_ = 0, k_ = 0, groups_ = 0, values_bytes_ = 0, stride_ = 0;
  Form form_;
  bool derived_ = false;
  Aligned records_;
};

// Derives the operand's records, some in each part.
class Deriving : public Task {
 public:
  explicit Deriving(std::shared_ptr<Operand> x)
      : Task(static_cast<int>((x->count() + rows_of_part(*x) - 1) / rows_of_part(*x))), x_(std::move(x)) {}

  size_t scratch_bytes() const override { return rows_of_part(*x_) * x_->stride(); }

  // Whether there is so little to do that it is not worth waking other threads.
  static bool is_small(const Operand& x) { return x.count() <= rows_of_part(x); }

 protected:
  void compute(int part, Aligned& scratch) const override {
    uint8_t* to = static_cast<uint8_t*>(scratch.at_least(scratch_bytes()));
    x_->derive(part * rows_of_part(*x_), rows(part), to);
  }

  void write(int part, Aligned& scratch) const override {
    std::memcpy(x_->record(part * rows_of_part(*x_)), scratch.data(), rows(part) * x_->stride());
  }

 private:
  static int64_t rows_of_part(const Operand& x) {
    constexpr int64_t kWhole = Operand::kDerived;
    return std::max(kWhole, (64 << 10) / x.stride() / kWhole * kWhole);
  }

  int64_t rows(int part) const { return std::min(rows_of_part(*x_), x_->count() - part * rows_of_part(*x_)); }

  const std::shared_ptr<Operand> x_;
};

// Operands that are no longer used, for the next products: fresh memory would have to be mapped page by page.
class Operands {
 public:
  std::shared_ptr<Operand> next() {
    return {spare(), [this](Operand* used) {
              std::lock_guard<std::mutex> lock(mutex_);
              spare_.emplace_back(used);
            }};
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
