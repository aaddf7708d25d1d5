// Calls from Python that pass by PyTorch's dispatcher: what a call is made of is read from Python's
// objects, the plan is found by the key that the dispatcher's call would have, and the first result
// is given back. Whatever is not as it should be is answered by None: Python then asks the
// dispatcher.
#include "python.h"

#include <dlfcn.h>

#include <cmath>
#include <cstring>
#include <exception>
#include <memory>
#include <stdexcept>
#include <string>

#include "operators.h"

namespace {

using elsa_cuda::Address;
using elsa_cuda::Entry;
using elsa_cuda::Handle;
using elsa_cuda::Key;
using elsa_cuda::kMostValues;
using elsa_cuda::Operator;
using elsa_cuda::Python;
using elsa_cuda::Where;
namespace dlpack = elsa_cuda::dlpack;

template <typename T>
T symbol(const char* name) {
  auto found = reinterpret_cast<T>(dlsym(RTLD_DEFAULT, name));
  if (found == nullptr) throw std::runtime_error(std::string("this process has no ") + name);
  return found;
}

const Python& python() {
  static const Python found = [] {
    Python made;
#define ELSA_FIND(field, name, ...) made.field = symbol<decltype(made.field)>(name);
    ELSA_PYTHON_FUNCTIONS(ELSA_FIND)
#undef ELSA_FIND
    made.none = symbol<PyObject*>("_Py_NoneStruct");
    made.yes = symbol<PyObject*>("_Py_TrueStruct");
    made.no = symbol<PyObject*>("_Py_FalseStruct");
    made.floats = symbol<PyObject*>("PyFloat_Type");
    made.integers = symbol<PyObject*>("PyLong_Type");
    return made;
  }();
  return found;
}

PyObject* given(PyObject* object) {
  python().increase(object);
  return object;
}

// Whether an object's own type is this one.
bool is_a(PyObject* object, PyObject* type) {
  PyObject* found = python().type_of(object);
  python().decrease(found);  // the object holds it
  return found == type;
}

// What a Python function of this file is about, for the life of the process.
struct Short {
  const Operator* op;
  const dlpack::Exchange* exchange;
  PyObject* tensor;  // the type that tensors must be of: a subclass may be anything
  PyObject* wrap;    // makes a list of tensors of a list of capsules with their handles
};

constexpr const char* kShort = "elsa_short";

// PyTorch's number of a dtype; -1 of others.
int32_t dtype_of(const dlpack::Tensor& tensor) {
  if (tensor.lanes != 1) return -1;
  switch (tensor.code << 8 | tensor.bits) {
    case dlpack::kUInt << 8 | 8:
      return 0;
    case dlpack::kInt << 8 | 8:
      return 1;
    case dlpack::kInt << 8 | 16:
      return 2;
    case dlpack::kInt << 8 | 32:
      return 3;
    case dlpack::kInt << 8 | 64:
      return 4;
    case dlpack::kFloat << 8 | 16:
      return 5;
    case dlpack::kFloat << 8 | 32:
      return 6;
    case dlpack::kFloat << 8 | 64:
      return 7;
    case dlpack::kBool << 8 | 8:
      return 11;
    case dlpack::kBfloat << 8 | 16:
      return 15;
    default:
      return -1;
  }
}

// The arguments of a call, from Python's objects. `read` answers whether they are as expected.
class Read {
 public:
  explicit Read(const Short& about) : about_(about) {
    key.add(static_cast<uint64_t>(about.op - elsa_cuda::operators.data()));
  }

  bool read(PyObject* const* arguments, std::ptrdiff_t count) {
    const std::string& types = about_.op->types;
    if (static_cast<size_t>(count) != types.size()) return false;
    for (size_t i = 0; i < types.size(); ++i) {
      if (!read(types[i], arguments[i])) return false;
    }
    return key.fits();
  }

  Key key;
  Address addresses[kMostValues];
  Where where;  // of the first tensor

 private:
  bool read(char type, PyObject* object) {
    const Python& py = python();
    switch (type) {
      case 'O':
        if (object == py.none) {
          addresses[tensors_++] = 0;
          elsa_cuda::add_no_tensor(key);
          return true;
        }
        [[fallthrough]];
      case 'T':
        return read_tensor(object);
      case 'b':
        if (object != py.yes && object != py.no) return false;
        key.add(object == py.yes ? 1 : 0);
        return true;
      case 'd': {
        // none: the scale of attention, by the head dimension of the first tensor
        double value = std::pow(static_cast<double>(head_dim_), -0.5);
        if (object != py.none) {
          if (!is_a(object, py.floats) && !is_a(object, py.integers)) return false;
          value = py.double_of(object);
          if (py.error() != nullptr) return false;
        } else if (head_dim_ <= 0) {
          return false;
        }
        uint64_t word = 0;
        std::memcpy(&word, &value, sizeof(value));
        key.add(word);
        return true;
      }
      case 's': {
        std::ptrdiff_t length = 0;
        const char* text = py.text_of(object, &length);
        if (text == nullptr) return false;
        key.add_text(text, static_cast<size_t>(length));
        return true;
      }
      default:
        return false;
    }
  }

