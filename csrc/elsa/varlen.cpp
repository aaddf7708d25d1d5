// How packed sequences are cut into items, and who works on them.
#include "varlen.h"

#include <string.h>

#include <algorithm>
#include <vector>

#include "gradient_kernel.h"
#include "kernel.h"
#include "work.h"

namespace elsa {
namespace {

// Items per thread, so that the last ones to finish are short beside the whole.
constexpr int64_t kItemsPerThread = 8;

View from_token(View view, int64_t token) {
  view.data =
      static_cast<const char*>(view.data) + token * view.stride[2] * element_size(view.dtype);
  return view;
}

Target from_token(Target target, int64_t token) {
  if (target.data) target.data += token * target.stride[2];
  return target;
}

// Sequence s of the packed ones as a problem of its own.
Attention sequence(const Attention& packed, const Sequences& at, int64_t s) {
  Attention a = packed;
  a.queries = at.query[s + 1] - at.query[s];
  a.keys = at.key[s + 1] - at.key[s];
  a.query = from_token(packed.query, at.query[s]);
  a.key = from_token(packed.key, at.key[s]);
  a.value = from_token(packed.value, at.key[s]);
  if (packed.out) {
    a.out = static_cast<char*>(packed.out) +
            at.query[s] * packed.heads * packed.value_dim * element_size(packed.query.dtype);
  }
  a.lse = packed.lse + at.query[s];
  a.lse_head = packed.queries;
  return a;
}

// A sequence's problem and the first of its items.
struct Forward {
  Attention problem;
  Plan plan;
  int64_t first;
  double scores;
};

struct Backward {
  AttentionGradient problem;
  int64_t first;
  double scores;
};

// Long sequences first: items are handed out in order, and short ones fill the gaps.
template <class Part>
void order(std::vector<Part>& parts) {
  std::stable_sort(parts.begin(), parts.end(),
                   [](const Part& x, const Part& y) { return x.scores > y.scores; });
}

template <class Part>
int64_t part_of(const std::vector<Part>& parts, int64_t item) {
  const auto after = std::upper_bound(parts.begin(), parts.end(), item,
                                      [](int64_t i, const Part& p) { return i < p.first; });
  return after - parts.begin() - 1;
}

// Zeros and -inf for queries without a key.
void fill_empty(const Attention& a) {
  const int64_t row = a.heads * a.value_dim * element_size(a.query.dtype);
  memset(a.out, 0, static_cast<size_t>(a.queries * row));
  for (int64_t h = 0; h < a.heads; ++h) {
    for (int64_t i = 0; i < a.queries; ++i) a.lse[lse_offset(a, 0, h) + i] = -__builtin_inff();
  }
}

int64_t split(const Attention& a, const Kernel& kernel, double target, Plan& plan) {
  const int64_t least = cut_keys(a, plan);
  const int64_t most = ceil_div(a.queries, kernel.row_tile);
  const int64_t wanted = target > 0.0 ? static_cast<int64_t>(scores_of(a) / target) + 1 : 1;
  plan.splits = std::max(least, std::min(wanted, most));
  plan.items = a.heads * plan.splits;
  return plan.items;
}

}  // namespace

Status varlen_attention(const Attention& packed, const Sequences& at, int threads,
                        ParallelFor parallel_for) {
  const Kernel* const kernel = attention_kernel();
  if (kernel == nullptr) return isa_status();
  if (packed.heads == 0) return Status::kOk;
  std::vector<Forward> parts;
  double scores = 0.0;
  for (int64_t s = 0; s < at.count; ++s) {
    const Attention a = sequence(packed, at, s);
    if (a.queries == 0) continue;
    if (a.keys == 0) {
      fill_empty(a);
      continue;
    }
    parts.push_back({a, {}, 0, scores_of(a)});
    scores += scores_of(a);
  }
  if (parts.empty()) return Status::kOk;
  order(parts);
  const double depth = static_cast<double>(packed.head_dim + packed.value_dim);
  const double all = scores * static_cast<double>(packed.heads);
  threads = static_cast<int>(worth_waking(all * depth, threads));
  const double target = threads > 1 ? all / static_cast<double>(threads * kItemsPerThread) : 0.0;
  int64_t items = 0, workspace = 0;
  for (Forward& part : parts) {
    part.first = items;
    items += split(part.problem, *kernel, target, part.plan);
    workspace = std::max(workspace, kernel->workspace(part.problem, part.plan));
  }
  Queues queues(items, 1);
  const auto run = [&](int64_t, float* memory) {
    Workspace own = {memory, -1};
    int64_t last = -1;
    for (int64_t item; (item = queues.take(0)) >= 0;) {
      const int64_t index = part_of(parts, item);
      const Forward& part = parts[index];
      if (index != last) own.packed_head = -1;  // packed keys are of another sequence
      last = index;
      kernel->run(part.problem, part.plan, item - part.first, -1, own);
    }
  };
  return share_out(std::min<int64_t>(threads, items), workspace, parallel_for, run);
}

Status varlen_gradient(const AttentionGradient& packed, const Sequences& at, int threads,
                       ParallelFor parallel_for) {
  const GradientKernel* const kernel = chosen(kEveryGradientKernel);
  if (kernel == nullptr) return isa_status();
  const Attention& all = packed.forward;
  if (all.heads == 0) return Status::kOk;
  std::vector<Backward> parts;
  double scores = 0.0;
  for (int64_t s = 0; s < at.count; ++s) {
    AttentionGradient g = packed;
    g.forward = sequence(all, at, s);
    g.out = from_token(packed.out, at.query[s]);
    g.grad_out = from_token(packed.grad_out, at.query[s]);
    if (packed.grad_lse) g.grad_lse = packed.grad_lse + at.query[s];
    g.query = from_token(packed.query, at.query[s]);
    g.key = from_token(packed.key, at.key[s]);
    g.value = from_token(packed.value, at.key[s]);
    const Attention& a = g.forward;
    if (a.queries == 0 || a.keys == 0) {
      clear_gradients(a, g.query, g.key, g.value);
      continue;
    }
    parts.push_back({g, 0, scores_of(a)});
    scores += scores_of(a);
  }
  if (parts.empty()) return Status::kOk;
  order(parts);
  int64_t items = 0, workspace = 0;
  for (Backward& part : parts) {
    part.first = items;
    items += all.kv_heads;
    workspace = std::max(workspace, kernel->attention_workspace(part.problem));
  }
  const double depth = static_cast<double>(3 * all.head_dim + 2 * all.value_dim);
  const double work = scores * depth * static_cast<double>(all.heads);
  threads = static_cast<int>(worth_waking(work, threads));
  Queues queues(items, 1);
  const auto run = [&](int64_t, float* memory) {
    for (int64_t item; (item = queues.take(0)) >= 0;) {
      const Backward& part = parts[part_of(parts, item)];
      kernel->attention(part.problem, item - part.first, memory);
    }
  };
  return share_out(std::min<int64_t>(threads, items), workspace, parallel_for, run);
}

}  // namespace elsa
