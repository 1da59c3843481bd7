// Products by the CPU's matrix units (AMX): 16 rows of x by the 16 rows of W of a panel, 64 bytes of columns at a time.
//
// A panel's pairs (or quads, of codes) of columns lie as the units take them. An instruction sums a step of 64 bytes by
// itself and adds that to a sum, in an order that depends on k alone; so whole tiles are multiplied for any number of
// rows, and what a product adds up in memory between its steps changes no bit.

#pragma once

// Activations are bfloat16 where the CPU has AVX512-BF16 (some virtual machines hide that and show AMX).
#if defined(__AMX_TILE__) && defined(__AMX_BF16__) && defined(__AMX_INT8__) && defined(__AVX512BF16__) && defined(__linux__)
#define HAS_AMX 1

#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>

namespace {

constexpr int64_t kTileRows = 16, kTileBytes = 64;  // of every tile

// Whether this process may use the units: Linux has to be asked, and may refuse.
inline bool amx_allowed() {
  constexpr long kRequest = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  static const bool allowed = syscall(SYS_arch_prctl, kRequest, kTileData) == 0;
  return allowed;
}

// The calling thread's units, where it may use them, for as long as this lives. Others of the process, oneDNN's kernels
// for one, configure them for themselves.
class Amx {
 public:
  // For products of `rows` rows: with few, sums and x have no others.
  explicit Amx(int64_t rows) {
    alignas(64) struct {
      uint8_t palette = 1, start_row = 0, reserved[14] = {};
      uint16_t bytes[16] = {};
      uint8_t rows[16] = {};
    } shapes;
    for (int tile = 0; tile < 8; ++tile) {
      shapes.bytes[tile] = kTileBytes;
      shapes.rows[tile] = static_cast<uint8_t>(tile < 6 ? std::min(rows, kTileRows) : kTileRows);
    }
    // GCC 12's intrinsic tells the compiler of eight of these bytes, and stores of the others are lost
    asm volatile("ldtilecfg %0" ::"m"(shapes));
  }
  ~Amx() { _tile_release(); }
  Amx(const Amx&) = delete;
  Amx& operator=(const Amx&) = delete;

  // GCC's intrinsics do not tell the compiler that they read and write memory.
  static void fence() { asm volatile("" ::: "memory"); }
};

// What is multiplied: pairs of bfloat16, or the signed bytes of x by the unsigned ones of W.
enum class Dot { kPairs, kBytes };

#define AMX_DOT(sum, x, w)                                     \
  do {                                                         \
    if constexpr (kDot == Dot::kPairs) _tile_dpbf16ps(sum, x, w); \
    else _tile_dpbsud(sum, x, w);                              \
  } while (0)

// sums[16 R, 16 C] of x[16 R, 64 bytes a step] times C panels, `apart` bytes from one to the next, begun or, with `goes_on`,
// added to; `sums_apart` and `ldx` are bytes. kPrefetch: bytes ahead of which a panel is fetched, or 0.
template <Dot kDot, int R, int C, int kPrefetch>
inline void amx_block(const void* x, int64_t ldx, const void* w, int64_t apart, int64_t steps, bool goes_on, void* sums,
                      int64_t sums_apart) {
  static_assert(R <= 2 && C <= 2, "four sums, two tiles of x and two of W are all eight");
  constexpr int64_t kTile = kTileRows * kTileBytes;
  char *first = static_cast<char*>(sums), *second = first + kTileRows * sums_apart;
  if (goes_on) {
    _tile_loadd(0, first, sums_apart);
    if constexpr (C > 1) _tile_loadd(1, first + kTileBytes, sums_apart);
    if constexpr (R > 1) _tile_loadd(2, second, sums_apart);
    if constexpr (R > 1 && C > 1) _tile_loadd(3, second + kTileBytes, sums_apart);
  } else {
    _tile_zero(0);
    if constexpr (C > 1) _tile_zero(1);
    if constexpr (R > 1) _tile_zero(2);
    if constexpr (R > 1 && C > 1) _tile_zero(3);
  }
  const char *rows = static_cast<const char*>(x), *panel = static_cast<const char*>(w);
  for (int64_t step = 0; step < steps; ++step, rows += kTileBytes, panel += kTile) {
    if constexpr (kPrefetch > 0)
      for (int64_t line = 0; line < kTile; line += 64) {
        _mm_prefetch(panel + kPrefetch + line, _MM_HINT_T0);
        if constexpr (C > 1) _mm_prefetch(panel + apart + kPrefetch + line, _MM_HINT_T0);
      }
    _tile_loadd(6, panel, kTileBytes);
    _tile_loadd(4, rows, ldx);
    AMX_DOT(0, 4, 6);
    if constexpr (C > 1) {
      _tile_loadd(7, panel + apart, kTileBytes);
      AMX_DOT(1, 4, 7);
    }
    if constexpr (R > 1) {
      _tile_loadd(5, rows + kTileRows * ldx, ldx);
      AMX_DOT(2, 5, 6);
      if constexpr (C > 1) AMX_DOT(3, 5, 7);
    }
  }
  _tile_stored(0, first, sums_apart);
  if constexpr (C > 1) _tile_stored(1, first + kTileBytes, sums_apart);
  if constexpr (R > 1) _tile_stored(2, second, sums_apart);
  if constexpr (R > 1 && C > 1) _tile_stored(3, second + kTileBytes, sums_apart);
}

// The same for any number of rows, of which x and sums hold whole tiles, and of panels.
template <Dot kDot, int kPrefetch>
inline void amx_product(const void* x, int64_t ldx, int64_t rows, const void* w, int64_t apart, int64_t panels,
                        int64_t steps, bool goes_on, void* sums, int64_t sums_apart) {
  Amx::fence();
  for (int64_t row = 0; row < rows; row += 2 * kTileRows)
    for (int64_t panel = 0; panel < panels; panel += 2) {
      const char* from = static_cast<const char*>(x) + row * ldx;
      const char* weights = static_cast<const char*>(w) + panel * apart;
      char* to = static_cast<char*>(sums) + row * sums_apart + panel * kTileBytes;
      const bool two_rows = rows - row > kTileRows, two_panels = panels - panel > 1;
      const auto run = two_rows ? two_panels ? amx_block<kDot, 2, 2, kPrefetch> : amx_block<kDot, 2, 1, kPrefetch>
                                : two_panels ? amx_block<kDot, 1, 2, kPrefetch> : amx_block<kDot, 1, 1, kPrefetch>;
      run(from, ldx, weights, apart, steps, goes_on, to, sums_apart);
    }
  Amx::fence();
}

// The products of rows with some panels, whose steps are few: visit(row, column, 16 products) in order of rows.
template <Dot kDot, typename Visit>
inline void amx_each(const void* x, int64_t ldx, int64_t rows, const void* w, int64_t apart, int64_t panels,
                     int64_t steps, Visit visit) {
  constexpr int64_t kMostPanels = 4;
  alignas(64) char products[2 * kTileRows * kMostPanels * kTileBytes];
  const int64_t bytes = panels * kTileBytes;
  for (int64_t row = 0; row < rows; row += 2 * kTileRows) {
    const int64_t some = std::min(2 * kTileRows, rows - row);
    amx_product<kDot, 0>(static_cast<const char*>(x) + row * ldx, ldx, some, w, apart, panels, steps, false, products,
                         bytes);
    for (int64_t i = 0; i < some; ++i)
      for (int64_t c = 0; c < panels; ++c) visit(row + i, c * kTileRows, products + i * bytes + c * kTileBytes);
  }
}

#undef AMX_DOT

}  // namespace

#endif
