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

struct Candidate {
  const Kernel* kernel;
  bool supported;
};

Choice choose() {
#if defined(__x86_64__) || defined(_M_X64)
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                    __builtin_cpu_supports("f16c");
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") &&
                      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512dq");
  const Candidate candidates[] = {
      {&kKernelAvx512, avx512}, {&kKernelAvx2, avx2}, {&kKernelBaseline, true}};
#elif defined(__aarch64__)
  const Candidate candidates[] = {{&kKernelNeon, true}};
#else
  const Candidate candidates[] = {{&kKernelBaseline, true}};
#endif
  const char* wanted = getenv("ELSA_CPU_ISA");
  const bool any = wanted == nullptr || *wanted == '\0';
  for (const Candidate& c : candidates) {
    if (any ? c.supported : strcmp(wanted, c.kernel->name) == 0) {
      if (!c.supported) return {nullptr, Status::kUnsupportedIsa};
      return {c.kernel, Status::kOk};
    }
  }
  return {nullptr, Status::kUnknownIsa};
}

const Choice& choice() {
  static const Choice chosen = choose();
  return chosen;
}

constexpr int64_t kMaxPackedFloats = 1 << 19;  // 2 MiB: about what a core's own cache holds

int64_t round_up(int64_t a, int64_t b) { return ceil_div(a, b) * b; }

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

// Threads that a problem of this size is worth waking.
int worth_waking(const Attention& a, int threads) {
  const double multiply_adds =
      static_cast<double>(a.batch * a.heads * a.queries) * static_cast<double>(a.keys) *
      static_cast<double>(a.head_dim + a.value_dim) * (a.causal ? 0.5 : 1.0);
  return multiply_adds < kSerialWork || threads < 1 ? 1 : threads;
}

struct Work {
  const Attention& problem;
  const Kernel& kernel;
  const Plan& plan;
  const int64_t workspace;  // floats of each worker
  Queues queues;
  std::atomic<bool> out_of_memory{false};
};

void work_on_items(int64_t worker, int64_t, void* context) {
  Work& work = *static_cast<Work*>(context);
  static thread_local Scratch scratch;
  Workspace workspace = {scratch.get(work.workspace), -1};
  if (workspace.memory == nullptr) {
    work.out_of_memory = true;
    return;
  }
  for (int64_t item; (item = work.queues.take(worker)) >= 0;) {
    work.kernel.run(work.problem, work.plan, item, work.queues.next_of(worker), workspace);
  }
}

int64_t element_size(DType dtype) { return dtype == DType::kFloat32 ? 4 : 2; }

void fill_empty(const Attention& a) {
  const int64_t rows = a.batch * a.heads * a.queries;
  memset(a.out, 0, static_cast<size_t>(rows * a.value_dim * element_size(a.query.dtype)));
  for (int64_t i = 0; i < rows; ++i) a.lse[i] = -__builtin_inff();
  if (a.lse_low) memset(a.lse_low, 0, static_cast<size_t>(rows) * sizeof(float));
}

}  // namespace

const Kernel* attention_kernel() { return choice().kernel; }

int64_t cut_keys(const Attention& a, Plan& plan) {
  plan.key_blocks = ceil_div(a.keys, kMaxKeyBlock);
  plan.key_block = round_up(ceil_div(a.keys, plan.key_blocks), kKeyGranule);
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
  threads = worth_waking(a, threads);
  const Plan plan = make_plan(a, kernel, threads);
  answer->key_block = plan.key_block;
  answer->key_blocks = plan.key_blocks;
  answer->query_ranges = plan.splits;
  answer->workers = threads < plan.items ? threads : plan.items;
  answer->block_rows = kernel.block_rows(a.keys < plan.key_block ? a.keys : plan.key_block);
  answer->sum_chain = kernel.sum_chain;
  answer->workspace_bytes = kernel.workspace(a, plan) * static_cast<int64_t>(sizeof(float));
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
  threads = worth_waking(a, threads);

  const Kernel& kernel = *choice().kernel;
  const Plan plan = make_plan(a, kernel, threads);
  const int64_t workers = threads < plan.items ? threads : plan.items;
  Work work = {a, kernel, plan, kernel.workspace(a, plan), Queues(plan.items, workers)};
  return work_on(work, work_on_items, workers, parallel_for);
}

}  // namespace elsa
