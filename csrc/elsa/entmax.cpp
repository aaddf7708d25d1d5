// How problems of alpha-entmax are cut into items, and who works on them.
#include "entmax.h"

#include <string.h>

#include "entmax_kernel.h"
#include "work.h"

namespace elsa {
namespace {

const EntmaxKernel* entmax_kernel() {
#if defined(__x86_64__) || defined(_M_X64)
  static const EntmaxKernel* const all[] = {&kEntmaxKernelAvx512, &kEntmaxKernelAvx2,
                                            &kEntmaxKernelBaseline};
#elif defined(__aarch64__)
  static const EntmaxKernel* const all[] = {&kEntmaxKernelNeon};
#else
  static const EntmaxKernel* const all[] = {&kEntmaxKernelBaseline};
#endif
  const char* name = isa_name();
  for (const EntmaxKernel* kernel : all) {
    if (name && strcmp(name, kernel->name) == 0) return kernel;
  }
  return nullptr;
}

// Items that workers take; `run(work, item, memory)` works on one.
struct Work {
  const Entmax* problem;
  const EntmaxGradient* gradient;  // null for the forward
  const EntmaxKernel& kernel;
  const Plan& plan;
  int64_t workspace;  // floats of each worker
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
    if (work.gradient) {
      work.kernel.gradient(*work.gradient, work.plan, item, workspace.memory);
    } else {
      work.kernel.run(*work.problem, work.plan, item, workspace);
    }
  }
}

int worth_waking(const Attention& a, int threads) {
  const double multiply_adds = static_cast<double>(a.batch * a.heads * a.queries) *
                               static_cast<double>(a.keys) * static_cast<double>(a.head_dim) *
                               (a.causal ? 0.5 : 1.0);
  return multiply_adds < kSerialWork || threads < 1 ? 1 : threads;
}

}  // namespace

Status entmax_attention(const Entmax& problem, int threads, ParallelFor parallel_for) {
  const EntmaxKernel* const kernel = entmax_kernel();
  if (kernel == nullptr) return isa_status();
  const Attention& a = problem.attention;
  const int64_t rows = a.batch * a.heads * a.queries;
  if (rows == 0) return Status::kOk;
  if (a.keys == 0) {
    const int64_t element = a.query.dtype == DType::kFloat32 ? 4 : 2;
    memset(a.out, 0, static_cast<size_t>(rows * a.value_dim * element));
    memset(problem.rows, 0, static_cast<size_t>(3 * rows) * sizeof(float));
    for (int64_t i = 0; i < rows; ++i) problem.rows[i] = -__builtin_inff();
    return Status::kOk;
  }
  const int64_t tiles = ceil_div(a.queries, kEntmaxTile) * ceil_div(a.keys, kEntmaxTile);
  memset(problem.tiles, 0, static_cast<size_t>(a.batch * a.heads * tiles));
  threads = worth_waking(a, threads);
  Plan plan = {};
  cut_keys(a, plan);
  const int64_t least = ceil_div(a.queries, kernel->list_rows(a.keys));
  plan.splits = choose_splits(a.batch * a.heads, a.queries, least, kernel->row_tile, threads);
  plan.items = a.batch * a.heads * plan.splits;
  const int64_t workers = threads < plan.items ? threads : plan.items;
  Work work = {&problem,
               nullptr,
               *kernel,
               plan,
               kernel->workspace(problem, plan),
               Queues(plan.items, workers)};
  return work_on(work, work_on_items, workers, parallel_for);
}

Status entmax_gradient(const EntmaxGradient& g, int threads, ParallelFor parallel_for) {
  const EntmaxKernel* const kernel = entmax_kernel();
  if (kernel == nullptr) return isa_status();
  const Attention& a = g.forward.attention;
  const int64_t items = a.batch * a.kv_heads;
  if (items * a.queries * a.keys == 0) {
    clear_gradients(a, g.query, g.key, g.value);
    if (g.alpha) memset(g.alpha, 0, static_cast<size_t>(a.batch * a.heads) * sizeof(float));
    return Status::kOk;
  }
  threads = worth_waking(a, threads);
  Plan plan = {};
  cut_keys(a, plan);
  plan.splits = ceil_div(a.queries, kernel->list_rows(a.keys));
  plan.items = items;
  const int64_t workers = threads < items ? threads : items;
  Work work = {
      &g.forward, &g, *kernel, plan, kernel->gradient_workspace(g, plan), Queues(items, workers)};
  return work_on(work, work_on_items, workers, parallel_for);
}

}  // namespace elsa
