// Multiplies rows by a normalized Walsh-Hadamard matrix in place: butterflies in the order of hadamard.py, so that both
// give the same bits.

#include "simd.h"
#include "threads.h"

namespace {

// Three butterfly stages inside a register: pairs 1, 2 and 4 lanes apart.
inline Lanes butterflies(Lanes x) {
  const Lanes one = SHUFFLE(x, x, 1, 0, 3, 2, 5, 4, 7, 6);
  x = one + x * Lanes{1, -1, 1, -1, 1, -1, 1, -1};
  const Lanes two = SHUFFLE(x, x, 2, 3, 0, 1, 6, 7, 4, 5);
  x = two + x * Lanes{1, 1, -1, -1, 1, 1, -1, -1};
  const Lanes four = SHUFFLE(x, x, 4, 5, 6, 7, 0, 1, 2, 3);
  return four + x * Lanes{1, 1, 1, 1, -1, -1, -1, -1};
}

inline void transform(float* x, int64_t size, float scale) {
  int64_t half = 1;
  if (size >= kLanes) {
    for (int64_t i = 0; i < size; i += kLanes) store(x + i, butterflies(load(x + i)));
    half = kLanes;
  }
  for (; half < size; half *= 2)
    for (int64_t i = 0; i < size; i += 2 * half)
      for (int64_t j = i; j < i + half; ++j) {
        const float a = x[j], b = x[j + half];
        x[j] = a + b;
        x[j + half] = a - b;
      }
  for (int64_t i = 0; i < size; ++i) x[i] *= scale;
}

}  // namespace

// x is [parts, size] with size a power of two; each row is transformed on its own.
extern "C" void hadamard(float* x, int64_t parts, int64_t size, float scale, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static) if (parts * size >= kSharedValues)
  for (int64_t i = 0; i < parts; ++i) transform(x + i * size, size, scale);
}
