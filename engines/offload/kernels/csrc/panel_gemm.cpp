// GEMM with weights in panels (panel_product.h), on threads that share its tiles' parts (tile_pool.h).
//
// A product is out = x W^T + bias for one matrix W, whose tiles are added as they arrive: each some rows of W. x is
// copied at the start, so that it need not outlive a thread that is late.

#include "panel_product.h"
#include "tile_pool.h"

namespace {

constexpr int64_t kRowsOfPart = 256;     // of x: bounds a thread's scratch memory

struct Rows {
  Aligned memory;
  int64_t rows, k, ld;

  const Activation* row(int64_t i) const { return static_cast<Activation*>(const_cast<Aligned&>(memory).at_least(0)) + i * ld; }
};

// Copies of x that are no longer used, for the next products: fresh memory would have to be mapped page by page.
class Copies {
 public:
  std::shared_ptr<Rows> copy(const Activation* x, int64_t ldx, int64_t rows, int64_t k) {
    std::shared_ptr<Rows> made(spare(), [this](Rows* used) {
      std::lock_guard<std::mutex> lock(mutex_);
      spare_.emplace_back(used);
    });
    made->rows = rows, made->k = k;
    made->ld = pairs_of(k) * 2 + 64 / sizeof(Activation);  // rows a power of two apart would share sets of the caches
    Activation* to = static_cast<Activation*>(made->memory.at_least(std::max<int64_t>(1, rows) * made->ld * sizeof *to));
    for (int64_t i = 0; i < rows; ++i) {
      std::memcpy(to + i * made->ld, x + i * ldx, k * sizeof *to);
      if (k % 2) to[i * made->ld + k] = {};
    }
    return made;
  }

 private:
  Rows* spare() {
    std::lock_guard<std::mutex> lock(mutex_);
    if (spare_.empty()) return new Rows();
    Rows* rows = spare_.back().release();
    spare_.pop_back();
    return rows;
  }

  std::mutex mutex_;
  std::vector<std::unique_ptr<Rows>> spare_;
};

struct Pool {
  explicit Pool(int threads) : threads(threads) {}

  Copies copies;  // outlives the threads
  TilePool threads;
};

class TileProduct : public Task {
 public:
  TileProduct(std::shared_ptr<Rows> x, const BFloat16* w, int64_t n, const Activation* bias, Activation* out, int64_t ldo)
      : Task(static_cast<int>(groups_of(n) * chunks_of(x->rows))), x_(std::move(x)), w_(w), n_(n),
        bias_(bias ? std::vector<Activation>(bias, bias + n) : std::vector<Activation>()), out_(out), ldo_(ldo) {}

 protected:
  void compute(int part, Aligned& scratch) const override {
    const Part p(*this, part);
    float* sums = static_cast<float*>(scratch.at_least(kRowsOfPart * kTogether * kPanel * sizeof(float)));
    multiply_panels(x_->row(p.row), x_->ld, p.rows, w_ + p.panel * kPanel * pairs_of(x_->k) * 2, p.panels, x_->k, sums);
  }

  void write(int part, Aligned& scratch) const override {
    const Part p(*this, part);
    const float* sums = static_cast<float*>(scratch.at_least(0));
    const int64_t first = p.panel * kPanel, columns = std::min(n_ - first, p.panels * kPanel);
    for (int64_t i = 0; i < p.rows; ++i) {
      Activation* to = out_ + (p.row + i) * ldo_ + first;
      const float* from = sums + i * kTogether * kPanel;
      if (bias_.empty())
        for (int64_t j = 0; j < columns; ++j) round_to(to + j, from[j]);
      else
        for (int64_t j = 0; j < columns; ++j) round_to(to + j, from[j] + widened(bias_[first + j]));
    }
  }

 private:
  static int64_t groups_of(int64_t n) { return (panels_of(n) + kTogether - 1) / kTogether; }
  static int64_t chunks_of(int64_t rows) { return (rows + kRowsOfPart - 1) / kRowsOfPart; }

  // All rows of x for one group of panels before the next group, so that its weights stay in the L2 cache.
  struct Part {
    int64_t row, rows, panel, panels;
    Part(const TileProduct& of, int part) {
      const int64_t chunks = chunks_of(of.x_->rows);
      row = part % chunks * kRowsOfPart, rows = std::min(kRowsOfPart, of.x_->rows - row);
      panel = part / chunks * kTogether, panels = std::min(kTogether, panels_of(of.n_) - panel);
    }
  };

  const std::shared_ptr<Rows> x_;
  const BFloat16* const w_;
  const int64_t n_;
  const std::vector<Activation> bias_;
  Activation* const out_;
  const int64_t ldo_;
};

struct Product {
  Pool& pool;
  std::shared_ptr<Rows> x;
  std::deque<std::shared_ptr<Task>> tiles;
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
// out[rows, n] and bias[n], or null, are theirs.
extern "C" void add_tile(void* product, const BFloat16* w, int64_t n, const Activation* bias, Activation* out, int64_t ldo) {
  Product& to = *static_cast<Product*>(product);
  to.tiles.push_back(std::make_shared<TileProduct>(to.x, w, n, bias, out, ldo));
  to.pool.threads.add(to.tiles.back());
}

// Whether tile number `tile` is done.
extern "C" int is_done(void* product, int64_t tile) { return static_cast<Product*>(product)->tiles[tile]->done(); }

// Computes until the first `tiles` tiles are done.
extern "C" void wait_for(void* product, int64_t tiles) {
  Product& of = *static_cast<Product*>(product);
  for (int64_t i = 0; i < tiles; ++i) of.pool.threads.wait(of.tiles[i]);
}

// Computes until all its tiles are done, and ends the product.
extern "C" void close_product(void* product) {
  wait_for(product, static_cast<Product*>(product)->tiles.size());
  delete static_cast<Product*>(product);
}
