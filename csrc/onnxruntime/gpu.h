// The operators on ONNX Runtime's CUDA provider: plans and kernels of the file beside this library,
// launched on the session's stream. Without ELSA_GPU the library is for the CPU alone: it asks less
// of the C and C++ libraries that it runs with.
#pragma once

#include "../elsa/window.h"
#include "common.h"

#ifndef ELSA_GPU

namespace elsa::ort {
namespace {

class Gpu {
 public:
  Gpu(const OrtApi*, const OrtKernelInfo*) {}
  void attention(const Context&, const Attention&, void*) const {}
  void window_attention(const Context&, const WindowAttention&) const {}
};
bool has_plans() { return false; }

}  // namespace
}  // namespace elsa::ort

#else

#include <dlfcn.h>

#include <algorithm>
#include <bit>
#include <fstream>
#include <iterator>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "../cuda/cache.h"
#include "../cuda/plan.h"
#include "../cuda/planfile.h"

namespace elsa::ort {
namespace {

using elsa_cuda::Address;

// lib/plans.elsa of a bundle.
class PlanFile {
 public:
  // Beside the library that `symbol` is of; called while that is registered: its path may be
  // relative to the directory that is the current one then.
  explicit PlanFile(const void* symbol) {
    Dl_info info;
    if (dladdr(symbol, &info) == 0 || info.dli_fname == nullptr) return;
    const std::unique_ptr<char, decltype(&free)> path(realpath(info.dli_fname, nullptr), free);
    if (path == nullptr) return;
    library_ = path.get();
    path_ = library_.substr(0, library_.rfind('/') + 1) + "plans.elsa";
  }

  bool exists() const { return !path_.empty() && std::ifstream(path_).good(); }

  // Opens the driver and reads the plans of this machine's GPUs, once. Throws std::runtime_error.
  void load() {
    const std::lock_guard<std::mutex> lock(guard_);
    if (loaded_) return;
    elsa_cuda::driver();
    std::ifstream file(path_, std::ios::binary);
    const std::vector<char> bytes{std::istreambuf_iterator<char>(file), {}};
    elsa_cuda::add_file(reinterpret_cast<const uint8_t*>(bytes.data()), bytes.size());
    // The driver keeps the kernels: this library must not be loaded again with none of them.
    dlopen(library_.c_str(), RTLD_NOW | RTLD_NOLOAD | RTLD_NODELETE);
    loaded_ = true;
  }

 private:
  std::string library_, path_;
  std::mutex guard_;
  bool loaded_ = false;
};

extern "C" __attribute__((visibility("default"))) OrtStatus* RegisterCustomOps(OrtSessionOptions*,
                                                                               const OrtApiBase*);

PlanFile& plan_file() {
  static auto& file = *new PlanFile(reinterpret_cast<const void*>(&RegisterCustomOps));
  return file;
}

bool has_plans() { return plan_file().exists(); }

// PyTorch's number of a dtype.
int32_t number_of(DType dtype) {
  return dtype == DType::kFloat32    ? 6
         : dtype == DType::kFloat16  ? 5
         : dtype == DType::kBFloat16 ? 15
                                     : 11;
}

// A call in the words of csrc/cuda/operators.cpp, without its device and its precision, which a
// bundle has one of.
class Call {
 public:
  explicit Call(const char* name) : name(name) {}

  // Null is no tensor. A stride of 0, which a View has where an axis has one element, is that of a
  // tensor without gaps: no pair of strides stands for two layouts.
  template <size_t kRank>
  void tensor(const void* data, DType dtype, const int64_t (&sizes)[kRank],
              const int64_t* strides = nullptr) {
    if (data == nullptr) return none();
    int64_t own[kRank], next = 1;
    for (size_t i = kRank; i-- > 0;) {
      own[i] = strides != nullptr && strides[i] != 0 ? strides[i] : next;
      next = own[i] * sizes[i];
    }
    const Address address = reinterpret_cast<Address>(data);
    elsa_cuda::add_tensor(key, address, number_of(dtype), {1, 0}, kRank, sizes, own);
    memcpy(sizes_[tensors], sizes, sizeof sizes);
    ranks_[tensors] = kRank;
    addresses[tensors++] = address;
  }
  void none() {
    elsa_cuda::add_no_tensor(key);
    addresses[tensors++] = 0;
  }
  void number(double value) { key.add(std::bit_cast<uint64_t>(value)); }
  void triple(const int64_t* values) {
    key.add(3);
    key.add(values, 3);
  }

