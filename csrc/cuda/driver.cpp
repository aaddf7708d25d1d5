#include "driver.h"

#include <dlfcn.h>

#include <atomic>
#include <mutex>
#include <stdexcept>
#include <string>

namespace elsa_cuda {
namespace {

// As many as PyTorch's own allocator takes.
constexpr int kMostDevices = 128;

std::mutex opening;
std::atomic<bool> opened{false};
std::string refusal;  // why the driver was not opened, once that was tried
Driver functions;
void* library = nullptr;
std::atomic<Context> primaries[kMostDevices];

template <typename F>
void load(void* from, const char* symbol, F& field) {
  field = reinterpret_cast<F>(dlsym(from, symbol));
  if (field == nullptr) {
    throw std::runtime_error(std::string("the CUDA driver has no ") + symbol +
                             ": it is older than CUDA 12");
  }
}

}  // namespace

void open_driver(const char* path) {
  const std::lock_guard<std::mutex> lock(opening);
  if (opened.load()) return;
  try {
    void* found = dlopen(path != nullptr ? path : "libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    if (found == nullptr) {
      const char* why = dlerror();
      throw std::runtime_error(std::string("no CUDA driver: ") +
                               (why != nullptr ? why : "unknown"));
    }
#define ELSA_LOAD(field, symbol, ...) load(found, symbol, functions.field);
    ELSA_DRIVER_FUNCTIONS(ELSA_LOAD)
#undef ELSA_LOAD
    const Result result = functions.init(0);
    if (result != 0) {
      const char* text = nullptr;
      functions.error_text(result, &text);
      throw std::runtime_error(std::string("the CUDA driver does not start: ") +
                               (text != nullptr ? text : std::to_string(result)));
    }
    library = found;
  } catch (const std::exception& error) {
    refusal = error.what();
    throw;
  }
  opened.store(true, std::memory_order_release);
}

const Driver& driver() {
  if (opened.load(std::memory_order_acquire)) return functions;
  {
    const std::lock_guard<std::mutex> lock(opening);
    if (!refusal.empty()) throw std::runtime_error(refusal);
  }
  open_driver();
  return functions;
}

void* find_symbol(const char* name) {
  driver();
  if (void* found = dlsym(library, name)) return found;
  void* torch = dlopen("libtorch_cuda.so", RTLD_LAZY | RTLD_NOLOAD);
  return torch == nullptr ? nullptr : dlsym(torch, name);
}

void check(Result result, const char* what, const char* detail) {
  if (result == 0) return;
  const char* name = nullptr;
  const char* text = nullptr;
  driver().error_name(result, &name);
  driver().error_text(result, &text);
  throw std::runtime_error(std::string(what) + (*detail != '\0' ? " of " : "") + detail +
                           " failed: " + (name != nullptr ? name : std::to_string(result)) + " (" +
                           (text != nullptr ? text : "unknown") + ")");
}

Current::Current(Device device) {
  if (device < 0 || device >= kMostDevices) {
    throw std::runtime_error("device " + std::to_string(device) + " is beyond the " +
                             std::to_string(kMostDevices) + " that are served");
  }
  Context wanted = primaries[device].load(std::memory_order_acquire);
  if (wanted == nullptr) {
    Device handle = 0;
    check(driver().device_get(&handle, device), "cuDeviceGet");
    check(driver().primary_context(&wanted, handle), "cuDevicePrimaryCtxRetain");
    primaries[device].store(wanted, std::memory_order_release);
  }
  Context now = nullptr;
  check(driver().current_context(&now), "cuCtxGetCurrent");
  if (now == wanted) return;
  if (now != nullptr) {
    Device of_now = -1;
    check(driver().current_device(&of_now), "cuCtxGetDevice");
    Device of_wanted = -2;
    check(driver().device_get(&of_wanted, device), "cuDeviceGet");
    foreign_ = of_now == of_wanted;
  }
  check(driver().push_context(wanted), "cuCtxPushCurrent");
  pushed_ = true;
}

Current::~Current() {
  Context gone = nullptr;
  if (pushed_) driver().pop_context(&gone);
}

}  // namespace elsa_cuda
