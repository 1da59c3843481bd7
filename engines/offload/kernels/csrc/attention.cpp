// Attention of a packed batch over a paged KV cache: in float32 arithmetic whatever the cache holds, but for prompts in
// bfloat16 (`half`) where the CPU has units for it.
//
// q is [heads, tokens, dim], out is [tokens, heads, dim]. Segment i owns the tokens starts[i] to starts[i + 1], which
// follow `cached[i]` tokens of the same sequence. Row i of table [segments, max_blocks] says how many bytes behind the
// address `base` its KV blocks lie: keys [kv_heads, block, dim], and the values `values_after` bytes behind them. In a
// packed cache a row takes `row_bytes` bytes instead of dim values. `block` is log2 of the tokens in a block. window = 0
// and softcap = 0 turn these off, sinks [heads] may be null, and value_topk = 1 takes all values;
// reference_attention.py defines them. lse [tokens, heads], or null, receives log-sum-exps, by which the attention
// states of two parts of a cache are merged.
//
// Decode tokens: decode_token.h reads the stored rows block by block, many heads at once. Prompt rows: the GEMMs of
// panel_attention.h or prompt_attention.h. As long as values are finite, a row's result depends, bit for bit, only on
// its query and what it sees, not on where the prompt was cut; the exception is a cut that leaves one row alone, which
// the decode path computes. Rows with value_topk < 1 take the decode path one by one; groups of many heads take the
// prompt path.
//
// All memory is taken before threads share the work: where it is missing, attend_ returns 1 and has done nothing.
// attention_scratch_ says how much a call takes at most; engines/offload/memory/attention_scratch.py foresees it.

#include <omp.h>

#include <algorithm>
#include <new>
#include <vector>

#include "aligned.h"
#include "attention_items.h"
#include "decode_token.h"
#include "panel_attention.h"
#include "prompt_attention.h"
#include "softmax.h"
#include "threads.h"

namespace {

constexpr int64_t kManyHeads = 16;               // from so many heads in a group, panels beat the decode path
constexpr int64_t kItems = 4;                    // work items per thread to aim for
constexpr int64_t kShared = 16 * kSharedValues;  // multiply-adds from which several threads attend

// Whether prompts of queries in bfloat16 attend by the CPU's units for it.
#ifdef HAS_PROMPT_ATTENTION
template <typename Stored>
constexpr bool kHasUnits = Stored::fits_bfloat16;
#else
template <typename Stored>
constexpr bool kHasUnits = false;
#endif

// What a call's scratch memory depends on. `alone`: each row reads its values by itself. `decoded`, `prompted`:
// positions from the first that a segment sees, rounded down to a panel, to its last, at most: of a segment whose
// tokens decode, and of a prompt; 0 where there is none.
struct Shape {
  int64_t heads, group, dim;
  bool alone, in_bfloat16;
  int64_t decoded, prompted;
};

// What a thread needs to attend. It attends in one way at a time, so all take the same memory.
template <typename Stored>
struct Worker {
  DecodeToken<Stored> token;
  PanelAttention panels;
#ifdef HAS_PROMPT_ATTENTION
  PromptAttention prompt;
#endif
  int64_t bytes;  // of that memory: whole pages

