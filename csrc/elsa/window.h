// Exact window attention on the CPU: raw pointers and strides, no runtime's header.
//
// Cyclic shift, padding, partition, the mask of shifted windows and the way back are index
// arithmetic: the projection's output is read, and the result written, once and in place.
#pragma once

#include "attention.h"

namespace elsa {

// Axes are depth, height, width; windows of two dimensions have window[0] = 1 and depth = 1.
struct WindowAttention {
  const void* qkv = nullptr;  // [batch, depth, height, width, 3 * heads * head_dim]
  int64_t stride[4] = {};     // of the first four, in elements; the channels are dense
  DType dtype = DType::kFloat32;
  // [heads, tokens, tokens] in stride[0..2], added to the scores; data == nullptr for none.
  // float32 or qkv's dtype.
  View bias;
  const void* pad_qkv = nullptr;  // [3 * heads * head_dim], what padding holds; null for zeros
  // [heads]: queries and keys are normalised and `scale` is replaced; null for plain products.
  const float* logit_scale = nullptr;
  void* out = nullptr;  // [batch, depth, height, width, heads * head_dim], dense, qkv's dtype
  int64_t batch = 0;
  int64_t depth = 0;
  int64_t height = 0;
  int64_t width = 0;
  int64_t heads = 0;
  int64_t head_dim = 0;
  int64_t window[3] = {};
  int64_t shift[3] = {};  // below window; where it is not 0, tokens from both ends do not mix
  float scale = 1.0f;
  float mask_value = -100.0f;  // added to the score of two tokens that do not mix
  bool head_first = false;     // channels are [heads, 3, head_dim] instead of [3, heads, head_dim]
  bool grid = false;           // a window takes every n-th token of an axis; no shift, no padding
};

// `threads` bounds the concurrency; small problems run on the calling thread alone.
Status window_attention(const WindowAttention& problem, int threads, ParallelFor parallel_for);

// out[head][i] = table[index[i]][head] as float32: a relative position bias from its table.
// table: [rows, heads] in stride[0..1]. False if an index lies outside the table.
bool gather_bias(const View& table, int64_t rows, int64_t heads, const int64_t* index,
                 int64_t count, float* out);

}  // namespace elsa
