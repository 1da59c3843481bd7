// Rotary position embeddings, in the order in which transformers' apply_rotary_pos_emb rounds: each product to the type
// of the rows, and their sum.

#include "rounding.h"
#include "threads.h"

namespace {

// Heads [heads][tokens][dim] of queries or keys; `head` and `token` are values from one to the next.
template <typename T>
struct Heads {
  T* at;
  int64_t head, token, count;

  T* row(int64_t h, int64_t t) const { return at + h * head + t * token; }
};

// A value of its own: a product that is fused with the sum that takes it would not be rounded.
inline Lanes apart(Lanes x) {
  asm("" : "+m"(x));
  return x;
}

// out = x * cos + (-second half of x, first half of x) * sin.
template <typename T>
void rotate(const T* x, const T* cos, const T* sin, T* out, int64_t dim) {
  const int64_t half = dim / 2;
  const auto turned = [&](Lanes value, Lanes c, Lanes other, Lanes s) {
    return rounded(rounded(apart(value * c), x) + rounded(apart(other * s), x), x);
  };
  for (int64_t j = 0; j < half; j += kLanes) {
    const int64_t count = half - j;
    const auto at = [&](const T* from) { return count < kLanes ? widen(from, count) : widen(from); };
    const auto put = [&](T* to, Lanes values) { count < kLanes ? write(to, values, count) : write(to, values); };
    const Lanes first = at(x + j), second = at(x + half + j);
    put(out + j, turned(first, at(cos + j), -second, at(sin + j)));
    put(out + half + j, turned(second, at(cos + half + j), first, at(sin + half + j)));
  }
}

template <typename T>
void rotate_all(const Heads<const T>& from, const Heads<T>& to, const T* cos, const T* sin, int64_t token,
                int64_t dim) {
  for (int64_t h = 0; h < from.count; ++h)
    rotate(from.row(h, token), cos + token * dim, sin + token * dim, to.row(h, token), dim);
}

}  // namespace

// q [heads][tokens][dim] and k [kv_heads][tokens][dim], whose heads and tokens are so many values apart, to out_q and
// out_k [tokens][heads][dim], contiguous, by cos and sin [tokens][dim].
#define ROTATE(name, type)                                                                                            \
  extern "C" void rotate_##name(const type* q, int64_t q_head, int64_t q_token, const type* k, int64_t k_head,        \
                                int64_t k_token, const type* cos, const type* sin, type* out_q, type* out_k,          \
                                int64_t heads, int64_t kv_heads, int64_t tokens, int64_t dim, int threads) {          \
    _Pragma("omp parallel for num_threads(threads) schedule(static) if (tokens * heads * dim >= kSharedValues)")      \
    for (int64_t token = 0; token < tokens; ++token) {                                                                \
      rotate_all<type>({q, q_head, q_token, heads}, {out_q, dim, heads * dim, heads}, cos, sin, token, dim);          \
      rotate_all<type>({k, k_head, k_token, kv_heads}, {out_k, dim, kv_heads * dim, kv_heads}, cos, sin, token, dim); \
    }                                                                                                                 \
  }

ROTATE(float32, float)
ROTATE(bfloat16, BFloat16)