  Worker(const DecodeLayout<Stored>& layout, const Shape& shape, void* memory)
      : token(layout, shape.heads, shape.group, shape.alone) {
    Arena decoding(memory), prompts(memory);
    if (shape.decoded) token.take(decoding, whole_panels(shape.decoded));
    if (shape.prompted && !shape.in_bfloat16) panels.take(prompts, whole_panels(shape.prompted), shape.dim);
#ifdef HAS_PROMPT_ATTENTION
    if (shape.prompted && shape.in_bfloat16) prompt.take(prompts, shape.dim, shape.group);
#endif
    bytes = (std::max(decoding.bytes(), prompts.bytes()) + 4095) / 4096 * 4096;
  }
};

// Whether a segment of `count` tokens attends token by token.
bool decodes(int64_t count, int64_t group, bool sparse) { return sparse || (count == 1 && group < kManyHeads); }

template <typename Stored>
void attend(const float* q, int64_t q_head, int64_t q_row, const Stored& stored, int64_t base, const int64_t* table,
            int64_t values_after, const int32_t* cached, const int32_t* starts, float* out, float* lse,
            int64_t segments, int64_t heads, int64_t kv_heads, int64_t dim, int block, int64_t max_blocks,
            const AttentionSpec& spec, bool half, int threads) {
  const int64_t group = heads / kv_heads;
  const bool sparse = spec.value_topk < 1;
  Shape shape{heads, group, dim, sparse, half && kHasUnits<Stored>, 0, 0};
  int64_t work = 0, seen = 0;
  for (int64_t segment = 0; segment < segments; ++segment) {
    const int64_t count = starts[segment + 1] - starts[segment], first = cached[segment], end = first + count;
    int64_t& longest = decodes(count, group, sparse) ? shape.decoded : shape.prompted;
    longest = std::max({longest, int64_t{1}, end - first_seen(spec, first) / kWidth * kWidth});
    work += 2 * count * end * heads * dim;
    seen += positions_seen(spec, first, count) * kv_heads;
  }
  const int used = work >= kShared ? threads : 1;
  // a decode item takes several heads, whose rows are adjacent in memory; a prompt is cut where heads are too few
  const int64_t together = DecodeToken<Stored>::heads_together(heads, group, max_blocks << block);
  const int64_t several = std::max<int64_t>(1, std::min(together, segments * kv_heads / (kItems * threads)));
  const int64_t share = (seen + used - 1) / used;
  std::vector<Item> items;
  for (int64_t segment = segments - 1; segment >= 0; --segment) {  // prompts come last in a batch and take longest
    const int64_t count = starts[segment + 1] - starts[segment];
    const int64_t size = count == 1 && decodes(count, group, sparse) ? several : 1;
    each_piece(spec, cached[segment], count, group, share, [&](int64_t row, int64_t end) {
      for (int64_t h = 0; h < kv_heads; h += size)
        items.push_back({segment, h, std::min(kv_heads, h + size), row, end});
    });
  }
  const DecodeLayout<Stored> layout(stored, int64_t{1} << block);
  const int64_t of_thread = Worker<Stored>(layout, shape, nullptr).bytes;
  Aligned scratch;
  char* const memory = static_cast<char*>(scratch.at_least(used * of_thread));
#pragma omp parallel num_threads(used) if (used > 1)
  {
    Worker<Stored> worker(layout, shape, memory + omp_get_thread_num() * of_thread);
#pragma omp for schedule(dynamic)
    for (size_t i = 0; i < items.size(); ++i) {
      const auto [segment, kv_head, last, row, end] = items[i];
      const int64_t count = end - row, first = cached[segment] + row, head = kv_head * group;
      const int64_t bytes = stored.row_bytes, head_bytes = bytes << block, first_row = base + kv_head * head_bytes;
      const BlockTable blocks{table + segment * max_blocks, first_row, first_row + values_after, head_bytes, block};
      const float* query = q + head * q_head + (starts[segment] + row) * q_row;
      float* result = out + ((starts[segment] + row) * heads + head) * dim;
      float* row_lse = lse ? lse + (starts[segment] + row) * heads + head : nullptr;
      if (decodes(starts[segment + 1] - starts[segment], group, sparse)) {
        for (int64_t k = 0; k < count; ++k, query += q_row, result += heads * dim, row_lse += row_lse ? heads : 0)
          worker.token.attend(query, q_head, result, dim, row_lse, first + k, last - kv_head, head, blocks, spec);
        continue;
      }
      const auto key = [=](int64_t t) {
        return stored.cursor(blocks(t, blocks.keys) + blocks.in_block(t) * bytes);
      };
      const auto value = [=](int64_t t) {
        return stored.cursor(blocks(t, blocks.values) + blocks.in_block(t) * bytes);
      };
#ifdef HAS_PROMPT_ATTENTION
      if constexpr (kHasUnits<Stored>)
        if (half) {
          worker.prompt.attend({query, q_row, q_head, count, group, first, head, result, heads * dim, row_lse, heads},
                               key, value, spec);
          continue;
        }
#endif
      PanelAttention& panels = worker.panels;
      panels.fill(first_seen(spec, first), first + count, key, value);
      if (count == 1)
        panels.attend({query, q_head, group, first, 0, head, result, dim, row_lse, 1}, spec);
      else
        for (int64_t g = 0; g < group; ++g)  // prompt rows, head by head
          panels.attend({query + g * q_head, q_row, count, first, 1, head + g, result + g * dim, heads * dim,
                         row_lse ? row_lse + g : nullptr, heads}, spec);
    }
  }
}

// Writes to `found` the bytes that no call takes whose sequences have up to `longest` tokens, and whether its prompts
// attend in bfloat16. Beside them a call takes 40 bytes an item.
template <typename Stored>
void scratch(const Stored& stored, int64_t heads, int64_t kv_heads, int64_t dim, int block, int64_t longest,
             bool sparse, bool half, int threads, int64_t* found) {
  const int64_t group = heads / kv_heads;
  const bool in_bfloat16 = half && kHasUnits<Stored>;
  const int64_t decoded = decodes(1, group, sparse) ? longest : 0, prompted = sparse ? 0 : longest;
  const Shape shape{heads, group, dim, sparse, in_bfloat16, decoded, prompted};
  const DecodeLayout<Stored> layout(stored, int64_t{1} << block);
  found[0] = threads * Worker<Stored>(layout, shape, nullptr).bytes, found[1] = in_bfloat16;
}

}  // namespace

