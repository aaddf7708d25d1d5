// Operators on CUDA devices through PyTorch's stable ABI: no Python, ATen or c10 symbol.
//
// A call whose layout was planned runs here. Any other goes to `elsa::<name>_plan`, which computes
// it and returns one tensor more: what is to be kept for the layout (see `keep`). It takes one
// argument more, too: whether the layout is kept as none for this library.
#include "operators.h"

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/library.h>

#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <utility>

#include "planfile.h"

namespace elsa_cuda {

std::array<Operator, kMostOperators> operators;
size_t operator_count = 0;
constexpr size_t kMostEntries = 4096;
Cache<Entry> cache(kMostEntries);
Cache<Admitted> admitted(kMostEntries);
std::atomic<int64_t> served{0};

using GetStream = AOTITorchError (*)(int32_t, void**);

static GetStream stream_getter() {
  static const auto found =
      reinterpret_cast<GetStream>(find_symbol("aoti_torch_get_current_cuda_stream"));
  return found;
}

Stream current_stream(Device device) {
  void* stream = nullptr;
  ask(stream_getter()(device, &stream), "the current stream");
  return static_cast<Stream>(stream);
}

Handle allocate(const Output& output, Where where) {
  AtenTensorHandle handle = nullptr;
  const AOTITorchError error = aoti_torch_empty_strided(
      static_cast<int64_t>(output.sizes.size()), output.sizes.data(), output.strides.data(),
      output.dtype, where.type, where.index, &handle);
  return Handle(error == AOTI_TORCH_SUCCESS ? handle : nullptr);
}

bool run(const Bound& bound, const Address* inputs, Where where, Handle* outputs,
         const Output* first) {
  const Plan& plan = bound.plan;
  Address slots[2 * kMostValues + 1];
  Handle workspace;
  uint32_t slot = 0;
  for (; slot < plan.inputs; ++slot) slots[slot] = inputs[slot];
  for (size_t i = 0; i < plan.outputs.size(); ++i) {
    outputs[i] = allocate(i == 0 && first != nullptr ? *first : plan.outputs[i], where);
    if (outputs[i].get() == nullptr) return false;
    slots[slot++] = address_of(outputs[i].get());
  }
  slots[slot] = 0;
  if (plan.workspace != 0) {
    Output bytes;
    bytes.sizes = {static_cast<int64_t>(plan.workspace)};
    bytes.strides = {1};
    workspace = allocate(bytes, where);
    if (workspace.get() == nullptr) return false;
    slots[slot] = address_of(workspace.get());
  }
  const Current current(bound.device);
  if (current.foreign()) return false;
  run(bound, slots, current_stream(bound.device));
  served.fetch_add(1, std::memory_order_relaxed);
  return true;
}

namespace {

using torch::stable::detail::to;

std::mutex registering;

// The arguments of a call, as the dispatcher gave them away.
class Arguments {
 public:
  Arguments(const Operator& op, const StableIValue* stack)
      : types_(op.types), count_(op.types.size()) {
    for (size_t i = 0; i < count_; ++i) values_[i] = stack[i];
  }
  Arguments(const Arguments&) = delete;
  Arguments& operator=(const Arguments&) = delete;
  ~Arguments() {
    for (size_t i = 0; i < count_; ++i) drop(types_[i], values_[i]);
  }

  // The call in words, and the addresses of its tensors. Without their device the words are those
  // of elsa_core/backends/cuda/planfile.py, in any process and on any GPU.
  void describe(Key& key, bool with_device = true) {
    with_device_ = with_device;
    tensors = 0;
    for (size_t i = 0; i < count_; ++i) describe(types_[i], values_[i], key);
  }

  // Hands the arguments to another call of the dispatcher.
  void give(StableIValue* stack) {
    for (size_t i = 0; i < count_; ++i) stack[i] = values_[i];
    count_ = 0;
  }

  uint32_t tensors = 0;
  Address addresses[kMostValues];
  Where where;  // of the first tensor

