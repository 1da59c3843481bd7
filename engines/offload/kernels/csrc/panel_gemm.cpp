// GEMM with weights in panels (panel_weights.h), on threads that share its tiles' parts (tile_pool.h).
//
// A product is out = x W^T + bias for one matrix W, whose tiles are added as they arrive: each some rows of W. x is
// copied at the start, so that it need not outlive a thread that is late.

#include <functional>

#include "panel_weights.h"
#include "tile_pool.h"

namespace {

constexpr int64_t kRowsOfPart = 256;                // of x: bounds a thread's scratch memory
constexpr int64_t kFewRows = 8, kGroupsOfPart = 4;  // of kTogether panels: with few rows a part is a hundred kilobytes

// A copy of x, and what products with quantized weights need of it.
struct Operand {
  Aligned memory, sums;
  int64_t count, k, ld, group;

  const Activation* values() const { return static_cast<const Activation*>(memory.get()); }

  // Sums each row's values by groups of columns, as the products of codes are summed.
  void sum_groups(int64_t size) {
    if (group == size) return;
    group = size;
    const int64_t groups = (k + size - 1) / size;
    float* to = static_cast<float*>(sums.at_least(std::max<int64_t>(1, count) * groups * sizeof *to));
    for (int64_t i = 0; i < count; ++i)
      for (int64_t g = 0; g < groups; ++g) {
        const Activation* from = values() + i * ld + g * size;
        Lanes sum = {};
        const int64_t columns = std::min(size, k - g * size);
        for (int64_t j = 0; j < columns; j += kLanes)
          sum += columns - j < kLanes ? widen(from + j, columns - j) : widen(from + j);
        to[i * groups + g] = add_up(sum);
      }
  }