#define ATTEND(name, type, ...)                                                                                       \
  extern "C" int attend_##name(const float* q, int64_t q_head, int64_t q_row, int64_t base, const int64_t* table,     \
                               int64_t values_after, const int32_t* cached, const int32_t* starts, float* out,        \
                               float* lse, int64_t segments, int64_t heads, int64_t kv_heads, int64_t dim, int block, \
                               int64_t max_blocks, int64_t window, float scale, float softcap, double value_topk,     \
                               const float* sinks, int half, int threads, [[maybe_unused]] int64_t row_bytes,         \
                               [[maybe_unused]] int group) {                                                          \
    const AttentionSpec spec{window, scale, softcap, value_topk, sinks};                                              \
    try {                                                                                                             \
      attend(q, q_head, q_row, type{__VA_ARGS__}, base, table, values_after, cached, starts, out, lse, segments,      \
             heads, kv_heads, dim, block, max_blocks, spec, half, threads);                                           \
      return 0;                                                                                                       \
    } catch (const std::bad_alloc&) {                                                                                 \
      return 1;                                                                                                       \
    }                                                                                                                 \
  }                                                                                                                   \
  extern "C" void attention_scratch_##name(int64_t heads, int64_t kv_heads, int64_t dim, int block, int64_t longest,  \
                                           int sparse, int half, int threads, [[maybe_unused]] int64_t row_bytes,     \
                                           [[maybe_unused]] int group, int64_t* found) {                              \
    scratch(type{__VA_ARGS__}, heads, kv_heads, dim, block, longest, sparse, half, threads, found);                   \
  }

// One storage a library, chosen at build time: compiling all of them takes a quarter of a minute.
#if defined(STORED_float32)
ATTEND(float32, PlainRows<float>, dim)
#elif defined(STORED_bfloat16)
ATTEND(bfloat16, PlainRows<BFloat16>, dim)
#elif defined(STORED_float16)
ATTEND(float16, PlainRows<Float16>, dim)
#elif defined(STORED_bits3)
ATTEND(bits3, GroupedRows<3>, dim, row_bytes, group)
#elif defined(STORED_bits4)
ATTEND(bits4, GroupedRows<4>, dim, row_bytes, group)
#elif defined(STORED_bits8)
ATTEND(bits8, GroupedRows<8>, dim, row_bytes, group)
#endif
