// What of Python's and DLPack's C interfaces is used, found at run time: processes without Python
// load this library too, and no Python headers are needed to build it. The functions are of
// Python's stable ABI; layouts and values are those of DLPack 1 (tests compare them with PyTorch's
// dlpack.h).
#pragma once

#include <cstddef>
#include <cstdint>

using PyObject = struct _object;

namespace elsa_cuda {

using FastCall = PyObject* (*)(PyObject* self, PyObject* const* arguments, std::ptrdiff_t count);
constexpr int kFastCall = 0x0080;  // METH_FASTCALL

struct Method {  // PyMethodDef
  const char* name;
  FastCall function;
  int flags;
  const char* doc;
};

#define ELSA_PYTHON_FUNCTIONS(F)                                                      \
  F(new_function, "PyCFunction_NewEx", PyObject*, Method*, PyObject*, PyObject*)      \
  F(new_capsule, "PyCapsule_New", PyObject*, void*, const char*, void (*)(PyObject*)) \
  F(capsule_pointer, "PyCapsule_GetPointer", void*, PyObject*, const char*)           \
  F(item, "PyList_GetItem", PyObject*, PyObject*, std::ptrdiff_t)                     \
  F(list_size, "PyList_Size", std::ptrdiff_t, PyObject*)                              \
  F(tuple_size, "PyTuple_Size", std::ptrdiff_t, PyObject*)                            \
  F(tuple_item, "PyTuple_GetItem", PyObject*, PyObject*, std::ptrdiff_t)              \
  F(integer_of, "PyLong_AsLongLong", long long, PyObject*)                            \
  F(type_of, "PyObject_Type", PyObject*, PyObject*)                                   \
  F(call, "PyObject_CallFunctionObjArgs", PyObject*, PyObject*, PyObject*, ...)       \
  F(double_of, "PyFloat_AsDouble", double, PyObject*)                                 \
  F(text_of, "PyUnicode_AsUTF8AndSize", const char*, PyObject*, std::ptrdiff_t*)      \
  F(error, "PyErr_Occurred", PyObject*)                                               \
  F(clear_error, "PyErr_Clear", void)                                                 \
  F(release, "PyEval_SaveThread", void*)                                              \
  F(acquire, "PyEval_RestoreThread", void, void*)                                     \
  F(increase, "Py_IncRef", void, PyObject*)                                           \
  F(decrease, "Py_DecRef", void, PyObject*)

struct Python {
#define ELSA_FIELD(field, symbol, result, ...) result (*field)(__VA_ARGS__);
  ELSA_PYTHON_FUNCTIONS(ELSA_FIELD)
#undef ELSA_FIELD
  PyObject *none, *yes, *no, *floats, *integers, *lists, *tuples;
};

namespace dlpack {

struct Tensor {  // DLTensor
  void* data;
  int32_t device_type, device_id;
  int32_t ndim;
  uint8_t code, bits;
  uint16_t lanes;
  int64_t* shape;
  int64_t* strides;  // in elements
  uint64_t byte_offset;
};

struct Exchange {  // DLPackExchangeAPI
  uint32_t major, minor;
  const Exchange* earlier;
  void* allocate;
  void* to_managed;
  void* from_managed;
  int (*describe)(void* tensor, Tensor* out);  // its owner keeps what `out` points to
  void* current_stream;
};

constexpr const char* kExchange = "dlpack_exchange_api";  // the capsule's name
constexpr uint32_t kMajor = 1;
constexpr int32_t kCpu = 1, kCuda = 2;
constexpr uint8_t kInt = 0, kUInt = 1, kFloat = 2, kBfloat = 4, kBool = 6;

}  // namespace dlpack
}  // namespace elsa_cuda
