// The operators that are served, the plans that are kept, and how a planned call runs.
#pragma once

#include <torch/csrc/inductor/aoti_torch/c/shim.h>

#include <array>
#include <atomic>
#include <memory>
#include <stdexcept>
#include <string>
#include <type_traits>

#include "cache.h"
#include "plan.h"

namespace elsa_cuda {

constexpr size_t kMostOperators = 16;
constexpr size_t kMostValues = 32;

struct Operator {
  std::string name, plan;
  // Of each argument: T tensor, O tensor or none, n integer, b boolean, d double, s string,
  // N integers, B booleans.
  std::string types;
  uint32_t results = 0;
  bool by_file = false;  // plans come from `find_plan` and not from Python
};

struct Entry {
  std::unique_ptr<const Bound> bound;  // null: such calls are not for this library
};

// A call of a Python function that is one of an operator, see python.cpp.
struct Admitted {
  std::shared_ptr<const Entry> entry;  // with a plan
  Output first;                        // the first result, as the function gives it
};

extern std::array<Operator, kMostOperators> operators;
extern size_t operator_count;
extern Cache<Entry> cache;
extern Cache<Admitted> admitted;     // forgotten with the plans
extern std::atomic<int64_t> served;  // calls that ran without Python's planners

inline void ask(AOTITorchError error, const char* what) {
  if (error != AOTI_TORCH_SUCCESS) {
    throw std::runtime_error(std::string("elsa: PyTorch refused ") + what);
  }
}

struct Delete {
  void operator()(AtenTensorHandle tensor) const { aoti_torch_delete_tensor_object(tensor); }
};
using Handle = std::unique_ptr<std::remove_pointer_t<AtenTensorHandle>, Delete>;

inline Address address_of(AtenTensorHandle tensor) {
  void* data = nullptr;
  ask(aoti_torch_get_data_ptr(tensor, &data), "an address");
  return reinterpret_cast<Address>(data);
}

// PyTorch's current stream of a device. Throws std::runtime_error.
Stream current_stream(Device device);

// Memory of PyTorch's allocator; empty where there is none.
Handle allocate(const Output& output, Where where);

// Runs a planned call: allocates `outputs`, at most kMostValues, and launches. first: what the
// first one is allocated as, of the plan's bytes; null: as the plan says. False: nothing was
// launched, for want of memory (PyTorch then says so itself) or in a context that is not PyTorch's.
bool run(const Bound& bound, const Address* inputs, Where where, Handle* outputs,
         const Output* first = nullptr);

}  // namespace elsa_cuda
