// What one instruction set's kernels of alpha-entmax offer to the driver. entmax_kernel.cpp is
// compiled once per set.
#pragma once

#include "entmax.h"
#include "kernel.h"

namespace elsa {

// Query rows whose lists exist at a time, at most: 16 MiB of scores and key numbers, which are
// touched as far as the lists reach, or one block of rows.
constexpr int64_t kEntmaxListFloats = 1 << 22;
constexpr int64_t kEntmaxMostRows = 512;

struct EntmaxKernel {
  const char* name;
  int64_t row_tile;                    // query rows of one register tile
  int64_t (*list_rows)(int64_t keys);  // query rows that an item may have at most
  int64_t (*workspace)(const Entmax& problem, const Plan& plan);  // in floats
  // One item: a range of query rows of one head.
  void (*run)(const Entmax& problem, const Plan& plan, int64_t item, Workspace& workspace);
  int64_t (*gradient_workspace)(const EntmaxGradient& problem, const Plan& plan);
  // One item: a key head of one batch entry and all query heads that share it.
  void (*gradient)(const EntmaxGradient& problem, const Plan& plan, int64_t item, float* memory);
};

ELSA_DECLARE_KERNELS(EntmaxKernel);

}  // namespace elsa
