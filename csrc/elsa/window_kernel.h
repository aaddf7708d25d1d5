// What one instruction set's window kernels offer to the driver. window_kernel.cpp is compiled once
// per set.
#pragma once

#include "kernel.h"
#include "window.h"

namespace elsa {

// How one problem is cut. Every field is a function of shapes and thread count alone, but for the
// two pointers.
struct WindowPlan {
  int64_t extent[3];   // depth, height, width
  int64_t windows[3];  // along each axis
  int64_t roll[3];     // the shift, below the extent
  int64_t tokens;      // of a window
  int64_t splits;      // query ranges per window and head
  int64_t items;       // batch * windows * heads * splits
  const float* bias;   // [heads, tokens, tokens] in bias_stride, rows dense; null for none
  int64_t bias_stride[2];
  const char* pad;  // the channels of a padded token
};

// A plan's geometry, of an image that is not empty; the rest is zero.
WindowPlan window_geometry(const WindowAttention& problem);

// Points the plan at what the kernels read besides qkv: converted where they cannot read it, in
// memory of the calling thread. False if there is none left.
bool prepare_window(const WindowAttention& problem, WindowPlan& plan);

struct WindowKernel {
  const char* name;
  int64_t row_tile;  // query rows of one register tile
  int64_t (*workspace)(const WindowAttention& problem, const WindowPlan& plan);  // in floats
  // Works on the items that take(context, &end) hands out, until it answers -1. Those up to `end`
  // are probably the next ones: their operands are fetched meanwhile.
  void (*run)(const WindowAttention& problem, const WindowPlan& plan, float* workspace,
              int64_t (*take)(void* context, int64_t* end), void* context);
};

ELSA_DECLARE_KERNELS(WindowKernel);

}  // namespace elsa
