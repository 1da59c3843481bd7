// Writes rows of keys and values into KV blocks.

#include <cstdint>
#include <cstring>

#include "rounding.h"

namespace {

// Row h of token i, `bytes` bytes at from + i * token + h * head.
struct Rows {
  const uint8_t* from;
  int64_t token, head;
};

void copy(uint8_t* to, const uint8_t* from, int64_t bytes) { std::memcpy(to, from, bytes); }

// Writes `bytes` of bfloat16.
void round_floats(uint8_t* to, const uint8_t* from, int64_t bytes) {
  const float* x = reinterpret_cast<const float*>(from);
  BFloat16* out = reinterpret_cast<BFloat16*>(to);
  const int64_t n = bytes / sizeof(BFloat16);
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) write(out + i, rounded(load(x + i), out));
  if (i < n) {
    float rest[kLanes] = {};
    std::memcpy(rest, x + i, (n - i) * sizeof(float));
    write(out + i, rounded(load(rest), out), n - i);
  }
}

template <void (*kWrite)(uint8_t*, const uint8_t*, int64_t)>
void write_all(const Rows (&both)[2], uint8_t* to, int64_t block, int64_t half, int64_t head, const int64_t* tokens,
               const int64_t* blocks, const int64_t* offsets, int64_t count, int64_t heads, int64_t bytes) {
  for (int64_t i = 0; i < count; ++i) {
    uint8_t* slot = to + blocks[i] * block + offsets[i] * bytes;
    for (const Rows& rows : both) {
      const uint8_t* row = rows.from + (tokens ? tokens[i] : i) * rows.token;
      for (int64_t h = 0; h < heads; ++h) kWrite(slot + h * head, row + h * rows.head, bytes);
      slot += half;
    }
  }
}

}  // namespace

// Keys, and values that are as many, go to slot offsets[i] of block blocks[i], row h of token i to
// to + blocks[i] * block + h * head + offsets[i] * bytes, values `half` bytes behind keys. `tokens` lists the i to
// write, or is null for all. `bytes` are those of a row there: as it is, or, of floats, rounded to bfloat16.
extern "C" void write_rows(const uint8_t* keys, int64_t key_token, int64_t key_head, const uint8_t* values,
                           int64_t value_token, int64_t value_head, uint8_t* to, int64_t block, int64_t half,
                           int64_t head, const int64_t* tokens, const int64_t* blocks, const int64_t* offsets,
                           int64_t count, int64_t heads, int64_t bytes, int rounds) {
  const Rows both[] = {{keys, key_token, key_head}, {values, value_token, value_head}};
  (rounds ? write_all<round_floats> : write_all<copy>)(both, to, block, half, head, tokens, blocks, offsets, count,
                                                       heads, bytes);
}
