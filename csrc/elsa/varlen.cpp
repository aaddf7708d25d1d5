// How packed sequences are cut into items, and who works on them.
#include "varlen.h"

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

// A sequence's problem, the first of its items and what it weighs.
template <class Problem>
struct Part {
  Problem problem;
  int64_t first;
  double scores;
  Plan plan;  // of a forward
};

// The problems of sequences that have queries and keys, long ones first: items are handed out in
// order, and short ones fill the gaps.
template <class Problem>
struct Parts {
  std::vector<Part<Problem>> all;
  double scores = 0.0;
  int64_t items = 0, workspace = 0;

  void add(const Problem& problem, const Attention& a) {
    all.push_back({problem, 0, scores_of(a), {}});
    scores += scores_of(a);
  }
  // count(part): its items; floats(part): of workspace.
  template <class Count, class Floats>
  void order(Count count, Floats floats) {
    std::stable_sort(all.begin(), all.end(),
                     [](const auto& x, const auto& y) { return x.scores > y.scores; });
    for (Part<Problem>& part : all) {
      part.first = items;
      items += count(part);
      workspace = std::max(workspace, floats(part));
    }
  }
  // Calls start(memory), then its answer for the items that a worker takes, with their parts.
  template <class Start>
  Status share(int64_t threads, ParallelFor parallel_for, Start start) const {
    Queues queues(items, 1);
    const auto run = [&](int64_t, float* memory) {
      auto work = start(memory);
      for (int64_t item; (item = queues.take(0)) >= 0;) {
        const auto after =
            std::upper_bound(all.begin(), all.end(), item,
                             [](int64_t i, const Part<Problem>& p) { return i < p.first; });
        work(*(after - 1), item - (after - 1)->first);
      }
    };
    return share_out(std::min(threads, items), workspace, parallel_for, run);
  }
};

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
  Parts<Attention> parts;
  for (int64_t s = 0; s < at.count; ++s) {
    const Attention a = sequence(packed, at, s);
    if (a.keys == 0) {
      fill_empty(a);
    } else if (a.queries > 0) {
      parts.add(a, a);
    }
  }
  if (parts.all.empty()) return Status::kOk;
  const double depth = static_cast<double>(packed.head_dim + packed.value_dim);
  const double all = parts.scores * static_cast<double>(packed.heads);
  const int64_t most = worth_waking(all * depth, threads);
  const double target = most > 1 ? all / static_cast<double>(most * kItemsPerThread) : 0.0;
  parts.order([&](auto& part) { return split(part.problem, *kernel, target, part.plan); },
              [&](auto& part) { return kernel->workspace(part.problem, part.plan); });
  return parts.share(most, parallel_for, [&](float* memory) {
    return [&, own = Workspace{memory, -1}, last = static_cast<const void*>(nullptr)](
               const auto& part, int64_t item) mutable {
      if (&part != last) own.packed_head = -1;  // packed keys are of another sequence
      last = &part;
      kernel->run(part.problem, part.plan, item, -1, own);
    };
  });
}

Status varlen_gradient(const AttentionGradient& packed, const Sequences& at, int threads,
                       ParallelFor parallel_for) {
  const GradientKernel* const kernel = chosen(kEveryGradientKernel);
  if (kernel == nullptr) return isa_status();
  const Attention& all = packed.forward;
  if (all.heads == 0) return Status::kOk;
  Parts<AttentionGradient> parts;
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
    } else {
      parts.add(g, a);
    }
  }
  if (parts.all.empty()) return Status::kOk;
  parts.order([&](auto&) { return all.kv_heads; },
              [&](auto& part) { return kernel->attention_workspace(part.problem); });
  const double depth = static_cast<double>(3 * all.head_dim + 2 * all.value_dim);
  const double work = parts.scores * depth * static_cast<double>(all.heads);
  return parts.share(worth_waking(work, threads), parallel_for, [&](float* memory) {
    return [kernel, memory](const auto& part, int64_t item) {
      kernel->attention(part.problem, item, memory);
    };
  });
}

}  // namespace elsa
