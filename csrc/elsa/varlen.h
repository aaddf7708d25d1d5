// Attention of packed sequences on the CPU: each is a problem of its own to the kernels of
// attention and of its gradients, and one parallel loop takes the heads of all of them.
#pragma once

#include "gradient.h"

namespace elsa {

// Where the sequences lie: sequence s has the queries [query[s], query[s + 1]) and the keys
// [key[s], key[s + 1]). Both start with 0, do not decrease and end with the number of tokens.
struct Sequences {
  const int64_t* query = nullptr;
  const int64_t* key = nullptr;
  int64_t count = 0;
};

// `packed` has batch 1, no mask, and all queries and keys; its lse is [heads, queries].
Status varlen_attention(const Attention& packed, const Sequences& sequences, int threads,
                        ParallelFor parallel_for);
Status varlen_gradient(const AttentionGradient& packed, const Sequences& sequences, int threads,
                       ParallelFor parallel_for);

}  // namespace elsa
