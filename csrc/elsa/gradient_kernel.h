// What one instruction set's gradient kernels offer to the driver. gradient_kernel.cpp is compiled
// once per set.
#pragma once

#include "gradient.h"
#include "window_kernel.h"

namespace elsa {

// How the windows of a problem are cut: an item is one head of a run of windows.
struct WindowGradientPlan {
  WindowPlan windows;
  int64_t runs;          // of windows; a function of shapes alone, for sums over windows follow it
  int64_t part;          // floats of an item's sums: of the bias, of padding, of logit_scale
  int64_t part_padding;  // offsets within
  int64_t part_scale;
  float* parts;  // [runs][heads][part]
};

struct GradientKernel {
  const char* name;
  int64_t (*attention_workspace)(const AttentionGradient& problem);  // in floats
  // One item: a key head of one batch entry and all query heads that share it.
  void (*attention)(const AttentionGradient& problem, int64_t item, float* workspace);
  int64_t (*window_workspace)(const WindowGradient& problem, const WindowGradientPlan& plan);
  void (*window)(const WindowGradient& problem, const WindowGradientPlan& plan, int64_t item,
                 float* workspace);
};

ELSA_DECLARE_KERNELS(GradientKernel);

}  // namespace elsa
