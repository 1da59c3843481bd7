// Writes rows of keys or values into KV blocks.

#include <cstdint>
#include <cstring>

// Row h of token i, `bytes` bytes at from + i * token_apart + h * head_apart, goes to slot offsets[i] of block blocks[i]:
// to + blocks[i] * block_apart + h * head_bytes + offsets[i] * bytes. `tokens` lists the i to write, or is null for all.
extern "C" void write_rows(const uint8_t* from, int64_t token_apart, int64_t head_apart, uint8_t* to,
                           int64_t block_apart, int64_t head_bytes, const int64_t* tokens, const int64_t* blocks,
                           const int64_t* offsets, int64_t count, int64_t heads, int64_t bytes) {
  for (int64_t i = 0; i < count; ++i) {
    const uint8_t* row = from + (tokens ? tokens[i] : i) * token_apart;
    uint8_t* slot = to + blocks[i] * block_apart + offsets[i] * bytes;
    for (int64_t h = 0; h < heads; ++h) std::memcpy(slot + h * head_bytes, row + h * head_apart, bytes);
  }
}
