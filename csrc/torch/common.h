// What the operators share: dtypes, outputs, threads and errors through PyTorch's stable ABI.
#pragma once

#include <stdlib.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <array>

#include "../elsa/attention.h"

// Stable headers up to PyTorch 2.11 know it by its shorter name alone.
#ifndef STABLE_TORCH_ERROR_CODE_CHECK
#define STABLE_TORCH_ERROR_CODE_CHECK(call) TORCH_ERROR_CODE_CHECK(call)
#endif

namespace elsa_torch {
namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

elsa::DType dtype_of(ScalarType type, const char* name) {
  switch (type) {
    case ScalarType::Float:
      return elsa::DType::kFloat32;
    case ScalarType::Half:
      return elsa::DType::kFloat16;
    case ScalarType::BFloat16:
      return elsa::DType::kBFloat16;
    case ScalarType::Bool:
      return elsa::DType::kBool;
    default:
      STD_TORCH_CHECK(false, name,
                      ": the CPU kernel takes float32, float16 or bfloat16 tensors "
                      "(and boolean masks)");
  }
}

template <size_t N>
Tensor empty(const std::array<int64_t, N>& size, const std::array<int64_t, N>& stride,
             int32_t dtype) {
  AtenTensorHandle handle = nullptr;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(N, size.data(), stride.data(), dtype,
                                                         aoti_torch_device_type_cpu(), 0, &handle));
  return Tensor(handle);
}

// The same, dense.
template <size_t N>
Tensor empty(const std::array<int64_t, N>& size, int32_t dtype = aoti_torch_dtype_float32()) {
  std::array<int64_t, N> stride;
  int64_t step = 1;
  for (int i = N - 1; i >= 0; --i) {
    stride[i] = step;
    step *= size[i];
  }
  return empty<N>(size, stride, dtype);
}

int32_t dtype_code(const Tensor& tensor) {
  int32_t dtype = 0;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(tensor.get(), &dtype));
  return dtype;
}

// The memory of a float32 tensor; of an operand it is not written to.
float* floats(const Tensor& tensor) {
  return const_cast<float*>(static_cast<const float*>(tensor.const_data_ptr()));
}

// What comes back in place of a gradient that is not wanted.
Tensor nothing() { return empty<1>({0}); }

void parallel_for(int64_t count, elsa::Body body, void* context) {
  STABLE_TORCH_ERROR_CODE_CHECK(torch_parallel_for(0, count, 1, body, context));
}

// Calls solve(threads, parallel_for), a driver of csrc/elsa.
template <class Solve>
void run(const char* name, Solve solve) {
  const auto threads = static_cast<int>(torch::stable::get_num_threads());
  const elsa::Status status = solve(threads, parallel_for);
  if (status == elsa::Status::kOk) return;
  const char* isa = getenv("ELSA_CPU_ISA");
  STD_TORCH_CHECK(status != elsa::Status::kOutOfMemory, name,
                  ": out of memory for the per-thread workspace");
  STD_TORCH_CHECK(status != elsa::Status::kUnsupportedIsa, name, ": ELSA_CPU_ISA=", isa,
                  ", but this CPU lacks it; unset the variable");
  STD_TORCH_CHECK(false, name, ": ELSA_CPU_ISA=", isa,
                  " is unknown on this architecture; unset the variable");
}

}  // namespace
}  // namespace elsa_torch
