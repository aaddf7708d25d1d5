// alpha-entmax attention and its gradients on the CPU: raw pointers and strides, float32 inside.
//
// A row of scores s with maximum m has the weights r_j / Z, r_j = [1 + b (s_j - m)]_+^(1 / a) with
// a = alpha - 1, Z = sum(r) and the slope b for which Z^a = b / a. Most weights are zero: each row
// keeps a list of the keys that can still weigh something, and all that follows reads the lists.
#pragma once

#include "attention.h"
#include "gradient.h"

namespace elsa {

constexpr int64_t kEntmaxTile = 64;  // queries and keys of a tile whose emptiness is noted
constexpr int64_t tiles_of(int64_t count) { return ceil_div(count, kEntmaxTile); }

struct Entmax {
  Attention attention;        // its `lse` is not used
  const double* a = nullptr;  // [batch, heads]: alpha - 1, in (0, 3]; NaN makes results NaN
  float* rows = nullptr;      // [3, batch, heads, queries]: m (-inf where no key is seen), b, Z
  uint8_t* tiles = nullptr;   // [batch, heads, queries / 64, keys / 64], rounded up: 1 where a
                              // tile holds a weight
};

struct EntmaxGradient {
  Entmax forward;            // its `out` is not used, `rows` and `tiles` are read; float32 operands
  View grad_out;             // [batch, heads, queries, value_dim], float32
  Target query, key, value;  // of the operands' shapes
  float* alpha = nullptr;    // [batch, heads]; null where it is not wanted
};

// `threads` bounds the concurrency. No result depends on the number of threads.
Status entmax_attention(const Entmax& problem, int threads, ParallelFor parallel_for);
Status entmax_gradient(const EntmaxGradient& problem, int threads, ParallelFor parallel_for);

}  // namespace elsa
