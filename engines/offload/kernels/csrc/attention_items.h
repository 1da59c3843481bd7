// Cuts a packed batch into work items, which threads take one after the other.

#pragma once

#include <algorithm>
#include <cstdint>

#include "softmax.h"

namespace {

// Query rows of a piece: with fewer, packing keys for it again takes more than a quarter of its time; with more, none to
// speak of.
constexpr int64_t kLeastRows = 128, kMostRows = 1 << 13;

// The tokens [row, end) of a segment for the key/value heads [first, last).
struct Item {
  int64_t segment, first, last, row, end;
};

// Positions that `count` tokens from position `first` on see, all together.
inline int64_t positions_seen(const AttentionSpec& spec, int64_t first, int64_t count) {
  int64_t sum = 0;
  for (int64_t t = first; t < first + count; ++t) sum += t + 1 - first_seen(spec, t);
  return sum;
}

// visit(first token, behind the last) for pieces of a segment's `count` tokens, which have `group` query rows each and
// begin at position `first`. The tokens of a piece see `share` positions or a little more, those of the last what is
// left. But none has fewer than kLeastRows rows, unless all of them have, or more than kMostRows.
template <typename Visit>
void each_piece(const AttentionSpec& spec, int64_t first, int64_t count, int64_t group, int64_t share, Visit visit) {
  const int64_t least = (kLeastRows + group - 1) / group, most = std::max<int64_t>(1, kMostRows / group);
  for (int64_t begin = 0, seen = 0, end = 1; end <= count; ++end) {
    seen += positions_seen(spec, first + end - 1, 1);
    const bool enough = seen >= share && end - begin >= least && count - end >= least;
    if (!enough && end - begin < most && end < count) continue;
    visit(begin, end);
    begin = end, seen = 0;
  }
}

}  // namespace
