// Compiled kernels, and planned calls as data: what they allocate and launch, with pointers named
// by slots.
#pragma once

#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "driver.h"

namespace elsa_cuda {

// A compiled kernel: its code and how it is launched.
struct Kernel {
  std::string symbol;
  std::vector<uint8_t> code;  // a cubin
  uint32_t threads = 0;       // of a block
  uint32_t shared_bytes = 0;  // of a block, dynamic
  uint32_t cluster = 1;       // blocks of a cluster, side by side along x
  bool overlap = false;       // may begin before the launch ahead of it ends
  bool cooperative = false;
};

// Keeps a kernel for the life of the process; its number. Throws std::runtime_error: it cannot be
// launched as it says.
uint32_t add_kernel(Kernel kernel);

// Reads bytes that anyone may have written, in order. `what` begins the text of what it throws.
class Reader {
 public:
  Reader(const uint8_t* bytes, uint64_t size, const char* what)
      : at_(bytes), left_(size), what_(what) {}

  const uint8_t* take(uint64_t size) {
    if (size > left_) refuse("the bytes end too soon");
    left_ -= size;
    return std::exchange(at_, at_ + size);
  }
  template <typename T>
  T read() {
    T value;
    std::memcpy(&value, take(sizeof(T)), sizeof(T));
    return value;
  }
  uint32_t count(uint32_t most, const char* why) {
    const uint32_t value = read<uint32_t>();
    if (value > most) refuse(why);
    return value;
  }
  std::string text() {
    const uint32_t size = count(4096, "a number is too large");
    return std::string(reinterpret_cast<const char*>(take(size)), size);
  }
  std::vector<uint8_t> block() {
    const uint64_t size = read<uint64_t>();
    const uint8_t* from = take(size);
    return std::vector<uint8_t>(from, from + size);
  }
  bool ended() const { return left_ == 0; }

 private:
  [[noreturn]] void refuse(const char* why) const {
    throw std::runtime_error(std::string(what_) + why);
  }
  const uint8_t* at_;
  uint64_t left_;
  const char* what_;
};

// A result: PyTorch's number of the dtype, sizes and strides in elements.
struct Output {
  int32_t dtype = 0;
  std::vector<int64_t> sizes;
  std::vector<int64_t> strides;
};

// What it takes from its first element to behind the last one. Throws std::runtime_error: too much.
uint64_t bytes_of(const Output& output);

// Where an address comes from. Slots: the operator's tensors in their order (absent ones too), then
// the outputs, then the workspace.
struct Place {
  uint32_t slot = 0;
  uint64_t offset = 0;  // bytes
};

struct Pointer {
  uint32_t at = 0;  // in Step::arguments
  Place place;
};

// A launch, or where `bytes` is not 0 memory that is set to zero.
struct Step {
  uint32_t kernel = 0;
  uint32_t grid[3] = {1, 1, 1};
  std::vector<uint8_t> arguments;  // one behind the other, each aligned to its size
  std::vector<uint32_t> offsets;   // of each argument
  std::vector<Pointer> pointers;
  Place zeroed;
  uint64_t bytes = 0;
};

struct Plan {
  uint32_t inputs = 0;
  std::vector<Output> outputs;
  uint64_t workspace = 0;  // bytes
  std::vector<Step> steps;

  uint32_t slots() const { return inputs + static_cast<uint32_t>(outputs.size()) + 1; }
};

// Reads a plan as elsa_core/backends/cuda/plan.py writes it. Throws std::runtime_error for bytes
// that are no plan: every length, slot, offset and size is checked, so that running what is
// returned reads no memory but its own, and writes none beyond outputs and workspace that it
// zeroes. What kernels do with their arguments is theirs.
Plan parse(const uint8_t* bytes, uint64_t size);

// A plan on a device: with the functions of its kernels.
struct Bound {
  Plan plan;
  Device device = 0;
  std::vector<const Kernel*> kernels;  // of each step, null where it zeroes
  std::vector<Function> functions;
};

// Loads what a plan launches, at its first use on a device, whose primary context is current.
// Throws std::runtime_error: a kernel is unknown or not loaded.
Bound bind(Plan plan, Device device);

// Makes the launches of a plan on a stream. slots: addresses, `plan.slots()` of them.
void run(const Bound& bound, const Address* slots, Stream stream);

}  // namespace elsa_cuda
