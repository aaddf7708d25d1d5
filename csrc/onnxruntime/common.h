// What the operators share: tensors, attributes, threads and errors of ONNX Runtime.
//
// Inside the library an error is an exception; `guarded` turns it into a status at the border.
#pragma once

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <algorithm>
#include <initializer_list>
#include <memory>
#include <new>
#include <stdexcept>
#include <thread>
#include <type_traits>

#include "../elsa/sizes.h"
#include "abi.h"

namespace elsa::ort {
namespace {

struct Failure {
  OrtStatus* status;
};

void check(OrtStatus* status) {
  if (status) throw Failure{status};
}

// The error is the parts in a row: words and whole numbers.
template <class... Parts>
[[noreturn]] void fail(const OrtApi* api, const Parts&... parts) {
  char text[512];
  size_t used = 0;
  const auto add = [&](const auto& part) {
    if constexpr (std::is_integral_v<std::decay_t<decltype(part)>>) {
      snprintf(text + used, sizeof text - used, "%lld", static_cast<long long>(part));
    } else {
      snprintf(text + used, sizeof text - used, "%s", part);
    }
    used += strlen(text + used);
  };
  (add(parts), ...);
  OrtStatus* const status = CreateStatus(api, kInvalidArgument, text);
  throw Failure{status};
}

template <class Body>
OrtStatus* guarded(const OrtApi* api, Body&& body) noexcept {
  try {
    body();
    return nullptr;
  } catch (const Failure& failure) {
    return failure.status;
  } catch (const std::runtime_error& error) {
    return CreateStatus(api, kFail, error.what());
  } catch (...) {
    return CreateStatus(api, kFail, "elsa: out of memory");
  }
}

constexpr size_t kMaxRank = 5;

// A dense tensor; `data` is null for an optional input that is not there, or that is empty.
struct Tensor {
  bool present = false;
  const char* data = nullptr;
  ElementType type = kUndefined;
  size_t rank = 0;
  int64_t size[kMaxRank] = {};

  bool empty() const { return std::find(size, size + rank, 0) != size + rank; }
  bool is(std::initializer_list<int64_t> sizes) const {
    return std::equal(size, size + rank, sizes.begin(), sizes.end());
  }
  // Strides in elements; 0 along an axis of one element.
  void strides(int64_t* out) const {
    int64_t next = 1;
    for (size_t i = rank; i-- > 0; next *= size[i]) out[i] = size[i] == 1 ? 0 : next;
  }
};

class Gpu;  // see gpu.h

// One call of a kernel; `gpu` is null on the CPU.
class Context {
 public:
  Context(const OrtApi* api, OrtKernelContext* context, const char* name, const Gpu* gpu)
      : api(api), name(name), gpu(gpu), context_(context) {
    check(KernelContext_GetInputCount(api, context, &inputs_));
  }

  template <class... Parts>
  [[noreturn]] void fail(const Parts&... parts) const {
    ort::fail(api, name, ": ", parts...);
  }

  // Checked to be a tensor of at most kMaxRank dimensions.
  Tensor input(size_t index, const char* label) const {
    Tensor tensor;
    const OrtValue* value = nullptr;
    if (index < inputs_) check(KernelContext_GetInput(api, context_, index, &value));
    if (value == nullptr) return tensor;
    OrtTensorTypeAndShapeInfo* facts = nullptr;
    check(GetTensorTypeAndShape(api, value, &facts));
    const auto release = [this](auto* held) { ReleaseTensorTypeAndShapeInfo(api, held); };
    const std::unique_ptr<OrtTensorTypeAndShapeInfo, decltype(release)> info(facts, release);
    int type = kUndefined;
    check(GetTensorElementType(api, facts, &type));
    tensor.type = static_cast<ElementType>(type);
    dtype(tensor, label);
    check(GetDimensionsCount(api, facts, &tensor.rank));
    if (tensor.rank > kMaxRank) {
      fail(label, " has ", tensor.rank, " dimensions, at most ", kMaxRank, " are supported");
    }
    check(GetDimensions(api, facts, tensor.size, tensor.rank));
    if (product(tensor.size, tensor.rank) < 0) {
      fail(label, " has too many elements");
    }
    void* data = nullptr;
    check(GetTensorMutableData(api, const_cast<OrtValue*>(value), &data));
    tensor.data = static_cast<const char*>(data);
    tensor.present = true;
    return tensor;
  }

