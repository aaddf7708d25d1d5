// How the gradients of a problem are cut into items, and who works on them.
#include "gradient.h"

#include <string.h>

#include "gradient_kernel.h"
#include "work.h"

namespace elsa {
namespace {

constexpr int64_t kItems = 64;           // of windows, at least, where there are as many
constexpr int64_t kMostParts = 4 << 20;  // floats of all items' sums

WindowGradientPlan make_plan(const WindowAttention& a) {
  WindowGradientPlan plan = {};
  plan.windows = window_geometry(a);
  const int64_t* along = plan.windows.windows;
  const int64_t windows = a.batch * along[0] * along[1] * along[2];
  const int64_t tokens = plan.windows.tokens;
  plan.part_padding = tokens * tokens;
  plan.part_scale = plan.part_padding + 3 * a.head_dim;
  plan.part = (plan.part_scale + 2 + 15) / 16 * 16;
  int64_t runs = ceil_div(kItems, a.heads);
  const int64_t most = kMostParts / (plan.part * a.heads);
  runs = runs < most ? runs : most;
  runs = runs < windows ? runs : windows;
  plan.runs = runs < 1 ? 1 : runs;
  return plan;
}

// Adds up the items' parts, run after run.
void add_parts(const WindowGradient& g, const WindowGradientPlan& plan) {
  const WindowAttention& a = g.forward;
  const int64_t area = plan.windows.tokens * plan.windows.tokens;
  const int64_t channels = 3 * a.heads * a.head_dim;
  if (g.bias) memset(g.bias, 0, static_cast<size_t>(a.heads * area) * sizeof(float));
  if (g.pad_qkv) memset(g.pad_qkv, 0, static_cast<size_t>(channels) * sizeof(float));
  const float* part = plan.parts;
  for (int64_t run = 0; run < plan.runs; ++run) {
    for (int64_t head = 0; head < a.heads; ++head, part += plan.part) {
      for (int64_t i = 0; g.bias && i < area; ++i) g.bias[head * area + i] += part[i];
      for (int64_t which = 0; g.pad_qkv && which < 3; ++which) {
        const int64_t place = a.head_first ? 3 * head + which : which * a.heads + head;
        const float* const sum = part + plan.part_padding + which * a.head_dim;
        for (int64_t d = 0; d < a.head_dim; ++d) g.pad_qkv[place * a.head_dim + d] += sum[d];
      }
    }
  }
  for (int64_t head = 0; g.logit_scale && head < a.heads; ++head) {
    double sum = 0.0;
    for (int64_t run = 0; run < plan.runs; ++run) {
      const float* const own = plan.parts + (run * a.heads + head) * plan.part + plan.part_scale;
      sum += static_cast<double>(own[0]) + own[1];
    }
    g.logit_scale[head] = static_cast<float>(sum);
  }
}

void clear(const Target& target, int64_t batch, int64_t heads, int64_t rows, int64_t columns) {
  // an operand without elements has any number of heads
  if (target.data == nullptr || batch * heads * rows * columns == 0) return;
  const int64_t* s = target.stride;
  for (int64_t b = 0; b < batch; ++b) {
    for (int64_t h = 0; h < heads; ++h) {
      for (int64_t i = 0; i < rows; ++i) {
        for (int64_t d = 0; d < columns; ++d) {
          target.data[b * s[0] + h * s[1] + i * s[2] + d * s[3]] = 0.0f;
        }
      }
    }
  }
}

}  // namespace

void clear_gradients(const Attention& a, const Target& query, const Target& key,
                     const Target& value) {
  clear(query, a.batch, a.heads, a.queries, a.head_dim);
  clear(key, a.batch, a.kv_heads, a.keys, a.head_dim);
  clear(value, a.batch, a.kv_heads, a.keys, a.value_dim);
}

Status attention_gradient(const AttentionGradient& g, int threads, ParallelFor parallel_for) {
  const GradientKernel* const kernel = chosen(kEveryGradientKernel);
  if (kernel == nullptr) return isa_status();
  const Attention& a = g.forward;
  const int64_t items = a.batch * a.kv_heads;
  if (items * a.queries * a.keys == 0) {
    clear_gradients(a, g.query, g.key, g.value);
    return Status::kOk;
  }
  const double work_size = static_cast<double>(a.batch * a.heads * a.queries) *
                           static_cast<double>(a.keys) *
                           static_cast<double>(3 * a.head_dim + 2 * a.value_dim);
  return each_item(items, worth_waking(work_size, threads), kernel->attention_workspace(g),
                   parallel_for,
                   [&](int64_t item, float* memory) { kernel->attention(g, item, memory); });
}

Status window_gradient(const WindowGradient& given, int threads, ParallelFor parallel_for) {
  WindowGradient g = given;
  g.forward.out = const_cast<float*>(g.grad_out);  // where find_tokens points: read, not written
  const GradientKernel* const kernel = chosen(kEveryGradientKernel);
  if (kernel == nullptr) return isa_status();
  const WindowAttention& a = g.forward;
  if (a.heads * a.head_dim == 0) return Status::kOk;
  WindowGradientPlan plan = {};
  if (a.batch * a.depth * a.height * a.width == 0) {
    plan.windows.tokens = a.window[0] * a.window[1] * a.window[2];
    add_parts(g, plan);
    return Status::kOk;
  }
  plan = make_plan(a);
  static thread_local Scratch parts;
  plan.parts = parts.get(plan.runs * a.heads * plan.part);
  if (plan.parts == nullptr || !prepare_window(a, plan.windows)) return Status::kOutOfMemory;
  const double rows = static_cast<double>(a.batch * a.depth * a.height * a.width);
  const double work_size = 5 * rows * static_cast<double>(plan.windows.tokens) *
                           static_cast<double>(a.heads * a.head_dim);
  const Status status = each_item(
      plan.runs * a.heads, worth_waking(work_size, threads), kernel->window_workspace(g, plan),
      parallel_for, [&](int64_t item, float* memory) { kernel->window(g, plan, item, memory); });
  if (status == Status::kOk) add_parts(g, plan);
  return status;
}

}  // namespace elsa
