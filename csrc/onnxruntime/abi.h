// The part of ONNX Runtime's C ABI that this library uses.
//
// The ABI is append-only: an entry of the function table never moves, so a runtime of version 1.17
// or later serves the entries below at the places where they have always been; those marked so are
// from 1.18 on.
#pragma once

#include <stddef.h>
#include <stdint.h>

struct OrtStatus;
struct OrtValue;
struct OrtKernelInfo;
struct OrtKernelContext;
struct OrtShapeInferContext;
struct OrtTensorTypeAndShapeInfo;
struct OrtSessionOptions;
struct OrtCustomOpDomain;
struct OrtAllocator;
struct OrtMemoryInfo;

// A struct of function pointers; see Entry.
struct OrtApi {
  void (*entry[279])();
};

struct OrtApiBase {
  const OrtApi* (*GetApi)(uint32_t version);  // null for a version that the runtime does not know
  const char* (*GetVersionString)();
};

// The operator's side of the ABI. Members that stay null are optional.
struct OrtCustomOp {
  uint32_t version;
  void* (*CreateKernel)(const OrtCustomOp*, const OrtApi*, const OrtKernelInfo*);
  const char* (*GetName)(const OrtCustomOp*);
  const char* (*GetExecutionProviderType)(const OrtCustomOp*);
  int (*GetInputType)(const OrtCustomOp*, size_t);
  size_t (*GetInputTypeCount)(const OrtCustomOp*);
  int (*GetOutputType)(const OrtCustomOp*, size_t);
  size_t (*GetOutputTypeCount)(const OrtCustomOp*);
  void (*KernelCompute)(void*, OrtKernelContext*);
  void (*KernelDestroy)(void*);
  int (*GetInputCharacteristic)(const OrtCustomOp*, size_t);
  int (*GetOutputCharacteristic)(const OrtCustomOp*, size_t);
  int (*GetInputMemoryType)(const OrtCustomOp*, size_t);
  int (*GetVariadicInputMinArity)(const OrtCustomOp*);
  int (*GetVariadicInputHomogeneity)(const OrtCustomOp*);
  int (*GetVariadicOutputMinArity)(const OrtCustomOp*);
  int (*GetVariadicOutputHomogeneity)(const OrtCustomOp*);
  OrtStatus* (*CreateKernelV2)(const OrtCustomOp*, const OrtApi*, const OrtKernelInfo*, void**);
  OrtStatus* (*KernelComputeV2)(void*, OrtKernelContext*);
  OrtStatus* (*InferOutputShapeFn)(const OrtCustomOp*, OrtShapeInferContext*);
  int (*GetStartVersion)(const OrtCustomOp*);
  int (*GetEndVersion)(const OrtCustomOp*);
  size_t (*GetMayInplace)(int**, int**);
  void (*ReleaseMayInplace)(int*, int*);
  size_t (*GetAliasMap)(int**, int**);
  void (*ReleaseAliasMap)(int*, int*);
};
static_assert(offsetof(OrtCustomOp, CreateKernelV2) == 136 && sizeof(OrtCustomOp) == 208);

namespace elsa::ort {

constexpr uint32_t kApiVersion = 17;     // the oldest that has ParallelFor and shape inference
constexpr uint32_t kGpuApiVersion = 18;  // the oldest with memory that a kernel's stream orders
constexpr int kDefaultMemory = 0;        // OrtMemType: the provider's own
constexpr const char* kCudaProvider = "CUDAExecutionProvider";

enum ErrorCode : int { kFail = 1, kInvalidArgument = 2, kNotImplemented = 9 };
enum ElementType : int {
  kUndefined = 0,  // in a signature: any
  kFloat = 1,
  kBool = 9,
  kFloat16 = 10,
  kBFloat16 = 16,
};
enum Characteristic : int { kRequired = 0, kOptional = 1 };

// One entry of the function table: its place and its signature.
template <int kIndex, class Result, class... Arguments>
struct Entry {
  Result operator()(const OrtApi* api, Arguments... arguments) const {
    return reinterpret_cast<Result (*)(Arguments...)>(api->entry[kIndex])(arguments...);
  }
};
template <int kIndex, class... Arguments>
using Call = Entry<kIndex, OrtStatus*, Arguments...>;

inline constexpr Call<0, ErrorCode, const char*> CreateStatus;
inline constexpr Call<26, const char*, OrtCustomOpDomain**> CreateCustomOpDomain;
inline constexpr Call<27, OrtCustomOpDomain*, const OrtCustomOp*> CustomOpDomain_Add;
inline constexpr Call<28, OrtSessionOptions*, OrtCustomOpDomain*> AddCustomOpDomain;
inline constexpr Call<51, OrtValue*, void**> GetTensorMutableData;
inline constexpr Call<60, const OrtTensorTypeAndShapeInfo*, int*> GetTensorElementType;
inline constexpr Call<61, const OrtTensorTypeAndShapeInfo*, size_t*> GetDimensionsCount;
inline constexpr Call<62, const OrtTensorTypeAndShapeInfo*, int64_t*, size_t> GetDimensions;
inline constexpr Call<65, const OrtValue*, OrtTensorTypeAndShapeInfo**> GetTensorTypeAndShape;
inline constexpr Call<72, const OrtMemoryInfo*, int*> MemoryInfoGetId;
inline constexpr Call<76, OrtAllocator*, void*> AllocatorFree;
inline constexpr Call<77, const OrtAllocator*, const OrtMemoryInfo**> AllocatorGetInfo;
inline constexpr Call<85, const OrtKernelInfo*, const char*, float*> KernelInfoGetAttribute_float;
inline constexpr Call<86, const OrtKernelInfo*, const char*, int64_t*> KernelInfoGetAttribute_int64;
inline constexpr Call<87, const OrtKernelInfo*, const char*, char*, size_t*>
    KernelInfoGetAttribute_string;
inline constexpr Call<88, const OrtKernelContext*, size_t*> KernelContext_GetInputCount;
inline constexpr Call<90, const OrtKernelContext*, size_t, const OrtValue**> KernelContext_GetInput;
inline constexpr Call<91, OrtKernelContext*, size_t, const int64_t*, size_t, OrtValue**>
    KernelContext_GetOutput;
inline constexpr Entry<93, void, OrtStatus*> ReleaseStatus;
inline constexpr Entry<99, void, OrtTensorTypeAndShapeInfo*> ReleaseTensorTypeAndShapeInfo;
inline constexpr Entry<132, void, OrtAllocator*> ReleaseAllocator;
inline constexpr Call<163, const OrtKernelInfo*, const char*, int64_t*, size_t*>
    KernelInfoGetAttributeArray_int64;
inline constexpr Call<193, const OrtKernelContext*, void**> KernelContext_GetGPUComputeStream;
inline constexpr Call<274, const OrtKernelContext*, void (*)(void*, size_t), size_t, size_t, void*>
    KernelContext_ParallelFor;
inline constexpr Call<277, const OrtKernelContext*, const OrtMemoryInfo*, size_t, void**>
    KernelContext_GetScratchBuffer;  // 1.18
inline constexpr Call<278, const OrtKernelInfo*, int, OrtAllocator**>
    KernelInfoGetAllocator;  // 1.18

}  // namespace elsa::ort
