// GEMM with weights in panels (panel_weights.h), on threads that share its tiles' parts (tile_pool.h).
//
// A product is out = x W^T + bias for one matrix W, whose tiles are added as they arrive: each some rows of W. x is
// copied when the first is added; only a thread that is late may read it after that, and drops what it reads.

#include "coded_product.h"

namespace {

// Rows of x in a part: bounds a thread's scratch memory; fewer where threads would have few parts each.
constexpr int64_t kMostRows = kInFloat32 ? 192 : 384, kLeastRows = 64, kPartsPerThread = kInFloat32 ? 16 : 8;
constexpr int64_t kFewRows = 8, kGroupsOfPart = 4;  // of kTogether panels: with few rows a part is a hundred kilobytes
// Multiply-adds of a part, some microseconds: below that, to take it and to write it out counts.
constexpr int64_t kLeastWork = 1 << 15;

struct Pool {
  explicit Pool(int count) : count(count), threads(count) {}

  const int count;
  Operands operands;  // outlive the threads
  TilePool threads;
};

struct Part {
  int64_t row, rows, panel, panels;
};

// How a tile's product is cut into parts: all rows of x for one group of panels before the next group, so that its
// weights stay in the L2 cache. Groups differ by a panel at most, as chunks of rows do by a block: a small rest would be
// slow.
struct Cut {
  int64_t rows, panels, groups, chunks;

  Cut(int64_t x_rows, int64_t columns, int64_t n, int64_t threads) : rows(x_rows), panels(panels_of(n)) {
    int64_t most = rows > kFewRows ? kMostAtOnce : kTogether * kGroupsOfPart;
    const int64_t least = kPartsPerThread * threads;
    groups = (panels + most - 1) / most, chunks = (rows + kMostRows - 1) / kMostRows;
    while (groups * chunks < least && rows / (chunks + 1) >= kLeastRows) ++chunks;
    const int64_t of_panel = std::max<int64_t>(1, rows * columns * kPanel);
    for (; kInFloat32 && groups * chunks < least && most > kTogether && most / 2 * of_panel >= kLeastWork;
         groups = (panels + most - 1) / most)
      most /= 2;
  }

  Part part(int64_t number) const {
    const int64_t chunk = number % chunks, group = number / chunks;
    const int64_t together = rows_together(), blocks = (rows + together - 1) / together;
    const int64_t row = blocks * chunk / chunks * together, panel = panels * group / groups;
    return {row, std::min(rows, blocks * (chunk + 1) / chunks * together) - row, panel,
            panels * (group + 1) / groups - panel};
  }
};

template <typename Weights>
class TileProduct : public Task {
 public:
  TileProduct(std::shared_ptr<Operand> x, const uint8_t* w, int64_t group, int64_t n, const Activation* bias,
              Activation* out, int64_t ldo, const Cut& cut)
      : Task(static_cast<int>(cut.groups * cut.chunks)), x_(std::move(x)), w_(w), group_(group), n_(n),
        bias_(bias ? std::vector<Activation>(bias, bias + n) : std::vector<Activation>()), out_(out), ldo_(ldo),
        cut_(cut) {}

  size_t scratch_bytes() const override {
    size_t most = 0;
    for (int i = 0; i < parts(); ++i) most = std::max(most, bytes_of(cut_.part(i)));
    return most;
  }

 protected:
  void compute(int part, Aligned& scratch) const override {
    const Part p = cut_.part(part);
    float* sums = static_cast<float*>(scratch.at_least(bytes_of(p)));
    const auto rows = Weights::rows_of(*x_).from(p.row, p.rows);
    constexpr int64_t kAtOnce = Weights::kAtOnce;
    for (int64_t done = 0; done < p.panels; done += kAtOnce, sums += kAtOnce * kPanel * whole_tiles(p.rows))
      Weights::multiply(rows, w_ + (p.panel + done) * Weights::panel_bytes(x_->columns(), group_),
                        std::min(kAtOnce, p.panels - done), group_, sums);
  }

  void write(int part, Aligned& scratch) const override {
    const Part p = cut_.part(part);
    const float* sums = static_cast<const float*>(scratch.data());
    constexpr int64_t kAtOnce = Weights::kAtOnce;
    for (int64_t done = 0; done < p.panels; done += kAtOnce, sums += kAtOnce * kPanel * whole_tiles(p.rows)) {
      const int64_t first = (p.panel + done) * kPanel, apart = std::min(kAtOnce, p.panels - done) * kPanel;
      const int64_t columns = std::min(n_ - first, apart);
      for (int64_t i = 0; i < p.rows; ++i) {
        Activation* to = out_ + (p.row + i) * ldo_ + first;
        const float* from = sums + i * apart;
        if (bias_.empty())
          for (int64_t j = 0; j < columns; ++j) round_to(to + j, from[j]);
        else
          for (int64_t j = 0; j < columns; ++j) round_to(to + j, from[j] + widened(bias_[first + j]));
      }
    }
  }

 private:
  static size_t bytes_of(const Part& p) { return p.panels * kPanel * whole_tiles(p.rows) * sizeof(float); }

  const std::shared_ptr<Operand> x_;
  const uint8_t* const w_;
  const int64_t group_, n_;
  const std::vector<Activation> bias_;
  Activation* const out_;
  const int64_t ldo_;
  const Cut cut_;
};

struct Product {
  Pool& pool;
  std::shared_ptr<Operand> x;
  std::shared_ptr<Task> deriving;
  std::deque<std::shared_ptr<Task>> tiles;

