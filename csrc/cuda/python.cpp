// Calls from Python that pass by PyTorch's dispatcher: what a function is called with is read from
// Python's objects, the plan of the operator's call that it makes of that is found, and the first
// result is given back. Whatever is not as it should be is answered by None: Python then asks the
// dispatcher.
#include "python.h"

#include <dlfcn.h>

#include <algorithm>
#include <cstring>
#include <exception>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>

#include "operators.h"

namespace elsa_cuda {
namespace {

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
    made.lists = symbol<PyObject*>("PyList_Type");
    made.tuples = symbol<PyObject*>("PyTuple_Type");
    return made;
  }();
  return found;
}

PyObject* given(PyObject* object) {
  python().increase(object);
  return object;
}

// An object's own type, which the object holds.
PyObject* type_of(PyObject* object) {
  PyObject* found = python().type_of(object);
  python().decrease(found);
  return found;
}

bool is_a(PyObject* object, PyObject* type) { return type_of(object) == type; }

// What a Python function of this file is about, for the life of the process.
struct Short {
  const Operator* op;
  uint64_t number;  // tells its calls from those of others
  const dlpack::Exchange* exchange;
  PyObject *tensor, *parameter;  // types that tensors may be of: another subclass may be anything
  PyObject* negated;             // whether a tensor's memory holds the negative of what it says
};

constexpr const char* kShort = "elsa_short";

// PyTorch's number of a dtype; -1 of others.
int32_t dtype_of(const dlpack::Tensor& tensor) {
  static constexpr struct {
    uint8_t code, bits;
    int32_t number;
  } kTypes[] = {
      {dlpack::kFloat, 32, 6}, {dlpack::kFloat, 16, 5}, {dlpack::kBfloat, 16, 15},
      {dlpack::kInt, 64, 4},   {dlpack::kInt, 32, 3},   {dlpack::kBool, 8, 11},
      {dlpack::kUInt, 8, 0},   {dlpack::kFloat, 64, 7}, {dlpack::kInt, 8, 1},
      {dlpack::kInt, 16, 2},
  };
  for (const auto& type : kTypes) {
    if (tensor.lanes == 1 && tensor.code == type.code && tensor.bits == type.bits) {
      return type.number;
    }
  }
  return -1;
}

// The arguments of a call of the operator, or of the function, which are of the same types but that
// a number and a tensor may be None, and a list of integers a tuple. `read` answers whether they
// are as expected.
class Read {
 public:
  Read(const Short& about, bool of_function) : about_(about), of_function_(of_function) {
    key.add(about.number);
  }

  bool read(PyObject* const* arguments) {
    const std::string& types = about_.op->types;
    for (size_t i = 0; i < types.size(); ++i) {
      if (!read(types[i], arguments[i])) return false;
    }
    return key.fits();
  }

  // Whether the tensors lie where those of another call do: none is a copy.
  bool has_memory_of(const Read& other) const {
    return count_ == other.count_ && std::equal(addresses, addresses + count_, other.addresses);
  }

  Key key;
  Address addresses[kMostValues];
  int32_t dims = 0;  // of the first tensor, as `where` is
  Where where;