  // "[2, 5, 48], [48]": the sizes of the tensors that are there.
  std::string shapes() const {
    std::string text;
    for (size_t t = 0; t < tensors; ++t) {
      for (size_t i = 0; i < ranks_[t]; ++i) {
        text += (i > 0 ? ", " : text.empty() ? "[" : ", [") + std::to_string(sizes_[t][i]);
      }
      if (ranks_[t] != 0) text += "]";
    }
    return text;
  }

  static constexpr size_t kMostTensors = 5;
  const char* const name;
  elsa_cuda::Key key;
  Address addresses[kMostTensors] = {};
  size_t tensors = 0;

 private:
  int64_t sizes_[kMostTensors][kMaxRank];
  size_t ranks_[kMostTensors] = {};
};

// What a kernel of the CUDA provider needs beside its attributes: its device and its memory.
class Gpu {
 public:
  Gpu(const OrtApi* api, const OrtKernelInfo* info) : api_(api) {
    plan_file().load();
    check(KernelInfoGetAllocator(api, info, kDefaultMemory, &allocator_));
    OrtStatus* failed = AllocatorGetInfo(api, allocator_, &memory_);
    if (failed == nullptr) failed = MemoryInfoGetId(api, memory_, &device_);
    if (failed != nullptr) {
      ReleaseAllocator(api, allocator_);
      throw Failure{failed};
    }
  }
  ~Gpu() { ReleaseAllocator(api_, allocator_); }
  Gpu(const Gpu&) = delete;

  void attention(const Context& c, const Attention& a, void* out) const {
    const int64_t query[4] = {a.batch, a.heads, a.queries, a.head_dim};
    const int64_t key[4] = {a.batch, a.kv_heads, a.keys, a.head_dim};
    const int64_t value[4] = {a.batch, a.kv_heads, a.keys, a.value_dim};
    const int64_t scores[4] = {a.batch, a.heads, a.queries, a.keys};
    int64_t mask[4];
    for (int i = 0; i < 4; ++i) mask[i] = a.mask.stride[i] != 0 ? scores[i] : 1;
    Call call("elsa::attention");
    call.tensor(a.query.data, a.query.dtype, query, a.query.stride);
    call.tensor(a.key.data, a.key.dtype, key, a.key.stride);
    call.tensor(a.value.data, a.value.dtype, value, a.value.stride);
    call.tensor(a.mask.data, a.mask.dtype, mask);
    call.key.add(a.causal ? 1 : 0);
    call.number(double{a.scale});
    const int64_t row = a.heads * a.value_dim;
    const int64_t size[4] = {a.batch, a.heads, a.queries, a.value_dim};
    const int64_t stride[4] = {a.queries * row, a.value_dim, row, 1};
    run(c, call, a.query.dtype, 4, size, stride, out);
  }

  void window_attention(const Context& c, const WindowAttention& a) const {
    const int64_t tokens = a.window[0] * a.window[1] * a.window[2];
    const int64_t channels = a.heads * a.head_dim;
    const int64_t qkv[5] = {a.batch, a.depth, a.height, a.width, 3 * channels};
    Call call("elsa::window_attention");
    call.tensor(a.qkv, a.dtype, qkv);
    call.tensor(a.bias.data, a.bias.dtype, {a.heads, tokens, tokens});
    call.none();  // the index of a table of biases
    call.tensor(a.pad_qkv, a.dtype, {3 * channels});
    call.tensor(a.logit_scale, DType::kFloat32, {a.heads});
    call.key.add(static_cast<uint64_t>(a.heads));
    call.triple(a.window);
    call.triple(a.shift);
    call.number(double{a.scale});
    call.number(double{a.mask_value});
    a.head_first ? call.key.add_text("head", 4) : call.key.add_text("qkv", 3);
    call.key.add(a.grid ? 1 : 0);
    const int64_t size[5] = {a.batch, a.depth, a.height, a.width, channels};
    int64_t stride[5] = {0, 0, 0, 0, 1};
    for (int i = 3; i >= 0; --i) stride[i] = stride[i + 1] * size[i + 1];
    run(c, call, a.dtype, 5, size, stride, a.out);
  }

 private:
  using Bound = elsa_cuda::Bound;

