// What one instruction set's kernels offer to the driver. attention_kernel.cpp is compiled once per
// set.
#pragma once

#include "attention.h"

namespace elsa {

// The tables of one type, of all instruction sets of this architecture, and those in order, the
// best first.
#if defined(__x86_64__) || defined(_M_X64)
#define ELSA_DECLARE_KERNELS(Type)                                                 \
  extern const Type k##Type##Avx512, k##Type##Avx2, k##Type##Baseline;             \
  inline constexpr const Type* kEvery##Type[] = {&k##Type##Avx512, &k##Type##Avx2, \
                                                 &k##Type##Baseline}
#elif defined(__aarch64__)
#define ELSA_DECLARE_KERNELS(Type) \
  extern const Type k##Type##Neon; \
  inline constexpr const Type* kEvery##Type[] = {&k##Type##Neon}
#else
#define ELSA_DECLARE_KERNELS(Type)     \
  extern const Type k##Type##Baseline; \
  inline constexpr const Type* kEvery##Type[] = {&k##Type##Baseline}
#endif

// The most keys whose scores exist at a time, for each query row in flight.
constexpr int64_t kMaxKeyBlock = 640;

// How one problem is cut. Every field is a function of shapes and thread count alone.
struct Plan {
  int64_t key_block;  // keys whose scores exist at a time
  int64_t key_blocks;
  bool keep_packed;  // the packed keys and values of a whole head fit in the workspace
  int64_t splits;    // query ranges per head
  bool prefetch;     // operands come from beyond a core's own cache
  int64_t items;     // batch * heads * splits
};

// Per-thread memory, carved out of one allocation.
struct Workspace {
  float* memory;
  int64_t packed_head;  // batch * kv_heads index whose packed keys are in memory, or -1
};

struct Kernel {
  const char* name;
  int64_t row_tile;                     // query rows of one register tile
  int64_t (*block_rows)(int64_t keys);  // query rows whose scores are in cache together
  int64_t (*workspace)(const Attention& problem, const Plan& plan);  // in floats
  // `upcoming` is the item that probably comes next, or -1: its operands are fetched meanwhile.
  void (*run)(const Attention& problem, const Plan& plan, int64_t item, int64_t upcoming,
              Workspace& workspace);
};

// The kernels that run here, or null (see isa_status).
const Kernel* attention_kernel();

// Zeros, and -inf in lse, for queries without a key.
void fill_empty(const Attention& problem);

// Sets a plan's key_block, key_blocks and keep_packed; gives the least number of its splits.
int64_t cut_keys(const Attention& problem, Plan& plan);

ELSA_DECLARE_KERNELS(Kernel);

}  // namespace elsa
