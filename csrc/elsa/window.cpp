// How a window problem is cut into items, and who works on them.
#include "window.h"

#include <string.h>

#include "kernel.h"
#include "pack.h"
#include "window_kernel.h"
#include "work.h"

namespace elsa {

WindowPlan window_geometry(const WindowAttention& a) {
  WindowPlan plan = {};
  const int64_t extent[3] = {a.depth, a.height, a.width};
  plan.tokens = 1;
  for (int i = 0; i < 3; ++i) {
    plan.extent[i] = extent[i];
    plan.roll[i] = a.shift[i] % extent[i];
    plan.windows[i] = ceil_div(extent[i], a.window[i]);
    plan.tokens *= a.window[i];
  }
  return plan;
}

bool prepare_window(const WindowAttention& a, WindowPlan& plan) {
  static thread_local Scratch pad_memory, bias_memory;
  const int64_t channels = 3 * a.heads * a.head_dim;
  plan.pad = static_cast<const char*>(a.pad_qkv);
  if (plan.pad == nullptr) {
    float* zeros = pad_memory.get(channels);
    if (zeros == nullptr) return false;
    memset(zeros, 0, static_cast<size_t>(channels) * sizeof(float));
    plan.pad = reinterpret_cast<const char*>(zeros);
  }
  if (a.bias.data == nullptr) return true;
  const View& bias = a.bias;
  if (bias.dtype == DType::kFloat32 && bias.stride[2] == 1) {
    plan.bias = static_cast<const float*>(bias.data);
    plan.bias_stride[0] = bias.stride[0];
    plan.bias_stride[1] = bias.stride[1];
    return true;
  }
  float* out = bias_memory.get(a.heads * plan.tokens * plan.tokens);
  if (out == nullptr) return false;
  plan.bias = out;
  plan.bias_stride[0] = plan.tokens * plan.tokens;
  plan.bias_stride[1] = plan.tokens;
  const View shifted = {bias.data, {0, bias.stride[0], bias.stride[1], bias.stride[2]}, bias.dtype};
  for (int64_t head = 0; head < a.heads; ++head) {
    const Matrix rows = matrix(shifted, 0, head);
    for (int64_t i = 0; i < plan.tokens; ++i, out += plan.tokens) {
      copy_row(rows, i, 0, plan.tokens, out);
    }
  }
  return true;
}

Status window_attention(const WindowAttention& a, int threads, ParallelFor parallel_for) {
  const WindowKernel* const kernel = chosen(kEveryWindowKernel);
  if (kernel == nullptr) return isa_status();
  if (a.batch * a.depth * a.height * a.width * a.heads * a.head_dim == 0) return Status::kOk;
  const double tokens = static_cast<double>(a.window[0] * a.window[1] * a.window[2]);
  const double rows = static_cast<double>(a.batch * a.depth * a.height * a.width);
  const double work_size = 2 * rows * tokens * static_cast<double>(a.heads * a.head_dim);
  const int64_t most = worth_waking(work_size, threads);
  WindowPlan plan = window_geometry(a);
  const int64_t heads = a.batch * a.heads * plan.windows[0] * plan.windows[1] * plan.windows[2];
  plan.splits = choose_splits(heads, plan.tokens, 1, kernel->row_tile, most);
  plan.items = heads * plan.splits;
  if (!prepare_window(a, plan)) return Status::kOutOfMemory;
  struct Worker {
    Queues& queues;
    int64_t index;
  };
  const auto take = [](void* context, int64_t* end) {
    const Worker& worker = *static_cast<const Worker*>(context);
    return worker.queues.take(worker.index, end);
  };
  const auto run = [&](Queues& queues, int64_t index, float* memory) {
    Worker worker = {queues, index};
    kernel->run(a, plan, memory, take, &worker);
  };
  return hand_out(plan.items, most, kernel->workspace(a, plan), parallel_for, run);
}

bool gather_bias(const View& table, int64_t rows, int64_t heads, const int64_t* index,
                 int64_t count, float* out) {
  for (int64_t i = 0; i < count; ++i) {
    if (index[i] < 0 || index[i] >= rows) return false;
  }
  const Matrix entries = {static_cast<const char*>(table.data), table.stride[0], table.stride[1],
                          table.dtype};
  for (int64_t head = 0; head < heads; ++head) {
    for (int64_t i = 0; i < count; ++i) {
      *out++ = read_element(entries.at(index[i], head), table.dtype);
    }
  }
  return true;
}

}  // namespace elsa