  Tensor required(size_t index, const char* label, size_t rank) const {
    const Tensor tensor = input(index, label);
    if (!tensor.present) fail(label, " is missing");
    if (tensor.rank != rank) {
      fail(label, " must have ", rank, " dimensions, has ", tensor.rank);
    }
    return tensor;
  }

  void* output(const int64_t* size, size_t rank) const {
    OrtValue* value = nullptr;
    void* data = nullptr;
    check(KernelContext_GetOutput(api, context_, 0, size, rank, &value));
    check(GetTensorMutableData(api, value, &data));
    return data;
  }

  DType dtype(const Tensor& tensor, const char* label) const {
    if (tensor.type == kFloat) return DType::kFloat32;
    if (tensor.type == kFloat16) return DType::kFloat16;
    if (tensor.type == kBFloat16) return DType::kBFloat16;
    if (tensor.type == kBool) return DType::kBool;
    fail(label, " must be float, float16, bfloat16 or (a mask) bool, not ONNX type ",
         static_cast<int>(tensor.type));
  }

  // Runs `compute(threads, parallel_for)` with the threads of the session. The C API does not say
  // how many the pool has: the machine's number bounds it, and workers without a thread of their
  // own find no work left.
  template <class Compute>
  void run(Compute&& compute) {
    static const int threads = std::max(1, static_cast<int>(std::thread::hardware_concurrency()));
    Context* const outer = current_;
    current_ = this;
    const Status status = compute(threads, parallel_for);
    current_ = outer;
    if (status == Status::kOutOfMemory) throw std::bad_alloc();
    if (status != Status::kOk) {
      const char* isa = getenv("ELSA_CPU_ISA");
      fail("ELSA_CPU_ISA=", isa ? isa : "",
           " is unknown, or this CPU lacks it; unset the variable");
    }
    check(parallel_status_);
  }

  OrtKernelContext* get() const { return context_; }

  const OrtApi* const api;
  const char* const name;
  const Gpu* const gpu;

 private:
  struct Job {
    Body body;
    void* context;
  };

  static void parallel_for(int64_t count, Body body, void* context) {
    Job job = {body, context};
    const auto one = [](void* data, size_t index) {
      const Job& job = *static_cast<const Job*>(data);
      const int64_t i = static_cast<int64_t>(index);
      job.body(i, i + 1, job.context);
    };
    current_->parallel_status_ = KernelContext_ParallelFor(current_->api, current_->context_, one,
                                                           static_cast<size_t>(count), 0, &job);
  }

  static thread_local Context* current_;
  OrtKernelContext* const context_;
  OrtStatus* parallel_status_ = nullptr;
  size_t inputs_ = 0;
};
thread_local Context* Context::current_ = nullptr;

// The attributes of a node; one that is missing keeps its default.
class Attributes {
 public:
  Attributes(const OrtApi* api, const OrtKernelInfo* info) : api_(api), info_(info) {}

  int64_t integer(const char* name, int64_t missing) const {
    int64_t value = missing;
    return found(KernelInfoGetAttribute_int64(api_, info_, name, &value)) ? value : missing;
  }
  float number(const char* name, float missing) const {
    float value = missing;
    return found(KernelInfoGetAttribute_float(api_, info_, name, &value)) ? value : missing;
  }
  // Whether the attribute is there and has exactly three entries.
  bool triple(const char* name, int64_t* out) const {
    size_t size = 0;
    if (!found(KernelInfoGetAttributeArray_int64(api_, info_, name, nullptr, &size))) return false;
    return size == 3 && found(KernelInfoGetAttributeArray_int64(api_, info_, name, out, &size));
  }
  bool equals(const char* name, const char* wanted) const {
    char text[16] = {};
    size_t size = sizeof text;
    return found(KernelInfoGetAttribute_string(api_, info_, name, text, &size)) &&
           strcmp(text, wanted) == 0;
  }