  template <typename Weights>
  void add(const uint8_t* w, int64_t group, int64_t n, const Activation* bias, Activation* out, int64_t ldo) {
    if (x->take_form(Weights::form(group))) derive();
    const Cut cut(x->count(), x->columns(), n, pool.count);
    tiles.push_back(std::make_shared<TileProduct<Weights>>(x, w, group, n, bias, out, ldo, cut));
    try {
      pool.threads.add(tiles.back());
    } catch (const std::bad_alloc&) {
      tiles.pop_back();
      throw;
    }
  }

  void derive() {
    if (Deriving::is_small(*x)) {
      x->derive(0, x->count(), x->record(0));
    } else {
      deriving = std::make_shared<Deriving>(x);
      pool.threads.add(deriving);
      pool.threads.wait(deriving);
    }
    x->is_derived();
  }
};

// Whether no thread holds a task any more, and what it has read may go.
bool is_last(const std::shared_ptr<Task>& task) {
  if (task.use_count() > 1) return false;
  std::atomic_thread_fence(std::memory_order_acquire);
  return true;
}

// Whether there was memory for what `act` did.
template <typename Act>
bool try_to(Act act) {
  try {
    act();
  } catch (const std::bad_alloc&) {
    return false;
  }
  return true;
}

}  // namespace

// The bytes of an activation: 2 for bfloat16, 4 for float32.
extern "C" int activation_bytes() { return sizeof(Activation); }

extern "C" void* open_pool(int threads) { return new Pool(threads); }

extern "C" void close_pool(void* pool) { delete static_cast<Pool*>(pool); }

// Starts a product of x[rows, k], whose rows are `ldx` values apart. x must stay as it is until the first tile is
// added, and mapped until the product is closed and what that returns has been left.
extern "C" void* open_product(void* pool, const Activation* x, int64_t ldx, int64_t rows, int64_t k) {
  Pool& threads = *static_cast<Pool*>(pool);
  Product* product = new Product{threads, threads.operands.next(), {}, {}};
  product->x->begin(x, ldx, rows, k);
  return product;
}

// How a tile is stored, and whether activations are rounded to eight bits for it; see tile_pool.py.
enum class Kind : int64_t { kPlain, kExact12, k3, k4, k8, kCoded4, kCoded8 };

// Some rows of W: `n` rows in panels at `w`, with groups of `group` columns, or 0.
struct Tile {
  Kind kind;
  const uint8_t* w;
  int64_t group, n;
};

// Adds `count` tiles, which must stay as they are until they are done and mapped until the pool is closed: out[rows, n]
// and bias[n], or null, are the first one's, and those of the others follow. All tiles of a product have groups alike;
// of kinds, only plain panels and those in twelve bits go together. Returns how many were added: fewer where there is
// no memory for more.
extern "C" int64_t add_tiles(void* product, const Tile* tiles, int64_t count, const Activation* bias, Activation* out,
                             int64_t ldo) {
  Product& of = *static_cast<Product*>(product);
  int64_t added = 0;
  const auto add_next = [&] {
    const Tile& tile = tiles[added];
    switch (tile.kind) {
      case Kind::kPlain: return of.add<PlainPanels>(tile.w, tile.group, tile.n, bias, out, ldo);
      case Kind::kExact12: return of.add<Exact12Panels>(tile.w, tile.group, tile.n, bias, out, ldo);
      case Kind::k3: return of.add<GroupedPanels<3>>(tile.w, tile.group, tile.n, bias, out, ldo);
      case Kind::k4: return of.add<GroupedPanels<4>>(tile.w, tile.group, tile.n, bias, out, ldo);
      case Kind::k8: return of.add<GroupedPanels<8>>(tile.w, tile.group, tile.n, bias, out, ldo);
      case Kind::kCoded4: return of.add<CodedPanels<4>>(tile.w, tile.group, tile.n, bias, out, ldo);
      case Kind::kCoded8: return of.add<CodedPanels<8>>(tile.w, tile.group, tile.n, bias, out, ldo);
    }
  };
  for (; added < count && try_to(add_next); ++added) {
    out += tiles[added].n;
    if (bias) bias += tiles[added].n;
  }
  return added;
}

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

// Computes until all its tiles are done, and ends the product. Returns null, or, where a late thread may still read x,
// something that it will leave.
extern "C" void* close_product(void* product) {
  const std::unique_ptr<Product> of(static_cast<Product*>(product));
  wait_for(product, of->tiles.size());
  of->pool.threads.drop_begun();
  if (!of->deriving || is_last(of->deriving)) return nullptr;
  return new std::shared_ptr<Task>(of->deriving);
}

// What one matrix adds to the products of an x: its tiles, see add_tiles, and where their results go.
struct MatrixTiles {
  const Tile* tiles;
  int64_t count;
  const Activation* bias;
  Activation* out;
  int64_t ldo;
};

// The products of x with `count` matrices, from open_product to close_product, whose result becomes `late`. Returns
// whether there was memory for them.
extern "C" int multiply(void* pool, const Activation* x, int64_t ldx, int64_t rows, int64_t k,
                        const MatrixTiles* matrices, int64_t count, void** late) {
  void* product = open_product(pool, x, ldx, rows, k);
  bool complete = true;
  for (const MatrixTiles* m = matrices; complete && m < matrices + count; ++m)
    complete = add_tiles(product, m->tiles, m->count, m->bias, m->out, m->ldo) == m->count;
  *late = close_product(product);
  return complete;
}

// Whether no thread is inside any more, and this was its end; what is left may not be used again.
extern "C" int was_left(void* late) {
  auto* task = static_cast<std::shared_ptr<Task>*>(late);
  if (!is_last(*task)) return 0;
  delete task;
  return 1;
}
