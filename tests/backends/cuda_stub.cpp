// A CUDA driver that runs nothing: it gives out handles and writes every call to the file that
// STUB_LOG names, one line each. STUB_FAIL names a function that fails with error 2.
//
// A device pointer is an address of this process's memory; "memset" is carried out.
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <string>
#include <vector>

#include "driver.h"

using namespace elsa_cuda;

#define STUB extern "C" __attribute__((visibility("default")))

namespace {

std::mutex guard;
std::map<std::uintptr_t, std::string> names;  // of functions
std::uintptr_t next_handle = 16;
thread_local Context current = nullptr;

void say(const std::string& line) {
  const char* path = std::getenv("STUB_LOG");
  if (path == nullptr) return;
  const std::lock_guard<std::mutex> lock(guard);
  if (FILE* file = std::fopen(path, "a")) {
    std::fprintf(file, "%s\n", line.c_str());
    std::fclose(file);
  }
}

int answer(const char* name) {
  const char* failing = std::getenv("STUB_FAIL");
  return failing != nullptr && std::strcmp(failing, name) == 0 ? 2 : 0;
}

std::string number(std::uintptr_t value) { return std::to_string(value); }

std::string hex(const void* bytes, size_t size) {
  std::string text;
  char two[3];
  for (size_t i = 0; i < size; ++i) {
    std::snprintf(two, sizeof(two), "%02x", static_cast<const unsigned char*>(bytes)[i]);
    text += two;
  }
  return text;
}

// "name;4,8,8" ahead of the code: what a kernel is called, and the bytes of its parameters.
std::vector<size_t> sizes_of(const std::string& head) {
  std::vector<size_t> sizes;
  const char* at = head.c_str() + head.find(';');
  while (*at == ';' || *at == ',')
    sizes.push_back(std::strtoul(at + 1, const_cast<char**>(&at), 10));
  return sizes;
}

}  // namespace

STUB Result cuInit(unsigned) { return answer("cuInit"); }
STUB Result cuDeviceGetCount(int* count) {
  *count = 2;
  return answer("cuDeviceGetCount");
}
STUB Result cuDeviceGet(Device* device, int index) {
  *device = index;
  return answer("cuDeviceGet");
}
STUB Result cuDeviceGetAttribute(int* value, int attribute, Device device) {
  *value = attribute == 75 ? 9 : device;  // device 0 is sm_90, device 1 sm_91
  return answer("cuDeviceGetAttribute");
}
STUB Result cuDevicePrimaryCtxRetain(Context* context, Device device) {
  *context = reinterpret_cast<Context>(static_cast<std::uintptr_t>(device) + 1);
  return answer("cuDevicePrimaryCtxRetain");
}
STUB Result cuCtxGetCurrent(Context* context) {
  *context = current;
  return answer("cuCtxGetCurrent");
}
STUB Result cuCtxGetDevice(Device* device) {  // contexts 1001, 1002... are further ones of a device
  *device = static_cast<Device>(reinterpret_cast<std::uintptr_t>(current) % 1000 - 1);
  return answer("cuCtxGetDevice");
}
STUB Result cuCtxPushCurrent_v2(Context context) {
  current = context;
  say("push " + number(reinterpret_cast<std::uintptr_t>(context)));
  return answer("cuCtxPushCurrent");
}
STUB Result cuCtxPopCurrent_v2(Context* context) {
  *context = current;
  current = nullptr;
  say("pop");
  return answer("cuCtxPopCurrent");
}
STUB Result cuThreadExchangeStreamCaptureMode(int* mode) {
  return *mode >= 0 && *mode <= 2 ? answer("cuThreadExchangeStreamCaptureMode") : 1;
}

STUB Result cuModuleLoadData(Module* module, const void* code) {
  say(std::string("load ") + static_cast<const char*>(code));
  *module = reinterpret_cast<Module>(const_cast<void*>(code));
  return answer("cuModuleLoadData");
}
STUB Result cuModuleUnload(Module) {
  say("unload");
  return answer("cuModuleUnload");
}
STUB Result cuModuleGetFunction(Function* function, Module module, const char* name) {
  const std::lock_guard<std::mutex> lock(guard);
  *function = reinterpret_cast<Function>(next_handle);
  names[next_handle] = reinterpret_cast<const char*>(module);
  next_handle += 16;
  return std::strncmp(reinterpret_cast<const char*>(module), name, std::strlen(name)) != 0
             ? 500
             : answer("cuModuleGetFunction");
}
STUB Result cuFuncSetAttribute(Function, int attribute, int value) {
  say("attribute " + std::to_string(attribute) + " " + std::to_string(value));
  return answer("cuFuncSetAttribute");
}
STUB Result cuFuncSetCacheConfig(Function, int config) {
  say("cache " + std::to_string(config));
  return answer("cuFuncSetCacheConfig");
}
STUB Result cuLaunchKernelEx(const Config* config, Function function, void** params, void** extra) {
  std::string head;
  {
    const std::lock_guard<std::mutex> lock(guard);
    head = names[reinterpret_cast<std::uintptr_t>(function)];
  }
  std::string line = "launch " + head.substr(0, head.find(';'));
  for (const uint32_t n : config->grid) line += " " + std::to_string(n);
  for (const uint32_t n : config->block) line += " " + std::to_string(n);
  line += " " + std::to_string(config->shared_bytes) + " " +
          number(reinterpret_cast<std::uintptr_t>(config->stream)) + " [";
  for (uint32_t i = 0; i < config->attribute_count; ++i) {
    const Attribute& attribute = config->attributes[i];
    line +=
        (i == 0 ? "" : " ") + std::to_string(attribute.id) + ":" + hex(attribute.value.bytes, 12);
  }
  line += "]";
  const std::vector<size_t> sizes = sizes_of(head);
  for (size_t i = 0; i < sizes.size(); ++i) line += " " + hex(params[i], sizes[i]);
  say(line + (extra == nullptr ? "" : " extra"));
  return answer("cuLaunchKernelEx");
}
STUB Result cuMemsetD8Async(Address address, unsigned char value, size_t size, Stream stream) {
  std::memset(reinterpret_cast<void*>(address), value, size);
  say("memset " + number(address) + " " + std::to_string(size) + " " +
      number(reinterpret_cast<std::uintptr_t>(stream)));
  return answer("cuMemsetD8Async");
}
STUB Result cuGetErrorName(Result result, const char** name) {
  *name = result == 2 ? "CUDA_ERROR_OUT_OF_MEMORY" : nullptr;
  return 0;
}
STUB Result cuGetErrorString(Result result, const char** text) {
  *text = result == 2 ? "out of memory" : nullptr;
  return 0;
}

// What libtorch_cuda.so has: the stream of a device.
STUB int aoti_torch_get_current_cuda_stream(int32_t device, void** stream) {
  *stream = reinterpret_cast<void*>(static_cast<std::uintptr_t>(7000 + device));
  return 0;
}
// For tests: makes a context current in this thread.
STUB void stub_set_context(std::uintptr_t context) { current = reinterpret_cast<Context>(context); }
