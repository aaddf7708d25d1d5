#include "kernels.h"

#include <deque>
#include <map>
#include <mutex>
#include <stdexcept>
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

const Kernel* find_kernel(uint32_t number) {
  const std::lock_guard<std::mutex> lock(guard);
  return number < kernels.size() ? &kernels[number] : nullptr;
}

Function function_of(uint32_t number, Device device) {
  const std::lock_guard<std::mutex> lock(guard);
  Function& function = loaded[{number, device}];
  if (function == nullptr) function = load(kernels.at(number));
  return function;
}

void launch(const Kernel& kernel, Function function, const uint32_t grid[3], Stream stream,
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

}  // namespace elsa_cuda
