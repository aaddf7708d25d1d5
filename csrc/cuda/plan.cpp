#include "plan.h"

#include <cstring>
#include <deque>
#include <map>
#include <mutex>
#include <stdexcept>
#include <string>
#include <utility>

namespace elsa_cuda {
namespace {

constexpr uint32_t kMostThreads = 1024;
constexpr uint32_t kMostShared = 1 << 20;
constexpr uint32_t kMostCluster = 16;
// Above it a kernel must ask for its shared memory.
constexpr uint32_t kPlainShared = 48 << 10;
constexpr uint32_t kPortableCluster = 8;

std::mutex guard;
std::deque<Kernel> kernels;  // a deque: what it holds never moves
std::map<std::pair<uint32_t, Device>, Function> loaded;

// Lets this thread load kernels while a stream is captured, as PyTorch allocates memory then.
class Relaxed {
 public:
  Relaxed() { driver().capture_mode(&mode_); }
  ~Relaxed() { driver().capture_mode(&mode_); }
  Relaxed(const Relaxed&) = delete;
  Relaxed& operator=(const Relaxed&) = delete;

 private:
  int mode_ = kCaptureRelaxed;
};

Function load(const Kernel& kernel) {
  const Relaxed relaxed;
  const Driver& cuda = driver();
  const char* name = kernel.symbol.c_str();
  Module module = nullptr;
  check(cuda.load_module(&module, kernel.code.data()), "cuModuleLoadData", name);
  try {
    Function function = nullptr;
    check(cuda.get_function(&function, module, name), "cuModuleGetFunction", name);
    if (kernel.shared_bytes > kPlainShared) {
      check(cuda.set_cache(function, kPreferShared), "cuFuncSetCacheConfig", name);
      check(cuda.set_attribute(function, kMaxDynamicSharedBytes,
                               static_cast<int>(kernel.shared_bytes)),
            "cuFuncSetAttribute", name);
    }
    if (kernel.cluster > kPortableCluster) {
      check(cuda.set_attribute(function, kNonPortableClusterAllowed, 1), "cuFuncSetAttribute",
            name);
    }
    return function;
  } catch (...) {
    cuda.unload_module(module);
    throw;
  }
}

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

uint32_t add_kernel(Kernel kernel) {
  if (kernel.symbol.empty() || kernel.code.empty()) {
    throw std::runtime_error("a kernel needs a name and code");
  }
  if (kernel.threads == 0 || kernel.threads > kMostThreads || kernel.shared_bytes > kMostShared ||
      kernel.cluster == 0 || kernel.cluster > kMostCluster) {
    throw std::runtime_error("kernel " + kernel.symbol + ": " + std::to_string(kernel.threads) +
                             " threads, " + std::to_string(kernel.shared_bytes) +
                             " bytes of shared memory and clusters of " +
                             std::to_string(kernel.cluster) + " cannot be launched");
  }
  const std::lock_guard<std::mutex> lock(guard);
  kernels.push_back(std::move(kernel));
  return static_cast<uint32_t>(kernels.size() - 1);
}

// As Triton's own launcher does. params: where each argument lies.
static void launch(const Kernel& kernel, Function function, const uint32_t grid[3], Stream stream,
                   void** params) {
  Attribute attributes[4] = {};
  uint32_t count = 0;
  const auto add = [&](uint32_t id) -> Attribute& {
    attributes[count].id = id;
    return attributes[count++];
  };
  if (kernel.overlap) add(kProgrammaticStreamSerialization).value.number = 1;
  if (kernel.cooperative) add(kCooperative).value.number = 1;
  if (kernel.cluster > 1) {
    Attribute& dimension = add(kClusterDimension);
    dimension.value.dimensions[0] = kernel.cluster;
    dimension.value.dimensions[1] = dimension.value.dimensions[2] = 1;
    add(kClusterSchedulingPolicy).value.number = kClusterSpread;
  }
  const Config config = {{grid[0] * kernel.cluster, grid[1], grid[2]},
                         {kernel.threads, 1, 1},
                         kernel.shared_bytes,
                         stream,
                         attributes,
                         count};
  check(driver().launch(&config, function, params, nullptr), "cuLaunchKernelEx",
        kernel.symbol.c_str());
}

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
  for (uint32_t left = arguments; left > 0; --left) {
    const uint32_t size = reader.read<uint32_t>();  // 0: a pointer
    const uint32_t bytes = size == 0 ? 8 : size;
    if (bytes != 1 && bytes != 2 && bytes != 4 && bytes != 8) {
      refuse("an argument's size is unknown");
    }
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
  return step;
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
  for (uint32_t left = outputs; left > 0; --left) {
    Output& output = plan.outputs.emplace_back();
    output.dtype = reader.read<int32_t>();
    const bool known = output.dtype >= 0 &&
                       static_cast<size_t>(output.dtype) < std::size(kItemBytes) &&
                       kItemBytes[output.dtype] != 0;
    if (!known) refuse("an output has an unknown dtype");
    const uint32_t dims = reader.count(kMostDims, "an output has too many dimensions");
    for (uint32_t i = 0; i < dims; ++i) output.sizes.push_back(reader.read<int64_t>());
    for (uint32_t i = 0; i < dims; ++i) output.strides.push_back(reader.read<int64_t>());
    sizes.push_back(bytes_of(output));
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
  bound.kernels.resize(plan.steps.size());
  bound.functions.resize(plan.steps.size());
  const std::lock_guard<std::mutex> lock(guard);
  for (size_t i = 0; i < plan.steps.size(); ++i) {
    const Step& step = plan.steps[i];
    if (step.bytes != 0) continue;
    if (step.kernel >= kernels.size()) {
      throw std::runtime_error("a plan names kernel " + std::to_string(step.kernel) +
                               ", which was not added");
    }
    const Kernel& kernel = kernels[step.kernel];
    if (step.grid[0] > kMostGrid[0] / kernel.cluster) refuse("a grid is too large");
    Function& function = loaded[{step.kernel, device}];
    if (function == nullptr) function = load(kernel);
    bound.kernels[i] = &kernel;
    bound.functions[i] = function;
  }
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