  bool read_tensor(PyObject* object) {
    if (!is_a(object, about_.tensor)) return false;
    dlpack::Tensor found;
    if (about_.exchange->describe(object, &found) != 0) return false;
    const int32_t dtype = dtype_of(found);
    const bool on_cpu = found.device_type == dlpack::kCpu;  // in tests alone
    if (dtype < 0 || found.ndim < 1 || found.byte_offset != 0 || found.strides == nullptr ||
        found.data == nullptr || (!on_cpu && found.device_type != dlpack::kCuda)) {
      return false;
    }
    const Where place = on_cpu ? Where{0, -1} : Where{1, found.device_id};
    if (tensors_ == 0) {
      where = place;
      head_dim_ = found.shape[found.ndim - 1];
    }
    const auto address = reinterpret_cast<Address>(found.data);
    addresses[tensors_++] = address;
    elsa_cuda::add_tensor(key, address, dtype, place, found.ndim, found.shape, found.strides);
    return true;
  }

  const Short& about_;
  uint32_t tensors_ = 0;
  int64_t head_dim_ = 0;
};

// The Python tensor of a handle, or null. PyTorch's own function for one handle leaks the tensor
// (torch 2.11 to 2.15); the one for a list of them does not.
PyObject* wrapped(const Short& about, Handle& tensor) {
  const Python& py = python();
  PyObject* handles = py.new_list(1);
  PyObject* capsule = py.new_capsule(tensor.get(), nullptr, nullptr);
  PyObject* result = nullptr;
  if (handles != nullptr && capsule != nullptr) {
    tensor.give();
    py.set_item(handles, 0, given(capsule));
    if (PyObject* tensors = py.call(about.wrap, handles, nullptr)) {
      result = given(py.item(tensors, 0));
      py.decrease(tensors);
    }
  }
  if (capsule != nullptr) py.decrease(capsule);
  if (handles != nullptr) py.decrease(handles);
  return result;
}

// The first result of a planned call, or null.
PyObject* result_of(const Short& about, const elsa_cuda::Bound& bound, const Read& call) {
  const Python& py = python();
  Handle outputs[kMostValues];
  void* thread = py.release();  // a launch may wait for a full queue, which a callback may hold up
  bool ran = false;
  try {
    ran = elsa_cuda::run(bound, call.addresses, call.where, outputs);
  } catch (const std::exception&) {  // the dispatcher's call meets it again and says so
  }
  py.acquire(thread);
  if (!ran) return nullptr;
  return wrapped(about, outputs[0]);
}

const Short* about_of(PyObject* self) {
  return static_cast<const Short*>(python().capsule_pointer(self, kShort));
}

PyObject* none() {
  python().clear_error();
  return given(python().none);
}

PyObject* serve(PyObject* self, PyObject* const* arguments, std::ptrdiff_t count) {
  const Short* about = about_of(self);
  Read call(*about);
  if (!call.read(arguments, count)) return none();
  const auto found = elsa_cuda::cache.find(call.key.words());
  const Entry* entry = found.entry.get();
  if (entry == nullptr || !entry->first.load(std::memory_order_relaxed)) return none();
  PyObject* result = result_of(*about, *entry->bound, call);
  return result != nullptr ? result : none();
}

PyObject* admit(PyObject* self, PyObject* const* arguments, std::ptrdiff_t count) {
  const Short* about = about_of(self);
  Read call(*about);
  if (!call.read(arguments, count)) return none();
  const auto found = elsa_cuda::cache.find(call.key.words());
  if (found.entry == nullptr || found.entry->bound == nullptr) return none();
  found.entry->first.store(true, std::memory_order_relaxed);
  return given(python().yes);
}

elsa_cuda::Method serve_method = {"serve", serve, elsa_cuda::kFastCall, nullptr};
elsa_cuda::Method admit_method = {"admit", admit, elsa_cuda::kFastCall, nullptr};

const Operator* find_operator(const char* name) {
  const std::string full = std::string("elsa::") + name;
  for (size_t i = 0; i < elsa_cuda::operator_count; ++i) {
    if (elsa_cuda::operators[i].name == full) return &elsa_cuda::operators[i];
  }
  return nullptr;
}

const dlpack::Exchange* exchange_of(PyObject* capsule) {
  const Python& py = python();
  auto* found =
      static_cast<const dlpack::Exchange*>(py.capsule_pointer(capsule, dlpack::kExchange));
  while (found != nullptr && found->major > dlpack::kMajor) found = found->earlier;
  py.clear_error();
  return found == nullptr || found->major != dlpack::kMajor || found->describe == nullptr ? nullptr
                                                                                          : found;
}

}  // namespace

// Two Python functions that take the arguments of an operator, for `elsa_core.backends.cuda`, which
// holds the interpreter's lock: `serve` gives the first result of a call that was admitted, or
// None; `admit` says that such calls are for this library (True, or None where it has no plan).
// exchange: `torch.Tensor.__dlpack_c_exchange_api__`; tensor: the type `torch.Tensor`; wrap: makes
// a tensor of a capsule with its handle. Returns null and leaves `made` as it is where this process
// has no such way.
extern "C" __attribute__((visibility("default"))) int elsa_cuda_short(
    const char* name, PyObject* exchange, PyObject* tensor, PyObject* wrap, PyObject** made) {
  try {
    const Operator* op = find_operator(name);
    const dlpack::Exchange* found = exchange_of(exchange);
    if (op == nullptr || found == nullptr) return -1;
    const Python& py = python();
    auto* about = new Short{op, found, given(tensor), given(wrap)};
    PyObject* self = py.new_capsule(about, kShort, nullptr);
    if (self == nullptr) return -1;
    made[0] = py.new_function(&serve_method, self, nullptr);
    made[1] = py.new_function(&admit_method, self, nullptr);
    py.decrease(self);
    return made[0] == nullptr || made[1] == nullptr ? -1 : 0;
  } catch (const std::exception&) {
    return -1;
  }
}
