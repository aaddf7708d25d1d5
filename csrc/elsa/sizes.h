// Sizes from outside, checked before anything is computed from them.
//
// A tensor's sizes need not fit in memory: an expanded one has any, and one without elements too.
#pragma once

#include <initializer_list>

#include "window.h"

namespace elsa {

// The most elements of a tensor, or of a workspace: four times as many bytes, and sums of a few
// such numbers, are far below 2^63.
constexpr int64_t kMostElements = int64_t{1} << 48;

// The product of sizes; -1 where one is negative, or where those that are not 0 make more than
// `most`: then no part of the product overflows either.
inline int64_t product(const int64_t* sizes, size_t count, int64_t most = kMostElements) {
  int64_t total = 1;
  bool empty = false;
  for (size_t i = 0; i < count; ++i) {
    const int64_t size = sizes[i];
    if (size < 0) return -1;
    empty |= size == 0;
    if (size > 0 && (__builtin_mul_overflow(total, size, &total) || total > most)) return -1;
  }
  return empty ? 0 : total;
}

inline int64_t product(std::initializer_list<int64_t> sizes, int64_t most = kMostElements) {
  return product(sizes.begin(), sizes.size(), most);
}

// Whether what is computed from the sizes of a problem fits in 64 bits.
inline bool fits(const Attention& a) {
  constexpr int64_t kMostScores = int64_t{1} << 62;
  const int64_t widest = a.head_dim > a.value_dim ? a.head_dim : a.value_dim;
  return product({a.batch, a.heads, a.queries, widest}) >= 0 &&
         product({a.batch, a.kv_heads, a.keys, a.head_dim + a.value_dim}) >= 0 &&
         product({a.batch, a.heads, a.queries, a.keys}, kMostScores) >= 0;
}

inline bool fits(const WindowAttention& a) {
  const int64_t tokens = product(a.window, 3), channels = product({3, a.heads, a.head_dim});
  if (tokens < 1 || channels < 1 || product({a.heads, tokens, tokens}) < 0) return false;
  if (product({a.batch, a.depth, a.height, a.width, channels}) < 0) return false;
  // windows hang over the end of each axis
  return product({a.batch, a.depth + a.window[0], a.height + a.window[1], a.width + a.window[2],
                  channels}) >= 0;
}

}  // namespace elsa