 private:
  bool read(char type, PyObject* object) {
    const Python& py = python();
    switch (type) {
      case 'O':
        if (object == py.none) {
          addresses[count_++] = 0;
          add_no_tensor(key);
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
        if (of_function_) key.add(object == py.none ? 0 : 1);
        if (object == py.none) return of_function_;
        if (!is_a(object, py.floats) && !is_a(object, py.integers)) return false;
        const double value = py.double_of(object);
        if (py.error() != nullptr) return false;
        uint64_t word = 0;
        std::memcpy(&word, &value, sizeof(value));
        key.add(word);
        return true;
      }
      case 'n':
        return read_integer(object);
      case 'N': {
        const bool tuple = is_a(object, py.tuples);
        if (!tuple && !is_a(object, py.lists)) return false;
        const std::ptrdiff_t size = tuple ? py.tuple_size(object) : py.list_size(object);
        key.add(static_cast<uint64_t>(size));
        for (std::ptrdiff_t i = 0; i < size; ++i) {
          PyObject* item = tuple ? py.tuple_item(object, i) : py.item(object, i);
          if (item == nullptr || !read_integer(item)) return false;
        }
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

  bool read_integer(PyObject* object) {
    if (!is_a(object, python().integers)) return false;
    const long long value = python().integer_of(object);
    key.add(static_cast<uint64_t>(value));
    return python().error() == nullptr;
  }

  bool read_tensor(PyObject* object) {
    PyObject* type = type_of(object);
    if (type != about_.tensor && type != about_.parameter) return false;
    PyObject* negated = python().call(about_.negated, object, nullptr);
    if (negated == nullptr) return false;
    python().decrease(negated);  // True and False outlive it
    if (negated != python().no) return false;
    dlpack::Tensor found;
    if (about_.exchange->describe(object, &found) != 0) return false;
    const int32_t dtype = dtype_of(found);
    const bool on_cpu = found.device_type == dlpack::kCpu;  // in tests alone
    if (dtype < 0 || found.ndim < 1 || found.byte_offset != 0 || found.strides == nullptr ||
        found.data == nullptr || (!on_cpu && found.device_type != dlpack::kCuda)) {
      return false;
    }
    const Where place = on_cpu ? Where{0, -1} : Where{1, found.device_id};
    if (count_ == 0) {
      where = place;
      dims = found.ndim;
    }
    const auto address = reinterpret_cast<Address>(found.data);
    addresses[count_++] = address;
    add_tensor(key, address, dtype, place, found.ndim, found.shape, found.strides);
    return true;
  }

  const Short& about_;
  const bool of_function_;
  uint32_t count_ = 0;
};

// PyTorch's own way from a tensor, which a handle points to, to its object; null where it has
// another name: as the question above, it is not of the stable ABI, whose function leaks the tensor
// (torch 2.11 to 2.15).
using Wrap = PyObject* (*)(AtenTensorHandle);
Wrap wrap() {
  static void* const torch = dlopen("libtorch_python.so", RTLD_LAZY | RTLD_NOLOAD);
  static const auto found = reinterpret_cast<Wrap>(
      torch == nullptr ? nullptr : dlsym(torch, "_Z16THPVariable_WrapRKN2at10TensorBaseE"));
  return found;
}

// The first result of a planned call, or null.
PyObject* result_of(const Admitted& call, const Read& given) {
  const Python& py = python();
  Handle outputs[kMostValues];
  bool ran = false;
  void* thread = py.release();  // a launch may wait for a full queue, which a callback may hold up
  try {
    ran = elsa_cuda::run(*call.entry->bound, given.addresses, given.where, outputs, &call.first);
  } catch (const std::exception&) {  // the dispatcher's call meets it again and says so
  }
  py.acquire(thread);
  if (!ran) return nullptr;
  try {
    return wrap()(outputs[0].get());
  } catch (const std::exception&) {
    return nullptr;
  }
}

PyObject* none() {
  python().clear_error();
  return given(python().none);
}

PyObject* serve(PyObject* self, PyObject* const* arguments, std::ptrdiff_t count) {
  // Whether somebody is told of the dispatcher's calls, such as another thread's profiler. By
  // PyTorch's own question, where this PyTorch has it: it is no part of the stable ABI.
  static const auto is_observed =
      reinterpret_cast<bool (*)()>(dlsym(RTLD_DEFAULT, "_ZN2at12hasCallbacksEv"));
  const auto* about = static_cast<const Short*>(python().capsule_pointer(self, kShort));
  Read call(*about, true);
  if (static_cast<size_t>(count) != about->op->types.size() ||
      (is_observed != nullptr && is_observed()) || !call.read(arguments)) {
    return none();
  }
  const auto found = admitted.find(call.key.words());
  if (found.entry == nullptr) return none();
  PyObject* result = result_of(*found.entry, call);
  return result != nullptr ? result : none();
}

// The first result as the function gives it: where its first tensor lacks the operator's second
// dimension, which is one then, so does the result. Other differences are not known here.
bool first_of(const Plan& plan, int32_t dims, int32_t of_function, Output& first) {
  first = plan.outputs[0];
  if (dims == of_function) return true;
  if (dims != of_function + 1 || first.sizes.size() != static_cast<size_t>(dims) ||
      first.sizes[1] != 1) {
    return false;
  }
  first.sizes.erase(first.sizes.begin() + 1);
  first.strides.erase(first.strides.begin() + 1);
  return true;
}

PyObject* admit(PyObject* self, PyObject* const* arguments, std::ptrdiff_t count) {
  const auto* about = static_cast<const Short*>(python().capsule_pointer(self, kShort));
  const size_t half = about->op->types.size();
  Read call(*about, false), of_function(*about, true);
  if (static_cast<size_t>(count) != 2 * half || !call.read(arguments) ||
      !of_function.read(arguments + half) || !call.has_memory_of(of_function)) {
    return none();
  }
  const uint64_t generation = admitted.find(of_function.key.words()).generation;
  const auto found = cache.find(call.key.words());
  if (found.entry == nullptr || found.entry->bound == nullptr) return none();
  auto made = std::make_shared<Admitted>();
  made->entry = found.entry;
  const Plan& plan = found.entry->bound->plan;
  if (!first_of(plan, call.dims, of_function.dims, made->first)) return none();
  admitted.put(of_function.key.words(), generation, std::move(made));
  return given(python().yes);
}

Method serve_method = {"serve", serve, kFastCall, nullptr};
Method admit_method = {"admit", admit, kFastCall, nullptr};

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

// Two Python functions about one that calls an operator, for `elsa_core.backends.cuda`, which holds
// the interpreter's lock. `serve` takes what that function was called with, as the operator orders
// it, and gives the first result of a call that was admitted, or None; `admit` takes the operator's
// own arguments and these, and says that such calls are for this library (True, or None where it
// has no plan).
// exchange: `torch.Tensor.__dlpack_c_exchange_api__`; tensor, parameter: the types `torch.Tensor`
// and `torch.nn.Parameter`; negated: `torch.Tensor.is_neg`. Returns -1 and leaves `made` as it is
// where this process has no such way.
extern "C" __attribute__((visibility("default"))) int elsa_cuda_short(
    const char* name, PyObject* exchange, PyObject* tensor, PyObject* parameter, PyObject* negated,
    PyObject** made) {
  try {
    const Operator* const end = operators.data() + operator_count;
    const Operator* const op = std::find_if(
        static_cast<const Operator*>(operators.data()), end,
        [&](const Operator& each) { return each.name == "elsa::" + std::string(name); });
    const dlpack::Exchange* found = exchange_of(exchange);
    if (op == end || found == nullptr || wrap() == nullptr) return -1;
    const Python& py = python();
    const auto number = static_cast<uint64_t>(op - operators.data());
    auto* about = new Short{op, number, found, given(tensor), given(parameter), given(negated)};
    PyObject* self = py.new_capsule(about, kShort, nullptr);
    if (self == nullptr) return -1;
    PyObject* functions[] = {py.new_function(&serve_method, self, nullptr),
                             py.new_function(&admit_method, self, nullptr)};
    py.decrease(self);
    if (functions[0] == nullptr || functions[1] == nullptr) return -1;
    std::copy(functions, functions + 2, made);
    return 0;
  } catch (const std::exception&) {
    return -1;
  }
}

}  // namespace elsa_cuda
