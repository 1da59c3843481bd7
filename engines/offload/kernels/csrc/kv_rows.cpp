// Writes rows of keys and values into KV blocks.

#include <cstdint>
#include <cstring>

namespace {

// Row h of token i, `bytes` bytes at from + i * token + h * head.
struct Rows {
  const uint8_t* from;
  int64_t token, head;
};

}  // namespace

// Keys, and values that are as many, go to slot offsets[i] of block blocks[i], row h of token i to
// to + blocks[i] * block + h * head + offsets[i] * bytes, values `half` bytes behind keys. `tokens` lists the i to
// write, or is null for all.
extern "C" void write_rows(const uint8_t* keys, int64_t key_token, int64_t key_head, const uint8_t* values,
                           int64_t value_token, int64_t value_head, uint8_t* to, int64_t block, int64_t half,
                           int64_t head, const int64_t* tokens, const int64_t* blocks, const int64_t* offsets,
                           int64_t count, int64_t heads, int64_t bytes) {
  const Rows both[] = {{keys, key_token, key_head}, {values, value_token, value_head}};
  for (int64_t i = 0; i < count; ++i) {
    uint8_t* slot = to + blocks[i] * block + offsets[i] * bytes;
    for (const Rows& rows : both) {
      const uint8_t* row = rows.from + (tokens ? tokens[i] : i) * rows.token;
      for (int64_t h = 0; h < heads; ++h) std::memcpy(slot + h * head, row + h * rows.head, bytes);
      slot += half;
    }
  }
}
