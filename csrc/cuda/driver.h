// The CUDA driver API, found at run time: building takes no CUDA toolkit, loading no driver.
#pragma once

#include <cstddef>
#include <cstdint>

namespace elsa_cuda {

using Result = int;
using Device = int;
using Address = unsigned long long;
using Context = struct OpaqueContext*;
using Module = struct OpaqueModule*;
using Function = struct OpaqueFunction*;
using Stream = struct OpaqueStream*;

// What of cuda.h is used, with its layouts and values (tests compare them with a real cuda.h).
constexpr uint32_t kCooperative = 2;
constexpr uint32_t kClusterDimension = 4;
constexpr uint32_t kClusterSchedulingPolicy = 5;
constexpr uint32_t kProgrammaticStreamSerialization = 6;
constexpr int kClusterSpread = 1;
constexpr int kMaxDynamicSharedBytes = 8;
constexpr int kNonPortableClusterAllowed = 14;
constexpr int kPreferShared = 1;
constexpr int kCaptureRelaxed = 2;

struct Attribute {  // CUlaunchAttribute
  uint32_t id;
  uint32_t pad;
  union {
    uint8_t bytes[64];
    int32_t number;
    uint32_t dimensions[3];
  } value;
};

struct Config {  // CUlaunchConfig
  uint32_t grid[3];
  uint32_t block[3];
  uint32_t shared_bytes;
  Stream stream;
  Attribute* attributes;
  uint32_t attribute_count;
};

#define ELSA_DRIVER_FUNCTIONS(F)                                         \
  F(init, "cuInit", unsigned)                                            \
  F(device_count, "cuDeviceGetCount", int*)                              \
  F(device_get, "cuDeviceGet", Device*, int)                             \
  F(device_attribute, "cuDeviceGetAttribute", int*, int, Device)         \
  F(primary_context, "cuDevicePrimaryCtxRetain", Context*, Device)       \
  F(current_context, "cuCtxGetCurrent", Context*)                        \
  F(current_device, "cuCtxGetDevice", Device*)                           \
  F(push_context, "cuCtxPushCurrent_v2", Context)                        \
  F(pop_context, "cuCtxPopCurrent_v2", Context*)                         \
  F(capture_mode, "cuThreadExchangeStreamCaptureMode", int*)             \
  F(load_module, "cuModuleLoadData", Module*, const void*)               \
  F(get_function, "cuModuleGetFunction", Function*, Module, const char*) \
  F(unload_module, "cuModuleUnload", Module)                             \
  F(set_attribute, "cuFuncSetAttribute", Function, int, int)             \
  F(set_cache, "cuFuncSetCacheConfig", Function, int)                    \
  F(launch, "cuLaunchKernelEx", const Config*, Function, void**, void**) \
  F(fill, "cuMemsetD8Async", Address, unsigned char, size_t, Stream)     \
  F(error_name, "cuGetErrorName", Result, const char**)                  \
  F(error_text, "cuGetErrorString", Result, const char**)

// The functions of one driver library.
struct Driver {
#define ELSA_FIELD(field, symbol, ...) Result (*field)(__VA_ARGS__);
  ELSA_DRIVER_FUNCTIONS(ELSA_FIELD)
#undef ELSA_FIELD
};

// Opens the driver library: libcuda.so.1, or the file that a test names. Throws
// std::runtime_error: none is there, it lacks a function, or it finds no device. A second call
// keeps what the first one opened.
void open_driver(const char* path = nullptr);

// The driver that was opened; opens libcuda.so.1 where that was not tried. Throws as
// `open_driver`, and again what that threw.
const Driver& driver();

// A function of the library that `open_driver` opened, or of libtorch_cuda.so where a process has
// loaded that; null where neither has it.
void* find_symbol(const char* name);

// Throws std::runtime_error "<what> failed: <name of the error> (<its text>)" unless result is 0.
void check(Result result, const char* what, const char* detail = "");

// Makes the primary context of a device the current one, and the former one at the end.
class Current {
 public:
  explicit Current(Device device);
  ~Current();
  Current(const Current&) = delete;
  Current& operator=(const Current&) = delete;
  // Whether another context of the same device was current (a green context, say): what was loaded
  // for the primary one must not be launched on its streams.
  bool foreign() const { return foreign_; }

 private:
  bool pushed_ = false;
  bool foreign_ = false;
};

}  // namespace elsa_cuda
