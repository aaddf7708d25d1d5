// Compiled kernels, and the functions that each device has loaded of them.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "driver.h"

namespace elsa_cuda {

// A compiled kernel: its code and how it is launched.
struct Kernel {
  std::string symbol;
  std::vector<uint8_t> code;  // a cubin, or PTX that ends with a zero
  uint32_t threads = 0;       // of a block
  uint32_t shared_bytes = 0;  // of a block, dynamic
  uint32_t cluster = 1;       // blocks of a cluster, side by side along x
  bool overlap = false;       // may begin before the launch ahead of it ends
  bool cooperative = false;
};

// Keeps a kernel for the life of the process; its number. Throws std::runtime_error: it cannot be
// launched as it says.
uint32_t add_kernel(Kernel kernel);

// A kernel by its number, or null. What it points to stays where it is.
const Kernel* find_kernel(uint32_t number);

// The function of a kernel on a device whose primary context is current; its module is loaded at
// the first call. Throws std::runtime_error.
Function function_of(uint32_t number, Device device);

// Launches a kernel, as Triton's own launcher does. params: where each argument lies.
void launch(const Kernel& kernel, Function function, const uint32_t grid[3], Stream stream,
            void** params);

}  // namespace elsa_cuda