  static constexpr uint64_t kPart = 512;     // parts of the scratch begin at multiples of it
  static constexpr size_t kMostScratch = 4;  // the result, those of no use, and the workspace
  static uint64_t padded(uint64_t bytes) { return (bytes + kPart - 1) / kPart * kPart; }

  // Makes the launches of a call whose first result is `out`; of others there is no use.
  void run(const Context& c, const Call& call, DType dtype, size_t rank, const int64_t* sizes,
           const int64_t* strides, void* out) const {
    const elsa_cuda::Current current(device_);
    if (current.foreign()) {
      c.fail("the session's CUDA context is not the device's primary one");
    }
    const std::shared_ptr<const Bound> bound = find(c, call);
    const elsa_cuda::Plan& plan = bound->plan;
    Address slots[Call::kMostTensors + kMostScratch];
    bool same = plan.inputs == call.tensors && !plan.outputs.empty() &&
                plan.outputs.size() < kMostScratch && plan.outputs[0].dtype == number_of(dtype) &&
                plan.outputs[0].sizes.size() == rank;
    for (size_t i = 0; same && i < rank; ++i) {  // the stride of one element is any
      same = plan.outputs[0].sizes[i] == sizes[i] &&
             (sizes[i] == 1 || plan.outputs[0].strides[i] == strides[i]);
    }
    if (!same) {
      c.fail("the plan for ", call.shapes().c_str(), " is for another result");
    }
    // The layout of a call holds its tensors' alignments; results are planned as aligned ones.
    if (reinterpret_cast<Address>(out) % elsa_cuda::kAlignment != 0) {
      c.fail("the address of the result is no multiple of ", elsa_cuda::kAlignment);
    }
    uint64_t offsets[kMostScratch], total = 0;
    for (size_t i = 1; i <= plan.outputs.size(); ++i) {  // the last is the workspace
      offsets[i] = total;
      total += padded(i < plan.outputs.size() ? bytes_of(plan.outputs[i]) : plan.workspace);
    }
    void* stream = nullptr;
    check(KernelContext_GetGPUComputeStream(c.api, c.get(), &stream));
    // The runtime would read what orders its memory from a null pointer.
    if (stream == nullptr) c.fail("the session has no CUDA stream");
    // Memory that the stream orders: another stream gets it when this one is past it.
    void* memory = nullptr;
    if (total != 0) {
      check(KernelContext_GetScratchBuffer(c.api, c.get(), memory_, total, &memory));
      if (memory == nullptr) c.fail("no memory for ", total, " bytes of scratch");
    }
    const auto release = [this](void* held) {
      ReleaseStatus(api_, AllocatorFree(api_, allocator_, held));
    };
    const std::unique_ptr<void, decltype(release)> scratch(memory, release);
    std::copy_n(call.addresses, call.tensors, slots);
    slots[call.tensors] = reinterpret_cast<Address>(out);
    for (size_t i = 1; i <= plan.outputs.size(); ++i) {
      slots[call.tensors + i] = reinterpret_cast<Address>(memory) + offsets[i];
    }
    elsa_cuda::run(*bound, slots, static_cast<elsa_cuda::Stream>(stream));
  }

  // The plan of a call with its kernels on this device, kept from the first call of its layout on.
  std::shared_ptr<const Bound> find(const Context& c, const Call& call) const {
    static auto& cache = *new elsa_cuda::Cache<Bound>(4096);
    elsa_cuda::Key key = call.key;
    key.add_text(call.name, strlen(call.name));
    key.add(static_cast<uint64_t>(device_));
    if (!key.fits()) c.fail("tensors of too many dimensions");
    const auto found = cache.find(key.words());
    if (found.entry != nullptr) return found.entry;
    try {
      auto bound = std::make_shared<const Bound>(
          elsa_cuda::bind(elsa_cuda::find_plan(call.name, call.key.words(), device_), device_));
      cache.put(key.words(), found.generation, bound);
      return bound;
    } catch (const std::runtime_error& error) {
      // Whole: the end says what is served, and `fail` has a line of a limited length.
      throw std::runtime_error(std::string(c.name) + " of " + call.shapes() + " on sm_" +
                               std::to_string(elsa_cuda::arch_of(device_)) + ": " + error.what());
    }
  }

  const OrtApi* const api_;
  OrtAllocator* allocator_ = nullptr;
  const OrtMemoryInfo* memory_ = nullptr;
  int device_ = 0;
};

}  // namespace
}  // namespace elsa::ort

#endif