 private:
  static void drop(char type, StableIValue value) {
    if (type == 'T') {
      aoti_torch_delete_tensor_object(to<AtenTensorHandle>(value));
    } else if (type == 'O') {
      auto* inner = to<StableIValue*>(value);
      if (inner == nullptr) return;
      aoti_torch_delete_tensor_object(to<AtenTensorHandle>(*inner));
      delete inner;
    } else if (type == 's') {
      torch_delete_string(to<StringHandle>(value));
    } else if (type == 'N' || type == 'B') {
      torch_delete_list(to<StableListHandle>(value));
    }
  }

  void describe(char type, StableIValue value, Key& key) {
    switch (type) {
      case 'T':
        return describe(to<AtenTensorHandle>(value), key);
      case 'O': {
        const auto* inner = to<StableIValue*>(value);
        return describe(inner == nullptr ? nullptr : to<AtenTensorHandle>(*inner), key);
      }
      case 'b':
        return key.add(to<bool>(value) ? 1 : 0);
      case 's': {
        const char* text = nullptr;
        size_t length = 0;
        ask(torch_string_c_str(to<StringHandle>(value), &text), "a string");
        ask(torch_string_length(to<StringHandle>(value), &length), "a string's length");
        return key.add_text(text, length);
      }
      case 'N':
      case 'B': {
        size_t size = 0;
        ask(torch_list_size(to<StableListHandle>(value), &size), "a list's length");
        key.add(size);
        for (size_t i = 0; i < size; ++i) {
          StableIValue item = 0;
          ask(torch_list_get_item(to<StableListHandle>(value), i, &item), "an item of a list");
          key.add(type == 'B' ? (to<bool>(item) ? 1 : 0) : item);
        }
        return;
      }
      default:
        return key.add(value);
    }
  }

  void describe(AtenTensorHandle tensor, Key& key) {
    if (tensor == nullptr) {
      addresses[tensors++] = 0;
      return add_no_tensor(key);
    }
    int64_t dims = 0;
    int64_t* sizes = nullptr;
    int64_t* strides = nullptr;
    int32_t dtype = 0, type = 0, index = 0;
    ask(aoti_torch_get_dim(tensor, &dims), "a tensor's dimensions");
    ask(aoti_torch_get_sizes(tensor, &sizes), "a tensor's sizes");
    ask(aoti_torch_get_strides(tensor, &strides), "a tensor's strides");
    ask(aoti_torch_get_dtype(tensor, &dtype), "a tensor's dtype");
    ask(aoti_torch_get_device_type(tensor, &type), "a tensor's device");
    ask(aoti_torch_get_device_index(tensor, &index), "a tensor's device");
    const Address address = address_of(tensor);
    if (tensors == 0) where = {type, index};
    addresses[tensors++] = address;
    add_tensor(key, address, dtype, {type, with_device_ ? index : 0}, dims, sizes, strides);
  }

