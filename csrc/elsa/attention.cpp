// Which kernels run, how a problem is cut into items, and who works on them.
#include "attention.h"

#include <stdlib.h>
#include <string.h>

#include "kernel.h"
#include "work.h"

namespace elsa {
namespace {

struct Choice {
  const Kernel* kernel;
  Status status;
};

bool runs_here(const char* name) {
#if defined(__x86_64__) || defined(_M_X64)
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                    __builtin_cpu_supports("f16c");
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") &&
                      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512dq");
  if (strcmp(name, "avx512") == 0) return avx512;
  if (strcmp(name, "avx2") == 0) return avx2;
  return strcmp(name, "baseline") == 0;
#else
  return true;
#endif
}

const Choice& choice() {
  static const Choice chosen = []() -> Choice {
    const char* wanted = getenv("ELSA_CPU_ISA");
    const bool any = wanted == nullptr || *wanted == '\0';
    for (const Kernel* kernel : kEveryKernel) {
      if (!any && strcmp(wanted, kernel->name) != 0) continue;
      if (runs_here(kernel->name)) return {kernel, Status::kOk};
      if (!any) return {nullptr, Status::kUnsupportedIsa};
    }
    return {nullptr, Status::kUnknownIsa};
  }();
  return chosen;
}

constexpr int64_t kMaxPackedFloats = 1 << 19;  // 2 MiB: about what a core's own cache holds

Plan make_plan(const Attention& a, const Kernel& kernel, int64_t threads) {
  Plan plan = {};
  const int64_t least = cut_keys(a, plan);
  plan.splits = choose_splits(a.batch * a.heads, a.queries, least, kernel.row_tile, threads);
  const int64_t operands = a.batch * (a.kv_heads * a.keys * (a.head_dim + a.value_dim) +
                                      a.heads * a.queries * a.head_dim);
  plan.prefetch = plan.splits == 1 && plan.key_blocks == 1 && operands > kMaxPackedFloats;
  plan.items = a.batch * a.heads * plan.splits;
  return plan;
}

int64_t workers_of(const Attention& a, int threads) {
  const double depth = static_cast<double>(a.head_dim + a.value_dim);
  return worth_waking(scores_of(a) * static_cast<double>(a.batch * a.heads) * depth, threads);
}

}  // namespace

void fill_empty(const Attention& a) {
  const int64_t rows = a.batch * a.heads * a.queries;
  memset(a.out, 0, static_cast<size_t>(rows * a.value_dim * element_size(a.query.dtype)));
  for (int64_t h = 0; h < a.batch * a.heads; ++h) {
    float* const lse = a.lse + lse_offset(a, h / a.heads, h % a.heads);
    for (int64_t i = 0; i < a.queries; ++i) lse[i] = -__builtin_inff();
  }
  if (a.lse_low) memset(a.lse_low, 0, static_cast<size_t>(rows) * sizeof(float));
}

const Kernel* attention_kernel() { return choice().kernel; }

int64_t cut_keys(const Attention& a, Plan& plan) {
  plan.key_blocks = ceil_div(a.keys, kMaxKeyBlock);
  const int64_t even = ceil_div(a.keys, plan.key_blocks);
  plan.key_block = ceil_div(even, kKeyGranule) * kKeyGranule;
  plan.key_blocks = ceil_div(a.keys, plan.key_block);
  const int64_t packed = plan.key_blocks * plan.key_block * (a.head_dim + a.value_dim);
  plan.keep_packed = plan.key_blocks == 1 || packed <= kMaxPackedFloats;
  return plan.key_blocks > 1 ? ceil_div(a.queries, kMaxStateRows) : 1;
}

const char* isa_name() { return choice().kernel ? choice().kernel->name : nullptr; }
Status isa_status() { return choice().status; }

Status cut(const Attention& a, int threads, Cut* answer) {
  if (choice().status != Status::kOk) return choice().status;
  const Kernel& kernel = *choice().kernel;
  const int64_t most = workers_of(a, threads);
  const Plan plan = make_plan(a, kernel, most);
  answer->key_block = plan.key_block;
  answer->key_blocks = plan.key_blocks;
  answer->query_ranges = plan.splits;
  answer->workers = most < plan.items ? most : plan.items;
  answer->block_rows = kernel.block_rows(a.keys < plan.key_block ? a.keys : plan.key_block);
  return Status::kOk;
}

Status attention(const Attention& a, int threads, ParallelFor parallel_for) {
  if (choice().status != Status::kOk) return choice().status;
  const int64_t rows = a.batch * a.heads * a.queries;
  if (rows == 0) return Status::kOk;
  if (a.keys == 0) {
    fill_empty(a);
    return Status::kOk;
  }
  const Kernel& kernel = *choice().kernel;
  const int64_t most = workers_of(a, threads);
  const Plan plan = make_plan(a, kernel, most);
  const auto run = [&](Queues& queues, int64_t worker, float* memory) {
    Workspace workspace = {memory, -1};
    for (int64_t item; (item = queues.take(worker)) >= 0;) {
      kernel.run(a, plan, item, queues.next_of(worker), workspace);
    }
  };
  return hand_out(plan.items, most, kernel.workspace(a, plan), parallel_for, run);
}

}  // namespace elsa
