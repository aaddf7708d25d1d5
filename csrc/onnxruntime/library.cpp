// The custom-op library of elsa for ONNX Runtime 1.17 and later, and its CUDA provider from 1.18
// on.
#include <map>
#include <mutex>

#include "attention.h"
#include "window.h"

namespace elsa::ort {
namespace {

// A model whose nodes need different function bodies holds them under numbered names, because
// functions of one name are new in ONNX Runtime 1.27. To the library they are one operator.
constexpr const char* kAttentionNames[] = {"Attention", "Attention_2", "Attention_3",
                                           "Attention_4"};
constexpr const char* kPackedNames[] = {"PackedAttention", "PackedAttention_2", "PackedAttention_3",
                                        "PackedAttention_4"};
constexpr const char* kWindowNames[] = {"WindowAttention", "WindowAttention_2", "WindowAttention_3",
                                        "WindowAttention_4"};

template <class Kernel, size_t kCount>
void add(const OrtApi* api, OrtCustomOpDomain* domain, const char* const (&names)[kCount],
         const char* provider) {
  for (const char* name : names) {
    for (const ElementType type : {kFloat, kFloat16, kBFloat16}) {
      // Never destroyed: sessions may outlive every static object of this library.
      check(CustomOpDomain_Add(api, domain, new Operator<Kernel>(name, type, provider)));
    }
  }
}

// The domain `elsa` of one runtime: a process may hold several copies of ONNX Runtime. on_gpu:
// there are plans for the CUDA provider, and the runtime is new enough.
OrtCustomOpDomain* domain_of(const OrtApi* api, bool on_gpu) {
  static std::mutex mutex;
  static auto& domains = *new std::map<const OrtApi*, OrtCustomOpDomain*>();
  const std::lock_guard<std::mutex> lock(mutex);
  if (const auto found = domains.find(api); found != domains.end()) return found->second;
  OrtCustomOpDomain* domain = nullptr;
  check(CreateCustomOpDomain(api, "elsa", &domain));
  for (const char* provider : {static_cast<const char*>(nullptr), kCudaProvider}) {
    if (provider != nullptr && !on_gpu) continue;
    add<AttentionKernel>(api, domain, kAttentionNames, provider);
    add<PackedAttentionKernel>(api, domain, kPackedNames, provider);
    add<WindowAttentionKernel>(api, domain, kWindowNames, provider);
  }
  return domains[api] = domain;
}

}  // namespace
}  // namespace elsa::ort

// The entry point that ONNX Runtime looks up by name.
extern "C" __attribute__((visibility("default"))) OrtStatus* RegisterCustomOps(
    OrtSessionOptions* options, const OrtApiBase* base) {
  using namespace elsa::ort;
  const OrtApi* api = base->GetApi(kApiVersion);
  if (api == nullptr) {
    return CreateStatus(base->GetApi(1), kNotImplemented,
                        "elsa needs ONNX Runtime 1.17 or later; this one is older");
  }
  return guarded(api, [&] {
    const bool on_gpu = has_plans() && base->GetApi(kGpuApiVersion) != nullptr;
    check(AddCustomOpDomain(api, options, domain_of(api, on_gpu)));
  });
}