  const std::string& types_;
  size_t count_;
  bool with_device_ = true;
  StableIValue values_[kMostValues];
};

// CPU tensors, which tests alone pass, have no index.
Device device_of(const Arguments& arguments) {
  return arguments.where.index < 0 ? 0 : arguments.where.index;
}

// Runs a planned call; see `elsa_cuda::run`.
bool run(const Bound& bound, const Arguments& arguments, StableIValue* stack) {
  Handle outputs[kMostValues];
  if (!elsa_cuda::run(bound, arguments.addresses, arguments.where, outputs)) return false;
  for (size_t i = 0; i < bound.plan.outputs.size(); ++i)
    stack[i] = torch::stable::detail::from(outputs[i].release());
  return true;
}

std::unique_ptr<const Bound> bound_of(Plan plan, Device device) {
  const Current current(device);
  if (current.foreign()) throw std::runtime_error("the current CUDA context is not PyTorch's");
  if (stream_getter() == nullptr) throw std::runtime_error("this PyTorch gives no CUDA stream");
  return std::make_unique<const Bound>(bind(std::move(plan), device));
}

// Keeps what `elsa::<name>_plan` said of a layout: nothing; "N", that such calls are not for this
// library; "P" and a plan. "E" and a text is an error that ends the call.
void keep(const Operator& op, const Key& key, uint64_t generation, const Arguments& arguments,
          AtenTensorHandle said) {
  int64_t size = 0;
  ask(aoti_torch_get_numel(said, &size), "a plan's size");
  if (size == 0) return;
  const auto* bytes = reinterpret_cast<const uint8_t*>(address_of(said));
  const uint64_t rest = static_cast<uint64_t>(size) - 1;
  if (bytes[0] == 'E') {
    throw std::runtime_error(std::string(reinterpret_cast<const char*>(bytes) + 1, rest));
  }
  auto entry = std::make_shared<Entry>();
  if (bytes[0] == 'P') {
    entry->bound = bound_of(parse(bytes + 1, rest), device_of(arguments));
    const Plan& plan = entry->bound->plan;
    if (plan.inputs != arguments.tensors || plan.outputs.size() != op.results) {
      throw std::runtime_error(op.name + ": a plan is for another operator");
    }
  }
  if (key.fits()) cache.put(key.words(), generation, std::move(entry));
}

// A call of a layout that was not met before, by the plans of a file.
void serve_by_file(const Operator& op, Arguments& arguments, const Key& key, uint64_t generation,
                   StableIValue* stack) {
  Key portable;
  arguments.describe(portable, false);
  if (!key.fits() || !portable.fits()) {  // words of it are missing: another call may have the same
    throw std::runtime_error(op.name + ": no kernel is here for tensors of so many dimensions");
  }
  auto entry = std::make_shared<Entry>();
  const Device device = device_of(arguments);
  entry->bound = bound_of(find_plan(op.name, portable.words(), device), device);
  if (!run(*entry->bound, arguments, stack)) {
    throw std::runtime_error(op.name + ": no memory, or a CUDA context that is not PyTorch's");
  }
  cache.put(key.words(), generation, std::move(entry));
}

void serve(const Operator& op, StableIValue* stack) {
  Arguments arguments(op, stack);
  Key key;
  key.add(static_cast<uint64_t>(&op - operators.data()));
  arguments.describe(key);
  uint64_t generation = 0;
  bool unplanned = false;
  if (key.fits()) {
    const auto found = cache.find(key.words());
    generation = found.generation;
    const bool planned = found.entry != nullptr && found.entry->bound != nullptr;
    if (planned && run(*found.entry->bound, arguments, stack)) return;
    unplanned = found.entry != nullptr && !planned;
  }
  if (op.by_file) return serve_by_file(op, arguments, key, generation, stack);
  StableIValue values[kMostValues] = {};
  arguments.give(values);
  values[op.types.size()] = torch::stable::detail::from(unplanned);
  ask(torch_call_dispatcher(op.plan.c_str(), "", values, TORCH_ABI_VERSION), op.plan.c_str());
  Handle results[kMostValues];
  for (uint32_t i = 0; i <= op.results; ++i) {
    results[i] = Handle(to<AtenTensorHandle>(values[i]));
  }
  keep(op, key, generation, arguments, results[op.results].get());
  for (uint32_t i = 0; i < op.results; ++i)
    stack[i] = torch::stable::detail::from(results[i].release());
}

template <size_t N>
void boxed(StableIValue* stack, uint64_t, uint64_t) {
  serve(operators[N], stack);
}

using Boxed = void (*)(StableIValue*, uint64_t, uint64_t);

template <size_t... N>
Boxed boxed_of(size_t number, std::index_sequence<N...>) {
  static constexpr Boxed all[] = {&boxed<N>...};
  return all[number];
}

// What a function that C calls answers: null, or the error of this thread's last call.
template <typename Work>
const char* answered(Work work) {
  static thread_local std::string error;
  try {
    work();
    return nullptr;
  } catch (const std::exception& failure) {
    error = failure.what();
  } catch (...) {
    error = "unknown error";
  }
  return error.c_str();
}

void add_operator(const char* name, const char* types, uint32_t results, const char* key,
                  bool by_file) {
  const std::lock_guard<std::mutex> lock(registering);
  if (operator_count == kMostOperators) throw std::runtime_error("too many operators");
  Operator& op = operators[operator_count];
  op.name = std::string("elsa::") + name;
  op.plan = op.name + "_plan";
  op.types = types;
  op.results = results;
  op.by_file = by_file;
  if (op.types.size() + 1 > kMostValues || results + 1 > kMostValues ||
      op.types.find_first_not_of("TOnbdsNB") != std::string::npos) {
    throw std::runtime_error(op.name + ": arguments that this library does not take");
  }
  using torch::stable::detail::StableLibrary;
  // For the life of the process, like the code that it names.
  auto* library = new StableLibrary(StableLibrary::Kind::IMPL, "elsa", key, __FILE__, __LINE__);
  library->impl(name, boxed_of(operator_count, std::make_index_sequence<kMostOperators>()));
  ++operator_count;
}

}  // namespace

#define ELSA_EXPORT extern "C" __attribute__((visibility("default")))

// For elsa_core/backends/cuda/library.py. Each returns null, or what went wrong.

// Opens the driver: libcuda.so.1, or the file that a test names.
ELSA_EXPORT const char* elsa_cuda_open(const char* path) {
  return answered([&] { open_driver(path); });
}

// Makes this library the kernel of elsa::<name> for a dispatch key.
ELSA_EXPORT const char* elsa_cuda_register(const char* name, const char* types, uint32_t results,
                                           const char* key) {
  return answered([&] { add_operator(name, types, results, key, false); });
}

// Keeps a kernel; `number` is what plans name it by. flags: 1 overlap, 2 cooperative.
ELSA_EXPORT const char* elsa_cuda_add_kernel(const char* symbol, const uint8_t* code, uint64_t size,
                                             uint32_t threads, uint32_t shared_bytes,
                                             uint32_t cluster, uint32_t flags, uint32_t* number) {
  return answered([&] {
    Kernel kernel;
    kernel.symbol = symbol;
    kernel.code.assign(code, code + size);
    kernel.threads = threads;
    kernel.shared_bytes = shared_bytes;
    kernel.cluster = cluster;
    kernel.overlap = (flags & 1) != 0;
    kernel.cooperative = (flags & 2) != 0;
    *number = add_kernel(std::move(kernel));
  });
}

// Reads a plan and, unless device is negative, loads its kernels there.
ELSA_EXPORT const char* elsa_cuda_load_plan(const uint8_t* bytes, uint64_t size, int device) {
  return answered([&] {
    if (device < 0) {
      parse(bytes, size);
    } else {
      bound_of(parse(bytes, size), device);
    }
  });
}

// Makes the launches of a plan that has neither results nor a workspace on the current stream.
// slots: the addresses of its inputs, and 0.
ELSA_EXPORT const char* elsa_cuda_launch(const uint8_t* bytes, uint64_t size, int device,
                                         const uint64_t* slots, uint64_t count) {
  return answered([&] {
    const auto bound = bound_of(parse(bytes, size), device);
    const Plan& plan = bound->plan;
    if (plan.inputs != count || !plan.outputs.empty() || plan.workspace != 0) {
      throw std::runtime_error("a plan of launches takes other tensors than it is given");
    }
    const Current current(device);
    const std::vector<Address> addresses(slots, slots + count + 1);
    elsa_cuda::run(*bound, addresses.data(), current_stream(device));
  });
}

// Forgets every plan.
ELSA_EXPORT void elsa_cuda_clear() {
  cache.clear();
  admitted.clear();  // last: what is admitted while this runs was planned before
}

// Layouts that are kept, and calls that ran without Python.
ELSA_EXPORT void elsa_cuda_counts(int64_t* layouts, int64_t* calls) {
  *layouts = static_cast<int64_t>(cache.size());
  *calls = served.load();
}

// For processes without Python's planners: defines the operators of a file of plans (see
// planfile.h) and serves them for a dispatch key, "CUDA". Call it once, before a model is loaded.
ELSA_EXPORT const char* elsa_cuda_serve_file(const uint8_t* bytes, uint64_t size, const char* key) {
  return answered([&] {
    driver();
    using torch::stable::detail::StableLibrary;
    const auto kind = StableLibrary::Kind::FRAGMENT;
    for (const Signature& each : add_file(bytes, size)) {
      auto* library = new StableLibrary(kind, "elsa", "", __FILE__, __LINE__);
      library->def(each.schema.c_str());
      add_operator(each.name.c_str(), each.types.c_str(), each.results, key, true);
    }
  });
}

}  // namespace elsa_cuda