 private:
  bool found(OrtStatus* status) const {
    if (status == nullptr) return true;
    ReleaseStatus(api_, status);
    return false;
  }
  const OrtApi* const api_;
  const OrtKernelInfo* const info_;
};

// Memory that a thread keeps between calls: fresh pages cost more than a small attention.
template <class Tag>
char* scratch(size_t bytes) {
  struct Block {
    ~Block() { free(memory); }
    char* memory = nullptr;
    size_t size = 0;
  };
  static thread_local Block block;
  if (bytes > block.size) {
    free(block.memory);
    block.memory = static_cast<char*>(malloc(bytes));
    block.size = block.memory ? bytes : 0;
    if (block.memory == nullptr) throw std::bad_alloc();
  }
  return block.memory;
}

// An operator of one name for one element type on one provider, null for the CPU's. A Kernel offers
// kLabel (what errors call it), kInputs, kRequired (how many of them every node has), kFree (the
// first whose type may differ from the operator's), a constructor from Attributes, and
// compute(Context&).
template <class Kernel>
struct Operator : OrtCustomOp {
  Operator(const char* name, ElementType type, const char* provider)
      : OrtCustomOp{}, name(name), type(type), provider(provider) {
    version = provider == nullptr ? kApiVersion : kGpuApiVersion;
    GetName = [](const OrtCustomOp* self) { return static_cast<const Operator*>(self)->name; };
    GetExecutionProviderType = [](const OrtCustomOp* self) {
      return static_cast<const Operator*>(self)->provider;
    };
    GetInputTypeCount = [](const OrtCustomOp*) { return Kernel::kInputs; };
    GetInputType = [](const OrtCustomOp* self, size_t index) -> int {
      return index >= Kernel::kFree ? kUndefined : static_cast<const Operator*>(self)->type;
    };
    GetOutputTypeCount = [](const OrtCustomOp*) { return size_t{1}; };
    GetOutputType = [](const OrtCustomOp* self, size_t) -> int {
      return static_cast<const Operator*>(self)->type;
    };
    GetInputCharacteristic = [](const OrtCustomOp*, size_t index) -> int {
      return index < Kernel::kRequired ? ort::kRequired : ort::kOptional;
    };
    GetOutputCharacteristic = [](const OrtCustomOp*, size_t) -> int { return ort::kRequired; };
    GetInputMemoryType = [](const OrtCustomOp*, size_t) { return 0; };
    GetVariadicInputMinArity = [](const OrtCustomOp*) { return 1; };
    GetVariadicInputHomogeneity = [](const OrtCustomOp*) { return 0; };
    GetVariadicOutputMinArity = [](const OrtCustomOp*) { return 1; };
    GetVariadicOutputHomogeneity = [](const OrtCustomOp*) { return 0; };
    GetStartVersion = [](const OrtCustomOp*) { return 1; };
    GetEndVersion = [](const OrtCustomOp*) { return INT32_MAX; };
    CreateKernelV2 = [](const OrtCustomOp* self, const OrtApi* api, const OrtKernelInfo* info,
                        void** kernel) {
      const bool on_gpu = static_cast<const Operator*>(self)->provider != nullptr;
      return guarded(api, [&] {
        auto gpu = on_gpu ? std::make_unique<const Gpu>(api, info) : nullptr;
        *kernel = new Instance{Kernel(api, Attributes(api, info)), api, std::move(gpu)};
      });
    };

    KernelComputeV2 = [](void* kernel, OrtKernelContext* context) {
      const Instance& instance = *static_cast<const Instance*>(kernel);
      return guarded(instance.api, [&] {
        Context call(instance.api, context, Kernel::kLabel, instance.gpu.get());
        instance.kernel.compute(call);
      });
    };
    KernelDestroy = [](void* kernel) { delete static_cast<Instance*>(kernel); };
  }

  struct Instance {
    const Kernel kernel;
    const OrtApi* const api;
    const std::unique_ptr<const Gpu> gpu;
  };
  const char* const name;
  const ElementType type;
  const char* const provider;
};

}  // namespace
}  // namespace elsa::ort
