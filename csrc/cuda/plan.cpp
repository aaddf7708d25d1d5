#include "plan.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <string>
#include <utility>

namespace elsa_cuda {
namespace {

constexpr uint32_t kMagic = 0x4e4c5045;  // "EPLN"
constexpr uint32_t kVersion = 1;
constexpr uint32_t kMostInputs = 32;
constexpr uint32_t kMostOutputs = 16;
constexpr uint32_t kMostDims = 16;
constexpr uint32_t kMostSteps = 64;
constexpr uint32_t kMostArguments = 256;
constexpr uint32_t kMostArgumentBytes = 4096;  // of a CUDA kernel
constexpr uint64_t kMostBytes = uint64_t{1} << 46;
constexpr uint32_t kMostGrid[3] = {0x7fffffff, 65535, 65535};
// PyTorch's numbers: uint8, int8, int16, int32, int64, half, float, double, bool, bfloat16.
constexpr int kItemBytes[] = {1, 1, 2, 4, 8, 2, 4, 8, 0, 0, 0, 1, 0, 0, 0, 2};

constexpr char kWhat[] = "no plan: ";

[[noreturn]] void refuse(const std::string& why) { throw std::runtime_error(kWhat + why); }

}  // namespace

uint64_t bytes_of(const Output& output) {
  uint64_t last = 0;  // the element behind the first
  for (size_t i = 0; i < output.sizes.size(); ++i) {
    const int64_t size = output.sizes[i], stride = output.strides[i];
    if (size < 0 || stride < 0) refuse("an output has a negative size or stride");
    if (size == 0) return 0;
    if (static_cast<uint64_t>(size) > kMostBytes || static_cast<uint64_t>(stride) > kMostBytes) {
      refuse("an output is too large");
    }
    // No overflow: both factors are below 2**46 only together with the check of the quotient.
    const uint64_t steps = static_cast<uint64_t>(size) - 1;
    if (steps != 0 && static_cast<uint64_t>(stride) > kMostBytes / steps) {
      refuse("an output is too large");
    }
    last += steps * static_cast<uint64_t>(stride);
    if (last > kMostBytes) refuse("an output is too large");
  }
  const uint64_t item = static_cast<uint64_t>(kItemBytes[output.dtype]);
  if (last + 1 > kMostBytes / item) refuse("an output is too large");
  return (last + 1) * item;
}

namespace {

Output read_output(Reader& reader) {
  Output output;
  output.dtype = reader.read<int32_t>();
  const bool known = output.dtype >= 0 &&
                     static_cast<size_t>(output.dtype) < std::size(kItemBytes) &&
                     kItemBytes[output.dtype] != 0;
  if (!known) refuse("an output has an unknown dtype");
  const uint32_t dims = reader.count(kMostDims, "an output has too many dimensions");
  for (uint32_t i = 0; i < dims; ++i) output.sizes.push_back(reader.read<int64_t>());
  for (uint32_t i = 0; i < dims; ++i) output.strides.push_back(reader.read<int64_t>());
  return output;
}

// `sizes`: the bytes of each slot; those of inputs are not known.
Place read_place(Reader& reader, const std::vector<uint64_t>& sizes, uint64_t needed) {
  Place place;
  place.slot = reader.read<uint32_t>();
  place.offset = reader.read<uint64_t>();
  if (place.slot >= sizes.size()) refuse("a pointer names an unknown slot");
  const uint64_t size = sizes[place.slot];
  if (place.offset > size || needed > size - place.offset) refuse("a pointer leaves its memory");
  return place;
}

void read_argument(Reader& reader, const std::vector<uint64_t>& sizes, Step& step) {
  const uint32_t size = reader.read<uint32_t>();  // 0: a pointer
  const uint32_t bytes = size == 0 ? 8 : size;
  if (bytes != 1 && bytes != 2 && bytes != 4 && bytes != 8) refuse("an argument's size is unknown");
  const uint32_t at = (static_cast<uint32_t>(step.arguments.size()) + bytes - 1) / bytes * bytes;
  if (at + bytes > kMostArgumentBytes) refuse("a launch has too many bytes of arguments");
  step.arguments.resize(at + bytes);
  step.offsets.push_back(at);
  if (size == 0) {
    step.pointers.push_back({at, read_place(reader, sizes, 0)});
  } else {
    const uint64_t value = reader.read<uint64_t>();
    std::memcpy(step.arguments.data() + at, &value, bytes);
  }
}

Step read_step(Reader& reader, const std::vector<uint64_t>& sizes, uint32_t inputs) {
  Step step;
  const uint32_t kind = reader.read<uint32_t>();
  if (kind == 1) {
    step.bytes = reader.read<uint64_t>();
    if (step.bytes == 0) refuse("nothing is to be zeroed");
    step.zeroed = read_place(reader, sizes, step.bytes);
    if (step.zeroed.slot < inputs) refuse("an input is to be zeroed");
    return step;
  }
  if (kind != 0) refuse("a step is of an unknown kind");
  step.kernel = reader.read<uint32_t>();
  for (int i = 0; i < 3; ++i) {
    step.grid[i] = reader.count(kMostGrid[i], "a grid is too large");
    if (step.grid[i] == 0) refuse("a grid is empty");
  }
  const uint32_t arguments = reader.count(kMostArguments, "a launch has too many arguments");
  for (uint32_t i = 0; i < arguments; ++i) read_argument(reader, sizes, step);
  return step;
}

uint64_t bytes_behind_first(const Plan& plan) {
  uint64_t most = 0;
  for (uint32_t i = 1; i < plan.outputs.size(); ++i) {
    int steps = 0;
    for (const Step& step : plan.steps) {
      const auto names = [&](const Pointer& each) { return each.place.slot == plan.inputs + i; };
      const bool zeroed = step.bytes != 0 && step.zeroed.slot == plan.inputs + i;
      steps += zeroed || std::any_of(step.pointers.begin(), step.pointers.end(), names) ? 1 : 0;
    }
    if (steps > 1) return 0;
    most = std::max(most, bytes_of(plan.outputs[i]));
  }
  return most;
}

}  // namespace

Plan parse(const uint8_t* bytes, uint64_t size) {
  Reader reader(bytes, size, kWhat);
  if (reader.read<uint32_t>() != kMagic) refuse("the bytes begin otherwise");
  if (reader.read<uint32_t>() != kVersion) refuse("it is of another version");
  Plan plan;
  plan.inputs = reader.count(kMostInputs, "it has too many inputs");
  std::vector<uint64_t> sizes(plan.inputs, kMostBytes);
  const uint32_t outputs = reader.count(kMostOutputs, "it has too many outputs");
  for (uint32_t i = 0; i < outputs; ++i) {
    plan.outputs.push_back(read_output(reader));
    sizes.push_back(bytes_of(plan.outputs.back()));
  }
  plan.workspace = reader.read<uint64_t>();
  if (plan.workspace > kMostBytes) refuse("its workspace is too large");
  sizes.push_back(plan.workspace);
  const uint32_t steps = reader.count(kMostSteps, "it has too many steps");
  for (uint32_t i = 0; i < steps; ++i) plan.steps.push_back(read_step(reader, sizes, plan.inputs));
  if (!reader.ended()) refuse("bytes follow its end");
  return plan;
}

Bound bind(Plan plan, Device device) {
  Bound bound;
  bound.device = device;
  for (const Step& step : plan.steps) {
    const bool launches = step.bytes == 0;
    const Kernel* kernel = launches ? find_kernel(step.kernel) : nullptr;
    if (launches && kernel == nullptr) {
      throw std::runtime_error("a plan names kernel " + std::to_string(step.kernel) +
                               ", which was not added");
    }
    if (launches && step.grid[0] > kMostGrid[0] / kernel->cluster) refuse("a grid is too large");
    bound.kernels.push_back(kernel);
    bound.functions.push_back(launches ? function_of(step.kernel, device) : nullptr);
  }
  bound.spare_bytes = bytes_behind_first(plan);
  bound.plan = std::move(plan);
  return bound;
}

void run(const Bound& bound, const Address* slots, Stream stream) {
  alignas(8) uint8_t arguments[kMostArgumentBytes];
  void* params[kMostArguments];
  for (size_t i = 0; i < bound.plan.steps.size(); ++i) {
    const Step& step = bound.plan.steps[i];
    if (step.bytes != 0) {
      const Address address = slots[step.zeroed.slot] + step.zeroed.offset;
      check(driver().fill(address, 0, step.bytes, stream), "cuMemsetD8Async");
      continue;
    }
    if (!step.arguments.empty()) {
      std::memcpy(arguments, step.arguments.data(), step.arguments.size());
    }
    for (const Pointer& pointer : step.pointers) {
      const Address address = slots[pointer.place.slot] + pointer.place.offset;
      std::memcpy(arguments + pointer.at, &address, sizeof(address));
    }
    for (size_t j = 0; j < step.offsets.size(); ++j) params[j] = arguments + step.offsets[j];
    launch(*bound.kernels[i], bound.functions[i], step.grid, stream, params);
  }
}

}  // namespace elsa_cuda
