// Gradients of attention and of window attention on the CPU: raw pointers and strides, float32.
//
// The weights are computed again from the operands, block by block. No sum depends on the number of
// threads or on the order in which they work: gradients are equal bit for bit.
#pragma once

#include "attention.h"
#include "window.h"

namespace elsa {

// A float32 tensor of four dimensions that is written; data == nullptr where it is not wanted.
struct Target {
  float* data = nullptr;
  int64_t stride[4] = {};
};

// Zeros for the gradients of an attention without scores; all of them are of the operands' shapes.
void clear_gradients(const Attention& problem, const Target& query, const Target& key,
                     const Target& value);

struct AttentionGradient {
  Attention forward;                // its `out` is not used, its `lse` is read
  View out;                         // [batch, heads, queries, value_dim]
  bool shard = false;               // rows see further keys: `out` and `lse` are of all of them
  View grad_out;                    // the same
  const float* grad_lse = nullptr;  // [batch, heads, queries], dense; null for zeros
  Target query, key, value;         // of the operands' shapes
};

struct WindowGradient {
  WindowAttention forward;          // its `out` is not used
  const float* grad_out = nullptr;  // [batch, depth, height, width, heads * head_dim], dense
  float* qkv = nullptr;             // [batch, depth, height, width, 3 * heads * head_dim], dense
  float* bias = nullptr;            // [heads, tokens, tokens], dense
  float* pad_qkv = nullptr;         // [3 * heads * head_dim]
  float* logit_scale = nullptr;     // [heads]
};

// The most tokens of a window that the kernel takes.
constexpr int64_t kMaxGradientTokens = 640;

// `threads` bounds the concurrency. Operands must be float32.
Status attention_gradient(const AttentionGradient& problem, int threads, ParallelFor parallel_for);
Status window_gradient(const WindowGradient& problem, int threads, ParallelFor parallel_for);

}  // namespace elsa