  Rows rows() const {
    return {values(), ld, count, k, static_cast<const float*>(sums.get()), group ? (k + group - 1) / group : 0};
  }
};

// Copies of x that are no longer used, for the next products: fresh memory would have to be mapped page by page.
class Copies {
 public:
  std::shared_ptr<Operand> copy(const Activation* x, int64_t ldx, int64_t rows, int64_t k) {
    std::shared_ptr<Operand> made(spare(), [this](Operand* used) {
      std::lock_guard<std::mutex> lock(mutex_);
      spare_.emplace_back(used);
    });
    made->count = rows, made->k = k, made->group = 0;
    made->ld = pairs_of(k) * 2 + 64 / sizeof(Activation);  // rows a power of two apart would share sets of the caches
    Activation* to = static_cast<Activation*>(made->memory.at_least(std::max<int64_t>(1, rows) * made->ld * sizeof *to));
    for (int64_t i = 0; i < rows; ++i) {
      std::memcpy(to + i * made->ld, x + i * ldx, k * sizeof *to);
      if (k % 2) to[i * made->ld + k] = {};
    }
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

struct Pool {
  explicit Pool(int threads) : threads(threads) {}

  Copies copies;  // outlives the threads
  TilePool threads;
};

template <typename Weights>
class TileProduct : public Task {
 public:
  TileProduct(std::shared_ptr<Operand> x, const uint8_t* w, int64_t group, int64_t n, const Activation* bias,
              Activation* out, int64_t ldo)
      : Task(static_cast<int>(groups_of(n, x->count) * chunks_of(x->count))), x_(std::move(x)), w_(w), group_(group),
        n_(n), bias_(bias ? std::vector<Activation>(bias, bias + n) : std::vector<Activation>()), out_(out), ldo_(ldo) {}

 protected:
  void compute(int part, Aligned& scratch) const override {
    const Part p(*this, part);
    float* sums = static_cast<float*>(scratch.at_least(panels_of_part(x_->count) * kPanel * p.rows * sizeof(float)));
    const Rows rows = x_->rows().from(p.row, p.rows);
    for (int64_t done = 0; done < p.panels; done += kTogether, sums += kSumsApart * p.rows)
      Weights::multiply(rows, w_ + (p.panel + done) * Weights::panel_bytes(x_->k, group_),
                        std::min(kTogether, p.panels - done), group_, sums);
  }

  void write(int part, Aligned& scratch) const override {
    const Part p(*this, part);
    const float* sums = static_cast<const float*>(scratch.get());
    for (int64_t done = 0; done < p.panels; done += kTogether, sums += kSumsApart * p.rows) {
      const int64_t first = (p.panel + done) * kPanel;
      const int64_t columns = std::min(n_ - first, std::min(kTogether, p.panels - done) * kPanel);
      for (int64_t i = 0; i < p.rows; ++i) {
        Activation* to = out_ + (p.row + i) * ldo_ + first;
        const float* from = sums + i * kSumsApart;
        if (bias_.empty())
          for (int64_t j = 0; j < columns; ++j) round_to(to + j, from[j]);
        else
          for (int64_t j = 0; j < columns; ++j) round_to(to + j, from[j] + widened(bias_[first + j]));
      }
    }
  }

 private:
  static int64_t panels_of_part(int64_t rows) { return kTogether * (rows > kFewRows ? 1 : kGroupsOfPart); }
  static int64_t groups_of(int64_t n, int64_t rows) {
    return (panels_of(n) + panels_of_part(rows) - 1) / panels_of_part(rows);
  }
  static int64_t chunks_of(int64_t rows) { return (rows + kRowsOfPart - 1) / kRowsOfPart; }

  // All rows of x for one group of panels before the next group, so that its weights stay in the L2 cache.
  struct Part {
    int64_t row, rows, panel, panels;
    Part(const TileProduct& of, int part) {
      const int64_t chunks = chunks_of(of.x_->count), most = panels_of_part(of.x_->count);
      row = part % chunks * kRowsOfPart, rows = std::min(kRowsOfPart, of.x_->count - row);
      panel = part / chunks * most, panels = std::min(most, panels_of(of.n_) - panel);
    }
  };

  const std::shared_ptr<Operand> x_;
  const uint8_t* const w_;
  const int64_t group_, n_;
  const std::vector<Activation> bias_;
  Activation* const out_;
  const int64_t ldo_;
};

struct Product {
  Pool& pool;
  std::shared_ptr<Operand> x;
  std::deque<std::shared_ptr<Task>> tiles;

  template <typename Weights>
  void add(const uint8_t* w, int64_t group, int64_t n, const Activation* bias, Activation* out, int64_t ldo) {
    if (group) x->sum_groups(group);
    tiles.push_back(std::make_shared<TileProduct<Weights>>(x, w, group, n, bias, out, ldo));
    pool.threads.add(tiles.back());
  }
};

}  // namespace

// The bytes of an activation: 2 for bfloat16, 4 for float32.
extern "C" int activation_bytes() { return sizeof(Activation); }

extern "C" void* open_pool(int threads) { return new Pool(threads); }

extern "C" void close_pool(void* pool) { delete static_cast<Pool*>(pool); }

// Starts a product of x[rows, k], whose rows are `ldx` values apart.
extern "C" void* open_product(void* pool, const Activation* x, int64_t ldx, int64_t rows, int64_t k) {
  Pool& threads = *static_cast<Pool*>(pool);
  return new Product{threads, threads.copies.copy(x, ldx, rows, k), {}};
}

// Adds `n` rows of W in panels, which must stay as they are until the tile is done and mapped until the pool is closed:
// out[rows, n] and bias[n], or null, are theirs. All tiles of a product have groups of `group` columns, or none.
#define ADD_TILE(name, weights)                                                                                    \
  extern "C" void add_##name(void* product, const uint8_t* w, int64_t group, int64_t n, const Activation* bias,    \
                             Activation* out, int64_t ldo) {                                                       \
    static_cast<Product*>(product)->add<weights>(w, group, n, bias, out, ldo);                                     \
  }

ADD_TILE(panels, PlainPanels)
ADD_TILE(panels12, Exact12Panels)
ADD_TILE(panels3, GroupedPanels<3>)
ADD_TILE(panels4, GroupedPanels<4>)
ADD_TILE(panels8, GroupedPanels<8>)

// Packs panels of bfloat16, of `pairs` pairs of columns, in twelve bits. Returns whether all chunks can be; else `out`
// is of no use.
extern "C" int pack_exact12(const BFloat16* panels, int64_t count, int64_t pairs, Chunk* out) {
  for (int64_t i = 0; i < count; ++i)
    for (int64_t at = 0; at < pairs * kPair; at += kChunk)
      if (!(out++)->pack(panels + i * pairs * kPair + at, std::min(kChunk, pairs * kPair - at))) return 0;
  return 1;
}

// Whether tile number `tile` is done.
extern "C" int is_done(void* product, int64_t tile) { return static_cast<Product*>(product)->tiles[tile]->done(); }

// Computes until the first `tiles` tiles are done.
extern "C" void wait_for(void* product, int64_t tiles) {
  Product& of = *static_cast<Product*>(product);
  for (int64_t i = 0; i < tiles; ++i) of.pool.threads.wait(of.tiles[i]);
}

// Returns when no thread reads the tiles of products that have ended, late ones included.
extern "C" void settle(void* pool) { static_cast<Pool*>(pool)->threads.settle(); }

// Computes until all its tiles are done, and ends the product.
extern "C" void close_product(void* product) {
  wait_for(product, static_cast<Product*>(product)->tiles.size());
  delete static_cast<Product*>(product);
}
