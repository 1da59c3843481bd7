// GEMM with weights in panels (panel_weights.h), on threads that share its tiles' parts (tile_pool.h).
//
// A product is out = x W^T + bias for one matrix W, whose tiles are added as they arrive: each some rows of W. x is
// copied at the start, so that it need not outlive a thread that is late.

#include <functional>

#include "coded_product.h"

namespace {

constexpr int64_t kRowsOfPart = 256;                // of x: bounds a thread's scratch memory
constexpr int64_t kFewRows = 8, kGroupsOfPart = 4;  // of kTogether panels: with few rows a part is a hundred kilobytes

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
      : Task(static_cast<int>(groups_of(n, x->count()) * chunks_of(x->count()))), x_(std::move(x)), w_(w), group_(group),
        n_(n), bias_(bias ? std::vector<Activation>(bias, bias + n) : std::vector<Activation>()), out_(out), ldo_(ldo) {}

 protected:
  void compute(int part, Aligned& scratch) const override {
    const Part p(*this, part);
    float* sums = static_cast<float*>(scratch.at_least(panels_of_part(x_->count()) * kPanel * p.rows * sizeof(float)));
    const auto rows = Weights::rows_of(*x_).from(p.row, p.rows);
    for (int64_t done = 0; done < p.panels; done += kTogether, sums += kSumsApart * p.rows)
      Weights::multiply(rows, w_ + (p.panel + done) * Weights::panel_bytes(x_->columns(), group_),
                        std::min(kTogether, p.panels - done), group_, sums);
  }

  void write(int part, Aligned& scratch) const override {
    const Part p(*this, part);
    const float* sums = static_cast<const float*>(scratch.data());
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
      const int64_t chunks = chunks_of(of.x_->count()), most = panels_of_part(of.x_->count());
      row = part % chunks * kRowsOfPart, rows = std::min(kRowsOfPart, of.x_->count() - row);
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
    if (group && x->take_form(Weights::form(group))) {
      const auto deriving = std::make_shared<Deriving>(x);
      pool.threads.add(deriving);
      pool.threads.wait(deriving);
    }
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
// out[rows, n] and bias[n], or null, are theirs. All tiles of a product have groups of `group` columns, or none, and are
// added by one of these functions; but plain panels and those in twelve bits go together.
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
ADD_TILE(coded_panels4, CodedPanels<4>)
ADD_TILE(coded_panels8, CodedPanels<8>)

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
