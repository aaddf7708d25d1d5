// Exact attention on the CPU: raw pointers and strides, no runtime's header.
//
// out = softmax(scale * Q K^T + mask) V and its log-sum-exp, one row of scores never leaving the
// cache.
#pragma once

#include <stdint.h>

namespace elsa {

// The largest head dimension that the kernels take; elsa_core/base/limits.py says the same.
constexpr int64_t kLargestHeadDim = 256;

enum class DType : int32_t { kFloat32, kFloat16, kBFloat16, kBool };

constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

constexpr int64_t element_size(DType dtype) {
  return dtype == DType::kFloat32 ? 4 : dtype == DType::kBool ? 1 : 2;
}

// A tensor of four dimensions. Strides count elements and may be zero.
struct View {
  const void* data = nullptr;
  int64_t stride[4] = {0, 0, 0, 0};
  DType dtype = DType::kFloat32;
};

// Which weights are dropped, and by what the others are multiplied; see philox.h.
struct Dropout {
  uint64_t seed = 0;
  uint32_t offset = 0;
  int32_t threshold = 0;  // of 31 random bits; from it on a weight is kept
  float kept = 1.0f;
};

// Which tiles of keys are left out. The first block of keys is folded first, then the one around
// the rows, then the rest: rows meet their largest scores sooner.
struct Sparse {
  // log2 of the largest weight, relative to the row's maximum so far, that may be left out; a tile
  // is left out where that holds for each of its weights. -inf for none.
  float threshold = -__builtin_inff();
  int64_t* counts = nullptr;  // [batch, heads, kCounts], added to
};
// Tiles of keys seen, and left out; those of which the maxima of rows were found; states that were
// rescaled; tiles of rows that were folded again, which these kernels never do.
enum Count { kSeen, kLeftOut, kMaxima, kRescaled, kAgain, kCounts };

struct Attention {
  View query;  // [batch, heads, queries, head_dim]
  View key;    // [batch, kv_heads, keys, head_dim]
  View value;  // [batch, kv_heads, keys, value_dim]
  View mask;   // [batch, heads, queries, keys], data == nullptr for none; bool: true takes part
  void* out = nullptr;       // [batch, queries, heads, value_dim], dense, the query's dtype
  float* lse = nullptr;      // [batch, heads, queries], dense, natural logarithm
  float* lse_low = nullptr;  // the same: what rounding took from lse; null where nobody asks
  int64_t lse_head = 0;      // its stride between heads where it is not dense; then batch is 1
  int64_t batch = 0;
  int64_t heads = 0;
  int64_t kv_heads = 0;
  int64_t queries = 0;
  int64_t keys = 0;
  int64_t head_dim = 0;
  int64_t value_dim = 0;
  float scale = 1.0f;
  bool causal = false;               // key j is visible to query i iff j <= i
  const Dropout* dropout = nullptr;  // null for none; lse is that without it
  const Sparse* sparse = nullptr;    // null for every tile in order; excludes dropout
};

// Where the rows of a head start in `lse`.
inline int64_t lse_offset(const Attention& a, int64_t batch, int64_t head) {
  return a.lse_head ? head * a.lse_head : (batch * a.heads + head) * a.queries;
}

// Runs body(begin, end, context) over [0, count) on the caller's threads.
using Body = void (*)(int64_t begin, int64_t end, void* context);
using ParallelFor = void (*)(int64_t count, Body body, void* context);

enum class Status { kOk, kOutOfMemory, kUnknownIsa, kUnsupportedIsa };

// The instruction set whose kernels run: the best one this machine has, or the one that the
// environment variable ELSA_CPU_ISA names. Null when that name is unknown or the machine lacks it
// (see isa_status).
const char* isa_name();
Status isa_status();

// How a problem is cut, for those who want to know without running it. Keys are folded block by
// block; within a block one maximum serves all keys and sums are trees of chains.
struct Cut {
  int64_t key_block;     // keys of a block (the last one may be shorter)
  int64_t key_blocks;    // merged one after another
  int64_t query_ranges;  // per head; an item is one range
  int64_t workers;       // threads that take items
  int64_t block_rows;    // query rows whose scores are in cache together
};

// Reads shapes and `causal` alone. The problem must not be empty.
Status cut(const Attention& problem, int threads, Cut* answer);

// `threads` bounds the concurrency; small problems run on the calling thread alone.
Status attention(const Attention& problem, int threads, ParallelFor parallel_for);

}  // namespace elsa
