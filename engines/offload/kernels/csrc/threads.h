// From how many values on an operation is shared among OpenMP's threads.
//
// To wake a thread takes as long as some ten thousand values. And it then spins for milliseconds: decode passes of a few
// rows come back sooner, so that it would always keep a CPU from the threads that multiply (tile_pool.h).

#pragma once

#include <cstdint>

namespace {

constexpr int64_t kSharedValues = 1 << 16;

}  // namespace
