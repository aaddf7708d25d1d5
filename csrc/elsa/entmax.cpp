// How problems of alpha-entmax are cut into items, and who works on them.
#include "entmax.h"

#include <string.h>

#include "entmax_kernel.h"
#include "work.h"

namespace elsa {
namespace {

int64_t workers_of(const Attention& a, int threads) {
  const double heads = static_cast<double>(a.batch * a.heads);
  return worth_waking(scores_of(a) * heads * static_cast<double>(a.head_dim), threads);
}

}  // namespace

Status entmax_attention(const Entmax& problem, int threads, ParallelFor parallel_for) {
  const EntmaxKernel* const kernel = chosen(kEveryEntmaxKernel);
  if (kernel == nullptr) return isa_status();
  const Attention& a = problem.attention;
  const int64_t rows = a.batch * a.heads * a.queries;
  if (rows == 0) return Status::kOk;
  if (a.keys == 0) {
    memset(a.out, 0, static_cast<size_t>(rows * a.value_dim * element_size(a.query.dtype)));
    memset(problem.rows, 0, static_cast<size_t>(3 * rows) * sizeof(float));
    for (int64_t i = 0; i < rows; ++i) problem.rows[i] = -__builtin_inff();
    return Status::kOk;
  }
  const int64_t tiles = tiles_of(a.queries) * tiles_of(a.keys);
  memset(problem.tiles, 0, static_cast<size_t>(a.batch * a.heads * tiles));
  const int64_t most = workers_of(a, threads);
  Plan plan = {};
  cut_keys(a, plan);
  const int64_t least = ceil_div(a.queries, kernel->list_rows(a.keys));
  plan.splits = choose_splits(a.batch * a.heads, a.queries, least, kernel->row_tile, most);
  plan.items = a.batch * a.heads * plan.splits;
  const auto run = [&](Queues& queues, int64_t worker, float* memory) {
    Workspace workspace = {memory, -1};
    for (int64_t item; (item = queues.take(worker)) >= 0;) {
      kernel->run(problem, plan, item, workspace);
    }
  };
  return hand_out(plan.items, most, kernel->workspace(problem, plan), parallel_for, run);
}

Status entmax_gradient(const EntmaxGradient& g, int threads, ParallelFor parallel_for) {
  const EntmaxKernel* const kernel = chosen(kEveryEntmaxKernel);
  if (kernel == nullptr) return isa_status();
  const Attention& a = g.forward.attention;
  const int64_t items = a.batch * a.kv_heads;
  if (items * a.queries * a.keys == 0) {
    clear_gradients(a, g.query, g.key, g.value);
    if (g.alpha) memset(g.alpha, 0, static_cast<size_t>(a.batch * a.heads) * sizeof(float));
    return Status::kOk;
  }
  const int64_t most = workers_of(a, threads);
  Plan plan = {};
  cut_keys(a, plan);
  plan.splits = ceil_div(a.queries, kernel->list_rows(a.keys));
  plan.items = items;
  return each_item(items, most, kernel->gradient_workspace(g, plan), parallel_for,
                   [&](int64_t item, float* memory) { kernel->gradient(g, plan, item, memory); });
}

}  // namespace elsa
